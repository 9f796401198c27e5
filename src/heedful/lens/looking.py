"""A report on what a model does while it reads a text, from every lens that applies."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heedful import __version__
from heedful._checks import check_whole
from heedful._errors import CorruptModel, HeedfulError, InvalidArgument, Unsupported
from heedful._files import write
from heedful._plot import Axes
from heedful._progress import Progress, silent
from heedful._result import plain
from heedful._runtime import undisturbed
from heedful._text import quantity, short
from heedful.bridges import answers, reading
from heedful.bridges.words import token_text
from heedful.lens.observation import observe
from heedful.lens.sections import RESEARCH, Subject, sections
from heedful.report import Finding, Items, Link, Mark, Prose, Section, Table, Text
from heedful.report.blocks import WIDE
from heedful.report.page import framed, page

if TYPE_CHECKING:
    from heedful.lens.attention import AttentionSummary

SENTENCE = "The animal did not cross the street because it was too tired."

# A report opens with so many sentences at least, and at most.
FEWEST, MOST = 3, 5


@dataclass(frozen=True)
class ModelFacts:
    """What a model is; `title` names it without telling where on a disk it lies."""

    folder: str
    title: str
    name: str
    layers: int
    heads: int
    parameters: int
    dtype: str
    attention: str

    def __str__(self) -> str:
        return (
            f"{self.name}: {quantity(self.layers, 'layer')} of {quantity(self.heads, 'head')}, "
            f"{short(self.parameters)} parameters\n"
            + (f"in {self.folder}\n" if self.folder else "")
            + f"{self.dtype}, attention implementation {self.attention}"
        )


@dataclass(frozen=True)
class LookResult:
    """The model, the text, and what each lens says.

    Args:
        model: what the model is.
        text: what it was given.
        tokens, special: what it read, and which of that are marks such as `[CLS]`.
        left_out: how many tokens at the end of the text `max_tokens` left out.
        sections: by the name of the lens, its section, or why it does not apply.
    """

    model: ModelFacts
    text: str
    tokens: tuple[str, ...]
    special: tuple[bool, ...]
    left_out: int
    sections: Mapping[str, Section | str] = field(repr=False)

    @property
    def attention(self) -> AttentionSummary | None:
        """What every head looks at; None where no layer's weights are a distribution over the tokens."""
        section = self.sections.get("attention")
        return None if section is None or isinstance(section, str) else section.result

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What the report opens with: three to five sentences, each with its caveat and where its evidence stands."""
        first = [finding for one in self._lenses().values() for finding in one.findings][:MOST]
        plain = (Finding(one.plain, "", name) for name, one in self._lenses().items() if one.plain)
        return (*first, *islice(plain, max(0, FEWEST - len(first))))

    def plot(self, ax: Axes | None = None) -> Axes:
        """How spread out each head's attention is, layers down and heads across."""
        if self.attention is None:
            raise Unsupported("the weights of this model are no distribution over tokens; look at html() instead")
        return self.attention.plot(ax)

    def __repr__(self) -> str:
        return f"LookResult({self.model.name}, {len(self.tokens)} tokens, {self.model.layers} layers)"

    def to_dict(self) -> dict[str, Any]:
        """Everything but the pictures; JSON types alone."""
        return {
            "model": plain(self.model),
            "text": self.text,
            "tokens": list(self.tokens),
            "tokens_left_out": self.left_out,
            "findings": plain(self.findings),
            "sections": {name: one.data for name, one in self._lenses().items()},
            "not_applicable": {name: one for name, one in self.sections.items() if isinstance(one, str)},
        }

    def __str__(self) -> str:
        lines = textwrap.wrap(f"{self.model.title} on {self._quoted()}" if self.text else self.model.title, WIDE)
        lines += _headed("Findings", self._findings().summary)
        for name, section in self._lenses().items():
            if name == self._first_research():
                lines += _headed("For researchers", line="=")
            lines += _headed(section.title, *textwrap.wrap(section.plain, WIDE), section.summary)
        lines += _headed("Does not apply", self._left_out().summary) if self._left_out().blocks else []
        words = textwrap.wrap(" ".join(self.tokens), 80, initial_indent="  ", subsequent_indent="  ")
        # A long text is known to whoever gave it.
        words = words if len(words) <= 6 else [*words[:5], "  ..."]
        cut = f", {self.left_out} more left out" if self.left_out else ""
        read = f"Read as {quantity(len(self.tokens), 'token')}{cut}:"
        return "\n".join([*lines, *_headed(self._model().title, str(self.model), read, *words)])

    def _quoted(self) -> str:
        words = " ".join(self.text.split())
        return f'"{textwrap.shorten(words, 120, placeholder=" ...") if len(words) > 120 else words}"'

    def _repr_html_(self) -> str:
        return framed(self.html())

    def html(self) -> str:
        """The report: one page that needs no other file and names no outside address."""
        research = self._first_research()
        sections = {"findings": self._findings()}
        for name, section in self._lenses().items():
            sections |= {"research": self._research()} if name == research else {}
            sections[name] = section
        sections |= {"left-out": self._left_out()} if self._left_out().blocks else {}
        return page(
            {**sections, "model": self._model()},
            title=f"{self.model.title}: what it looks at",
            heading=self.model.title,
            quote=self.text,
            command="look",
            links=("findings", *self._lenses(), "model"),
            footer=f"Written by heedful {__version__}.",
        )

    def _lenses(self) -> dict[str, Section]:
        return {name: one for name, one in self.sections.items() if not isinstance(one, str)}

    def _first_research(self) -> str | None:
        return next((name for name in self._lenses() if name in RESEARCH), None)

    def _findings(self) -> Section:
        items: list[Text] = [[one.text, " ", Link("Evidence", one.evidence)] for one in self.findings]
        return Section(
            "Findings",
            [
                Items(items, [one.caveat for one in self.findings], style="findings", shown="page"),
                Items([one.text for one in self.findings], [one.caveat for one in self.findings], style="findings", shown="terminal"),
            ],
        )  # fmt: skip

    def _research(self) -> Section:
        chosen = {name: one for name, one in self._lenses().items() if name in RESEARCH}
        items: list[Text] = [
            [Link(one.title, name), f": {one.plain or one.summary.splitlines()[0]}"] for name, one in chosen.items()
        ]
        return Section("For researchers", [Items(items, style="plain")])

    def _left_out(self) -> Section:
        items = [f"{name.capitalize()}: {why}" for name, why in self.sections.items() if isinstance(why, str)]
        return Section("Does not apply", [Items(items, style="note")] if items else [])

    def _model(self) -> Section:
        model = self.model
        number, _, unit = short(model.parameters).partition(" ")
        facts = [
            ("architecture", model.name),
            ("layers", str(model.layers)),
            ("heads in each", str(model.heads)),
            ("parameters", number, unit),
            ("tokens read", str(len(self.tokens)), f"{self.left_out} more left out" if self.left_out else ""),
            ("type of numbers", model.dtype),
            ("implementation", model.attention),
        ]
        tokens: list[str | Mark] = []
        for token, special in zip(self.tokens, self.special, strict=True):
            tokens += [Mark(token, "special" if special else "token"), " "]
        text = [Prose(tokens, style="tokens", title="The text as tokens")] if tokens else []
        title = "The model and the text" if self.text else "The model"
        return Section(title, [Table((), facts, style="facts"), *text])

    def save(self, path: str | Path) -> Path:
        """Writes the report as a whole or not at all; a file of that name is replaced.

        >>> look(text="Water is wet.").save("report.html")  # doctest: +SKIP
        """
        return write(path, self.html())


