"""Forward and backward passes by length, head size and mask, beside torch's attention: whatever a call waits for the processor is left out."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.timing import interleaved
from heedful import Gaussian, Kernel, ReluSquared, Sigmoid, Softmax, attend, masks
from heedful.masks import Mask

TORCH = "torch"
KERNELS: dict[str, Kernel] = {
    "Softmax": Softmax(),
    "Sigmoid": Sigmoid(bias=-5.0),
    "ReluSquared": ReluSquared(),
    "Gaussian raw": Gaussian(normalize=False),
    "Gaussian": Gaussian(),
}
# A bias as low as long sequences ask for, -log n, with which the hardware's hyperbolic tangent is not tried.
LOW = "Sigmoid, bias -10"
MORE: dict[str, Kernel] = {LOW: Sigmoid(bias=-10.0)}

# Their speed over that of cuDNN's softmax attention, forward and backward, from 512 to 32,768 tokens.
SPEED = {"Sigmoid": 1.0, "ReluSquared": 1.0, "Gaussian raw": 1.0, "Gaussian": 0.95}
BARRED = range(512, 32_769)


@dataclass(frozen=True)
class Case:
    shape: tuple[int, int, int, int]
    is_causal: bool = False
    mask: str = ""

    @property
    def density(self) -> float:
        """The share of pairs that may attend."""
        n = self.shape[2]
        return {"": 0.5 if self.is_causal else 1.0, "padding": 0.75, "packed": 0.5, "window": 1 - (1 - 1024 / n) ** 2}[
            self.mask
        ]

    @property
    def flops(self) -> float:
        batch, heads, n, size = self.shape
        return 4.0 * batch * heads * n**2 * size * self.density


def cases(tokens: int, heads: int, lengths: tuple[int, ...]) -> list[Case]:
    """Lengths with as many tokens each; then head sizes, and masks, at one length."""

    def shape(length: int, size: int, heads: int = heads) -> tuple[int, int, int, int]:
        return max(1, tokens // length), heads, length, size

    ways = [(length, size, causal) for size in (64, 128) for causal in (False, True) for length in lengths]
    found = [Case(shape(n, size, heads if n <= 16_384 else heads // 2), causal) for n, size, causal in ways]
    found.append(Case(shape(65_536, 64, 8)))
    found += [Case(shape(4096, size), causal) for size in (32, 96, 256) for causal in (False, True)]
    return found + [Case(shape(4096, 64), mask=mask) for mask in ("padding", "packed", "window")]


def attention(name: str, is_causal: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    if name == TORCH:
        return lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    kernel = (KERNELS | MORE)[name]
    return lambda q, k, v: attend(q, k, v, is_causal=is_causal, kernel=kernel)


def contestants(case: Case) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """cuDNN's softmax attention first; under a mask, which torch takes as a matrix, whichever of its kernels takes it."""
    if not case.mask:

        def cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return scaled_dot_product_attention(q, k, v, is_causal=case.is_causal)

        names = [name for name in (*KERNELS, *MORE) if name != "Softmax"]
        return {TORCH: cudnn} | {name: attention(name, case.is_causal) for name in names}
    return {name: run for name, run in masked(case, "cuda").items() if name not in MORE}


