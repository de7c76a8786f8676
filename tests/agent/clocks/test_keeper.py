"""The keeper by exact commands: computations of known durations, and clocks that take 10 ms to set.

And what it decides from: the lead of a raise, and the timetable's predictions from previous iterations. And
the figures of clocks in time, which contain its own.
"""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.agent.clocks.keeper import ClockKeeper, Clocks, Commands
from perseus.agent.clocks.lead_time import LeadTime
from perseus.agent.clocks.sets import ClockSet, ResetClock, ScheduleClock, SetClock
from perseus.agent.clocks.timetable import Prediction, Timetable
from perseus.agent.rank.clock_counters import ClockCounters

LATENCY_S = 0.010
SUPPORTED_MHZ = (1400, 1200, 1000)


class Bench:
    """A keeper under a plan, after some iterations of it; computations follow each other without a gap."""

    def __init__(
        self, clocks_mhz: Clocks, durations_s: tuple[float, ...], *, iterations: int = 3, gap_s: float = 0.0
    ) -> None:
        self.keeper = ClockKeeper()
        self.now_s = 100.0
        self.clocks_mhz = clocks_mhz
        self.gap_s = gap_s
        self.durations_s = durations_s
        for clock_mhz in (None, *clocks_mhz):
            for _ in range(64):  # enough to displace the assumptions
                self.keeper.lead.clock_set(ClockSet(clock_mhz, LATENCY_S, 0.0, 0.0))
        self.keeper.follow(clocks_mhz)
        for _ in range(iterations):
            self.iteration()

    def iteration(self) -> None:
        self.keeper.begin_iteration(self.now_s)
        for position, duration_s in enumerate(self.durations_s):
            self.begin(position)
            self.now_s += duration_s
            self.end(position)
            self.now_s += self.gap_s

    def begin(self, position: int, following: Clocks | None = None) -> Commands:
        commands = self.keeper.begin(position, self.now_s, self.now_s, following or self.clocks_mhz)
        self.keeper.validate(SUPPORTED_MHZ)
        return commands

    def end(self, position: int, following: Clocks | None = None) -> Commands:
        commands = self.keeper.end(position, self.now_s, self.now_s, following or self.clocks_mhz)
        self.keeper.validate(SUPPORTED_MHZ)
        return commands

    def compute(self, position: int, duration_s: float, following: Clocks | None = None) -> Commands:
        """Mark a whole computation; return the commands of its end."""
        self.begin(position, following)
        self.now_s += duration_s
        return self.end(position, following)


def schedule(clock_mhz: int | None, at_s: float) -> ScheduleClock:
    return ScheduleClock(clock_mhz, pytest.approx(at_s))  # type: ignore[arg-type]


def test_a_raise_is_requested_one_latency_before_the_end_and_a_lower_clock_at_it() -> None:
    bench = Bench((1000, 1400), (0.050, 0.100))
    begin_s = bench.now_s
    assert bench.begin(0) == [SetClock(1000), schedule(1400, begin_s + 0.040)]
    bench.now_s = begin_s + 0.050
    assert bench.end(0) == []
    assert bench.begin(1) == []


def test_each_mark_moves_the_raise() -> None:
    bench = Bench((1000, 1000, 1400), (0.050, 0.050, 0.100))
    begin_s = bench.now_s
    assert bench.begin(0) == [SetClock(1000)]
    bench.now_s = begin_s + 0.043
    assert bench.end(0) == []
    commands = bench.begin(1)
    assert commands == [schedule(1400, begin_s + 0.043 + 0.050 - bench.keeper.lead.of(1400))]
    assert bench.keeper.lead.margin_s == pytest.approx(0.007), "it began earlier than predicted"


def test_a_computation_that_ends_early_brings_the_raise_at_once() -> None:
    bench = Bench((1000, 1400), (0.050, 0.100))
    begin_s = bench.now_s
    bench.begin(0)
    bench.now_s = begin_s + 0.030
    assert bench.end(0) == [SetClock(1400)]


def test_a_short_computation_gets_the_raise_of_the_next_before_it_begins() -> None:
    bench = Bench((1000, 1000, 1400), (0.050, 0.005, 0.100))
    begin_s = bench.now_s
    assert bench.begin(0) == [SetClock(1000), schedule(1400, begin_s + 0.045)]


