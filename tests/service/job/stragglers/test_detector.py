"""The detector: which pipelines are slow, and since when; and what a job does, on a cluster with noise."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from perseus.service.domain.inputs import PolicySet, StragglerCleared
from perseus.service.domain.model import JobState
from perseus.service.domain.specification import OperatingPolicy
from perseus.service.job.iterations.variation_memory import MAX_ITERATIONS
from perseus.service.job.stragglers.detector import (
    ENTER,
    QUIET_ITERATIONS,
    SLOWING_REASONS,
    Finding,
    StragglerDetector,
)
from perseus.service.job.stragglers.response_cost import INITIAL_PAUSE
from perseus.service.job.stragglers.spans import IterationSpans
from perseus.v1 import event_pb2, job_pb2
from tests.service.job.clusters import TimedCluster, straggler
from tests.service.service_fakes import make_spec

PLANNED_S = 10.0
VERSION = 5


class Series:
    """A detector, and the slowness ratios fed to it: spans over 10 s, planned or not.

    It has learned from so many iterations that there is hardly any noise.
    """

    def __init__(self, pipeline_count: int, *, is_planned: bool = True, learned: int = 40) -> None:
        self.detector = StragglerDetector(pipeline_count)
        self.count = pipeline_count
        self.is_planned = is_planned
        self.iteration = -1
        for _ in range(1 + learned):
            self.feed([1.0] * pipeline_count)

    def feed(
        self,
        slowness: Sequence[float] | NDArray[np.float64],
        version: int | None = None,
        reasons: Sequence[int] = (),
        work: Sequence[float] | NDArray[np.float64] = (),
    ) -> list[Finding]:
        self.iteration += 1
        planned_s = np.full(self.count, PLANNED_S if self.is_planned else np.nan)
        return self.detector.judge(
            IterationSpans(
                iteration=self.iteration,
                versions=np.full(self.count, VERSION if version is None else version),
                spans_s=PLANNED_S * np.array(slowness),
                planned_s=planned_s,
                slowest_stages=np.zeros(self.count, np.int64),
                stage_ratios=np.array(slowness),
                clock_event_reasons=np.array(reasons or [0] * self.count),
                relative_work=np.array(work) if len(work) else 1.0,
            )
        )

    def feed_first(self, slowness: Sequence[float]) -> list[tuple[int, int, Any]]:
        """Feed a series of the first pipeline's slowness, the others unchanged; return the findings."""
        return [
            (index, finding.pipeline, finding.slowdown_factor)
            for index, factor in enumerate(slowness, 1)
            for finding in self.feed([factor] + [1.0] * (self.count - 1))
        ]


@pytest.fixture(params=product([2, 3, 4, 9], [True, False]), ids="{0[0]} pipelines, planned: {0[1]}".format)
def series(request: pytest.FixtureRequest) -> Series:
    pipeline_count, is_planned = request.param
    return Series(pipeline_count, is_planned=is_planned)


Part = tuple[list[float], list[tuple[int, float]]]
"""The first pipeline's slowness in some iterations, and the findings: in which of these, and the factor."""


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([([1.2] * 10, [(2, 1.2)]), ([1.0] * 10, [(2, 1.0)])], id="a lasting slowdown, its end"),
        pytest.param([([1.0, 1.5, *[1.0] * 5, 3.0, *[1.0] * 5], [])], id="single slow iterations"),
        pytest.param([([1 + 0.9 * ENTER] * 20, [])], id="slowness below the limit"),
        pytest.param([([1.2, 1.2, 1.0, 1.0] * 10, [(2, 1.2), (4, 1.0)])], id="slow flapping is given up"),
        pytest.param(
            [([1.2, np.nan, 1.2], [(3, 1.2)]), ([1.0, np.nan, np.nan, 1.0], [(4, 1.0)])],
            id="unknown iterations neither count nor interrupt",
        ),
    ],
)
def test_a_slowdown_that_lasts_is_found_and_its_end_too(series: Series, parts: list[Part]) -> None:
    for slowness, findings in parts:
        expected = [(index, 0, pytest.approx(factor)) for index, factor in findings]
        assert series.feed_first(slowness) == expected


