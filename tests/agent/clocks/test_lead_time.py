import pytest

from perseus.agent.clocks.lead_time import LeadTime
from perseus.agent.clocks.sets import ClockSet


def done(clock_mhz: int | None, *, latency_s: float, late_s: float = 0.0) -> ClockSet:
    return ClockSet(clock_mhz, 10.0 + late_s + latency_s, 10.0 + late_s, 10.0)


def test_before_any_set_the_longest_usual_latency_is_assumed() -> None:
    assert LeadTime().of(1400) == pytest.approx(0.021)


def test_a_clock_has_its_own_latency_once_it_was_set_often_enough() -> None:
    lead = LeadTime()
    for latency_s in (0.010, 0.011, 0.050):
        lead.clock_set(done(1000, latency_s=latency_s))
        lead.clock_set(done(None, latency_s=2 * latency_s))
    lead.clock_set(done(1400, latency_s=1.0))
    assert lead.latency_s == pytest.approx(0.022), "the median of 10, 11, 20, 22, 50, 100 and 1000 ms"
    assert lead.of(1000) - lead.margin_s == pytest.approx(0.011)
    assert lead.of(None) - lead.margin_s == pytest.approx(0.022)
    assert lead.of(1400) - lead.margin_s == pytest.approx(0.022), "the median of all: one set is too few"
    assert lead.reach_s == pytest.approx(0.044 + lead.margin_s)


def test_the_margin_covers_nine_in_ten() -> None:
    lead = LeadTime()
    for late_ms in range(64):
        lead.clock_set(done(1000, latency_s=0.010, late_s=late_ms / 1000))
    assert lead.margin_s == pytest.approx(0.057, abs=0.001)
    for early_ms in range(64):
        lead.mispredicted(-early_ms / 1000)
    assert lead.margin_s == pytest.approx(0.057, abs=0.001), "late begins need no margin"
    for late_ms in range(64):
        lead.mispredicted(late_ms / 1000)
    assert lead.margin_s == pytest.approx(0.114, abs=0.002)


def test_after_late_raises_the_lead_grows_soon() -> None:
    lead = LeadTime()
    for _ in range(64):
        lead.mispredicted(0.0)
    for _ in range(7):
        lead.mispredicted(0.008)
    assert lead.margin_s >= 0.008