def test_a_clock_is_not_lowered_where_a_raise_would_have_to_wait_for_that_set() -> None:
    bench = Bench((1400, 1000, 1200), (0.050, 0.019, 0.100))
    assert bench.compute(0, 0.050) == [SetClock(1200)], "setting 1000 MHz would delay it"
    long = Bench((1400, 1000, 1200), (0.050, 0.021, 0.100))
    assert long.compute(0, 0.050) == [SetClock(1000)]
    assert long.begin(1) == [schedule(1200, long.now_s + 0.011)]


def test_a_wait_before_a_raise_passes_at_the_previous_clock() -> None:
    bench = Bench((1000, 1400), (0.050, 0.100), gap_s=0.030)
    begin_s = bench.now_s
    assert bench.begin(0) == [SetClock(1000)], "no raise before the next mark"
    bench.now_s = begin_s + 0.050
    assert bench.end(0) == [schedule(1400, begin_s + 0.050 + 0.020)]


def test_a_wait_before_a_lower_clock_passes_at_the_lower_clock() -> None:
    bench = Bench((1400, 1000), (0.050, 0.100), gap_s=0.070)
    assert bench.compute(0, 0.050) == [SetClock(1000)]


def test_a_computation_of_unknown_duration_may_end_at_once() -> None:
    bench = Bench((1000, 1400, 1200), (0.05, 0.05, 0.05), iterations=0)
    assert bench.keeper.begin_iteration(bench.now_s) == [SetClock(1000)]
    assert bench.begin(0) == [SetClock(1400)]
    assert bench.end(0) == []
    assert bench.begin(1) == []
    assert bench.end(1) == [SetClock(1200)]
    assert bench.begin(2) == []
    bench.now_s += 0.050
    assert bench.end(2) == [schedule(None, bench.now_s + 0.040)], "a lower one at the next begin only"


def test_the_next_plan_counts_at_the_end_of_the_iteration_but_not_beyond_its_first_computation() -> None:
    bench = Bench((1000, 1000), (0.050, 0.050))
    begin_s = bench.now_s
    following: Clocks = (1200, None)
    bench.begin(0, following)
    bench.now_s = begin_s + 0.050
    assert bench.end(0, following) == []
    assert bench.begin(1, following) == [schedule(1200, begin_s + 0.090)]


def test_an_immediate_request_replaces_a_scheduled_one() -> None:
    bench = Bench((1000, 1400), (0.050, 0.100))
    bench.begin(0)
    assert bench.keeper.fall_back() == [ResetClock()]
    assert bench.keeper.fall_back() == []


def test_a_scheduled_raise_that_is_no_longer_needed_is_withdrawn() -> None:
    bench = Bench((1000, 1000), (0.050, 0.050))
    bench.compute(0, 0.050)
    assert bench.begin(1, (1400, 1000)) == [schedule(1400, bench.now_s + 0.040)]
    bench.now_s += 0.030
    assert bench.end(1) == [schedule(None, bench.now_s + 0.040)], "in place of what was scheduled before"
    assert bench.begin(0) == [SetClock(1000)]


def test_a_short_gap_passes_at_the_previous_clock_and_one_that_turns_out_long_at_the_fallback() -> None:
    bench = Bench((1200, 1000), (0.050, 0.100), gap_s=0.039)
    bench.compute(0, 0.050)
    bench.now_s += 0.039
    assert bench.begin(1) == []
    bench.now_s += 0.080
    end_s = bench.now_s
    assert bench.end(1) == [SetClock(1200), schedule(None, end_s + 0.040)], "not below the next one's first"
    assert bench.keeper.end_iteration(end_s, end_s, bench.clocks_mhz) == []
    bench.now_s = end_s + 5.0
    assert bench.keeper.begin_iteration(bench.now_s) == [SetClock(1200)], "it went to stock meanwhile"
    assert bench.keeper.wanted_mhz == 1200


def test_a_gap_that_is_known_to_be_long_passes_at_the_fallback_from_its_begin() -> None:
    bench = Bench((1000, 1200), (0.050, 0.100), gap_s=0.041)
    bench.begin(0)
    bench.now_s += 0.150
    assert bench.compute(1, 0.100) == [ResetClock()]
    bench.now_s += 0.041
    assert bench.keeper.begin_iteration(bench.now_s) == [SetClock(1000)]


def test_a_gap_that_is_reported_late_goes_to_the_fallback_at_once() -> None:
    bench = Bench((1000, 1200), (0.050, 0.100))
    bench.begin(0)
    bench.begin(1)
    assert bench.keeper.end(1, bench.now_s, bench.now_s + 0.041, bench.clocks_mhz) == [ResetClock()]


