"""The interval's factor, against printed tables of Student's distribution."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.service.domain.student_t import interval_factor

# The 97.5 % quantile by degrees of freedom, from printed tables.
TABLE = {
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228,
    15: 2.131, 20: 2.086, 30: 2.042, 60: 2.000, 120: 1.980, math.inf: 1.960,
}  # fmt: skip


@pytest.mark.parametrize(("freedom", "expected"), TABLE.items())
def test_the_factor_is_the_tabulated_quantile(freedom: float, expected: float) -> None:
    assert interval_factor(freedom) == pytest.approx(expected, rel=1.5e-3 if freedom == 3 else 4e-4)


@given(st.floats(1.0, 100.0), st.floats(0.0, 5.0))
def test_the_factor_falls_continuously_with_the_freedom(freedom: float, more: float) -> None:
    assert interval_factor(freedom + more) <= interval_factor(freedom) * (1 + 1e-12)
    assert interval_factor(freedom + 1e-9) == pytest.approx(interval_factor(freedom), rel=1e-6)