@pytest.mark.parametrize(
    ("is_planned", "slowness", "factors"),
    [
        pytest.param(True, [1.2, 1.1, 1.0, 1.0], {0: 1.2, 1: 1.1}, id="two, each with a factor of its own"),
        pytest.param(True, [1.0, 0.8], {}, id="one that keeps its plan is none, however fast its peer"),
        pytest.param(False, [1.0, 0.8], {0: 1.25}, id="without plans, the slower of two"),
        pytest.param(True, [1.56, 1.3, 1.3], {0: 1.2}, id="one amid a step of the whole job"),
        pytest.param(False, [1.56, 1.3, 1.3], {0: 1.2}, id="and without plans"),
    ],
)
def test_stragglers_are_the_pipelines_that_are_slower_than_planned_or_than_their_peers(
    is_planned: bool, slowness: list[float], factors: dict[int, float]
) -> None:
    series = Series(len(slowness), is_planned=is_planned)
    assert series.feed(slowness) == []
    findings = {finding.pipeline: finding.slowdown_factor for finding in series.feed(slowness)}
    assert findings == pytest.approx(factors)
    assert series.feed(slowness) == []


def test_a_step_of_the_whole_job_is_no_straggler(series: Series) -> None:
    for factor in (1.15, 1.3, 1.3, 1.3, 0.9, 0.9):
        assert series.feed([factor] * series.count) == []


def test_a_slowdown_that_began_within_an_iteration_is_found_with_its_full_factor(series: Series) -> None:
    found = series.feed_first([1.1] + [1.2] * 8)
    assert (found[0][0], found[-1][2]) == (2, pytest.approx(1.2)), "at once, and its factor follows"
    assert series.feed_first([1.1] + [1.0] * 4)[-1][2] == 1.0


@pytest.mark.parametrize(
    ("high", "low", "period"),
    [
        (1.2, 1.0, 1),
        (1 + 2 * ENTER, 1.0, 1),
        (1 + 5.5 * ENTER, 1 - 3.5 * ENTER, 1),
        *((1 + 1.25 * ENTER, 1 + 0.75 * ENTER, period) for period in (1, 2, 3, 7)),
    ],
)
def test_alternating_jitter_is_found_at_most_once_and_none_waits_for_it_if_it_ends_in_between(
    series: Series, high: float, low: float, period: int
) -> None:
    """The detector may find its mean."""
    assert len(series.feed_first((([high] * period + [low] * period) * 20)[:40])) <= 1
    assert low > 1 or series.detector.factor(0) in (None, 1.0)


def test_timeouts_shrink_when_quiet(series: Series) -> None:
    series.feed_first([1.2, 1.2, 1.0, 1.0])
    assert series.feed_first([1.2] * 3 + [1.0] * (3 + QUIET_ITERATIONS)) == [], "three outweigh three"
    found = series.feed_first([1.2] * 15)
    assert found[0][1:] == (0, pytest.approx(1.2)), "after two hiccups, it has to last longer than they did"
    assert 3 < found[0][0] <= 13


def test_one_iteration_is_enough_if_the_gpu_reports_that_it_is_slowed(series: Series) -> None:
    others = [1.0] * (series.count - 1)
    reasons = [0] * (series.count - 1)
    assert series.feed([1.2, *others], reasons=[0x4, *reasons]) == [], "a power limit is no sign"
    assert series.feed([1.0, *others], reasons=[0x40, *reasons]) == [], "nor is heat that costs nothing"
    (finding,) = series.feed([1.2, *others], reasons=[0x40, *reasons])
    assert (finding.iteration_count, finding.clock_event_reasons) == (1, 0x40)
    assert SLOWING_REASONS & 0x40


def test_the_first_iteration_under_other_clocks_does_not_count(series: Series) -> None:
    slow = [1.2] + [1.0] * (series.count - 1)
    for version in range(10, 20):
        assert series.feed(slow, version) == []
    series.feed(slow, 19)
    assert len(series.feed(slow, 19)) == 1


def test_the_factor_follows_the_straggler(series: Series) -> None:
    series.feed_first([1.2] * 2)
    ((count, _, factor),) = series.feed_first([1.3] * 3)
    assert (2 <= count <= 3, factor) == (True, pytest.approx(1.3)), "up"
    assert series.feed_first([1.1] * 2) == [(2, 0, pytest.approx(1.1))], "down at once"
    assert series.feed_first([1.1 * (1 + ENTER / 2), 1.1] * 5) == [], "within the limits it stays"


