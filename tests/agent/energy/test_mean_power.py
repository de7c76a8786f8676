"""Mean powers from counters that move in steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.agent.energy.mean_power import MeanPower


def test_a_new_stopped_reset_or_missing_counter_yields_no_power() -> None:
    drawn = MeanPower()
    assert drawn.take({"still": (1.0, 50.0), "anew": (1.0, 50.0), "away": (1.0, 50.0)}) == {}
    assert drawn.take({"still": (1.0, 50.0), "anew": (2.0, 3.0)}) == {}
    found = drawn.take({"still": (3.0, 250.0), "anew": (3.0, 103.0), "away": (3.0, 250.0)})
    assert found == pytest.approx({"still": 100.0, "anew": 100.0})
    assert drawn.take({"still": (4.0, 250.0)}) == {}, "read again, at the same value: not 0 W"


@given(st.lists(st.tuples(st.floats(0.5, 1.5), st.floats(0, 1000)), min_size=1, max_size=20))
def test_no_joule_is_lost_or_reported_twice(steps: list[tuple[float, float]]) -> None:
    drawn, now_s, energy_j, reported_j = MeanPower(), 0.0, 0.0, 0.0
    drawn.take({"a": (now_s, energy_j)})
    for duration_s, added_j in steps:
        now_s, energy_j = now_s + duration_s, energy_j + added_j
        reported_j += drawn.take({"a": (now_s, energy_j)}).get("a", 0.0) * duration_s
    assert reported_j == pytest.approx(energy_j, rel=1e-6, abs=1e-6)
