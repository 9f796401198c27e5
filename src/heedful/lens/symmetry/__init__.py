"""The symmetry laboratory: does a function respect the symmetries of its embedding and of its positions?

Ma & Ying (2023): what commutes with every rotation and reflection of the embedding is $f(X, Z) = AX + BZ$, its coefficients
functions of inner products. Here any function or module is tested for it, with a counterexample where it fails, and with its
coefficients and their formula where it holds.

>>> import torch
>>> from heedful.lens.symmetry import audit
>>> report = audit(torch.nn.LayerNorm(6, elementwise_affine=False, dtype=torch.float64), d=6, trials=20)
>>> report.reports["O"].passed, report.reports["position"].passed
(False, True)
"""

from heedful.lens.symmetry._audit import Audit, audit
from heedful.lens.symmetry._report import Component, Counterexample, Report, SymmetryBroken, failure_bound
from heedful.lens.symmetry.coefficients import Coefficients, coefficient_function, recover_coefficients, symmetrize
from heedful.lens.symmetry.equivariance import check_equivariance, check_permutation
from heedful.lens.symmetry.formula import Candidate, Formula, identify
from heedful.lens.symmetry.information import InformationReport, check_finite_information

__all__ = [
    "Audit",
    "Candidate",
    "Coefficients",
    "Component",
    "Counterexample",
    "Formula",
    "InformationReport",
    "Report",
    "SymmetryBroken",
    "audit",
    "check_equivariance",
    "check_finite_information",
    "check_permutation",
    "coefficient_function",
    "failure_bound",
    "identify",
    "recover_coefficients",
    "symmetrize",
]