def test_a_report_overrides_the_detector(series: Series) -> None:
    series.feed_first([1.2] * 2)
    series.detector.forget(0)
    assert series.detector.factor(0) is None
    assert series.feed_first([1.2] * 2) == [(2, 0, pytest.approx(1.2))]


def test_a_restart_keeps_stragglers_and_drops_unfinished_evidence(series: Series) -> None:
    series.detector.restore(0, 1.2)
    series.feed_first([1.0])
    series.detector.restart()
    assert series.feed_first([1.0, 1.0]) == [], "the first iteration does not count"
    assert series.feed_first([1.0]) == [(1, 0, 1.0)]


LEVELS = st.floats(-0.99, 0.99)


@given(jitter=st.lists(LEVELS, min_size=20, max_size=60), count=st.integers(2, 5), planned=st.booleans())
def test_jitter_about_the_limit_is_found_at_most_once(jitter: list[float], count: int, planned: bool) -> None:
    """It becomes a straggler once at most; its factor may follow it."""
    series = Series(count, is_planned=planned)
    found = series.feed_first([1 + ENTER * (1 + each / 2) for each in jitter])
    assert sum(factor == 1 for _, _, factor in found) == 0


@given(slow=st.integers(1, 8), fast=st.integers(1, 8), high=st.floats(1.05, 1.5), count=st.integers(2, 5))
def test_no_rhythm_flaps(slow: int, fast: int, high: float, count: int) -> None:
    """After some attempts the pipeline is left alone: in the long run hardly anything changes."""
    series = Series(count)
    found = series.feed_first(([high] * slow + [1.0] * fast) * 12)
    assert sum(factor == 1 for _, _, factor in found) <= 3


@given(
    slowness=st.lists(st.lists(st.floats(0.9, 1.4), min_size=3, max_size=3), min_size=1, max_size=40),
    shift=st.floats(1, 1.5),
    planned=st.booleans(),
)
@example(  # the same slowness as before an iteration without a finding, but others wait less for it
    slowness=[[1.0, 1.25, 1.0], [1.0, 1.25, 1.25], [1.0, 1.25, 1.0], [1.0, 1.25, 1.25]],
    shift=1.0,
    planned=False,
)
def test_findings_make_sense(slowness: list[list[float]], shift: float, planned: bool) -> None:
    series = Series(3, is_planned=planned)
    shifted = Series(3, is_planned=False)
    factors = [(1.0, 1.0)] * 3
    for row in slowness:
        found = series.feed(row)
        for finding in found:
            new = finding.slowdown_factor, finding.waited_factor
            assert new != factors[finding.pipeline], "a finding is a change"
            assert 1 <= finding.waited_factor <= finding.slowdown_factor
            factors[finding.pipeline] = new
            reported = series.detector.factor(finding.pipeline)
            assert reported == (pytest.approx(finding.waited_factor) if finding.is_straggler else None)
        if not planned:
            again = shifted.feed([shift * factor for factor in row])
            assert [finding.pipeline for finding in again] == [finding.pipeline for finding in found]


@given(
    slowness=st.lists(st.lists(st.floats(0.9, 1.4), min_size=4, max_size=4), min_size=1, max_size=20),
    order=st.permutations(range(4)),
)
@example(slowness=[[1.0, 1.0, 1.1, 1.3]] * 8, order=[0, 1, 3, 2])  # two are slow from the same iteration on
def test_pipelines_are_judged_alike(slowness: list[list[float]], order: list[int]) -> None:
    here, there = Series(4), Series(4)
    for row in slowness:
        found = {
            finding.pipeline: (finding.slowdown_factor, finding.waited_factor) for finding in here.feed(row)
        }
        moved = {
            order[finding.pipeline]: (finding.slowdown_factor, finding.waited_factor)
            for finding in there.feed([row[pipeline] for pipeline in order])
        }
        assert moved == found


def jumps(seed: int, count: int, pipelines: int = 32) -> NDArray[np.float64]:
    """Return noisy slowness ratios: the slowest of 32 typically takes 1.35 × the median."""
    slowness: NDArray[np.float64] = np.exp(
        0.145 * np.random.default_rng(seed).standard_normal((count, pipelines))
    )
    return slowness