def _headed(title: str, *content: str, line: str = "-") -> list[str]:
    return ["", title, line * len(title), *content]


def look(
    model: Any = None,
    text: str | None = None,
    *,
    tokenizer: Any = None,
    inputs: Mapping[str, Any] | None = None,
    max_tokens: int | None = None,
    progress: Progress | None = None,
) -> LookResult:
    """Runs a model on a text, records what its attention does, and shows that to every lens.

    Args:
        model: a Hugging Face folder, or the name of a model in the local Hugging Face cache; the demo MiniLM by default. Or a model of
            transformers, with its tokenizer.
        text: what the model reads; a sentence of two clauses by default.
        tokenizer: of a model that is no folder; in place of the folder's own, where one is given beside it.
        inputs: instead of a text, what a model of transformers is called with: pictures, sound, a text with a picture. Of a batch,
            the first is shown.
        max_tokens: read no more than the first so many tokens, special ones included, and tell how many were left out. A
            text longer than the model's own limit is refused without it.
        progress: called with how much is done, how much there is, and what is under way.

    Of a model with an encoder and a decoder, the encoder reads the text. The model is left as it was found.

    >>> result = look(text="She poured water into the cup until it was full.")
    >>> result.model.name, len(result.tokens), list(result.sections)[:3]
    ('BertModel', 13, ['pronouns', 'attention', 'causes'])
    """
    say = progress or silent
    check_whole(max_tokens=max_tokens, optional=True)
    if inputs is not None and (text is not None or max_tokens is not None):
        raise InvalidArgument("inputs are given instead of a text; leave text and max_tokens out")
    text = "" if inputs is not None else SENTENCE if text is None else text
    if inputs is None:
        reading.check_text(text)
    say(0, 1, "loading")
    opened = _open(model, tokenizer, needs_tokenizer=inputs is None)
    left_out = 0
    if inputs is None:
        inputs, left_out = _read(opened, text, max_tokens)
    say(0, 1, "reading")
    observation = _observe(opened.reader, inputs, opened.tokenizer)
    base = opened.base
    facts = ModelFacts(
        folder=str(opened.folder or ""),
        title=opened.title,
        name=type(base).__name__,
        layers=len(observation),
        heads=max(record.heads for record in observation),
        parameters=sum(parameter.numel() for parameter in base.parameters()),
        dtype=str(base.dtype).removeprefix("torch."),
        attention=str(base.config._attn_implementation),
    )
    subject = Subject(
        opened.reader, opened.tokenizer, opened.folder, text, observation, say, inputs, headed=opened.headed
    )
    results = dict(sections(subject, lambda name: say(0, 1, name)))
    tokens = tuple(token_text(opened.tokenizer, token) for token in observation.tokens[0])
    return LookResult(facts, text, tokens, tuple(observation.special[0].tolist()), left_out, results)


