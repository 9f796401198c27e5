"""What the heads of a model look at, in a few numbers and a map each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from unicodedata import category

import torch
from torch import Tensor

from heedful._errors import InvalidArgument
from heedful._plot import Axes, heat_map
from heedful._result import Result, plain
from heedful.lens.roles import Role, measured, ordered, position_tests

# Rows of 16-bit weights sum to one within this.
ROUNDING = 2e-2

# A head without a role is called broad from this share of the highest possible entropy.
BROAD = 0.9
UNNAMED = "no role"


@dataclass(frozen=True)
class TokenPair:
    """One token attending to another."""

    layer: int
    head: int
    query: int
    key: int
    query_token: str
    key_token: str
    weight: float

    def __str__(self) -> str:
        return f"{self.query_token} -> {self.key_token}"


@dataclass(frozen=True)
class HeadSummary(Result):
    """One head, averaged over the queries of one sentence; the fields are defined in `summarize`."""

    layer: int
    head: int
    entropy: float
    normalized_entropy: float
    distance: float
    first: float
    special: float
    itself: float
    previous: float
    next: float
    strongest: TokenPair | None
    farther: TokenPair | None
    tests: tuple[Role, ...] = ()

    _also = ("focus",)

    @property
    def roles(self) -> tuple[Role, ...]:
        """What the head does, by the tests that it passes, the most telling first; there may be several, or none."""
        return ordered(self.tests)

    @property
    def focus(self) -> str:
        """What the head does, in a word: the name of its first role, else `broad` or `no role`."""
        if self.roles:
            return self.roles[0].name
        return "broad" if self.normalized_entropy >= BROAD else UNNAMED

    @property
    def focus_share(self) -> float:
        """The share of attention that its first role takes, or of the highest entropy for `broad`; 0 for `no role`."""
        if self.roles:
            return self.roles[0].score
        return self.normalized_entropy if self.focus == "broad" else 0.0

    def tested(self, more: Sequence[Role]) -> HeadSummary:
        """The same head with other tests; those of the same name take the place of its own."""
        names = {role.name for role in more}
        return replace(self, tests=(*(role for role in self.tests if role.name not in names), *more))

    def __str__(self) -> str:
        roles = "; ".join(map(str, self.roles)) or self.focus
        return f"head {self.layer}.{self.head}: {roles}"

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"roles": [role.name for role in self.roles]}


@dataclass(frozen=True)
class AttentionSummary(Result):
    """Every head of every layer, on one sentence."""

    tokens: tuple[str, ...]
    layers: tuple[tuple[HeadSummary, ...], ...]

    def mean(self, layer: int, name: str) -> float:
        """The mean of a field of `HeadSummary` over the heads of a layer."""
        heads = self.layers[layer]
        return sum(getattr(head, name) for head in heads) / len(heads)

    @property
    def named(self) -> int:
        """How many heads have a role."""
        return sum(bool(head.roles) for heads in self.layers for head in heads)

    def pairs(self, count: int = 5, *, neighbours: bool = False) -> tuple[TokenPair, ...]:
        """The strongest pairs of tokens over all heads, each pair once, by falling weight.

        Neighbours, which some heads attend to whatever they are, are left out unless they are asked for.
        """
        candidates = (head.strongest if neighbours else head.farther for heads in self.layers for head in heads)
        by_weight = sorted((pair for pair in candidates if pair is not None), key=lambda pair: -pair.weight)
        best: dict[tuple[int, int], TokenPair] = {}
        for pair in by_weight:
            best.setdefault((pair.query, pair.key), pair)
        return tuple(best.values())[:count]

    def to_dict(self) -> dict[str, Any]:
        layers = [{"layer": heads[0].layer, "heads": plain(heads)} for heads in self.layers]
        return {"tokens": list(self.tokens), "layers": layers}

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draws normalised entropy as a heat map, layers down and heads across."""
        width = max(len(heads) for heads in self.layers)
        grid = [
            [head.normalized_entropy for head in heads] + [float("nan")] * (width - len(heads)) for heads in self.layers
        ]
        ax = heat_map(ax, grid, "entropy / log(visible keys)", vmin=0.0, vmax=1.0, cmap="viridis")
        ax.set(xlabel="head", ylabel="layer", title="How spread out each head's attention is")
        return ax

    def _repr_html_(self) -> str:
        from heedful.report import Table
        from heedful.report.page import fragment

        rows = [
            [
                one.layer,
                one.head,
                "; ".join(map(str, one.roles)) or one.focus,
                f"{one.entropy:.2f}",
                str(one.farther or ""),
            ]
            for heads in self.layers
            for one in heads
        ]
        return fragment([Table(["layer", "head", "role", "entropy", "strongest pair"], rows, " ".join(self.tokens))])

    def __str__(self) -> str:
        lines = ["layer     entropy  distance  roles: head (share of its attention), ..."]
        for at in range(len(self.layers)):
            entropy, share = self.mean(at, "entropy"), self.mean(at, "normalized_entropy")
            first, *more = self._roles(at)
            distance, layer = self.mean(at, "distance"), self.layers[at][0].layer
            lines.append(f"{layer:>5}  {entropy:>5.2f} {share:>4.0%}  {distance:>8.1f}  {first}")
            lines += [" " * 29 + one for one in more]
        lines.append("Entropy in nats and in percent of the highest possible; distance in tokens.")
        return "\n".join(lines)

    def _roles(self, layer: int) -> list[str]:
        """A line for each role that heads of this layer have, with the two that have most of it."""
        groups: dict[str, list[tuple[float, int]]] = {}
        for head in self.layers[layer]:
            shares = [(role.name, role.score) for role in head.roles] or [(head.focus, head.focus_share)]
            for name, share in shares:
                groups.setdefault(name, []).append((-share, head.head))
        groups = dict(
            sorted(groups.items(), key=lambda item: (item[0] in ("broad", UNNAMED), item[0] == UNNAMED, min(item[1])))
        )
        lines = []
        for word, heads in groups.items():
            same = sorted(heads)
            shown = [f"{head} ({-share:.2f})" for share, head in same[:2]]
            shown += [f"{len(same) - 2} more"] if len(same) > 2 else []
            if word == UNNAMED:
                shown = [f"{len(same)} head{'s' if len(same) > 1 else ''}"]
            lines.append(f"{word}: {', '.join(shown)}")
        return lines


