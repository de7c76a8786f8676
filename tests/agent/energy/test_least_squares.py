import numpy as np
import pytest

from perseus.agent.energy.least_squares import generalised_least_squares

COEFFICIENTS = np.array([300.0, 80.0])


def covariance(diagonal: np.ndarray, off_diagonal: np.ndarray) -> np.ndarray:
    return np.diag(diagonal) + np.diag(off_diagonal, 1) + np.diag(off_diagonal, -1)


def test_equals_the_textbook_formula() -> None:
    random = np.random.default_rng(0)
    design = random.uniform(0, 0.1, (30, 2))
    diagonal, off_diagonal = random.uniform(1.0, 2.0, 30), random.uniform(-0.5, 0.0, 29)
    noise = random.multivariate_normal(np.zeros(30), covariance(diagonal, off_diagonal))
    observed = design @ COEFFICIENTS + 0.5 * noise  # less than the covariance says: no widening
    found, errors, information = generalised_least_squares(
        design, observed, diagonals=diagonal[None], off_diagonal=off_diagonal
    )
    inverse = np.linalg.inv(covariance(diagonal, off_diagonal))
    expected_covariance = np.linalg.inv(design.T @ inverse @ design)
    assert found == pytest.approx(expected_covariance @ design.T @ inverse @ observed)
    assert errors == pytest.approx(np.sqrt(np.diag(expected_covariance)))
    assert np.linalg.inv(information) == pytest.approx(expected_covariance)


def test_residuals_larger_than_expected_widen_the_errors() -> None:
    random = np.random.default_rng(1)
    design = random.uniform(0, 0.1, (200, 2))
    observed = design @ COEFFICIENTS + 3.0 * random.standard_normal(200)
    settings = {"diagonals": np.ones((1, 200)), "off_diagonal": np.zeros(199)}
    _, expected, _ = generalised_least_squares(design, design @ COEFFICIENTS, **settings)
    _, errors, _ = generalised_least_squares(design, observed, **settings)
    assert errors / expected == pytest.approx(3.0, rel=0.15)


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_the_likeliest_covariance_is_chosen(scale: float) -> None:
    random = np.random.default_rng(2)
    design = random.uniform(0, 0.1, (200, 2))
    observed = design @ COEFFICIENTS + scale * random.standard_normal(200)
    candidates = np.array([0.1, 1.0, 10.0])
    off_diagonal = np.zeros(199)
    _, errors, _ = generalised_least_squares(
        design, observed, diagonals=np.tile(candidates[:, None] ** 2, 200), off_diagonal=off_diagonal
    )
    _, expected, _ = generalised_least_squares(
        design, design @ COEFFICIENTS, diagonals=np.full((1, 200), scale**2), off_diagonal=off_diagonal
    )
    assert errors == pytest.approx(expected, rel=0.15)


def test_undetermined_coefficients_get_an_enormous_error_and_the_others_none() -> None:
    random = np.random.default_rng(3)
    design = random.uniform(0, 0.1, (50, 2))
    design = np.column_stack([design, design[:, 1], np.zeros(50)])
    observed = design @ np.array([300.0, 40.0, 40.0, 0.0])
    found, errors, information = generalised_least_squares(
        design, observed, diagonals=np.full((1, 50), 1e-6), off_diagonal=np.zeros(49)
    )
    assert found[0] == pytest.approx(300.0)
    assert errors[0] < 0.1
    assert np.all(errors[1:] > 1e3)
    assert information @ [0.0, 1.0, -1.0, 0.0] == pytest.approx(0.0)
