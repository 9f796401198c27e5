"""The network: cells as vectors, attention between rows and between columns, and an answer for every cell (Kossen et al. 2021)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from heedful._attend import attend
from heedful._checks import check_choice, check_number, check_whole
from heedful._errors import InvalidArgument
from heedful.kernels import Gaussian
from heedful.nn import ColumnAttention, DatapointAttention, Module, Remembered

RowEncoder = Literal["flatten", "latent"]
Numbers = Literal["linear", "periodic"]

NEAR = Gaussian(2.0)
"""How votes of rows are weighed: by the distance of their vectors."""

DOUBT = 0.02
"""How much of the rows' votes is left to the classes' shares: none is ever impossible."""

LARGE = 3.0
"""Standard deviations beyond which `numbers="periodic"` sees the logarithm."""


class Rows(NamedTuple):
    """Rows of tables: `values (B, n, d)`, standardised numbers and codes of levels, any number where `missing (B, n, d)`; `target (B, n)`,
    codes of classes or standardised numbers, anything where `hidden (B, n)`."""

    values: Tensor
    missing: Tensor
    target: Tensor
    hidden: Tensor

    def take(self, places: Tensor) -> Rows:
        """Some rows of every table, by a mask `(n,)` or by their places."""
        return Rows(*(part[:, places] for part in self))


class Answers(NamedTuple):
    """For each row: the target `(B, n, outputs)`, every feature `(B, n, width)` in the order of `TableNetwork.outputs`, and the row as a vector."""

    target: Tensor
    features: Tensor
    row: Tensor


class TableNetwork(Module):
    r"""Rows of a table that look at one another: a Non-Parametric Transformer (Kossen et al. 2021, "Self-attention between datapoints").

    A cell is a vector $H_{ij} = c_{ij} W_j + b_j + E_j + E_{\mathrm{kind}(j)}$ of its value or level and of a bit that says that it is hidden; the target is a
    column like the others. Layers attend between rows, then between the columns of each row; linear maps read every column's answer.

    Args:
        levels: for each feature 0 (a number) or the number of its levels.
        outputs: classes of the target; 0 for a number.
        embed_dim: width e of a cell.
        num_heads: heads of attention between rows; between columns as many of them as divide e.
        layers: pairs of attention between rows and between columns.
        row_encoder: what of a row meets other rows: `"flatten"`, all its cells, as published ($13 (d e)^2$ parameters a layer); `"latent"`, `row_tokens` vectors
            that are a linear map of the cells at first and, between columns, attend to them ($13 (r e)^2$).
        between_columns: without it, latent rows alone go through the layers.
        between_rows: False lets every row see itself alone: the control.
        numbers: `"linear"`, as published; `"periodic"` adds sines and cosines of learned frequencies, and takes the logarithm of far values.
        linear: adds a linear map of the cells to the target's answer, and another to those of features.
        votes: what a latent row says of its class are votes of the rows it looks at, by nearness of vectors, and nothing else beside the linear map; of a number, votes and a map of its vector: classes vote by
            $\log \sum_i a_i [y_i = c] - \log p_c$ with the shares $p_c$ of classes, numbers by $\sum_i a_i (y_i - x_i w)$.
        expansion: how many times wider than its layer a network inside is.
        dropout, attention_dropout, norm_kv, scale, residual, eps, inducing: see `heedful.nn.DatapointBlock`.

    `forward(rows, keys_hidden)` lets rows attend to those of the same table that are not hidden as keys. `remember(rows)` keeps keys and values of stored rows, and
    `forward(rows, memory=...)` lets others attend to these alone, at a cost of queries x stored rows.

    >>> import torch
    >>> network = TableNetwork((0, 0, 3), 2, embed_dim=8, num_heads=2, layers=1)
    >>> values, known = torch.tensor([[[0.5, -1.0, 2.0], [0.1, 0.0, 0.0]]]), torch.zeros(1, 2, 3, dtype=torch.bool)
    >>> rows = Rows(values, known, torch.tensor([[1, 0]]), torch.tensor([[False, True]]))
    >>> network(rows).target.shape, network(rows).features.shape
    (torch.Size([1, 2, 2]), torch.Size([1, 2, 5]))
    """

    def __init__(
        self,
        levels: Sequence[int],
        outputs: int,
        *,
        embed_dim: int = 64,
        num_heads: int = 8,
        layers: int = 4,
        row_encoder: RowEncoder = "flatten",
        row_tokens: int = 4,
        between_columns: bool = True,
        between_rows: bool = True,
        numbers: Numbers = "linear",
        frequencies: int = 8,
        linear: bool = False,
        votes: bool = False,
        expansion: int = 4,
        dropout: float = 0.1,
        attention_dropout: float | None = None,
        norm_kv: bool = True,
        scale: str = "head",
        residual: str = "linear",
        eps: float = 1e-5,
        inducing: int | None = None,
        device: Any = None,
    ) -> None:
        super().__init__()
        check_whole(embed_dim=embed_dim, num_heads=num_heads, layers=layers, row_tokens=row_tokens)
        check_whole(frequencies=frequencies, expansion=expansion)
        check_whole(0, outputs=outputs)
        check_number(least=0, high=1, dropout=dropout)
        check_choice(RowEncoder, row_encoder=row_encoder)
        check_choice(Numbers, numbers=numbers)
        if not between_columns and row_encoder == "flatten":
            raise InvalidArgument(
                "between_columns=False is for row_encoder='latent', whose rows are read off the cells"
            )
        if votes and row_encoder == "flatten":
            raise InvalidArgument("votes=True is for row_encoder='latent', whose rows are vectors")
        self.votes = votes
        self.levels, self.outputs, self.embed_dim, self.num_heads = tuple(levels), outputs, embed_dim, num_heads
        self.layers, self.row_encoder, self.row_tokens = layers, row_encoder, row_tokens
        self.between_columns, self.between_rows, self.numbers = between_columns, between_rows, numbers
        self.frequencies, self.linear, self.expansion, self.dropout = frequencies, linear, expansion, dropout
        self.attention_dropout = attention_dropout
        self.norm_kv, self.scale, self.residual, self.eps, self.inducing = norm_kv, scale, residual, eps, inducing
        place: dict[str, Any] = {"device": device}
        self._numbers = [at for at, count in enumerate(self.levels) if not count]
        self._categories = [at for at, count in enumerate(self.levels) if count]
        columns, e = 1 + len(self.levels), embed_dim
        self.embedding = Embedding(self.levels, e, numbers, frequencies, **place)
        self.target_embedding = TargetEmbedding(outputs, e, **place)
        # A linear map of all cells knows which is which; cells that attend to one another do not.
        self.index = nn.Parameter(torch.randn(columns, e, **place)) if between_columns else None
        self.kinds: Tensor
        kinds = [int(bool(outputs)), *(0 for _ in self._numbers), *(1 for _ in self._categories)]
        self.kind = nn.Parameter(torch.randn(2, e, **place)) if between_columns and len(set(kinds)) > 1 else None
        self.register_buffer("kinds", torch.tensor(kinds, device=device), persistent=False)
        block: dict[str, Any] = {
            "dropout": dropout, "attention_dropout": attention_dropout, "norm_kv": norm_kv, "scale": scale, "residual": residual, "eps": eps, **place
        }  # fmt: skip
        latent = row_encoder == "latent"
        across = row_tokens if latent else columns
        self.readout = nn.Linear(columns * e, row_tokens * e, **place) if latent else None
        self.rows = nn.ModuleList(
            DatapointAttention(across, e, num_heads, inducing=inducing, hidden=expansion * across * e, **block)
            for _ in range(layers)
        )
        within = math.gcd(num_heads, e)
        self.columns = nn.ModuleList(
            ColumnAttention(e, within, hidden=expansion * e, **block) for _ in range(layers if between_columns else 0)
        )
        width = row_tokens * e if latent else columns * e
        self.last_norm = nn.LayerNorm(width, **place) if latent else nn.Identity()
        answers = max(1, outputs)
        self.target_head = nn.Linear(width if latent else e, answers, **place)
        self.feature_head = FeatureHead(self.levels, width if latent else e, shared=latent, **place)
        self.vote = nn.Linear(width, width, **place) if votes else None
        self.gate = nn.Parameter(torch.zeros((), **place)) if votes and outputs else None
        self.linear_head: nn.Linear | None = None
        self.feature_linear: nn.Linear | None = None
        if linear:
            entries = len(self._numbers) + sum(self.levels)
            self.linear_head = nn.Linear(entries, answers, bias=False, **place)
            self.feature_linear = nn.Linear(entries, entries, bias=False, **place)
            nn.init.zeros_(self.linear_head.weight)
            nn.init.zeros_(self.feature_linear.weight)

    @property
    def sizes(self) -> list[int]:
        """Of each feature how many entries of `Answers.features` it has, in its order: numbers first."""
        return [1] * len(self._numbers) + [self.levels[at] for at in self._categories]

    @property
    def order(self) -> list[int]:
        """Features in the order of `Answers.features`: numbers first, then those with levels."""
        return [*self._numbers, *self._categories]

    @property
    def _across(self) -> list[DatapointAttention]:
        return list(self.rows)  # type: ignore[arg-type]

    @property
    def _within(self) -> list[ColumnAttention]:
        return list(self.columns)  # type: ignore[arg-type]

    def remember(self, rows: Rows, keys_hidden: Tensor | None = None) -> list[Remembered]:
        """Keys and values of stored rows, one entry for each layer."""
        memory: list[Remembered] = []
        self._run(rows, keys_hidden, None, memory)
        return memory

    def forward(
        self, rows: Rows, keys_hidden: Tensor | None = None, memory: Sequence[Remembered] | None = None
    ) -> Answers:
        """An answer for every cell; rows where `keys_hidden (B, n)` is True are seen by none, also not by themselves."""
        return self._run(rows, keys_hidden, memory, None)

    def coefficients(
        self,
        rows: Rows,
        keys_hidden: Tensor | None = None,
        memory: Sequence[Remembered] | None = None,
        *,
        layer: int = -1,
    ) -> Tensor:
        """How much each row takes of each other, or of each stored one, in a layer: `[B, heads, n, keys]`. Behind the last layer come the votes, with one head."""
        seen: list[Tensor] = []
        self._run(rows, keys_hidden, memory, None, seen=(range(self.layers + self.votes)[layer], seen))
        return seen[0]

    def _run(
        self,
        rows: Rows,
        keys_hidden: Tensor | None,
        memory: Sequence[Remembered] | None,
        kept: list[Remembered] | None,
        seen: tuple[int, list[Tensor]] | None = None,
    ) -> Answers:
        cells = torch.cat(
            (self.target_embedding(rows.target, rows.hidden)[:, :, None], self.embedding(rows.values, rows.missing)),
            dim=2,
        )
        if self.index is not None:
            cells = cells + self.index
        if self.kind is not None:
            cells = cells + self.kind[self.kinds]
        cells = functional.dropout(cells, self.dropout, self.training)
        tokens = 0
        if self.readout is not None:
            tokens = self.row_tokens
            row = self.readout(cells.flatten(2)).unflatten(2, (tokens, self.embed_dim))
            cells = torch.cat((row, cells), dim=2) if self.between_columns else row
        for place, attention in enumerate(self._across):
            part = cells[:, :, :tokens] if tokens else cells
            stored = None if memory is None else memory[place]
            if seen is not None and seen[0] == place:
                key = None if stored is not None or keys_hidden is None else part
                seen[1].append(attention.coefficients(part, key, keys_hidden, remembered=stored))
            if kept is not None:
                kept.append(attention.remember(part, keys_hidden))
            mixed = self._between_rows(attention, part, keys_hidden, stored)
            cells = torch.cat((mixed, cells[:, :, tokens:]), dim=2) if tokens else mixed
            if self.between_columns:
                cells = self._within[place](cells)
        vector = cells[:, :, :tokens] if tokens else cells
        vector = self.last_norm(vector.flatten(2))
        out = functional.dropout(vector if tokens else cells, self.dropout, self.training)
        plain = self._linear(rows)
        if self.vote is None:
            target = self.target_head(out if tokens else out[:, :, 0]) + plain
        else:
            near = self.vote(vector)[:, None]
            cast = self._ballots(rows, near, plain, keys_hidden)
            ballots = cast if memory is None else memory[-1]
            if kept is not None:
                kept.append(cast)
            if seen is not None and seen[0] == self.layers:
                mask = None if ballots.padding is None else ~ballots.padding[:, None, None]
                seen[1].append(attend.coefficients(near, ballots.key, mask, kernel=NEAR))
            # Votes average what rows hold; a number may need more than an average.
            own = self.target_head.bias if self.outputs else self.target_head(out)
            target = own + plain + self._voted(near, ballots)
        features = self.feature_head(out if tokens else out[:, :, 1:])
        if self.feature_linear is not None:
            features = features + self.feature_linear(self.embedding.dense(rows.values, rows.missing))
        return Answers(target, features, vector)

    def _linear(self, rows: Rows) -> Tensor:
        """The linear map of the cells, zeros where there is none."""
        if self.linear_head is None:
            return self.target_head.bias.new_zeros(())
        return self.linear_head(self.embedding.dense(rows.values, rows.missing))

    def _ballots(self, rows: Rows, near: Tensor, plain: Tensor, keys_hidden: Tensor | None) -> Remembered:
        """What rows vote for, and who may not: rows without a target."""
        silent = rows.hidden if keys_hidden is None else rows.hidden | keys_hidden
        if self.outputs:
            votes = functional.one_hot(rows.target.masked_fill(silent, 0), self.outputs).to(near)
        else:
            votes = rows.target.to(near)[..., None] - plain
        votes = votes.masked_fill(silent[..., None], 0.0)
        return Remembered(near, votes[:, None], silent)

    def _voted(self, near: Tensor, ballots: Remembered) -> Tensor:
        if not self.between_rows:
            return near.new_zeros(())
        assert ballots.padding is not None
        key, votes, speaks = ballots.key, ballots.value, ~ballots.padding
        if len(speaks) == 1 and not near.is_cuda and not torch.compiler.is_compiling():
            key, votes = (part[:, :, speaks[0]] for part in (key, votes))
            heard = attend(near, key, votes, kernel=NEAR)[:, 0]
        else:
            heard = attend(near, key, votes, speaks[:, None, None], kernel=NEAR)[:, 0]
        if self.gate is None:
            return heard
        total = votes.sum(2)  # [B, 1, outputs]
        shares = (1 - DOUBT) * total / total.sum(-1, keepdim=True).clamp_min(1) + DOUBT / self.outputs
        return self.gate.exp() * (((1 - DOUBT) * heard + DOUBT * shares).log() - shares.log())

    def _between_rows(
        self, attention: DatapointAttention, cells: Tensor, keys_hidden: Tensor | None, stored: Remembered | None
    ) -> Tensor:
        if self.between_rows and stored is None and keys_hidden is not None:
            # One table on a CPU: its keys alone are there to be read, without a mask.
            if len(keys_hidden) == 1 and not cells.is_cuda and not torch.compiler.is_compiling():
                return attention(cells, cells[:, ~keys_hidden[0]])
            return attention(cells, cells, keys_hidden)
        if self.between_rows:
            return attention(cells, remembered=stored)
        # Every row is a table of its own.
        return attention(cells.flatten(0, 1)[:, None])[:, 0].unflatten(0, cells.shape[:2])


class Embedding(nn.Module):
    """Cells of features as vectors `(B, n, d, e)`, numbers first; of a hidden cell only that it is hidden."""

    def __init__(self, levels: Sequence[int], size: int, numbers: str, frequencies: int, device: Any = None) -> None:
        super().__init__()
        self.numbers = [at for at, count in enumerate(levels) if not count]
        self.categories = [at for at, count in enumerate(levels) if count]
        self.counts = [levels[at] for at in self.categories]
        self.periodic = numbers == "periodic"
        self.starts: Tensor
        count = len(self.numbers)
        inputs = 2 + (2 * frequencies if self.periodic else 0)
        self.frequencies = nn.Parameter(0.1 * torch.randn(count, frequencies, device=device)) if self.periodic else None
        self.weight = nn.Parameter(torch.empty(count, inputs, size, device=device))
        self.bias = nn.Parameter(torch.empty(count, size, device=device))
        # Published cells start as torch's linear maps do; sines and cosines at unit variance.
        bound = (3 / inputs) ** 0.5 if self.periodic else inputs**-0.5
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)
        # Level 0 of each column is the hidden cell.
        self.table = nn.Embedding(max(1, sum(self.counts) + len(self.counts)), size, device=device)
        starts = torch.tensor([0, *(1 + levels for levels in self.counts)][: len(self.counts)]).cumsum(0)
        self.register_buffer("starts", starts.to(device=device, dtype=torch.long), persistent=False)

    def forward(self, values: Tensor, missing: Tensor) -> Tensor:
        parts = []
        if self.numbers:
            number, gone = self._known(values, missing)
            inputs = [number[..., None], gone.to(number)[..., None]]
            if self.frequencies is not None:
                turns = 2 * math.pi * self.frequencies * number[..., None]
                here = (~gone)[..., None]
                inputs += [turns.sin() * here, turns.cos() * here]
            # [d, B n, inputs] @ [d, inputs, e]: one product for each column.
            stacked = torch.cat(inputs, dim=-1).flatten(0, 1).transpose(0, 1)
            cells = torch.baddbmm(self.bias[:, None], stacked, self.weight).transpose(0, 1)
            cells = functional.relu(cells) if self.periodic else cells
            parts.append(cells.unflatten(0, values.shape[:2]))
        if self.categories:
            parts.append(self.table(self._codes(values, missing) + self.starts))
        return torch.cat(parts, dim=2)

    def dense(self, values: Tensor, missing: Tensor) -> Tensor:
        """Numbers, and a 0 or 1 for each level; zeros where a cell is hidden."""
        parts = [self._known(values, missing)[0]] if self.numbers else []
        codes = self._codes(values, missing)
        for at, count in enumerate(self.counts):
            parts.append(functional.one_hot(codes[..., at], 1 + count)[..., 1:].to(values.dtype))
        return torch.cat(parts, dim=2)

    def _known(self, values: Tensor, missing: Tensor) -> tuple[Tensor, Tensor]:
        gone = missing[..., self.numbers]
        number = values[..., self.numbers].masked_fill(gone, 0.0)
        if self.periodic:
            size = number.abs().clamp_min(LARGE)
            number = number * (LARGE / size) * (1 + (size / LARGE).log())
        return number, gone

    def _codes(self, values: Tensor, missing: Tensor) -> Tensor:
        gone = missing[..., self.categories]
        return (1 + values[..., self.categories].masked_fill(gone, -1.0)).long()


class TargetEmbedding(nn.Module):
    """The target's cell as a vector `(B, n, e)`: a class or a number, or that it is hidden."""

    def __init__(self, outputs: int, size: int, device: Any = None) -> None:
        super().__init__()
        self.table = nn.Embedding(outputs + 1, size, device=device) if outputs else None
        self.map = None if outputs else nn.Linear(2, size, device=device)

    def forward(self, target: Tensor, hidden: Tensor) -> Tensor:
        if self.table is not None:
            return self.table((1 + target).masked_fill(hidden, 0))
        assert self.map is not None
        number = target.to(self.map.weight).masked_fill(hidden, 0.0)
        return self.map(torch.stack((number, hidden.to(number)), dim=-1))


