"""Generalised least squares with a tridiagonal noise covariance. Pure numerics."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_MIN_SINGULAR_SHARE = 1e-9


def generalised_least_squares(
    design: Array, observed: Array, *, diagonals: Array, off_diagonal: Array
) -> tuple[Array, Array, Array]:
    """Return coefficients and standard errors, shape (p,) each, and their information, shape (p, p), under
    the likeliest of several noise covariances.

    The information is the inverse of the coefficients' covariance. It is finite for every design, and 0 along
    directions that the design does not determine.

    Shapes: `design` (n, p), `observed` (n,), `diagonals` (covariances, n), `off_diagonal` (n - 1,). The
    covariance is chosen by restricted likelihood. A coefficient that the design does not determine gets an
    enormous standard error. Residuals larger than the covariance explains widen all standard errors.
    """
    norms = np.linalg.norm(design, axis=0)
    norms[norms == 0] = 1.0
    whitened, log_determinants = _whiten(np.column_stack([design / norms, observed]), diagonals, off_diagonal)
    best_likelihood = -np.inf
    for system, log_determinant in zip(whitened, log_determinants, strict=True):
        left, singular, right = np.linalg.svd(system[:, :-1], full_matrices=False)
        singular = singular.clip(_MIN_SINGULAR_SHARE * singular[0])
        solution = right.T @ (left.T @ system[:, -1] / singular)
        misfit = float(np.sum((system[:, -1] - system[:, :-1] @ solution) ** 2))
        likelihood = -(log_determinant + 2 * np.log(singular).sum() + misfit) / 2
        if likelihood > best_likelihood:
            best_likelihood = likelihood
            coefficients = solution / norms
            excess = max(1.0, misfit / (design.shape[0] - design.shape[1]))
            errors = np.sqrt(excess * np.sum((right.T / singular) ** 2, axis=1)) / norms
            scaled = system[:, :-1] * norms
            information = scaled.T @ scaled / excess
    return coefficients, errors, information


def _whiten(rows: Array, diagonals: Array, off_diagonal: Array) -> tuple[Array, Array]:
    """Return `rows` multiplied by L⁻¹ for each covariance L Lᵀ, and the covariances' log determinants."""
    whitened = np.empty((*diagonals.shape, rows.shape[1]))
    pivots = np.empty_like(diagonals)
    whitened[:, 0], pivots[:, 0] = rows[0], diagonals[:, 0]
    for row in range(1, len(rows)):
        factor = off_diagonal[row - 1] / pivots[:, row - 1]
        pivots[:, row] = diagonals[:, row] - factor * off_diagonal[row - 1]
        whitened[:, row] = rows[row] - factor[:, None] * whitened[:, row - 1]
    return whitened / np.sqrt(pivots)[..., None], np.log(pivots).sum(axis=1)
