"""Whether a function of tokens and knowledge turns with them."""

import torch

F64 = {"dtype": torch.float64}
N, K, D = 7, 5, 11


def haar(size, determinant):
    turn, triangle = torch.linalg.qr(torch.randn(size, size, **F64))
    turn = turn * triangle.diagonal().sign()
    if torch.linalg.det(turn) * determinant < 0:
        turn[:, 0] = -turn[:, 0]
    return turn


def drawn(*shape):
    return torch.randn(*shape, **F64)


def deviation(f, x, z):
    """How far f of turned vectors is from turned f, the larger of both determinants; and where z is left behind, the smaller."""
    errors, controls = [], []
    wanted = f(x, z)
    for determinant in (1, -1):
        turn = haar(x.shape[-1], determinant)
        errors.append(float((f(x @ turn, z @ turn) - wanted @ turn).norm() / wanted.norm()))
        controls.append(float((f(x @ turn, z) - wanted @ turn).norm() / wanted.norm()))
    return max(errors), min(controls)


def settled(layer):
    return layer.double().eval().requires_grad_(False)