class FeatureHead(nn.Module):
    """Answers for features `(B, n, width)`, of the row as one vector (`shared`) or of each cell by weights of its own."""

    def __init__(self, levels: Sequence[int], size: int, *, shared: bool, device: Any = None) -> None:
        super().__init__()
        numbers = sum(not count for count in levels)
        counts = [count for count in levels if count]
        self.sizes = [1] * numbers + counts
        self.shared = nn.Linear(size, sum(self.sizes), device=device) if shared else None
        self.places: Tensor
        if not shared:
            self.weight = nn.Parameter(torch.empty(sum(self.sizes), size, device=device))
            self.bias = nn.Parameter(torch.zeros(sum(self.sizes), device=device))
            nn.init.uniform_(self.weight, -(size**-0.5), size**-0.5)
            places = torch.repeat_interleave(torch.arange(len(self.sizes)), torch.tensor(self.sizes))
            self.register_buffer("places", places.to(device=device), persistent=False)

    def forward(self, cells: Tensor) -> Tensor:
        if self.shared is not None:
            return self.shared(cells)
        # The cell of each answer beside that answer's weights.
        return (cells[:, :, self.places] * self.weight).sum(-1) + self.bias


class Members(nn.Module):
    """Several networks of one table, trained beside one another; `step` counts what they have learned."""

    def __init__(self, networks: Sequence[TableNetwork]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)
        self.step: Tensor
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def __iter__(self) -> Iterator[TableNetwork]:
        return iter(self.networks)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.networks)
