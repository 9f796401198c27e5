"""What a lens is shown, and which lenses add a section to the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heedful._errors import MissingExtra, Unsupported
from heedful._progress import Progress, silent
from heedful.report import Section

if TYPE_CHECKING:
    from heedful.lens.observation import Observation

# Name -> the module whose `section(subject)` reads it, in the order of the report. To add a lens, add its line.
LENSES = {
    "pronouns": "heedful.lens.pronouns",
    "attention": "heedful.lens.maps",
    "causes": "heedful.lens.causes.section",
    "flow": "heedful.lens.flows.section",
    "spectrum": "heedful.lens.spectra.section",
    "symmetry": "heedful.lens.symmetry.section",
    "transport": "heedful.lens.transport.section",
    "corpus": "heedful.lens.corpus.section",
    "depth": "heedful.lens.depth.section",
}


@dataclass(frozen=True)
class Subject:
    """One model reading one text: what every lens is shown.

    Args:
        model: what read the text: of an encoder and a decoder, the encoder.
        tokenizer: of the model.
        folder: where the model lies; None for one that was loaded by hand.
        text: as it was given; `inputs` may hold its beginning alone.
        observation: what attention did.
        progress: may be called by a lens that works for longer than a second.
        inputs: what the model was called with: tokens, pictures, series.
        headed: the model with the head that answers; a sentence where that cannot be used, None where `model` is all there is.
    """

    model: Any
    tokenizer: Any
    folder: Path | None
    text: str
    observation: Observation
    progress: Progress = silent
    inputs: Mapping[str, Any] = field(default_factory=dict, repr=False)
    headed: Any = field(default=None, repr=False)

    def check_words(self) -> None:
        """Refuses a subject that was given no text, on behalf of a lens that needs one."""
        if not self.text:
            raise Unsupported(f"{type(self.model).__name__} was given no text, which this lens reads word by word")

    def beginning(self, tokens: int) -> dict[str, Any]:
        """What the model was called with, cut to its first tokens; empty where it read no tokens."""
        length = next((value.shape[1] for value in self.inputs.values() if value.dim() == 2), 0)
        cut = {name: value.dim() == 2 and value.shape[1] == length for name, value in self.inputs.items()}
        return (
            {name: value[:, :tokens] if cut[name] else value for name, value in self.inputs.items()} if length else {}
        )


# Lenses whose section is for those who study models; each opens with a plain line.
RESEARCH = ("spectrum", "symmetry", "transport", "corpus", "depth")


def sections(subject: Subject, begin: Callable[[str], None] = lambda name: None) -> Iterator[tuple[str, Section | str]]:
    """Each lens by name with its section, or with the reason, in one line, why it does not apply.

    `begin(name)` is called before a lens starts.
    """
    for name, module in LENSES.items():
        begin(name)
        try:
            yield name, import_module(module).section(subject)
        except (Unsupported, MissingExtra) as reason:
            yield name, " ".join(str(reason).split())
        # One lens that stumbles over a model nobody foresaw must not take the others with it.
        except Exception as error:
            problem = " ".join(f"{type(error).__name__}: {error}".split())
            yield name, f"this lens failed on this model, which is a fault of heedful's: {problem:.200}"
