"""The guard and the watch for drift, alone."""

from dataclasses import replace

from perseus.service.domain.measured import JobIteration
from perseus.service.domain.specification import Coordinates, Parallelism
from perseus.service.job.planning.drift import BLOCK, Drift, DriftWatch
from perseus.service.job.planning.guard import Guard, GuardRules
from perseus.solver import Kind, Measurement, Pipeline, one_forward_one_backward
from tests.service.service_fakes import CLOCKS_MHZ, energy_j, estimate, time_s

PROMISE_S = 1.0
SCHEDULE = one_forward_one_backward(2, 8)
SHAPE = Parallelism(3, 2, 1)
KINDS = (Kind.FORWARD, Kind.BACKWARD)
MEASURED = {(stage, mhz) for stage in range(2) for mhz in CLOCKS_MHZ}
PROBLEM = Pipeline(
    SCHEDULE,
    {
        (stage, 0, kind): tuple(
            Measurement(mhz, time_s(stage, kind, mhz), energy_j(stage, kind, mhz)) for mhz in CLOCKS_MHZ
        )
        for stage in range(2)
        for kind in KINDS
    },
    (60.0, 60.0),
)


def iteration(number: int, seconds: float, version: int = 1, is_regular: bool = True) -> JobIteration:
    return JobIteration(number, (version, version), is_regular, seconds, (50.0, 50.0))


def broken_at(times_s: list[float]) -> list[int]:
    guard = Guard(GuardRules())
    return [n for n, s in enumerate(times_s) if guard.judge(iteration(n, s), PROMISE_S, 0.9) is not None]


def test_a_promise_is_broken_by_the_median_of_five() -> None:
    assert broken_at([1.0] * 5 + [1.02] * 5) == [7]
    assert broken_at([1.02] * 5) == [4]
    assert broken_at([1.02] * 4) == []
    assert broken_at([1.009] * 20) == []
    assert broken_at([1.0, 1.5, 1.0, 1.5, 1.0] * 4) == []


def broken_by_gaps(gaps: list[tuple[float, float]], baseline_gap_time_s: float | None = 0.2) -> list[int]:
    """Gaps as (time, what low clocks can have added to it), between iterations that keep their promise."""
    guard = Guard(GuardRules())
    return [
        number
        for number, (gap_s, slowed_s) in enumerate(gaps)
        if guard.judge(
            replace(iteration(number, 1.0), gap_time_s=gap_s, gap_slowed_time_s=slowed_s),
            PROMISE_S,
            0.9,
            baseline_gap_time_s,
        )
        is not None
    ]


def test_an_evaluation_at_stock_breaks_no_promise() -> None:
    assert broken_by_gaps([(0.2, 0.008), (5.0, 0.008)] * 20) == []
    assert broken_by_gaps([(5.0, 0.0)] * 20) == []


def test_what_low_clocks_add_to_the_gaps_is_not_unseen() -> None:
    assert broken_by_gaps([(0.23, 0.05)] * 5) == [4]
    assert broken_by_gaps([(0.5, 0.02)] * 5) == [4]
    assert broken_by_gaps([(0.23, 0.005)] * 20) == [], "so much of it at most"
    assert broken_by_gaps([(0.205, 0.05)] * 20) == [], "and so much altogether"
    assert broken_by_gaps([(0.5, 0.05)] * 20, None) == [], "what is usual at stock is not known"


def test_the_evidence_names_the_times() -> None:
    guard = Guard(GuardRules())
    found = [guard.judge(iteration(n, 1.02 + n / 1000), PROMISE_S, 0.9) for n in range(5)]
    assert found[-1] is not None
    assert found[-1].iteration_times_s == (1.02, 1.021, 1.022, 1.023, 1.024)
    assert (found[-1].median_time_s, found[-1].promised_time_s, found[-1].baseline_time_s) == (
        1.022,
        1.0,
        0.9,
    )


def test_other_plans_and_irregular_iterations_do_not_count() -> None:
    guard = Guard(GuardRules())
    for number in range(40):
        mixed = iteration(number, 1.1, version=number // 4)
        assert guard.judge(mixed, PROMISE_S, 0.9) is None
        assert guard.judge(replace(mixed, is_regular=False), PROMISE_S, 0.9) is None


def watch(scales: dict[tuple[int, int], float], count: int = 16) -> DriftWatch:
    """Every rank is at 1200 MHz, its times scaled by (pipeline, stage)."""
    found = DriftWatch(SHAPE)
    for place in SHAPE.all_coordinates():
        told = estimate(SCHEDULE.orders[place.stage], 1, 3, 1200)
        scale = scales.get((place.pipeline, place.stage), 1.0)
        samples = tuple(
            replace(sample, time_s=sample.time_s * scale, computation_count=count) for sample in told.samples
        )
        found.take_estimate(Coordinates(place.pipeline, place.stage, 0), replace(told, samples=samples))
    return found


def check(found: DriftWatch) -> Drift | None:
    return found.check(PROBLEM, MEASURED, ignored=())


def test_what_all_pipelines_show_is_drift_and_what_one_shows_is_not() -> None:
    assert check(watch({})) is None
    assert check(watch({(0, 1): 1.3})) is None
    drift = check(watch({(pipeline, 1): 1.05 for pipeline in range(3)}))
    assert drift is not None
    assert drift.worst[:2] == (1, 1200)
    assert abs(drift.worst_ratio - 1.05) < 1e-9
    assert len(drift.times_s) == 4


def test_a_clock_that_was_not_measured_is_held_to_more() -> None:
    slightly = {(pipeline, 1): 1.015 for pipeline in range(3)}
    assert check(watch(slightly)) is None
    assert watch(slightly).check(PROBLEM, MEASURED - {(1, 1200)}, ignored=()) is not None


def test_a_few_computations_say_nothing() -> None:
    assert check(watch({(pipeline, 1): 2.0 for pipeline in range(3)}, count=4)) is None


def test_a_look_is_due_after_every_block_under_the_same_plans() -> None:
    found = DriftWatch(SHAPE)
    due = [n for n in range(2 * BLOCK) if found.is_due((1, 1))]
    assert due == [BLOCK - 1, 2 * BLOCK - 1]
    assert not any(found.is_due((n, n)) for n in range(3 * BLOCK))