def masked(case: Case, device: str) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Under a mask that is made once, as a batch has one for all its layers; torch is given it as a matrix."""
    batch, _, n, _ = case.shape
    mask = mask_of(case, device)
    assert mask is not None
    dense = mask.dense((batch, 1, n, n), torch.device(device))
    found = {name: _masked(kernel, mask) for name, kernel in (KERNELS | MORE).items()}
    return {TORCH: lambda q, k, v: scaled_dot_product_attention(q, k, v, dense)} | found


def mask_of(case: Case, device: str) -> Mask | None:
    batch, _, n, _ = case.shape
    if case.mask == "padding":
        return masks.padding(torch.full((batch,), 3 * n // 4, device=device))
    if case.mask == "packed":
        return masks.packed(torch.tensor([0, n // 2, n], device=device))
    return masks.window(1024, 1024) if case.mask else None


def _masked(kernel: Kernel, mask: Mask) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda q, k, v: attend(q, k, v, mask, kernel=kernel)


def drawn(case: Case) -> tuple[list[Tensor], Tensor]:
    x = [torch.randn(case.shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    return x, torch.randn_like(x[0]).detach()


def compile_ahead(asked: list[Case]) -> None:
    """Every kernel once, many at a time in processes of their own: Triton's cache then has them."""
    forms = {(case.shape[3], case.is_causal, case.mask) for case in asked}
    shapes = [Case((16, 16, 4096 if mask else 256, size), causal, mask) for size, causal, mask in forms]
    # Other lengths have other tiles; heads of odd length, and heads beside one another, are compared before anything is timed.
    shapes += [Case((4, 16, 2048, size), causal) for size, causal, mask in forms if not mask]
    shapes += [Case((16, 16, 193, 64), causal) for causal in (False, True)]
    # Causal softmax is compared, not timed by length.
    names = {False: (*SPEED, LOW), True: (*KERNELS, LOW)}
    jobs = [(case, name) for case in shapes for name in (KERNELS if case.mask else names[case.is_causal])]
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        for fault in pool.imap_unordered(_compiled, jobs):
            if fault:
                print(fault, file=sys.stderr, flush=True)


def _compiled(job: tuple[Case, str]) -> str | None:
    case, name = job
    try:
        x, above = drawn(case)
        torch.autograd.grad(contestants(case)[name](*x), x, above)
        if case.shape[2] == 256:
            beside = [y.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for y in x]
            torch.autograd.grad(
                contestants(case)[name](*beside), beside, above.transpose(1, 2).contiguous().transpose(1, 2)
            )
        torch.cuda.synchronize()
    except Exception as fault:
        return f"{job}: {type(fault).__name__}: {str(fault).splitlines()[0]}"
    return None


def timed(asked: list[Case], repeats: int, rows: list[dict[str, Any]]) -> Iterator[None]:
    """Adds milliseconds of forward passes, called one by one and replayed as a CUDA graph, and of backward passes as a graph; a case at a time."""
    for case in asked:
        x, above = drawn(case)
        called, forward, both, failed = {}, {}, {}, {}
        for name, run in contestants(case).items():
            try:
                called[name] = lambda run=run, x=x: _without(run, x)
                forward[name] = graph(called[name])
                both[name] = graph(lambda run=run, x=x, above=above: torch.autograd.grad(run(*x), x, above))
            except Exception as fault:
                failed[name] = f"{type(fault).__name__}: {str(fault).splitlines()[0]}"
        runs = [{name: one[name] for name in both} for one in (called, forward, both)]
        times = [interleaved(one, repeats, "cuda", 3.0) for one in runs]
        for name in both:
            first, graphed, whole = (one[name] for one in times)
            backward = whole.median - graphed.median
            rates = {"forward": case.flops / graphed.median / 1e9, "backward": 2.5 * case.flops / backward / 1e9}
            rows.append(
                {
                    "contestant": name,
                    "shape": case.shape,
                    "causal": case.is_causal,
                    "mask": case.mask,
                    "called": asdict(first),
                    "forward": asdict(graphed),
                    "forward+backward": asdict(whole),
                    "backward": round(backward, 5),
                    "TFLOP/s": {way: round(rate, 1) for way, rate in rates.items()}
                    | {"called": round(case.flops / first.median / 1e9, 1)},
                }
            )
        rows += [
            {"contestant": n, "shape": case.shape, "causal": case.is_causal, "mask": case.mask, "skipped": why}
            for n, why in failed.items()
        ]
        said = ", ".join(
            f"{r['contestant']} {r['TFLOP/s']}" for r in rows[-len(both) - len(failed) :] if "forward" in r
        )
        print(case, said, *failed.items(), file=sys.stderr, flush=True)
        yield


def _without(run: Callable[..., Tensor], x: list[Tensor]) -> Tensor:
    with torch.no_grad():
        return run(*x)


def graph(run: Callable[[], Any]) -> Callable[[], None]:
    """A call as a CUDA graph: what is launched, without whoever launches it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
        run()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        run()
    return captured.replay
