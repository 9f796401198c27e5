"""What the kernels for Hopper take of a chip, without one: `python -m benchmarks.registers`.

Compiles each form of the forward and backward passes for compute capability 9.0 and prints registers of a thread, bytes of shared
memory, instructions that spill registers, and of the innermost loop that multiplies its instructions, products, and instructions that
wait for another unit (exponentials, shared memory) or spill. Needs a version of Triton that has the kernels, and no GPU: whether a
change spills registers is known before it is timed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from heedful.ops.fused import launch, serving
from heedful.ops.fused._device import Chip

EXP = {"activation": "exp", "distance": True}
KERNELS: dict[str, dict[str, Any]] = {
    "sigmoid": {"activation": "sigmoid"},
    "tanh": {"activation": "tanh"},
    "relu_squared": {"activation": "relu_squared"},
    "softmax": {"activation": "exp", "division": 1},
    "gaussian raw": EXP,
    "gaussian": EXP | {"division": 1},
}
# Instructions of the machine by what is counted of them.
COUNTED = {
    "products": "HGMMA",
    "exponentials": "MUFU",
    "reads and writes of shared memory": "LDS|STS|LDSM|STSM",
    "spills": "STL|LDL",
}


def problem(name: str, size: int, causal: bool, length: int) -> launch.Problem:
    settings = {"block_size": [1, 1], "low": None, "high": 0 if causal else None, "degree": 1, "division": 0}
    settings |= {"distance": False} | KERNELS[name]
    query, key, value = (torch.empty(1, 16, length, size, dtype=torch.bfloat16) for _ in range(3))
    return launch.Problem(query, key, value, torch.ones(16), *(None,) * 9, **settings)


def counts(machine_code: str, products: int, exponentials: int) -> dict[str, int]:
    """Counts of instructions that spill in all, and of all that is counted in the shortest loop with so many of these: a block's."""
    code = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,6})\*/\s+([^;]*);", machine_code)]
    loops = []
    for end, text in code:
        back = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)
        if back and (begin := int(back[1], 16)) <= end:
            loops.append([x for at, x in code if begin <= at <= end])
    whole = [loop for loop in loops if _count(loop, "HGMMA") >= products and _count(loop, "MUFU") >= exponentials]
    body = min(whole, key=len, default=[])
    inside = {name: _count(body, words) for name, words in COUNTED.items()}
    return {"spills in all": _count([text for _, text in code], COUNTED["spills"]), "loop": len(body), **inside}


def _count(lines: list[str], words: str) -> int:
    return sum(bool(re.search(rf"\b({words})\b", line)) for line in lines)


def compiling(found: list[dict[str, Any]], products: int, exponentials: int) -> Callable[..., None]:
    """In place of a launch: compiles the kernel and adds what it takes."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

    def run(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        compiled = kernel.warmup(*args, grid=grid, **options)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            code, usage = (
                subprocess.run([tool, flag, file.name], capture_output=True, text=True, check=True).stdout
                for flag in ("--dump-sass", "-res-usage")
            )
        registers = int(re.findall(r"REG:(\d+)", usage)[0])
        found.append(
            {"registers": registers, "bytes": compiled.metadata.shared, **counts(code, products, exponentials)}
        )

    return run


def without_a_gpu() -> None:
    """Triton compiles for a chip that is not there."""
    import triton
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", 90, 32)
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0
        )
    )


def takes(way: str, given: launch.Problem) -> dict[str, Any]:
    """What the kernel of a pass takes."""
    from heedful.ops.fused import hopper, hopper_backward

    found: list[dict[str, Any]] = []
    tickets = torch.empty(1, dtype=torch.int32)
    rows, causal, divided = torch.empty(given.query.shape[:3]), given.high is not None, given.division == 1
    size = given.query.shape[-1]
    # A thread has 64 coefficients of a block of 64 rows and 128 columns; backward there are five products, in parts of 16 numbers.
    each = 0 if given.activation == "relu_squared" else 64 if way == "forward" or size == 64 else 32
    run = compiling(found, size // 16 + 8 if way == "forward" else 32, each)
    norms = rows if given.distance else None
    if way == "forward":
        marks = rows if given.distance or causal or given.activation == "tanh" else None
        hopper.forward(given, torch.empty_like(given.query), marks, norms, tickets if given.distance else None, run)
    else:
        x: list[Tensor] = [torch.empty_like(given.query) for _ in range(3)]
        eighths = torch.empty(*rows.shape, 8, dtype=torch.bfloat16)
        terms, deltas = eighths if given.distance or divided else None, eighths if divided else None
        left = torch.empty(rows.numel() // 64, dtype=torch.int32) if causal else None
        sums = torch.empty(given.query.shape)
        hopper_backward.backward(given, x[0], terms, deltas, norms, sums, *x[1:], left, run)
    return found[-1]


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.registers", description=(__doc__ or "").split("\n\n")[1]
    )
    parser.add_argument(
        "--only", default="", metavar="PATTERN", help="forms whose name matches this regular expression"
    )
    parser.add_argument("--length", type=int, default=4096, help="queries and keys of a head (4096)")
    asked = parser.parse_args(given)
    import triton

    if not triton.__version__.startswith(serving.HOPPER) or launch.INTERPRETED:
        parser.error(
            f"the kernels for Hopper are made for Triton {serving.VERSIONS}; this is {triton.__version__}"
            + (" in its interpreter: unset TRITON_INTERPRET" if launch.INTERPRETED else "")
        )
    from heedful.ops.fused import hopper, hopper_backward

    without_a_gpu()
    for module in (hopper, hopper_backward):
        module.chip = lambda device: Chip(9, 132, 2**17)  # type: ignore[attr-defined]
    forms = [(way, size, causal, name) for way in ("forward", "backward") for size in (64, 128) for causal in (False, True) for name in KERNELS]  # fmt: skip
    for way, size, causal, name in forms:
        title = f"{way} {size}{' causal' if causal else ''} {name}"
        if (way, name) != ("backward", "tanh") and re.search(asked.only, title):
            told = takes(way, problem(name, size, causal, asked.length))
            print(f"{title:<32}", *(f"{name} {value:>6}" for name, value in told.items()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
