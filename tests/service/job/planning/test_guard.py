"""Plans beside stock: blocks, what they show, and when a plan is surely slower than promised."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from perseus.service.domain.inputs import BudgetTargetSet, MaxClockSet, PolicySet
from perseus.service.domain.measured import JobIteration
from perseus.service.domain.model import JobState
from perseus.service.domain.pairs import NO_PAIRS, Pair
from perseus.service.domain.specification import Deadline, OperatingPolicy
from perseus.service.domain.stall import StockReason
from perseus.service.job.planning import guard, stock_blocks
from perseus.service.job.planning.guard import Guard, SlowdownProof
from perseus.service.job.planning.stock_blocks import EARLY_COUNT, BlockStep, StockBlocks
from perseus.service.job.rules import Rules
from perseus.v1 import event_pb2
from tests.service.job.clusters import FIRST, TruthfulCluster, straggler

PLANS, STOCK = (7, 7), (8, 8)
RULES = Rules()

pytestmark = pytest.mark.usefixtures("stock_beside_plans")


def iteration(number: int, time_s: float, versions: tuple[int, ...], energy_j: float = 10.0) -> JobIteration:
    return JobIteration(
        number, versions, True, time_s, (energy_j,), is_at_stock=versions == STOCK, state=JobState.PLANNED
    )


class Job:
    """A job whose iterations take `time_s(number, is_planned)`; what it was offered is in force at once."""

    def __init__(self, time_s: Callable[[int, bool], float], seed: str = "job/1") -> None:
        self.blocks = StockBlocks(RULES, seed)
        self.guard = Guard(RULES)
        self.pairs: list[Pair] = []
        self.times, self.energies = NO_PAIRS, NO_PAIRS
        self.stock_numbers: list[int] = []
        self.proofs: list[SlowdownProof] = []
        self.irregular: set[int] = set()
        self.changes: list[int] = []
        self._time_s = time_s
        self._versions = PLANS

    def run(self, count: int, promised: float = 1.0) -> "Job":
        for number in range(count):
            is_planned = self._versions == PLANS
            if not is_planned:
                self.stock_numbers.append(number)
            taken = replace(
                iteration(number, self._time_s(number, is_planned), self._versions, 9.0 + is_planned),
                is_regular=number not in self.irregular,
            )
            match self.blocks.take(taken, PLANS, self.times.count, None, may_begin=True):
                case BlockStep() as step:
                    self._versions = STOCK if step is BlockStep.STOCK else PLANS
                    self.changes.append(number + 1)
                case Pair() as pair:
                    self.pairs.append(pair)
                    self.times = self.times.with_pair(pair.planned_time_s, pair.stock_time_s)
                    self.energies = self.energies.with_pair(pair.planned_energy_j, pair.stock_energy_j)
                    if proof := self.guard.judge(pair, self.times, promised, (1,)):
                        self.proofs.append(proof)
        return self


def test_blocks_follow_each_other_at_first_and_take_three_percent_at_random_moments_then() -> None:
    job = Job(lambda _number, is_planned: 1.1 if is_planned else 1.0).run(20_000)
    early = [number for number in job.stock_numbers if number < 120]
    assert len(early) == pytest.approx(120 / 3, abs=6)
    assert len(job.stock_numbers) / 20_000 == pytest.approx(stock_blocks.SHARE, rel=0.15)
    ends = [pair.last_iteration for pair in job.pairs[stock_blocks.EARLY_COUNT :]]
    distances = np.diff(ends)
    assert distances.min() < 0.7 * distances.mean()
    assert distances.max() > 1.3 * distances.mean()
    assert Job(lambda *_: 1.0, "other/1").run(5000).stock_numbers != job.stock_numbers[: len(early)]
    assert job.times.ratio == pytest.approx(1.1)
    assert job.times.ratio_se == pytest.approx(0.0, abs=1e-7)
    assert job.energies.ratio == pytest.approx(10.0 / 9.0)


def test_the_first_iteration_under_other_clocks_and_irregular_ones_count_on_no_side() -> None:
    def time_s(number: int, is_planned: bool) -> float:
        is_first = number in (0, *job.changes)
        return 50.0 if is_first else 1.0 + is_planned

    job = Job(time_s)
    job.irregular = set(range(3, 300, 7))
    job.run(200)
    assert len(job.pairs) > 5
    assert {time_s for pair in job.pairs[1:] for time_s in pair.before_s + pair.after_s} == {2.0}
    assert {time_s for pair in job.pairs for time_s in pair.stock_s} == {1.0}


def test_a_block_of_irregular_iterations_ends_without_a_comparison() -> None:
    job = Job(lambda *_: 1.0)
    job.irregular = set(range(RULES.baseline_iterations, 1000))
    job.run(200)
    assert job.pairs == []
    assert 0 < len(job.stock_numbers) < 5 * RULES.baseline_iterations


def noisy(seed: int, ratio: float, sigma: float, drift: float = 0.0) -> Callable[[int, bool], float]:
    """Return times of iterations whose work is log-normal, under plans by a ratio slower than stock."""
    rng = np.random.default_rng(seed)
    return lambda number, is_planned: float(
        (1 + drift * number) * math.exp(sigma * rng.standard_normal()) * (ratio if is_planned else 1.0)
    )


@pytest.mark.parametrize(
    ("sigma", "drift"), [(0.01, 0.0), (0.1, 0.0), (0.35, 0.0), (0.01, 1e-4), (0.1, 1e-4)]
)
def test_intervals_are_true_under_noise_and_drift_and_plans_that_keep_their_promise_stay(
    sigma: float, drift: float
) -> None:
    """Nineteen in twenty of the intervals; the binomial distribution allows 7 misses of 60 in 98 %."""
    misses = alarms = 0
    for seed in range(60):
        job = Job(noisy(seed, 1.0, sigma, drift)).run(1000)
        margin = job.times.ratio_margin()
        assert margin is not None
        misses += abs(job.times.ratio - 1.0) > margin
        alarms += bool(job.proofs)
    assert misses <= 7
    assert alarms <= 3


@pytest.mark.parametrize(("sigma", "ratio"), [(0.005, 1.02), (0.01, 1.05), (0.1, 1.2), (0.2, 1.3)])
def test_plans_that_are_slower_than_promised_are_proven_to_be_so(sigma: float, ratio: float) -> None:
    jobs = [Job(noisy(seed, ratio, sigma)).run(3000) for seed in range(10)]
    assert sum(bool(job.proofs) for job in jobs) >= 9
    assert not any(job.proofs for job in (Job(noisy(1, ratio, sigma)).run(1000, ratio + 0.01),))
    proof = jobs[0].proofs[0]
    assert proof.promised * 1.01 < proof.surely < proof.ratio


def test_a_plan_that_becomes_slow_does_not_live_on_a_good_time() -> None:
    job = Job(lambda number, is_planned: 1.0 + 0.05 * (is_planned and number > 5000)).run(5600)
    assert job.proofs
    assert job.proofs[0].pair_count > 20


# ---------------------------------------------------------------------- in a job


def test_a_planned_job_runs_at_stock_now_and_then_under_the_same_versions_and_no_event_says_so() -> None:
    cluster = TruthfulCluster().plan()
    run, before = cluster.machine.run, len(cluster.events())
    versions, planned_s = run.offers.versions, cluster.job(is_full=True).planned_iteration_time_s
    seen = set()
    for _ in range(60):
        cluster.run(1)
        seen.add(cluster.ranks[FIRST].in_force.version)
        job = cluster.job(is_full=True)
        assert job.planned_iteration_time_s == planned_s
        assert run.offers.plan_versions == versions
    assert len(seen) > 3
    assert versions[0] in seen
    assert cluster.events()[before:] == []
    period, saving = run.log.latest_period() or (None, None)
    assert period is not None
    assert saving is not None
    assert period.time_pairs.count >= 3
    assert period.iteration_count > 20, "it goes on after each block"
    assert saving.baseline_number == period.number
    assert saving.slowdown_percent == pytest.approx(0.0, abs=0.1)


@pytest.mark.parametrize("what", ["straggler", "maximum clock", "power budget", "solving"])
def test_no_block_begins_while_something_else_decides(what: str) -> None:
    cluster = TruthfulCluster().plan()
    while not cluster.machine.run.offers.is_beside_plans:
        cluster.run(1)
    match what:
        case "straggler":
            cluster.send(straggler(1.05))
        case "maximum clock":
            cluster.send(MaxClockSet(1200))
        case "power budget":
            cluster.send(BudgetTargetSet(1.4, is_urgent=True))
        case "solving":  # as after a restart, with plans in force
            while cluster.machine.run.offers.is_beside_plans:
                cluster.run(1)
            cluster.waiting = []
            cluster.machine.run.planner.drop_frontier()
            cluster.machine._lifecycle.solve()
    assert not cluster.machine.run.offers.is_beside_plans
    cluster.run(80)
    assert not cluster.machine.run.offers.is_beside_plans
    # A pair whose iterations at stock were over is completed, if nothing explains what comes after.
    assert cluster.machine.run.log.periods[-1].time_pairs.count == (what == "solving")


def test_stock_that_is_measured_anew_does_not_change_plans_by_itself() -> None:
    """A deadline's target depends on what stock takes: each block would bring another plan."""
    cluster, rng = TruthfulCluster().plan(), np.random.default_rng(0)
    cluster.send(PolicySet(OperatingPolicy(deadline=Deadline(iteration_count=1000, time_s=1450.0))))
    cluster.run(4)
    versions = cluster.machine.run.offers.plan_versions
    for _ in range(130):
        cluster.work = partial(lambda work, _stage: work, float(np.exp(0.01 * rng.standard_normal())))
        cluster.run(1)
    assert cluster.machine.run.offers.plan_versions == versions
    assert cluster.machine.run.log.periods[-1].time_pairs.count >= EARLY_COUNT


