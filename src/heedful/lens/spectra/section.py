"""The singular values of a model's attention on one text, as a section of the report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from heedful._errors import InvalidArgument, Unsupported
from heedful._runtime import undisturbed
from heedful.lens.observation import Observation, observe
from heedful.lens.spectra.measure import KEEP, of_record, spectrum
from heedful.lens.spectra.result import SHARE, MatrixSpectrum, Spectrum, mean_curve
from heedful.nn.primal_core import PrimalCore
from heedful.report import Figure, Note, Prose, Section, Table
from heedful.report.charts import Axis, Band, Chart, Dots, Line, ticks

if TYPE_CHECKING:
    from heedful.lens.sections import Subject

# Tokens of a long text that are read anew: the work grows with their cube.
TOKENS = 256

# Cubes of lengths, summed over heads: some seconds on two cores. Beyond it fewer heads of each layer are read.
WORK = 2**31

INTRODUCTION = (
    "The effective rank says how many directions a head's matrix of coefficients has; 1 means that every token is given the same "
    "mixture. The cosine kernel of the same queries and keys cannot have more than the head's width, nor can a primal layer: compare "
    "with it, not with the number of tokens."
)


def section(subject: Subject) -> Section:
    """Effective ranks by layer and head, cumulative curves, and the cosine kernel of the same layers beside them."""
    notes: list[str] = []
    try:
        result = _read(subject, notes)
    except InvalidArgument as error:
        raise Unsupported(str(error)) from None
    notes.append(_bounds(result))
    data = {
        "matrices": [{name: value for name, value in one.to_dict().items() if name != "values"} for one in result],
        "mean_curves": [
            {"name": name, "layer": layer, "cumulative": mean_curve(result.select(name, layer))}
            for name in result.names
            for layer in result.select(name).layers
        ],
        "notes": notes,
    }
    blocks = [
        Prose(INTRODUCTION, shown="page"),
        Prose(_means(result), style="verbatim", shown="terminal"),
        Figure([_ranks(result)], title="Effective rank by layer"),
        Figure(
            [_curves(result, layer) for layer in result.layers],
            key=result.names,
            caption="lines: mean over heads, bands: all heads, gray: 90 %",
            title="Cumulative singular values",
        ),
        *map(Note, notes),
        _table(result),
    ]
    return Section("Singular values", blocks, data, result=result, plain=_plain(result))


def _read(subject: Subject, notes: list[str]) -> Spectrum:
    """The matrices of the subject; what was left out for the sake of time is noted."""
    seen: Observation = subject.observation
    inputs = dict(subject.inputs)
    longest = max((max(record.queries_len, record.keys_len) for record in seen), default=0)
    beginning = subject.beginning(TOKENS) if longest > TOKENS else {}
    if beginning:
        inputs = beginning
        notes.append(f"Of this text the first {TOKENS} tokens were read here.")
    if inputs and any(isinstance(part, PrimalCore) for part in subject.model.modules()):
        with undisturbed(subject.model):
            return spectrum(subject.model, inputs)
    if beginning:
        with undisturbed(subject.model):
            seen = observe(subject.model, inputs, keep=KEEP)
    cost = [min(record.queries_len, record.keys_len) * record.queries_len * record.keys_len for record in seen]
    allowed = WORK / max(1, sum(cost))
    matrices: list[MatrixSpectrum] = []
    fewer = False
    for done, record in enumerate(seen):
        subject.progress(done, len(seen), "spectrum")
        count = min(record.heads, max(1, int(allowed)))
        fewer |= count < record.heads
        matrices += of_record(record, seen, [at * record.heads // count for at in range(count)])
    if fewer:
        notes.append("Of each layer some heads were read, evenly spaced: the text is long.")
    if not matrices:
        raise Unsupported("no layer has a matrix of coefficients for this text")
    return Spectrum(tuple(matrices))


def _bounds(result: Spectrum) -> str:
    tokens, width = max(min(one.rows, one.columns) for one in result), min(one.bound for one in result)
    if width < tokens:
        return f"Rank at most {tokens} by the number of tokens, {width} by the width of a head (cosine, primal)."
    return f"Rank at most {tokens}, the number of tokens; heads are wide enough not to bound it further."


def _plain(result: Spectrum) -> str:
    """The section in one sentence."""
    own = result.select(result.names[0])
    ranks = [own.select(layer=layer).effective_rank for layer in own.layers]
    tokens = max(min(one.rows, one.columns) for one in own)
    where = f" in the first layer and {ranks[-1]:.1f} in the last" if len(ranks) > 1 else ""
    return f"Of {tokens} tokens, a head makes about {ranks[0]:.1f} independent mixtures{where} (1: every token gets the same mixture)."


def _means(result: Spectrum) -> str:
    """A line for each layer, means over heads."""
    lines = ["Effective rank (in brackets how many singular values hold 90 % of their sum), means over heads"]
    lines.append("layer  " + "  ".join(f"{name:>15}" for name in result.names))
    for layer in result.layers:
        cells = []
        for name in result.names:
            part = [one for one in result if (one.name, one.layer) == (name, layer)]
            mean = Spectrum(tuple(part), result.power)
            cells.append(f"{f'{mean.effective_rank:.1f} ({mean.rank_90:.1f})' if part else '':>15}")
        lines.append(f"{layer:>5}  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def _table(result: Spectrum) -> Table:
    head = ["layer", "head", "matrix", "effective rank", "stable rank", "90 % in", "90 % of energy in", "of at most"]
    rows = [
        [one.layer, one.head, one.name, f"{one.effective_rank:.2f}", f"{one.stable_rank:.2f}", one.rank(), one.rank(power=2), one.bound]
        for one in result
    ]  # fmt: skip
    caption = "How many singular values hold 90 % of their sum, and of the sum of their squares"
    return Table(head, rows, caption, long=True, title="Singular values of every head in figures", shown="page")


def _ranks(result: Spectrum) -> Chart:
    """Every head as a dot, the mean of a layer as a line, layers across."""
    layers, names = result.layers, result.names
    tallest = max(one.effective_rank for one in result) * 1.08 or 1.0
    parts: list[Dots | Line] = []
    for kind, name in enumerate(names):
        own = result.select(name)
        # Kinds side by side, so that their dots do not hide one another.
        shift = 0.5 + 0.16 * (kind - (len(names) - 1) / 2)
        parts.append(Dots([(layers.index(one.layer) + shift, one.effective_rank) for one in own], kind))
        means = [(layers.index(layer) + shift, own.select(layer=layer).effective_rank) for layer in own.layers]
        parts.append(Line(means, kind, name))
    marks = [(layers.index(layer) + 0.5, str(layer)) for layer in layers[:: max(1, len(layers) // 16)]]
    x, y = Axis(0, len(layers), marks, "layer"), Axis(0, tallest, ticks(tallest))
    return Chart(f"Effective rank by layer, for {', '.join(names)}", x, y, parts, (720, 300))


def _curves(result: Spectrum, layer: int) -> Chart:
    """The curves of one layer: the mean over heads in a band from the lowest to the highest."""
    longest = max(len(one.values) for one in result)
    parts: list[Band | Line] = []
    counts = []
    for kind, name in enumerate(result.names):
        own = Spectrum(tuple(one for one in result if (one.name, one.layer) == (name, layer)))
        if not len(own):
            continue
        curves = [one.cumulative() for one in own]
        shares = [[curve[min(at, len(curve) - 1)] for curve in curves] for at in range(max(map(len, curves)))]
        upper, lower = ([(0.0, 0.0), *((at, pick(part)) for at, part in enumerate(shares, 1))] for pick in (max, min))
        parts.append(Band(upper, lower, kind))
        parts.append(Line([(0.0, 0.0), *((float(at), share) for at, share in enumerate(mean_curve(own), 1))], kind))
        counts.append(f"{name} {own.rank_90:.1f}")
    caption = f"Layer {layer}: 90 % in {', '.join(counts)}"
    x = Axis(0, longest, [(0, "0"), (longest, str(longest))])
    return Chart(caption, x, Axis(0, 1, [(0, ""), (SHARE, "")]), parts, (200, 130), caption)