def test_gap_lengths_are_kept_for_the_next_plan() -> None:
    bench = Bench((1000, 1200), (0.050, 0.100), gap_s=0.050)
    bench.keeper.follow((1200, 1000))
    bench.compute(0, 0.050, (1200, 1000))
    bench.begin(1, (1200, 1000))
    assert bench.end(1, (1200, 1000)) == [ResetClock()]


def test_for_measuring_a_lone_first_computation_the_usual_gap_passes_at_the_previous_clock() -> None:
    bench = Bench((1000, 1000), (0.050, 0.100), gap_s=0.300)
    bench.keeper.follow((1000, 1000), keeps_gaps=True)
    bench.iteration()
    bench.compute(0, 0.0)
    assert bench.compute(1, 0.0) == [schedule(None, bench.now_s + 0.340)], "an evaluation comes on top"


def test_an_iteration_whose_last_mark_is_lost_has_a_gap_after_it_too() -> None:
    bench = Bench((1000, 1000), (0.050, 0.100), gap_s=0.010)
    bench.keeper.begin_iteration(bench.now_s)
    bench.begin(0)
    end_s = bench.now_s + 0.150
    assert bench.keeper.end_iteration(end_s, end_s, bench.clocks_mhz) == [schedule(None, end_s + 0.040)]


def test_the_fallback_may_be_a_max_clock_instead_of_stock() -> None:
    bench = Bench((1000, 1000), (0.050, 0.100), gap_s=0.100)
    bench.keeper.fallback_mhz = 1200
    bench.compute(0, 0.050)
    assert bench.compute(1, 0.0) == [SetClock(1200)]
    assert bench.keeper.fall_back() == []


@pytest.mark.parametrize(
    ("longest_s", "iterations", "next_plan", "limit_s"),
    [
        (0.100, 3, None, 1.0),
        (0.100, 3, (1000, 1200), 1.0),
        (2.0, 3, None, 8.0),
        (2.0, 0, None, 10.0),
    ],
    ids=["short computations", "the next plan keeps the limit", "long computations", "without data"],
)
def test_a_trainer_that_is_silent_for_long_counts_as_hung(
    longest_s: float, iterations: int, next_plan: Clocks | None, limit_s: float
) -> None:
    bench = Bench((1000, 1000), (0.050, longest_s), iterations=iterations)
    if next_plan is not None:
        bench.keeper.follow(next_plan)
    bench.begin(0)
    assert not bench.keeper.is_silent(bench.now_s, bench.now_s + limit_s - 0.1)
    assert bench.keeper.is_silent(bench.now_s, bench.now_s + limit_s + 0.1)


def test_a_trainer_at_its_fallback_is_not_silent_and_resumes() -> None:
    bench = Bench((1000, 1000), (0.050, 2.0))
    bench.compute(0, 0.0)
    bench.begin(1)
    assert bench.keeper.fall_back() == [ResetClock()]
    assert not bench.keeper.is_silent(bench.now_s, bench.now_s + 100)
    bench.now_s += 60.0
    assert bench.end(1) == []
    assert bench.begin(0) == [SetClock(1000)]


def test_prediction_errors_are_reported() -> None:
    bench = Bench((1000, 1000), (0.050, 0.050))
    assert bench.keeper.prediction_error_s == pytest.approx(0.0)
    for _ in range(64):
        bench.compute(0, 0.052)
        bench.keeper.follow(bench.clocks_mhz)
        for _ in range(3):
            bench.compute(0, 0.050)
    assert bench.keeper.prediction_error_s == pytest.approx(0.002, abs=0.002)


# --- Its lead ----------------------------------------------------------------------------------------------


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


# --- Its timetable ------------------------------------------------------------------------------------------

DURATIONS_S = (1.0, 2.0, 3.0)
GAP_S = 0.5


def run(timetable: Timetable, begin_s: float, durations_s: tuple[float, ...] = DURATIONS_S) -> float:
    """Mark one iteration, with a gap before each computation; return its end."""
    for position, duration_s in enumerate(durations_s):
        begin_s += GAP_S
        timetable.begin(position, begin_s)
        begin_s += duration_s
        timetable.end(position, begin_s)
    return begin_s