def summarize(
    weights: Sequence[Tensor],
    tokens: Sequence[str],
    *,
    special: Sequence[bool] | None = None,
    visible: Tensor | None = None,
) -> AttentionSummary:
    r"""Sums up attention weights $a_{ij}$ (query i, key j, rows summing to one) head by head.

    With $V_i$ the keys that query i may see, and means over the queries i of a head:

    - `entropy`: $H_i = -\sum_j a_{ij} \log a_{ij}$, in nats;
    - `normalized_entropy`: $H_i / \log |V_i|$, over queries that see two keys or more; 0 where none does;
    - `distance`: $\sum_j a_{ij} |i - j|$, in tokens;
    - `first`: $a_{i0}$; `special`: $\sum_{j \in S} a_{ij}$ over the special tokens S; `itself`: $a_{ii}$;
    - `previous`, `next`: $a_{i,i-1}$ and $a_{i,i+1}$, over queries that have such a neighbour;
    - `strongest`: the largest $a_{ij}$ with $i \neq j$ and neither token special; None where all are zero. `farther`: the same, with
      $|i - j| > 1$ and no punctuation, where many heads rest;
    - `tests`: what share goes to the previous token, the next, the token itself, the first, and special ones, with the share that random
      heads as sharp as this one give, and the threshold from which that is a role (`Role`). A text of a few tokens shows no roles.

    Args:
        weights: one tensor `[heads, tokens, tokens]` per layer. A row of zeros, a query that attends to nothing, is left out.
        tokens: the tokens, as they shall be printed.
        special: True for `[CLS]`, `[SEP]`, `<s>` and the like; none by default.
        visible: boolean `[tokens, tokens]`, True where query i may see key j. By default the keys that any head of the
            layer gives weight to, which is what a causal or windowed mask leaves.

    >>> import torch
    >>> even, ahead = torch.full((8, 8), 1 / 8), torch.eye(8).roll(1, dims=1)
    >>> summary = summarize([torch.stack((even, ahead))], "the cat sat on the red mat .".split())
    >>> for head in summary.layers[0]:
    ...     print(head)
    head 0.0: broad
    head 0.1: next token, 1.00 of its attention; chance 0.12
    >>> round(summary.layers[0][0].entropy, 4)  # log 8
    2.0794
    >>> print(summary.layers[0][1].strongest)
    the -> cat
    """
    n = len(tokens)
    special = [False] * n if special is None else list(special)
    if n == 0:
        raise InvalidArgument("tokens must not be empty; give the tokens that the weights belong to")
    if len(special) != n:
        raise InvalidArgument(f"special must say True or False for each of the {n} tokens; got {len(special)} entries")
    if visible is not None and (visible.dtype != torch.bool or visible.shape != (n, n)):
        raise InvalidArgument(
            f"visible must be boolean of shape ({n}, {n}); got {visible.dtype} {tuple(visible.shape)}"
        )
    if len(weights) == 0:
        raise InvalidArgument("weights must hold one tensor per layer; got none")
    layers = (heads_of(layer, at, tokens, special, visible) for at, layer in enumerate(weights))
    return AttentionSummary(tuple(tokens), tuple(layers))


