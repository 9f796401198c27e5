"""Singular values of attention: how many directions a matrix of coefficients really has."""

from heedful.lens.spectra.measure import spectrum
from heedful.lens.spectra.result import MatrixSpectrum, Spectrum

__all__ = ["MatrixSpectrum", "Spectrum", "spectrum"]
