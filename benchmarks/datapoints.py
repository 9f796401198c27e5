"""Attention between rows of a table on a CUDA device: `python -m benchmarks.datapoints`.

Peak memory of forward and backward through a network of eight layers over 50,000 and 100,000 rows; time of one layer between rows beside
the same layer with its rows x rows coefficients written out; time of a layer compiled and not. Each is compared with float64 before it
is measured. Weights are float32, products bfloat16 under autocast, dropout acts, as in training. The raw figures are printed as
JSON and go to `benchmarks/results/datapoints.json`; the exit code is 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.bars import Bar
from benchmarks.gpu import concluded, machine, prepare
from benchmarks.times import peak
from benchmarks.timing import RESULTS, WrongResult, interleaved
from heedful.nn import ColumnAttention, DatapointAttention, DatapointBlock

# Bytes at most: 60 GB for 100,000 rows, 40 GB for 50,000; and how many times faster than coefficients written out.
MEMORY, SPEED = {100_000: 60e9, 50_000: 40e9}, 3.0
# Rows compared with float64, and the relative error that 16 bit may have in a layer and in a network.
COMPARED, ERROR, ERRORS = 64, 2e-2, 5e-2


@dataclass(frozen=True)
class Setting:
    columns: int = 20
    width: int = 32  # of a cell
    heads: int = 8
    layers: int = 8
    latent: int = 4  # row tokens
    dropout: float = 0.1
    rows: tuple[tuple[str, int], ...] = (("latent", 100_000), ("flatten", 100_000), ("flatten", 50_000))
    raced: int = 8_000
    compiled: int = 1_000
    dtype: str = "bfloat16"
    device: str = "cuda"


QUICK = Setting(5, 8, 2, 2, 2, rows=(("latent", 61), ("flatten", 61)), raced=67, compiled=31)


class Network(nn.Module):
    """Layers between rows and between columns in turn; `latent` row tokens, where there are any, stand for the row between rows."""

    def __init__(self, setting: Setting, latent: int) -> None:
        super().__init__()
        self.latent = latent
        self.tokens = nn.Parameter(torch.randn(latent, setting.width, device=setting.device))
        options: dict[str, Any] = {"dropout": setting.dropout, "device": setting.device}
        between = latent or setting.columns
        self.layers = nn.ModuleList(
            ColumnAttention(setting.width, setting.heads, **options)
            if place % 2
            else DatapointAttention(between, setting.width, setting.heads, **options)
            for place in range(setting.layers)
        )

    def forward(self, cells: Tensor, step: Callable[[nn.Module, Tensor], Tensor] = lambda layer, x: layer(x)) -> Tensor:
        """`step(layer, cells)` is how a layer is applied."""
        x = torch.cat((self.tokens.to(cells.dtype).expand(*cells.shape[:2], -1, -1), cells), dim=2)
        for layer in self.layers:
            if isinstance(layer, DatapointAttention) and self.latent:
                x = torch.cat((step(layer, x[:, :, : self.latent]), x[:, :, self.latent :]), dim=2)
            else:
                x = step(layer, x)
        return x[:, :, self.latent :]


def explicit(block: DatapointBlock, x: Tensor, rows: Tensor | None = None) -> Tensor:
    """The block's equations with all coefficients written out, as people write them."""

    def heads(one: Tensor) -> Tensor:
        return one.unflatten(-1, (block.num_heads, -1)).transpose(1, 2)

    def drop(one: Tensor) -> Tensor:
        return functional.dropout(one, block.dropout, block.training)

    assert block.skip is not None
    normal = block.norm1(x)
    source = normal if rows is None else block.norm1(rows)
    query, key, value = heads(block.query(normal)), heads(block.key(source)), heads(block.value(source))
    weights = drop((query @ key.mT * query.shape[-1] ** -0.5).softmax(-1))  # [B, H, m, n]
    out = block.skip(x) + drop(block.out((weights.to(value.dtype) @ value).transpose(1, 2).flatten(-2)))
    return out + drop(block.linear2(drop(functional.gelu(block.linear1(block.norm2(out))))))