def _checked(weights: Tensor, layer: int, n: int) -> Tensor:
    """The weights in float64, rows summing to one or zero."""
    if not isinstance(weights, Tensor) or weights.dim() != 3 or weights.shape[1:] != (n, n) or weights.shape[0] == 0:
        got = tuple(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
        raise InvalidArgument(
            f"weights of layer {layer} must have shape (heads, tokens, tokens) = (heads, {n}, {n}); got {got}. "
            "Take one sentence of a batch: attentions[layer][0]"
        )
    a = weights.detach().to("cpu", torch.float64)
    total = a.sum(dim=-1, keepdim=True)
    wrong = ~a.isfinite().all(-1) | (a < 0).any(-1) | ((total - 1).abs() > ROUNDING).squeeze(-1) & (a != 0).any(-1)
    if wrong.any():
        head, query = (int(i) for i in wrong.nonzero()[0])
        raise InvalidArgument(
            f"weights of layer {layer}, head {head}, query {query} are no distribution over keys: they sum to "
            f"{float(total[head, query]):.4g}, the lowest is {float(a[head, query].min()):.4g}. "
            "Give weights after the softmax; divide those of a kernel that is not normalised by their sum"
        )
    return a / total.clamp_min(torch.finfo(a.dtype).tiny)


def heads_of(
    weights: Tensor, layer: int, tokens: Sequence[str], special: Sequence[bool], visible: Tensor | None, first: int = 0
) -> tuple[HeadSummary, ...]:
    """Heads `first`, `first + 1`, ... of one layer, from their weights `[heads, tokens, tokens]`."""
    n = len(tokens)
    a = _checked(weights, layer, n)
    at = torch.arange(n)
    step = (at[:, None] - at).abs()
    live = (a != 0).any(dim=-1)  # [H, Q]
    seen = (a > 0).any(dim=0) if visible is None else visible.cpu()
    if (a * ~seen).any():
        raise InvalidArgument(
            f"layer {layer} gives weight to keys that visible hides; give the mask the model ran with"
        )
    choices = seen.sum(dim=-1)
    entropy = torch.special.entr(a).sum(dim=-1)
    previous, following = a.new_zeros(2, *a.shape[:-1])
    previous[:, 1:] = a.diagonal(-1, -2, -1)
    following[:, :-1] = a.diagonal(1, -2, -1)
    measures = {
        "entropy": _mean(entropy, live),
        "normalized_entropy": _mean(entropy / choices.clamp_min(2).log(), live & (choices > 1)),
        "distance": _mean((a * step).sum(dim=-1), live),
        "first": _mean(a[..., 0], live),
        "special": _mean(a[..., torch.tensor(special, dtype=torch.bool)].sum(dim=-1), live),
        "itself": _mean(a.diagonal(0, -2, -1), live),
        "previous": _mean(previous, live & (at > 0)),
        "next": _mean(following, live & (at < n - 1)),
    }
    marks = [mark or _is_punctuation(token) for mark, token in zip(special, tokens, strict=True)]
    strongest = _strongest(a * (step > 0), layer, tokens, special, first)
    farther = _strongest(a * (step > 1), layer, tokens, marks, first)
    tests = [measured(a, *keys).roles(name) for name, keys in position_tests(special, seen).items()]
    return tuple(
        HeadSummary(
            layer,
            first + at,
            **{name: float(value[at]) for name, value in measures.items()},
            strongest=strongest[at],
            farther=farther[at],
            tests=tuple(roles[at] for roles in tests),
        )
        for at in range(len(a))
    )


def _mean(value: Tensor, where: Tensor) -> Tensor:
    """The mean of `[H, Q]` over the queries that count; zero where none does."""
    return (value * where).sum(dim=-1) / where.sum(dim=-1).clamp_min(1)


def _is_punctuation(token: str) -> bool:
    """Whether a token is of punctuation alone; "<" and "$" are symbols to Unicode, and so are pictures, which are words."""
    return bool(token) and all(category(sign)[0] in "PS" and category(sign) != "So" for sign in token)


def _strongest(
    a: Tensor, layer: int, tokens: Sequence[str], special: Sequence[bool], first: int
) -> list[TokenPair | None]:
    plain = ~torch.tensor(special, dtype=torch.bool)
    candidates = a * (plain[:, None] & plain)
    pairs: list[TokenPair | None] = []
    for head, flat in enumerate(candidates.flatten(1), first):
        query, key = divmod(int(flat.argmax()), len(tokens))
        weight = float(flat.max())
        pairs.append(TokenPair(layer, head, query, key, tokens[query], tokens[key], weight) if weight > 0 else None)
    return pairs
