"""Times and energies have readable digits at any size; durations are before or after now."""

from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.cli.amounts import joules, seconds
from perseus.cli.listing import later, moment

FACTORS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9, "ps": 1e-12}


@pytest.mark.parametrize(
    ("time_s", "shown"),
    [
        (0.0, "0.000 s"),
        (123.4567, "123.457 s"),
        (0.1, "0.100 s"),
        (0.0999, "99.90 ms"),
        (0.00123456, "1.235 ms"),
        (45.6e-6, "45.60 µs"),
        (7e-9, "7.000 ns"),
        (1e-12, "1.000 ps"),
        (-0.002, "-2.000 ms"),
    ],
)
def test_times(time_s: float, shown: str) -> None:
    assert seconds(time_s) == shown


@pytest.mark.parametrize(
    ("energy_j", "shown"),
    [(0.0, "0 J"), (25_123.4, "25123 J"), (100.0, "100 J"), (9.876, "9.876 J"), (0.0251, "25.10 mJ")],
)
def test_energies(energy_j: float, shown: str) -> None:
    assert joules(energy_j) == shown


@given(time_s=st.floats(1e-12, 1e6), decimals=st.integers(0, 6))
def test_what_is_shown_is_within_a_hundredth(time_s: float, decimals: int) -> None:
    number, unit = seconds(time_s, decimals).split()
    assert float(number) * FACTORS[unit] == pytest.approx(time_s, rel=0.0051)


@pytest.mark.parametrize(("parsed", "sign"), [(moment, -1), (later, 1)])
@pytest.mark.parametrize(("text", "duration_s"), [("90s", 90), ("15m", 900), ("2h", 7200), ("7d", 604_800)])
def test_a_duration_is_before_or_after_now(
    parsed: Callable[[str, str], datetime], sign: int, text: str, duration_s: float
) -> None:
    delay_s = (parsed("--x", text) - datetime.now(UTC)).total_seconds()
    assert delay_s == pytest.approx(sign * duration_s, abs=60)
