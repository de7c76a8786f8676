"""Irregular iterations, and when plans are withdrawn because of them."""

from perseus.service.domain.measured import JobIteration
from perseus.service.domain.model import JobState
from perseus.service.job.iterations.iteration_log import report
from perseus.service.job.planning.irregular import IrregularWatch
from perseus.service.job.rules import Rules
from perseus.v1 import event_pb2
from tests.service.job.truthful_cluster import TruthfulCluster

PREDICTED_S = 1.0


def iteration(number: int, time_s: float, version: int = 1, *, is_regular: bool = False) -> JobIteration:
    return JobIteration(number, (version, version), is_regular, time_s, (50.0, 50.0))


def judged(watch: IrregularWatch, times_s: list[float], regular_every: int = 0) -> list[int]:
    """Return the iterations at which the plans are withdrawn."""
    return [
        number
        for number, time_s in enumerate(times_s)
        if watch.judge(
            iteration(number, time_s, is_regular=bool(regular_every) and number % regular_every == 0),
            PREDICTED_S,
        )
        is not None
    ]


def test_plans_are_withdrawn_if_most_of_the_latest_iterations_are_irregular_and_slow() -> None:
    assert judged(IrregularWatch(Rules()), [1.02] * 5) == [4]
    assert judged(IrregularWatch(Rules()), [1.005] * 20) == []
    assert judged(IrregularWatch(Rules()), [0.5] * 20) == [], "shorter ones do no harm"
    assert judged(IrregularWatch(Rules()), [5.0] * 20, regular_every=2)[:1] == [5]
    watch = IrregularWatch(Rules())
    assert [watch.judge(iteration(n, 5.0, is_regular=n % 3 > 0), PREDICTED_S) for n in range(20)] == [
        None
    ] * 20


def test_iterations_that_take_as_long_at_stock_keep_the_plans() -> None:
    watch = IrregularWatch(Rules())
    for number in range(6):
        watch.take_stock(iteration(number, 1.5, version=0))
        watch.take_stock(iteration(number, 0.9, version=0, is_regular=True))
    watch.restart()
    assert judged(watch, [1.5] * 20) == []
    assert judged(watch, [1.6] * 5) != []


def test_iterations_under_other_plans_do_not_count() -> None:
    watch = IrregularWatch(Rules())
    assert all(watch.judge(iteration(n, 5.0, version=n // 4), PREDICTED_S) is None for n in range(40))


def test_a_job_with_irregular_iterations_is_at_stock_until_they_are_regular_again() -> None:
    cluster = TruthfulCluster().plan()
    t_min_s = cluster.job().t_min_s
    cluster.iterate(5, 3.0, is_regular=False)
    cluster.expect(JobState.BASELINE)
    assert cluster.machine.record.state_reason == (
        "iterations are irregular and take 3.000000 s: stock until they are regular again"
    )
    cluster.iterate(20, 3.0, is_regular=False)
    cluster.expect(JobState.BASELINE)
    cluster.run_until(JobState.PLANNED)
    assert cluster.job().t_min_s == t_min_s, "nothing was measured or solved anew"
    assert cluster.announced(event_pb2.PredictionViolated) == []
    cluster.run(3)
    cluster.iterate(20, 3.0, is_regular=False)
    cluster.expect(JobState.PLANNED)  # by now they are known to take as long at stock
    (*_, baseline, last) = [period for period, _ in report(cluster.machine.run.log.periods, 0)]
    assert (baseline.state, last.state) == (JobState.BASELINE, JobState.PLANNED)
    assert last.irregular_count == 20
    assert last.irregular_time_s == 3.0