def test_nothing_is_predicted_from_a_single_iteration() -> None:
    timetable = Timetable(3)
    end_s = run(timetable, 0.0)
    assert timetable.duration_s(0) is None
    assert list(timetable.after_end(2, end_s)) == [Prediction(3, end_s, None)]
    timetable.begin(0, end_s)
    assert list(timetable.after_begin(0, end_s)) == [Prediction(1, end_s, None)], "it may end at once"


def test_an_iteration_is_predicted_from_its_begin() -> None:
    timetable = Timetable(3)
    run(timetable, run(timetable, run(timetable, 0.0)))
    assert list(islice(timetable.from_start(300.0), 2)) == [
        Prediction(0, 300.0, 301.0),
        Prediction(1, 301.5, 303.5),
    ]


def test_one_slow_iteration_changes_nothing() -> None:
    timetable = Timetable(3)
    end_s = 0.0
    for factor in (1, 1, 10, 1, 1):
        end_s = run(timetable, end_s, tuple(factor * each for each in DURATIONS_S))
    assert [timetable.duration_s(position) for position in range(3)] == pytest.approx(DURATIONS_S)


def test_the_shortest_gap_counts() -> None:
    timetable = Timetable(1)
    for begin_s in (0.0, 2.0, 3.25, 9.0):  # each lasts a second
        timetable.begin(0, begin_s)
        timetable.end(0, begin_s + 1.0)
    assert timetable.gap_s(0) == 0.25


def test_lost_marks_yield_no_duration_and_no_gap() -> None:
    timetable = Timetable(3)
    for begin_s in (0.0, 100.0, 200.0):
        timetable.begin(0, begin_s)
        timetable.end(2, begin_s + 50.0)
        timetable.interrupt()
    assert [timetable.duration_s(position) for position in range(3)] == [None] * 3
    assert [timetable.gap_s(position) for position in range(3)] == [0.0] * 3


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["begin", "end"]), st.integers(0, 2), st.floats(0, 10)), max_size=80
    ),
    position=st.integers(0, 2),
)
def test_predictions_are_in_the_future_and_in_order_after_any_marks(
    steps: list[tuple[str, int, float]], position: int
) -> None:
    timetable = Timetable(3)
    now_s = 0.0
    for edge, at, passed_s in steps:
        now_s += passed_s
        (timetable.begin if edge == "begin" else timetable.end)(at, now_s)
    for ahead in (timetable.after_begin(position, now_s), timetable.after_end(position, now_s)):
        predictions = list(ahead)
        assert 1 <= len(predictions) <= 3
        assert [each.position for each in predictions] == list(
            range(position + 1, position + 1 + len(predictions))
        )
        time_s = now_s
        for each in predictions:
            assert each.begin_s >= time_s
            assert each.end_s is None or each.end_s >= each.begin_s
            time_s = each.end_s or each.begin_s


@pytest.mark.parametrize(
    ("planned_mhz", "clocks", "late_count", "missed_count", "on_clock_s"),
    [
        pytest.param(1000, [(1000, 2.0)], 0, 0, 3.0, id="at its clock"),
        pytest.param(1000, [(1400, 2.0), (1000, 3.0), (1200, 4.5)], 0, 0, 1.5, id="a lower clock comes late"),
        pytest.param(1400, [(1000, 2.0), (1400, 2.5)], 1, 0, 2.5, id="a raise comes late"),
        pytest.param(None, [(1400, 2.0), (None, 2.5)], 1, 0, 2.5, id="stock is the highest clock"),
        pytest.param(1400, [(None, 2.0)], 0, 1, 0.0, id="never at its clock"),
    ],
)
def test_a_computation_is_counted(
    planned_mhz: int | None,
    clocks: list[tuple[int | None, float]],
    late_count: int,
    missed_count: int,
    on_clock_s: float,
) -> None:
    counters = ClockCounters()
    counters.add(planned_mhz, clocks, 5.0)
    assert counters == ClockCounters(0, 1, late_count, missed_count, 3.0, on_clock_s)


def test_the_statistics_have_the_keepers_predictions() -> None:
    bench = Bench((1000, 1400), (0.050, 0.100))
    bench.compute(0, 0.043)
    bench.begin(1)
    clocks = ClockCounters().statistics(3, bench.keeper)
    found = (clocks.margin_s, clocks.prediction_error_s, clocks.set_latency_s, clocks.set_latency_count)
    assert found == pytest.approx((0.007, 0.0, LATENCY_S, 64))
