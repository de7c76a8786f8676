"""Bins of equal ratio for histograms of distances in log ratios. Pure."""

import math

import numpy as np
from numpy.typing import NDArray

from perseus.service.domain.telemetry import FloatColumn

LOWEST = 1e-4
"""Lower edge of the first bin; smaller distances count there."""

BINS_PER_E = 12
_HIGHEST = 4.0
BIN_COUNT = math.ceil(math.log(_HIGHEST / LOWEST) * BINS_PER_E) + 1


def bins(distances: FloatColumn) -> NDArray[np.int64]:
    """Return the bin of each distance."""
    ratios = np.clip(distances, LOWEST, _HIGHEST) / LOWEST
    found: NDArray[np.int64] = (np.log(ratios) * BINS_PER_E).astype(np.int64)
    return found


def counts_in_bins(distances: FloatColumn) -> FloatColumn:
    """Return how many of the distances are in each bin."""
    return np.bincount(bins(distances), minlength=BIN_COUNT).astype(np.float64)


def edge(number: float) -> float:
    """Return the distance at a (fractional) bin number."""
    return LOWEST * math.exp(number / BINS_PER_E)
