"""The set latency that plans are made with: which one counts, and when it changes."""

from hypothesis import example, given
from hypothesis import strategies as st

from perseus.service.domain.commands import Solve
from perseus.service.domain.model import JobState
from perseus.service.domain.records import JobRecord
from perseus.service.domain.specification import Coordinates, OperatingPolicy
from perseus.service.job.planning.set_latency import MIN_SETS, SETTLING_TIME_S, SetLatency
from perseus.v1 import event_pb2
from tests.service.job.clusters import TruthfulCluster
from tests.service.service_fakes import clock_statistics

RANKS = [Coordinates(0, stage, 0) for stage in range(4)]


def reported(*latencies_s: float, planned_s: float = 0.0) -> SetLatency:
    latency = SetLatency(JobRecord(OperatingPolicy(), set_latency_s=planned_s), len(RANKS))
    for rank, latency_s in zip(RANKS, latencies_s, strict=False):
        latency.take(rank, clock_statistics(1, latency_s))
    latency.validate()
    return latency


def test_the_largest_counts_as_soon_as_all_have_reported() -> None:
    latency = reported(0.010, 0.018, 0.012)
    latency.follow(0.0)
    assert latency.planned_s == 0.0, "one is missing"
    latency.take(RANKS[3], clock_statistics(1, 0.011))
    latency.follow(1.0)
    assert latency.planned_s == 0.018


def test_if_some_never_report_the_others_count_after_a_while_or_for_the_first_plans() -> None:
    latency = reported(0.010, 0.018)
    latency.follow(0.0)
    latency.follow(SETTLING_TIME_S)
    assert latency.planned_s == 0.018
    latency = reported(0.010)
    latency.adopt_changes()
    assert latency.planned_s == 0.010


def test_a_latency_of_too_few_sets_does_not_count() -> None:
    latency = SetLatency(JobRecord(OperatingPolicy()), 1)
    latency.take(RANKS[0], clock_statistics(1, 0.020, MIN_SETS - 1))
    latency.adopt_changes()
    assert latency.planned_s == 0.0
    latency.take(RANKS[0], clock_statistics(1, 0.0201, MIN_SETS))
    latency.adopt_changes()
    assert latency.planned_s == 0.021, "rounded up to the millisecond"


def test_a_change_that_is_small_or_does_not_last_changes_nothing() -> None:
    latency = reported(0.020, 0.020, 0.020, 0.020, planned_s=0.020)
    for now_s, latency_s in enumerate([0.021, 0.025, 0.019, 0.014, 0.040, 0.020], start=1):
        for rank in RANKS:
            latency.take(rank, clock_statistics(1, latency_s))
        latency.follow(SETTLING_TIME_S * now_s)
        assert latency.planned_s == 0.020
        latency.validate()


def test_a_larger_latency_of_one_rank_counts_once_it_lasts() -> None:
    latency = reported(0.020, 0.020, 0.020, 0.030, planned_s=0.020)
    latency.follow(0.0)
    latency.follow(SETTLING_TIME_S - 0.1)
    assert latency.planned_s == 0.020
    latency.follow(SETTLING_TIME_S)
    assert latency.planned_s == 0.030


def test_a_smaller_latency_counts_only_if_all_have_reported() -> None:
    latency = reported(0.010, 0.010, 0.010, planned_s=0.020)
    latency.follow(0.0)
    latency.follow(10 * SETTLING_TIME_S)
    assert latency.planned_s == 0.020, "the fourth may be the slow one"
    latency.take(RANKS[3], clock_statistics(1, 0.010))
    latency.follow(11 * SETTLING_TIME_S)
    latency.follow(12 * SETTLING_TIME_S)
    assert latency.planned_s == 0.010


@given(st.lists(st.tuples(st.sampled_from(RANKS), st.floats(1e-4, 10.0), st.booleans())))
@example([(RANKS[0], 0.050, False), (RANKS[0], 0.050, True)])
def test_the_largest_is_that_of_the_ranks_that_are_there(
    steps: list[tuple[Coordinates, float, bool]],
) -> None:
    latency, own_s = SetLatency(JobRecord(OperatingPolicy()), len(RANKS)), dict[Coordinates, float]()
    for rank, latency_s, is_gone in steps:
        if is_gone:
            latency.forget([rank])
            own_s.pop(rank, None)
        else:
            latency.take(rank, clock_statistics(1, latency_s))
            own_s[rank] = latency_s
        latency.validate()
        largest_s = max(own_s.values(), default=0.0)
        assert largest_s - 1e-12 <= latency.largest_s <= largest_s + 0.0010001


# ---------------------------------------------------------------------- in the machine


def solves(cluster: TruthfulCluster) -> list[float]:
    """Return the latencies that problems were solved with."""
    return [command.set_latency_s for command in cluster.history if isinstance(command, Solve)]


def let_all_report(cluster: TruthfulCluster, latency_s: float) -> None:
    for rank in cluster.ranks.values():
        rank.set_latency_s = latency_s


def test_a_latency_that_is_reported_under_plans_renews_them() -> None:
    cluster = TruthfulCluster().plan()
    cluster.run(2)
    let_all_report(cluster, 0.050)
    cluster.run(3)
    assert solves(cluster) == [0.0, 0.050]
    cluster.expect(JobState.PLANNED)
    assert cluster.announced(event_pb2.PredictionViolated) == []


def test_a_restart_keeps_the_latency() -> None:
    cluster = TruthfulCluster()
    let_all_report(cluster, 0.060)
    cluster.plan()
    let_all_report(cluster, 0.0)
    cluster.restart()
    assert cluster.job().set_latency_s == 0.060
    assert solves(cluster) == [0.060, 0.060]