def explicitly(layer: nn.Module, cells: Tensor, key: Tensor | None = None) -> Tensor:
    """A layer of tables by its equations."""
    if isinstance(layer, DatapointAttention):
        return explicit(layer.block, cells.flatten(-2), None if key is None else key.flatten(-2)).reshape(cells.shape)
    assert isinstance(layer, ColumnAttention)
    return explicit(layer.block, cells.flatten(0, 1)).reshape(cells.shape)


class Runs:
    """How modules are run here: under autocast, forward and backward to the input and every parameter."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def cells(self, rows: int, columns: int) -> Tensor:
        torch.manual_seed(0)
        return torch.randn(1, rows, columns, self.setting.width, device=self.setting.device)

    def forward(self, call: Callable[[Tensor], Tensor], cells: Tensor) -> Tensor:
        with torch.autocast(self.setting.device, getattr(torch, self.setting.dtype)):
            return call(cells)

    def training(self, call: Callable[[Tensor], Tensor], cells: Tensor, module: nn.Module) -> Callable[[], Any]:
        leaf = cells.requires_grad_()
        leaves = [leaf, *(weight for weight in module.parameters() if weight.numel())]

        def run() -> Any:
            out = self.forward(call, leaf)
            return torch.autograd.grad(out, leaves, torch.ones_like(out))

        return run

    @torch.no_grad()
    def check(self, name: str, found: Tensor, wanted: Tensor, allowed: float) -> float:
        error = float((found.double() - wanted).norm() / wanted.norm())
        if not error < allowed:
            raise WrongResult(f"{name} has relative error {error:.1e}, allowed {allowed:.0e}")
        return error

    def memory(self, encoder: str, rows: int) -> dict[str, Any]:
        """Peak bytes and milliseconds of a network over so many rows."""
        torch.manual_seed(1)
        network = Network(self.setting, self.setting.latent if encoder == "latent" else 0)
        errors = {"network": self.network_error(network), "layer": self.layer_error(network, rows)}
        run = self.training(network, self.cells(rows, self.setting.columns), network)
        bytes_ = peak(run, self.setting.device)
        timings = interleaved({"forward+backward": run}, 3, self.setting.device)
        count = sum(weight.numel() for weight in network.parameters())
        return {
            "encoder": encoder,
            "rows": rows,
            "parameters": count,
            "errors": errors,
            "peak": bytes_,
            "milliseconds": asdict(timings["forward+backward"]),
        }

    @torch.no_grad()
    def network_error(self, network: Network) -> float:
        """Of the whole network over few rows, beside its equations in float64."""
        network.eval()
        cells = self.cells(257, self.setting.columns)
        found = self.forward(network, cells)
        wanted = network.double()(cells.double(), explicitly)
        network.float().train()
        return self.check("the network", found, wanted, ERRORS)

    @torch.no_grad()
    def layer_error(self, network: Network, rows: int) -> float:
        """Of some rows among all, in the first layer between rows, beside its equations in float64."""
        layer = network.layers[0].eval()
        cells = self.cells(rows, network.latent or self.setting.columns)
        some = torch.linspace(0, rows - 1, min(COMPARED, rows), device=cells.device).long()
        found = self.forward(layer, cells)[:, some]
        wanted = explicitly(layer.double(), cells.double()[:, some], cells.double())
        layer.float().train()
        return self.check("a layer between rows", found, wanted, ERROR)

    def race(self, encoder: str) -> dict[str, Any]:
        """A layer between rows, and the same with its coefficients written out: peak bytes and milliseconds."""
        setting = self.setting
        torch.manual_seed(1)
        columns = setting.latent if encoder == "latent" else setting.columns
        layer = DatapointAttention(
            columns, setting.width, setting.heads, dropout=setting.dropout, device=setting.device
        )  # fmt: skip
        cells = self.cells(setting.raced, columns)
        with torch.no_grad():
            layer.eval()
            ways = {"heedful": layer, "explicit": lambda x: explicitly(layer, x)}
            outs = {name: self.forward(call, cells) for name, call in ways.items()}
            some = torch.linspace(0, setting.raced - 1, min(COMPARED, setting.raced), device=cells.device).long()
            wanted = explicitly(layer.double(), cells.double()[:, some], cells.double())
            errors = {name: self.check(name, out[:, some], wanted, ERROR) for name, out in outs.items()}
            layer.float().train()
        del outs, wanted
        runs = {name: self.training(call, cells, layer) for name, call in ways.items()}
        return {
            "encoder": encoder,
            "rows": setting.raced,
            "errors": errors,
            "peak": {name: peak(run, setting.device) for name, run in runs.items()},
            "milliseconds": {name: asdict(one) for name, one in interleaved(runs, 11, setting.device).items()},
        }

    def compiled(self, kind: str) -> dict[str, Any]:
        """A layer of a smaller table, compiled and not."""
        setting = self.setting
        torch.manual_seed(1)
        options: dict[str, Any] = {"dropout": setting.dropout, "device": setting.device}
        layer = (
            ColumnAttention(setting.width, setting.heads, **options)
            if kind == "columns"
            else DatapointAttention(setting.columns, setting.width, setting.heads, **options)
        )
        backend = "inductor" if setting.device == "cuda" else "eager"
        graph = torch.compile(layer, fullgraph=True, backend=backend)
        cells = self.cells(setting.compiled, setting.columns)
        with torch.no_grad():
            layer.eval()
            wanted = explicitly(layer.double(), cells.double())
            layer.float()
            errors = {
                name: self.check(name, self.forward(call, cells), wanted, ERROR)
                for name, call in (("eager", layer), ("compiled", graph))
            }
            layer.train()
        runs = {name: self.training(call, cells, layer) for name, call in (("eager", layer), ("compiled", graph))}
        least = 2.0 if setting.device == "cuda" else 0.0
        timings = interleaved(runs, 11, setting.device, least=least)
        return {
            "layer": kind,
            "rows": setting.compiled,
            "errors": errors,
            "milliseconds": {name: asdict(one) for name, one in timings.items()},
        }


def measured(setting: Setting) -> dict[str, list[dict[str, Any]]]:
    runs = Runs(setting)
    found: dict[str, list[dict[str, Any]]] = {"memory": [], "race": [], "compiled": []}
    for encoder, rows in setting.rows:
        found["memory"].append(runs.memory(encoder, rows))
        _clear(setting.device)
    for encoder in ("latent", "flatten"):
        found["race"].append(runs.race(encoder))
        _clear(setting.device)
    for kind in ("rows", "columns"):
        found["compiled"].append(runs.compiled(kind))
    return found


def _clear(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def bars(found: dict[str, list[dict[str, Any]]]) -> list[Bar]:
    made = []
    for row in found["memory"]:
        bound = MEMORY[row["rows"]]
        name = f"{row['rows']} rows, {row['encoder']}"
        made.append(Bar(name, "bytes of forward and backward", bound, at_least=False, value=row["peak"]))
    for row in found["race"]:
        times = {name: timing["median"] for name, timing in row["milliseconds"].items()}
        name, speed = f"{row['rows']} rows, {row['encoder']}", times["explicit"] / times["heedful"]
        made.append(Bar(name, "speed of a layer / coefficients written out", SPEED, value=speed))
    return made


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.datapoints", description=(__doc__ or "").split("\n\n")[1]
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small sizes that try the driver and judge nothing, on the CPU where there is no device",
    )
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="where the raw figures go")
    asked = parser.parse_args(given)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not asked.quick:
        print("there is no CUDA device here; --quick tries the driver at small sizes", file=sys.stderr)
        return 2
    setting = replace(QUICK if asked.quick else Setting(), device=device)
    prepare(device)
    found = measured(setting)
    judged = [] if asked.quick else bars(found)
    result: dict[str, Any] = {"machine": machine(device), "setting": asdict(setting), **found}
    return concluded(result, judged, None if asked.quick else asked.out / "datapoints.json")


if __name__ == "__main__":
    sys.exit(main())