def test_a_coordinator_that_is_restarted_in_a_block_brings_the_plans_back() -> None:
    cluster = TruthfulCluster().plan()
    while not cluster.machine.run.offers.is_beside_plans:
        cluster.run(1)
    cluster.restart()
    cluster.join_all()
    cluster.run(5)
    assert cluster.machine.record.state is JobState.PLANNED
    assert cluster.job().min_planned_iteration_time_s > 0


def test_plans_beyond_the_policys_slowdown_are_followed_by_faster_ones() -> None:
    cluster = TruthfulCluster().plan()
    cluster.send(PolicySet(OperatingPolicy(20.0)))
    cluster.plan_delay_s = 0.1
    slower_s = cluster.job().max_planned_iteration_time_s
    cluster.run(150)
    assert cluster.announced(event_pb2.PredictionViolated)
    assert cluster.machine.record.state is JobState.PLANNED
    assert cluster.job().max_planned_iteration_time_s < slower_s


@pytest.mark.parametrize("is_stated", [True, False])
def test_stated_work_explains_what_varies(is_stated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, after an hour that shows nothing, the job goes back to stock and says why."""
    monkeypatch.setattr(guard, "DECISION_S", 100.0)
    rng = np.random.default_rng(0)
    cluster = TruthfulCluster().plan()
    for _ in range(150 if is_stated else 1500):
        work = float(np.exp(0.5 * rng.standard_normal()))
        cluster.work = partial(lambda work, _stage: work, work)
        for rank in cluster.ranks.values():
            rank.relative_work = work if is_stated else 0.0
        cluster.run(1)
        if cluster.machine.record.state is JobState.STOCK:
            break
    assert cluster.machine.record.state is (JobState.PLANNED if is_stated else JobState.STOCK)
    if not is_stated:
        assert cluster.machine.record.stock_reason is StockReason.UNDECIDED
        assert "iterations vary too much: after an hour" in cluster.job().state_reason
        assert "relative_work" in cluster.job().next_step


def test_times_that_are_known_too_badly_make_no_plan() -> None:
    cluster, rng = TruthfulCluster(), np.random.default_rng(0)
    cluster.join_all()
    while cluster.machine.record.state is not JobState.STOCK:
        cluster.work = partial(lambda work, _stage: work, float(np.exp(0.5 * rng.standard_normal())))
        cluster.run(1)
        assert cluster.machine.record.state is not JobState.PLANNED
    assert cluster.machine.record.stock_reason is StockReason.NOISY
    assert "plans would need a margin of" in cluster.job().state_reason
    assert "relative_work" in cluster.job().next_step
