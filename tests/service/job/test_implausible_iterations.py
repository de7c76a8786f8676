"""Iterations that one rank claims and where it can't be beside the others."""

import re
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus.service.domain.errors import InvalidFieldError
from perseus.service.domain.inputs import (
    AgentDisconnected,
    BudgetTargetSet,
    PlanInForce,
    RankLeft,
    TelemetryArrived,
)
from perseus.service.domain.model import JobState, RankLeftReason, RefusalReason
from perseus.service.job.iterations.iteration_log import OPEN_LIMIT
from perseus.service.job.rules import Rules
from perseus.v1 import event_pb2
from tests.service.job.clusters import FIRST, answer, offers, planned, straggler
from tests.service.service_fakes import EPOCH, Cluster, FakeRank, batch, make_spec

FAR = 1_000_000


def claim(rank: FakeRank, first: int = FAR, count: int = 300) -> TelemetryArrived:
    """Return a valid batch of iterations from one far ahead on."""
    rank.sequence += 1
    iterations = range(first, first + count)
    version = rank.in_force.version
    rows = batch(rank.sequence, iterations, version, 0.8, is_regular=False)
    return TelemetryArrived(rank.place, rank.instance_id, rows)


def complete_count(cluster: Cluster) -> int:
    totals = cluster.machine.run.log.totals
    return totals.regular_count + totals.irregular_count


def expect_progress(cluster: Cluster, count: int = 20) -> None:
    """Let all ranks run on; all their iterations are complete, and the next plan is soon in force."""
    before = complete_count(cluster)
    cluster.iterate(count)
    assert complete_count(cluster) >= before + count - 1
    cluster.iterate_until(JobState.PLANNED)
    cluster.iterate(6)
    frontier = cluster.machine.run.planner.frontier
    assert frontier is not None
    cluster.send(BudgetTargetSet(1.1 * frontier.t_min_s, is_urgent=False))
    cluster.iterate(4)
    assert max(cluster.planned_times_s()) > frontier.t_min_s


def test_a_batch_far_ahead_is_refused_by_name_and_harms_nothing() -> None:
    cluster = planned(pipelines=4)
    rank = cluster.ranks[FIRST]
    reached, before = rank.iteration, cluster.job(is_full=True)
    far = reached + 128 + 10_000
    expected = (
        f"iterations.iteration[0]: expected at most {far}, as most ranks of the job have reached {reached}"
    )
    with pytest.raises(InvalidFieldError, match=re.escape(expected)):
        cluster.handle(claim(rank))
    assert cluster.job(is_full=True) == before
    changes = cluster.announced(event_pb2.StateChanged)
    cluster.send(AgentDisconnected(rank.instance_id))
    for each in cluster.ranks.values():
        if each.instance_id == rank.instance_id:
            cluster.send(each.joined())
    assert cluster.announced(event_pb2.StateChanged) == changes, "the rank has not been lost"
    expect_progress(cluster)
    assert cluster.machine.run.ranks[FIRST].iteration == rank.iteration, "where it is by its later batches"


def claim_on_joining(cluster: Cluster) -> None:
    for rank in cluster.ranks.values():
        cluster.send(replace(rank.joined(), iteration=FAR if rank.place == FIRST else -1))


def claim_before_the_others_tell_where_they_are(cluster: Cluster) -> None:
    cluster.join_all()
    cluster.send(claim(cluster.ranks[FIRST]))


def claim_in_an_answer(cluster: Cluster) -> None:
    cluster.join_all()
    cluster.iterate_until(JobState.PLANNED)
    cluster.iterate(3)
    rank = cluster.ranks[FIRST]
    version = rank.in_force.version
    cluster.send(PlanInForce(FIRST, rank.instance_id, EPOCH, version, FAR))
    for refusal in (None, RefusalReason.PAST_START):
        cluster.send(answer(cluster, FIRST, version, refusal, FAR))


@pytest.mark.parametrize(
    "claim_far", [claim_on_joining, claim_before_the_others_tell_where_they_are, claim_in_an_answer]
)
def test_a_claim_harms_nothing(claim_far: Callable[[Cluster], None]) -> None:
    cluster = Cluster(make_spec())
    claim_far(cluster)
    expect_progress(cluster)