@pytest.mark.parametrize("is_planned", [True, False])
def test_wild_jitter_from_the_first_iteration_on_is_no_straggler(is_planned: bool) -> None:
    found = 0
    for seed in range(5):
        series = Series(32, is_planned=is_planned, learned=0)
        found += sum(len(series.feed(slowness)) for slowness in jumps(seed, 200))
    assert found <= 1, "stated: one in 1,000 iterations"


def test_in_wild_jitter_a_straggler_is_found_and_others_take_only_the_certain_part() -> None:
    series = Series(32, learned=0)
    for slowness in jumps(0, 100):
        series.feed(slowness)
    slow = np.array([2.0] + [1.0] * 31)
    assert any(series.feed(slow * slowness) for slowness in jumps(1, 40)[:6])
    for slowness in jumps(1, 40)[6:]:
        series.feed(slow * slowness)
    factor = series.detector.factor(0)
    assert factor is not None
    assert factor < 1.3, "the slowest of 31 others often takes more than half of it"


def test_before_the_noise_is_known_a_few_iterations_are_no_evidence() -> None:
    series = Series(2, learned=0)
    assert series.feed_first([1.1] * 4) == []


def test_a_response_that_costs_time_is_withdrawn_and_not_repeated_soon() -> None:
    """The straggler is noisy: others that wait for it are often slower than it."""
    series = Series(4)
    detector, count = series.detector, 4
    detector.restore(0, 1.2)

    def feed(factor: float, others_planned: float) -> list[Finding]:
        series.iteration += 1
        planned_s = PLANNED_S * np.array([1.0] + [others_planned] * (count - 1))
        spans_s = planned_s * np.array([factor] + [1.0] * (count - 1))
        zeros = np.zeros(count, np.int64)
        return detector.judge(
            IterationSpans(series.iteration, zeros + VERSION, spans_s, planned_s, zeros, spans_s, zeros)
        )

    slowness = [1.15, 1.25, 1.17, 1.23] * 20
    found = [finding for factor in slowness for finding in feed(factor, 1.25)]
    assert found[0].has_cost_time
    assert (found[0].waited_factor, found[0].is_straggler) == (1.0, True)
    assert found[0].iteration - 40 <= 6
    later = [finding.iteration for finding in found[1:] if finding.waited_factor > 1]
    assert all(iteration - found[0].iteration > INITIAL_PAUSE for iteration in later)


def test_more_work_that_the_trainer_reports_is_no_slowness() -> None:
    """With sequences of varying length, spans vary by 30 %, and the reported work explains all of it."""
    random = np.random.default_rng(3)
    series = Series(8, learned=0)
    for _ in range(400):
        work = np.exp(0.3 * random.standard_normal(8))
        assert series.feed(work * np.exp(0.001 * random.standard_normal(8)), work=work) == []
    slow = np.array([1.05] + [1.0] * 7)
    found = []
    for _ in range(3):
        work = np.exp(0.3 * random.standard_normal(8))
        found += series.feed(slow * work * np.exp(0.001 * random.standard_normal(8)), work=work)
    assert {finding.pipeline for finding in found} == {0}
    assert found[0].slowdown_factor == pytest.approx(1.05, rel=0.005)


# ---------------------------------------------------------------------- on an emulated cluster


SEEDS = range(3)


def planned(pipelines: int = 2, seed: int = 0, **changes: float) -> TimedCluster:
    cluster = TimedCluster(make_spec(pipelines=pipelines, stages=3, microbatches=6), seed=seed, **changes)
    cluster.run_to_plan()
    return cluster


def detected(cluster: TimedCluster) -> dict[int, float]:
    """Return T' over T_min of the known stragglers."""
    job = cluster.job(is_full=True)
    assert all(straggler.is_detected for straggler in job.stragglers)
    return {straggler.pipeline: straggler.iteration_time_s / job.t_min_s for straggler in job.stragglers}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("pipelines", "slow"), [(2, 0), (2, 1), (4, 2)])
