"""The keeper by exact commands: computations of known durations, and clocks that take 10 ms to set."""

import pytest

from perseus.agent.clocks.keeper import ClockKeeper, Clocks, Commands
from perseus.agent.clocks.sets import ClockSet, ResetClock, ScheduleClock, SetClock

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