def test_a_rank_that_refuses_every_start_is_offered_its_clocks_once_an_iteration() -> None:
    cluster = planned()
    cluster.handle(straggler(pipeline=1))
    rank, own = cluster.ranks[FIRST], cluster.machine.run.offers
    for _ in range(3):
        refusal = answer(cluster, FIRST, own.of_rank(FIRST).version, RefusalReason.PAST_START, FAR)
        assert offers(cluster.handle(refusal)) == {}
    for each in cluster.ranks.values():
        each.begin()
        cluster.handle(each.end(0.8))
    assert cluster.machine.run.offers.of_rank(FIRST).start_iteration > rank.iteration


def test_a_start_that_a_rank_ahead_refuses_is_postponed_once_most_others_are_there() -> None:
    """Answers may overtake reports; and one rank is lost, so no iteration of the whole job comes to help."""
    cluster = planned(pipelines=4)
    cluster.handle(straggler(pipeline=1))
    rank, own = cluster.ranks[FIRST], cluster.machine.run.offers
    ahead = rank.iteration + 200
    offer = own.of_rank(FIRST)
    cluster.handle(answer(cluster, FIRST, offer.version, RefusalReason.PAST_START, ahead))
    assert own.of_rank(FIRST) == offer, "as if it were a false claim"
    for each in list(cluster.ranks.values())[:-1]:
        cluster.handle(claim(each, ahead, 1))
    assert own.of_rank(FIRST).version == offer.version
    assert own.of_rank(FIRST).start_iteration > ahead


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (2, 2)])
def test_the_whole_job_may_jump(shape: tuple[int, int]) -> None:
    """Half of the ranks are refused once; then most are there."""
    training = Training(*shape, first=0, iteration_s=1.0, kept=64)
    run_on(training, 3)
    training.iteration += FAR
    refused_count = 0
    training.advance(1, 1.0)
    for index in range(len(training.trainers)):
        try:
            training.report(index, 1)
        except InvalidFieldError:
            refused_count += 1
    assert refused_count <= len(training.trainers) // 2 + 1
    before = complete_count(training.cluster)
    run_on(training, 5)
    assert complete_count(training.cluster) == before + 5


# ---------------------------------------------------------------------- what happens in honest trainings


@dataclass
class Trainer:
    """One rank with its agent: rows that it has not sent yet, the latest of which it keeps."""

    rank: FakeRank
    kept: int
    rows: deque[tuple[int, float]] = field(default_factory=deque)
    is_connected: bool = True


class Training:
    """A job whose ranks run in step, while their agents report as late as they like."""

    def __init__(self, pipelines: int, stages: int, first: int, iteration_s: float, kept: int) -> None:
        rules = Rules(lease_s=3600.0, baseline_iterations=2, profile_iterations=2)
        self.cluster = Cluster(make_spec(pipelines=pipelines, stages=stages), rules)
        self.iteration, self.iteration_s = first, iteration_s
        self.trainers = [Trainer(rank, kept) for rank in self.cluster.ranks.values()]
        for index, trainer in enumerate(self.trainers):
            trainer.rank.instance_id = f"agent-{index}"
        self.cluster.join_all()

    def advance(self, count: int, faster: float) -> None:
        """Let all ranks run; their agents send nothing."""
        for _ in range(count):
            for trainer in self.trainers:
                trainer.rows.append((self.iteration, self.iteration_s * faster))
                while len(trainer.rows) > trainer.kept:
                    trainer.rows.popleft()
            self.cluster.now_s += self.iteration_s * faster
            self.iteration += 1

    def report(self, index: int, count: int) -> None:
        """Let an agent send rows, in one batch."""
        trainer = self.trainers[index % len(self.trainers)]
        if not (trainer.is_connected and trainer.rows):
            return
        sent = [trainer.rows.popleft() for _ in range(min(count, len(trainer.rows)))]
        rank = trainer.rank
        rank.sequence += 1
        rows = batch(rank.sequence, [number for number, _ in sent], 0, 1.0, is_regular=False)
        rows = rows._replace(iterations=rows.iterations._replace(duration_s=[time_s for _, time_s in sent]))
        self.cluster.handle(TelemetryArrived(rank.place, rank.instance_id, rows))

    def reconnect(self, index: int) -> None:
        """Cut an agent's stream, or open it again; it tells where its rank is."""
        trainer = self.trainers[index % len(self.trainers)]
        if trainer.is_connected:
            self.cluster.handle(AgentDisconnected(trainer.rank.instance_id))
        else:
            trainer.rank.iteration = self.iteration
            self.cluster.handle(trainer.rank.joined())
        trainer.is_connected = not trainer.is_connected

    def resume_from(self, checkpoint: int) -> None:
        """Start all trainers again, at an earlier iteration or at a later one."""
        for trainer in self.trainers:
            if not trainer.is_connected:
                self.reconnect(self.trainers.index(trainer))
            rank = trainer.rank
            self.cluster.handle(RankLeft(rank.place, rank.instance_id, RankLeftReason.TRAINER_GONE))
            trainer.rows.clear()
        for trainer in self.trainers:
            trainer.rank.start_trainer()
            self.cluster.handle(trainer.rank.joined())
        self.iteration = checkpoint

    def restart(self) -> None:
        """Start the coordinator again."""
        for trainer in self.trainers:
            trainer.is_connected = False
        self.cluster.restart_with(lambda _: None)