def test_a_straggler_is_answered_and_withdrawn_within_three_iterations(
    pipelines: int, slow: int, seed: int
) -> None:
    cluster = planned(pipelines, seed)
    others = set(range(pipelines)) - {slow}
    cluster.run(MAX_ITERATIONS)  # until it is known that computations vary by 1 %
    t_min_s = cluster.job().t_min_s
    (own_s,) = {*cluster.planned_times_s()}
    assert t_min_s < own_s < 1.01 * t_min_s

    cluster.slowdowns[slow] = 1.2
    assert cluster.offered_within(3) == others
    assert cluster.announced(event_pb2.StragglerFinding)[-1].slowdown_factor == pytest.approx(1.2, abs=0.02)
    assert detected(cluster) == {slow: pytest.approx(1.18, abs=0.02)}, (
        "the others only take the time that they surely wait"
    )
    assert all(change.straggler_finding.pipeline == slow for change in cluster.findings(10))
    for pipeline, time_s in enumerate(cluster.planned_times_s()):
        assert time_s == own_s if pipeline == slow else own_s < time_s <= 1.22 * t_min_s

    cluster.slowdowns[slow] = 1.0
    assert cluster.offered_within(3) == others
    assert detected(cluster) == {}
    assert cluster.findings(20) == []
    assert cluster.planned_times_s() == [own_s] * pipelines


def test_without_a_plan_pipelines_are_compared_with_their_peers() -> None:
    cluster = TimedCluster(make_spec(pipelines=3, stages=3, microbatches=6))
    cluster.join_all()
    cluster.run(5)
    (found,) = cluster.findings(4, {2: 1.2})
    assert cluster.machine.record.state in (JobState.BASELINE, JobState.PROFILING)
    assert found.straggler_finding.pipeline == 2
    assert "its peers" in found.message
    assert cluster.machine.run.planner.straggler_times_s() == {2: 0.0}


def test_a_report_overrides_findings_until_it_is_cleared() -> None:
    cluster = planned()
    t_min_s = cluster.job().t_min_s
    cluster.send(straggler(1.3, pipeline=1))
    overridden = {change.straggler_finding.is_overridden for change in cluster.findings(6, {1: 1.2})}
    assert overridden == {True}
    (slow,) = cluster.job(is_full=True).stragglers
    assert slow == job_pb2.Straggler(pipeline=1, iteration_time_s=1.3 * t_min_s)

    cluster.send(StragglerCleared(1))
    assert detected(cluster) == {1: pytest.approx(1.18, abs=0.02)}, "the finding made meanwhile counts"
    cluster.send(StragglerCleared(1))
    assert detected(cluster) == {}
    (again,) = cluster.findings(3)
    assert again.straggler_finding.pipeline == 1
    (found,) = cluster.findings(3, {1: 1.0})
    assert found.type == event_pb2.JOB_EVENT_TYPE_STRAGGLER_WITHDRAWN
    assert detected(cluster) == {}
    assert cluster.handle(StragglerCleared(1)) == []


def test_a_straggler_scales_with_the_plan_that_it_has() -> None:
    cluster = planned(noise=0.0)
    cluster.send(PolicySet(OperatingPolicy(10.0)))
    cluster.findings(6, {1: 1.1})
    own_s = cluster.planned_times_s()[1]
    (slow,) = cluster.job(is_full=True).stragglers
    assert slow.pipeline == 1
    assert slow.iteration_time_s == pytest.approx(1.1 * own_s, rel=0.01)
    cluster.send(PolicySet(OperatingPolicy(0.0)))
    cluster.run(6)
    assert detected(cluster) == {1: pytest.approx(1.1, rel=0.01)}


@pytest.mark.parametrize("seed", range(6))
def test_a_straggler_that_takes_a_while_to_prove_violates_no_prediction(seed: int) -> None:
    """With lasting noise, each further iteration is weak evidence."""
    cluster = planned(4, seed, noise=0.001)
    chance = np.random.default_rng(seed)
    for _ in range(5):
        cluster.findings(12, dict(enumerate((1 + 0.004 * chance.standard_normal(4)).tolist())))
    cluster.slowdowns[1] = 1.3
    assert cluster.offered_within(16) == {0, 2, 3}
    assert cluster.announced(event_pb2.PredictionViolated) == []
    assert cluster.machine.record.state is JobState.PLANNED
