"""Attention of linear cost, each formula written plainly: peers to be timed, and in float64 the truth to be met."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

Tensors = tuple[Tensor, ...]


def plain(
    q: Tensor, k: Tensor, f: Tensor, w_e: Tensor, w_r: Tensor, c_e: Tensor, c_r: Tensor, b: Tensor, lam: Tensor
) -> Tensors:
    """Outputs of the heads `[B, H, n, p]` and mean J^2, with scores written out."""
    w_e, w_r, b, lam = (x.to(q.dtype) for x in (w_e, w_r, b, lam))
    on_e, on_r = (torch.einsum("bhmp,hms->bhps", f, w) for w in (w_e, w_r))
    e = functional.normalize(q, dim=-1) @ on_e
    r = functional.normalize(k, dim=-1) @ on_r
    out = functional.linear(torch.cat((e, r), dim=-1), torch.cat((c_e, c_r), dim=-1).to(q.dtype), b)
    energy = [(lam[:, None] * x).square().sum(dim=-1).mean(dim=(1, 2)) / 2 for x in (e, r)]  # [B]
    return out, (energy[0] + energy[1] - (w_e * w_r).sum(dim=(-2, -1)).mean()).square().mean()


def plain_module(x: Tensor, heads: int, rows: Tensor, parameters: dict[str, Tensor]) -> Tensors:
    """From the input `[B, n, d]` to the output, and mean J^2. `rows` are places `[m]` to take, or weights `[m, n]` of a mean."""

    def split(y: Tensor) -> Tensor:
        return y.unflatten(-1, (heads, -1)).transpose(1, 2)

    weights, biases = (parameters[f"in_proj.{part}"].chunk(2) for part in ("weight", "bias"))
    q, k = (split(functional.linear(x, w, b)) for w, b in zip(weights, biases, strict=True))
    f = split(x[:, rows] if rows.dim() == 1 else rows.to(x.dtype) @ x)
    c = parameters["head_proj.weight"].chunk(2, dim=-1)
    out, loss = plain(
        q, k, f, parameters["w_e"], parameters["w_r"], *c, parameters["head_proj.bias"], parameters["lam"]
    )
    out = out.transpose(1, 2).flatten(-2)
    return functional.linear(out, parameters["out_proj.weight"], parameters["out_proj.bias"]), loss


def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensors:
    return ((q @ k.mT * q.shape[-1] ** -0.5).softmax(dim=-1) @ v,)


def linear(q: Tensor, k: Tensor, v: Tensor) -> Tensors:
    q, k = functional.elu(q) + 1, functional.elu(k) + 1
    return (q @ (k.mT @ v) / (q @ k.sum(dim=-2, keepdim=True).mT),)


def nystrom(q: Tensor, k: Tensor, v: Tensor, landmarks: int = 64, steps: int = 6) -> Tensors:
    """Softmax attention through landmarks, means of segments; the pseudo-inverse by iteration, in float32 or wider."""
    kind, scale = q.dtype, q.shape[-1] ** -0.5
    q_mean, k_mean = (x.unflatten(-2, (landmarks, -1)).mean(dim=-2) for x in (q, k))
    left = (q @ k_mean.mT * scale).softmax(dim=-1)
    right = (q_mean @ k.mT * scale).softmax(dim=-1)
    middle = (q_mean @ k_mean.mT * scale).softmax(dim=-1)
    middle = middle.double() if kind == torch.float64 else middle.float()
    inverse = middle.mT / (middle.sum(dim=-2).amax(dim=-1) * middle.sum(dim=-1).amax(dim=-1))[..., None, None]
    one = torch.eye(landmarks, dtype=middle.dtype, device=q.device)
    for _ in range(steps):
        product = middle @ inverse
        inverse = inverse @ (13 * one - product @ (15 * one - product @ (7 * one - product))) / 4
    return (left @ (inverse.to(kind) @ (right @ v)),)


def performer(q: Tensor, k: Tensor, v: Tensor, directions: Tensor) -> Tensors:
    """Softmax attention by positive orthogonal random features."""
    q, k, directions = q * q.shape[-1] ** -0.25, k * k.shape[-1] ** -0.25, directions.to(q.dtype)
    q, k = (x @ directions.mT - x.square().sum(dim=-1, keepdim=True) / 2 for x in (q, k))
    q = (q - q.detach().amax(dim=-1, keepdim=True)).exp()
    k = (k - k.detach().amax(dim=(-2, -1), keepdim=True)).exp()
    return (q @ (k.mT @ v) / (q @ k.sum(dim=-2, keepdim=True).mT + 1e-6),)


def directions_of(dim: int, count: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    blocks = [torch.linalg.qr(torch.randn(dim, dim, generator=generator))[0] for _ in range(count // dim)]
    return (torch.cat(blocks) * torch.randn(count, dim, generator=generator).norm(dim=-1, keepdim=True)).to(device)


def places(length: int, count: int, sampling: str, device: str) -> Tensor:
    """Which tokens stand for a sequence, or the weights of their means."""
    row = torch.arange(count, device=device)
    if sampling == "stride":
        return row * (length - 1) // (count - 1)
    first, last = row * length // count, (row + 1) * length // count
    at = torch.arange(length, device=device)
    inside = (at >= first[:, None]) & (at < last[:, None])
    return inside.double() / inside.sum(dim=1, keepdim=True)
