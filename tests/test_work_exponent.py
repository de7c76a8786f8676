"""How durations follow work is found from durations, whatever else makes groups of them differ."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.work_exponent import MAX_EXPONENT, WorkExponent


@given(
    exponent=st.floats(0.0, MAX_EXPONENT),
    sigma=st.floats(0.2, 0.8),
    units_s=st.lists(st.floats(1e-3, 10.0), min_size=1, max_size=5),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_exponent_is_found_within_its_error(
    exponent: float, sigma: float, units_s: list[float], seed: int
) -> None:
    random, noise = np.random.default_rng(seed), 0.01
    learned = WorkExponent()
    for unit_s in units_s:
        learned.begin_group()
        for work in np.exp(sigma * random.standard_normal(30)):
            learned.add(
                float(work), float(unit_s * work**exponent * np.exp(noise * random.standard_normal()))
            )
    assert learned.value == pytest.approx(
        exponent, abs=0.01 + 8 * noise / (sigma * (25 * len(units_s)) ** 0.5)
    )


def test_it_is_1_as_long_as_nothing_varies_and_never_negative() -> None:
    learned = WorkExponent()
    assert learned.value == 1
    for duration_s in (1.0, 1.1, 0.9):
        learned.add(5.0, duration_s)
    assert learned.value == 1
    for work, duration_s in ((1.0, 2.0), (3.0, 1.0), (9.0, 0.5)):
        learned.add(work, duration_s)
    assert learned.value == 0
