"""The singular values of a model's attention on one text, as a section of the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING

from heedful._errors import InvalidArgument, Unsupported
from heedful.lens.observation import Observation, observe
from heedful.lens.sections import Section, html_table
from heedful.lens.spectra.measure import KEEP, of_record, spectrum
from heedful.lens.spectra.result import SHARE, MatrixSpectrum, Spectrum, mean_curve
from heedful.nn._primal_core import PrimalCore

if TYPE_CHECKING:
    from heedful.lens.sections import Subject

__all__ = ["section"]

# Tokens of a long text that are read anew: the work grows with their cube.
TOKENS = 256

# Cubes of lengths, summed over heads: some seconds on two cores. Beyond it fewer heads of each layer are read.
WORK = 2**31

COLOURS = ("var(--accent, #9a4a00)", "var(--link, #14508c)", "var(--ink, #1d2129)")
DASHES = ("", "6 3", "2 3")


def section(subject: Subject) -> Section:
    """Effective ranks by layer and head, cumulative curves, and the cosine kernel of the same layers beside them."""
    notes: list[str] = []
    try:
        found = _read(subject, notes)
    except InvalidArgument as error:
        raise Unsupported(str(error)) from None
    notes.append(_bounds(found))
    data = {
        "matrices": [{name: value for name, value in one.to_dict().items() if name != "values"} for one in found],
        "mean_curves": [
            {"name": name, "layer": layer, "cumulative": mean_curve(found.select(name, layer))}
            for name in found.names
            for layer in found.select(name).layers
        ],
        "notes": notes,
    }
    html = (
        "<p>The effective rank says how many directions a head's matrix of coefficients has; 1 means that every token is "
        "given the same mixture. The cosine kernel of the same queries and keys cannot have more than the head's width, "
        "nor can a primal layer: compare with it, not with the number of tokens.</p>"
        f"<h3>Effective rank by layer</h3><figure>{_ranks(found)}</figure>"
        f'<h3>Cumulative singular values</h3>{_legend(found)}<div class="curves">{"".join(map(_panel(found), found.layers))}</div>'
        + "".join(f'<p class="note">{escape(note)}</p>' for note in notes)
        + f'<h3>Singular values of every head in figures</h3><div class="long sortable">{_table(found)}</div>'
    )
    return Section(
        "Singular values", "\n".join([_told(found), *notes]), data, html, STYLE, result=found, plain=_plain(found)
    )


STYLE = (
    ".curves{display:grid;grid-template-columns:repeat(auto-fill,minmax(10.5rem,1fr));gap:1.2rem 1.4rem}"
    ".curves figure{margin:0}.curves figcaption{font-size:.8125rem;color:var(--soft)}.curves svg{width:100%}"
    ".keys{display:flex;flex-wrap:wrap;gap:.3rem 1.4rem;font-size:.875rem;margin:.2rem 0 1rem}"
    ".keys svg{width:2rem;height:.6rem;margin-right:.4rem;vertical-align:middle}"
)


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
        return spectrum(subject.model, inputs)
    if beginning:
        seen = observe(subject.model, inputs, keep=KEEP)
    cost = [min(record.queries_len, record.keys_len) * record.queries_len * record.keys_len for record in seen]
    allowed = WORK / max(1, sum(cost))
    matrices: list[MatrixSpectrum] = []
    fewer = False
    for done, record in enumerate(seen):
        subject.progress(done, len(seen))
        count = min(record.heads, max(1, int(allowed)))
        fewer |= count < record.heads
        matrices += of_record(record, seen, [at * record.heads // count for at in range(count)])
    if fewer:
        notes.append("Of each layer some heads were read, evenly spaced: the text is long.")
    if not matrices:
        raise Unsupported("no layer has a matrix of coefficients for this text")
    return Spectrum(tuple(matrices))


def _bounds(found: Spectrum) -> str:
    tokens, width = max(min(one.rows, one.columns) for one in found), min(one.bound for one in found)
    if width < tokens:
        return f"Rank at most {tokens} by the number of tokens, {width} by the width of a head (cosine, primal)."
    return f"Rank at most {tokens}, the number of tokens; heads are wide enough not to bound it further."


def _plain(found: Spectrum) -> str:
    """The section in one sentence."""
    own = found.select(found.names[0])
    ranks = [own.select(layer=layer).effective_rank for layer in own.layers]
    tokens = max(min(one.rows, one.columns) for one in own)
    where = f" in the first layer and {ranks[-1]:.1f} in the last" if len(ranks) > 1 else ""
    return f"Of {tokens} tokens, a head makes about {ranks[0]:.1f} independent mixtures{where} (1: every token gets the same mixture)."


def _told(found: Spectrum) -> str:
    """A line for each layer, means over heads."""
    lines = ["Effective rank (in brackets how many singular values hold 90 % of their sum), means over heads"]
    lines.append("layer  " + "  ".join(f"{name:>15}" for name in found.names))
    for layer in found.layers:
        cells = []
        for name in found.names:
            part = [one for one in found if (one.name, one.layer) == (name, layer)]
            mean = Spectrum(tuple(part), found.power)
            cells.append(f"{f'{mean.effective_rank:.1f} ({mean.rank_90:.1f})' if part else '':>15}")
        lines.append(f"{layer:>5}  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def _table(found: Spectrum) -> str:
    head = ["layer", "head", "matrix", "effective rank", "stable rank", "90 % in", "90 % of energy in", "of at most"]
    rows = [
        [
            one.layer,
            one.head,
            one.name,
            f"{one.effective_rank:.2f}",
            f"{one.stable_rank:.2f}",
            one.rank(),
            one.rank(power=2),
            one.bound,
        ]
        for one in found
    ]
    return html_table(head, rows, "How many singular values hold 90 % of their sum, and of the sum of their squares")


def _legend(found: Spectrum) -> str:
    keys = "".join(
        f'<span><svg viewBox="0 0 32 8" aria-hidden="true">{_line([(0, 4), (32, 4)], at)}</svg>{escape(name)}</span>'
        for at, name in enumerate(found.names)
    )
    return f'<p class="keys">{keys}<span>lines: mean over heads, bands: all heads, gray: 90 %</span></p>'


def _line(points: Sequence[tuple[float, float]], kind: int, width: float = 2) -> str:
    colour, dash = COLOURS[kind % len(COLOURS)], DASHES[kind % len(DASHES)]
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="{width:g}"{dashed}/>'


def _text(
    x: float, y: float, text: object, anchor: str = "middle", size: int = 12, colour: str = "currentColor"
) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}">{escape(str(text))}</text>'


def _ranks(found: Spectrum, size: tuple[int, int] = (720, 300)) -> str:
    """Every head as a dot, the mean of a layer as a line, layers across."""
    wide, high = size
    left, right, top, bottom = 44, 110, 16, 40
    layers = found.layers
    tallest = max(one.effective_rank for one in found) * 1.08 or 1.0
    step = (wide - left - right) / max(1, len(layers))

    def x(layer: int, kind: int, shift: float = 0.0) -> float:
        # Kinds side by side, so that their dots do not hide one another.
        return left + step * (layers.index(layer) + 0.5 + 0.16 * (kind - (len(found.names) - 1) / 2) + shift)

    def y(rank: float) -> float:
        return top + (1 - rank / tallest) * (high - top - bottom)

    parts = []
    for rank in _ticks(tallest):
        parts.append(f'<path d="M{left} {y(rank):.1f}H{wide - right}" stroke="currentColor" opacity="0.12"/>')
        parts.append(_text(left - 6, y(rank) + 4, f"{rank:g}", "end"))
    for layer in layers[:: max(1, len(layers) // 16)]:
        parts.append(_text(left + step * (layers.index(layer) + 0.5), high - bottom + 18, layer))
    ends = []
    for kind, name in enumerate(found.names):
        one = found.select(name)
        for matrix in one:
            parts.append(
                f'<circle cx="{x(matrix.layer, kind):.1f}" cy="{y(matrix.effective_rank):.1f}" r="2.6" '
                f'fill="{COLOURS[kind % len(COLOURS)]}" opacity="0.4"/>'
            )
        means = [(x(layer, kind), y(one.select(layer=layer).effective_rank)) for layer in one.layers]
        parts.append(_line(means, kind) if len(means) > 1 else "")
        ends.append((means[-1][1], kind))
    for height, (_, kind) in zip(_apart([end for end, _ in sorted(ends)]), sorted(ends), strict=True):
        colour = COLOURS[kind % len(COLOURS)]
        parts.append(_text(wide - right + 8, height + 4, found.names[kind], "start", 13, colour))
    parts.append(_text((left + wide - right) / 2, high - 6, "layer"))
    label = "Effective rank by layer, for " + ", ".join(found.names)
    return f'<svg viewBox="0 0 {wide} {high}" role="img" aria-label="{escape(label)}" style="max-width:{wide}px;width:100%">{"".join(parts)}</svg>'


def _apart(heights: Sequence[float], least: float = 15.0) -> list[float]:
    """Heights of labels, in rising order, moved down where they would overlap."""
    placed: list[float] = []
    for height in heights:
        placed.append(max(height, placed[-1] + least) if placed else height)
    return placed


def _ticks(highest: float) -> list[float]:
    """A few round numbers from 0 up to the highest."""
    step = next(size for size in (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 10**9) if highest / size <= 6)
    return [step * at for at in range(int(highest / step) + 1)]


def _panel(found: Spectrum) -> Callable[[int], str]:
    """Draws the curves of one layer: the mean over heads in a band from the lowest to the highest."""
    longest = max(len(one.values) for one in found)
    wide, high, left, bottom = 200, 130, 4, 16

    def x(at: int) -> float:
        return left + at / longest * (wide - 2 * left)

    def y(share: float) -> float:
        return 4 + (1 - share) * (high - bottom - 4)

    def draw(layer: int) -> str:
        parts = [f'<path d="M{left} {y(SHARE):.1f}H{wide - left}" stroke="currentColor" opacity="0.25"/>']
        parts.append(f'<path d="M{left} {y(0):.1f}H{wide - left}" stroke="currentColor" opacity="0.5"/>')
        told = []
        for kind, name in enumerate(found.names):
            one = Spectrum(tuple(part for part in found if (part.name, part.layer) == (name, layer)))
            if not len(one):
                continue
            curves = [part.cumulative() for part in one]
            ends = [[curve[min(at, len(curve) - 1)] for curve in curves] for at in range(max(map(len, curves)))]
            above = [(x(at + 1), y(max(values))) for at, values in enumerate(ends)]
            below = [(x(at + 1), y(min(values))) for at, values in enumerate(ends)]
            band = " ".join(f"{a:.1f},{b:.1f}" for a, b in [(x(0), y(0)), *above, *below[::-1]])
            parts.append(f'<polygon points="{band}" fill="{COLOURS[kind % len(COLOURS)]}" opacity="0.14"/>')
            parts.append(
                _line([(x(0), y(0)), *((x(at), y(share)) for at, share in enumerate(mean_curve(one), 1))], kind)
            )
            told.append(f"{name} {one.rank_90:.1f}")
        parts.append(_text(left, high - 3, 0, "start", 11) + _text(wide - left, high - 3, longest, "end", 11))
        caption = f"Layer {layer}: 90 % in {', '.join(told)}"
        svg = f'<svg viewBox="0 0 {wide} {high}" role="img" aria-label="{escape(caption)}">{"".join(parts)}</svg>'
        return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"

    return draw