STEPS = st.one_of(
    st.tuples(st.just("advance"), st.sampled_from([1, 2, 5, 150, 600]), st.sampled_from([0.6, 1.0])),
    st.tuples(st.just("report"), st.integers(0, 3), st.sampled_from([1, 3, 700])),
    st.tuples(st.just("reconnect"), st.integers(0, 3)),
    st.tuples(st.just("resume_from"), st.integers(0, 100_000)),
    st.tuples(st.just("restart")),
)


@given(
    shape=st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2)]),
    first=st.sampled_from([0, 50_000]),
    iteration_s=st.sampled_from([0.02, 1.0, 100.0]),
    kept=st.sampled_from([1, 64, 4096]),
    steps=st.lists(STEPS, max_size=25),
)
def test_no_honest_report_is_refused_and_the_job_goes_on(
    shape: tuple[int, int], first: int, iteration_s: float, kept: int, steps: list[tuple[object, ...]]
) -> None:
    training = Training(*shape, first, iteration_s, kept)
    for name, *arguments in steps:
        getattr(training, str(name))(*arguments)
    for index, trainer in enumerate(training.trainers):
        if not trainer.is_connected:
            training.reconnect(index)
        for _ in range(2):
            training.report(index, OPEN_LIMIT)
            trainer.rows = deque(list(trainer.rows)[-OPEN_LIMIT:])
    before = complete_count(training.cluster)
    for _ in range(8):
        training.advance(1, 1.0)
        for index in range(len(training.trainers)):
            training.report(index, 700)
    assert complete_count(training.cluster) >= before + 6


@given(
    shape=st.sampled_from([(1, 2), (2, 2)]),
    claims=st.lists(
        st.one_of(
            st.none(),
            st.tuples(st.sampled_from([1, 5, 100, 200, 400, 5000, FAR]), st.sampled_from([1, 5, 300])),
        ),
        max_size=40,
    ),
)
def test_no_claims_of_one_rank_keep_the_job_from_going_on(
    shape: tuple[int, int], claims: list[tuple[int, int] | None]
) -> None:
    """None: all ranks run an iteration, and report it."""
    training = Training(*shape, first=0, iteration_s=1.0, kept=64)
    liar = training.trainers[0].rank
    for each in claims:
        if each is not None:
            ahead, count = each
            with suppress(InvalidFieldError):
                training.cluster.handle(claim(liar, training.iteration + ahead, count))
        else:
            run_on(training, 1)
    before = complete_count(training.cluster)
    run_on(training, 20)
    assert complete_count(training.cluster) >= before + 19


def run_on(training: Training, count: int) -> None:
    for _ in range(count):
        training.advance(1, 1.0)
        for index in range(len(training.trainers)):
            training.report(index, 700)