@dataclass(frozen=True)
class _Opened:
    """A model that was opened once: its base, with its head, and what to call it."""

    base: Any
    headed: Any  # a sentence where its head cannot be used
    tokenizer: Any
    folder: Path | None
    title: str

    @property
    def reader(self) -> Any:
        """What reads the text."""
        return self.base.get_encoder() if self.base.config.is_encoder_decoder else self.base


def _open(model: Any, tokenizer: Any, *, needs_tokenizer: bool) -> _Opened:
    if model is None or isinstance(model, str | Path):
        folder = reading.demo_model_path() if model is None else reading.find_model(model)
        try:
            headed, own = answers.open_model(folder)
            base = headed.base_model
        # A report needs no head; what explains answers says why it has none.
        except (CorruptModel, Unsupported) as error:
            base, own = reading.load(folder)
            headed = " ".join(str(error).split())
        return _Opened(base, headed, tokenizer or own, folder, reading.title_of(folder))
    if (tokenizer is None and needs_tokenizer) or not hasattr(model, "main_input_name"):
        raise InvalidArgument(
            "model must be a Hugging Face folder, the name of a model in the local cache, or a transformers model with tokenizer=...; got "
            f"{type(model).__name__}"
        )
    name = Path(str(getattr(model.config, "_name_or_path", "") or type(model).__name__)).name
    return _Opened(model, model, tokenizer, None, name)


def _read(opened: _Opened, text: str, max_tokens: int | None) -> tuple[dict[str, Any], int]:
    """What the model is called with, and how many tokens were left out."""
    model, tokenizer = opened.base, opened.tokenizer
    if model.main_input_name != "input_ids":
        raise Unsupported(f"{type(model).__name__} reads {model.main_input_name}; give a model that reads text")
    encoded = reading.inputs_of(model, tokenizer, text, return_special_tokens_mask=True)
    count, limit = encoded["input_ids"].shape[1], reading.limit_of(model, tokenizer)
    most = count if max_tokens is None else min(count, max_tokens)
    if most > limit:
        raise InvalidArgument(
            f"the text has {count} tokens, but the model's limit is {limit}; give a shorter text, or read its beginning "
            f"with max_tokens={limit}"
        )
    if most < count:
        encoded = reading.inputs_of(model, tokenizer, text, most=most, return_special_tokens_mask=True)
    # Asked for less than its special tokens take, a tokenizer may cut nothing at all.
    if encoded.pop("special_tokens_mask")[0].bool().all() or encoded["input_ids"].shape[1] > most:
        why = f"finds no tokens in {text!r:.60}; give other words"
        if most < count:
            why = f"needs more than max_tokens={max_tokens} for its special tokens alone; allow more"
        raise InvalidArgument(f"the tokenizer of {type(model).__name__} {why}")
    return encoded, count - encoded["input_ids"].shape[1]


def _observe(model: Any, inputs: Mapping[str, Any], tokenizer: Any) -> Any:
    try:
        with undisturbed(model):
            return observe(model, inputs, tokenizer=tokenizer)
    except HeedfulError:
        raise
    # Models fail by every class there is, most often because they want more than a text.
    except Exception as error:
        raise Unsupported(f"{type(model).__name__} fails on this text alone: {' '.join(str(error).split())}") from error
