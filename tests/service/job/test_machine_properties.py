"""Random runs of a job: joins, losses, reconnects, late and refused offers, stragglers, restarts.

After every input the machine validates itself; no version goes backwards. When things calm down, every rank
has its share of its pipeline's plan in force, and plans request nothing that a rank can't do: a stage that
may not set clocks is at stock; if no stage may, the whole job is.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from perseus.service.domain.commands import AcceptRank, Command, EndStream, SendMaxClock, SendOffer, Solve
from perseus.service.domain.errors import RankNotServedError, TelemetryOutdatedError
from perseus.service.domain.inputs import (
    AgentDisconnected,
    AgentHeard,
    AgentLeft,
    BudgetTargetSet,
    MaxClockSet,
    OfferAnswered,
    PolicySet,
    RankLeft,
    ResumeRequested,
    Solved,
    StragglerCleared,
    StragglerReported,
    TelemetryArrived,
    Tick,
)
from perseus.service.domain.model import (
    STOCK_MHZ,
    JobState,
    RankLeftReason,
    RefusalReason,
    Straggler,
    stage_clocks,
)
from perseus.service.domain.specification import Coordinates, OperatingPolicy
from perseus.service.job.rules import Rules
from perseus.solver import solve
from tests.service.service_fakes import CLOCKS_MHZ, EPOCH, Cluster, FakeRank, make_spec

PLACES = list(make_spec().parallelism.all_coordinates())
LEASE_S = 10.0


@pytest.fixture(autouse=True)
def no_stock_beside_plans() -> None:
    """Blocks at stock come as they really do."""


class RandomRun(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster(
            make_spec(microbatches=2), Rules(lease_s=LEASE_S, baseline_iterations=1, profile_iterations=1)
        )
        self.waiting: deque[SendOffer] = deque()
        self.problems: deque[Solve] = deque()
        self.joined: set[Coordinates] = set()
        self.sent: dict[tuple[Coordinates, int], object] = {}
        self.unknown: list[OfferAnswered] = []
        self.reported: TelemetryArrived | None = None
        self.incarnations = 0
        self.may_be_at_stock = False

    # The agents of the cluster carry out the machine's commands: offers may wait, in order.

    def take(self, commands: Iterable[Command]) -> None:
        for command in commands:
            if isinstance(command, SendOffer):
                assert command.rank in self.joined, "an offer to a rank that no agent serves"
                version = command.rank, command.offer.version
                clocks = stage_clocks(command.offer.clocks, command.rank.stage)
                assert self.sent.setdefault(version, clocks) == clocks, "a version has other clocks"
                self.waiting.append(command)
            elif isinstance(command, AcceptRank | SendMaxClock):
                self.rank(command.rank).limit(command.max_clock)
            elif isinstance(command, Solve):
                self.problems.append(command)
            elif isinstance(command, EndStream):
                self.break_stream(command.instance_id)

    def break_stream(self, instance_id: str) -> None:
        self.joined -= {place for place in self.joined if self.rank(place).instance_id == instance_id}
        self.waiting = deque(command for command in self.waiting if command.instance_id != instance_id)
        self.unknown = [answer for answer in self.unknown if answer.instance_id != instance_id]

    def rank(self, place: Coordinates) -> FakeRank:
        return self.cluster.ranks[place]

    def deliver_one(self) -> None:
        command = self.waiting.popleft()
        rank = self.rank(command.rank)
        self.take(self.cluster.handle(rank.answer(command.offer)))
        if (in_force := rank.apply()) is not None:
            self.take(self.cluster.handle(in_force))

    def step(self, rank: FakeRank) -> None:
        in_force = rank.begin()
        if rank.place in self.joined:
            if in_force is not None:
                self.take(self.cluster.handle(in_force))
            self.reported = rank.end(0.8)
            self.take_telemetry(self.reported)

    def take_telemetry(self, reported: TelemetryArrived) -> None:
        """Send telemetry; it is refused and changes nothing if the machine has lost the rank."""
        before = self.cluster.job(is_full=True)
        try:
            self.take(self.cluster.handle(reported))
        except (RankNotServedError, TelemetryOutdatedError):
            assert self.cluster.job(is_full=True) == before

    def join_rank(self, place: Coordinates) -> None:
        self.joined.add(place)
        self.waiting = deque(command for command in self.waiting if command.rank != place)
        self.rank(place).pending = None
        self.take(self.cluster.handle(self.rank(place).joined()))
        # Offers to the previous trainer are answered only now, on the same stream.
        late = [answer for answer in self.unknown if answer.rank == place]
        self.unknown = [answer for answer in self.unknown if answer.rank != place]
        for answer in late:
            self.take(self.cluster.handle(answer))

    def lose(self, place: Coordinates) -> None:
        self.joined.discard(place)
        self.unknown += [
            replace(self.rank(place).answer(command.offer), refusal=RefusalReason.UNKNOWN_RANK, iteration=-1)
            for command in self.waiting
            if command.rank == place
        ]
        self.waiting = deque(command for command in self.waiting if command.rank != place)
        self.rank(place).start_trainer()
        left = RankLeft(place, self.rank(place).instance_id, RankLeftReason.TRAINER_GONE)
        self.take(self.cluster.handle(left))

    def calm_down(self) -> None:
        """Trainers are in step, all ranks join, offers arrive, problems are solved, iterations pass."""
        self.set_max_clock(None)
        if len({rank.iteration for rank in self.cluster.ranks.values()}) > 1:
            for place in PLACES:
                self.lose(place)
        self.join_all()
        calm_count = 0
        for _ in range(100):
            while self.waiting:
                self.deliver_one()
            while self.problems:
                self.finish_solving()
            for rank in self.cluster.ranks.values():
                self.step(rank)
            if self.cluster.machine.record.state is JobState.BASELINE:  # it waits for the end of stragglers
                for pipeline in self.cluster.machine.run.stragglers.pipelines:
                    self.take(self.cluster.handle(StragglerCleared(pipeline)))
            machine = self.cluster.machine
            is_calm = machine.record.state in (JobState.PLANNED, JobState.STOCK) and all(
                rank.in_force.version == machine.run.offers.of_rank(place).version
                for place, rank in self.cluster.ranks.items()
            )
            calm_count += is_calm
            if calm_count >= 10 and is_calm and not machine.run.offers.is_beside_plans:
                break

    # The random events.

    @initialize(is_planned=st.booleans())
    def begin(self, is_planned: bool) -> None:
        if is_planned:
            self.calm_down()

    @rule(place=st.sampled_from(PLACES))
    def join(self, place: Coordinates) -> None:
        if place not in self.joined:
            self.join_rank(place)

    @rule()
    def join_all(self) -> None:
        for place in PLACES:
            self.join(place)

    @precondition(lambda self: self.joined)
    @rule(data=st.data())
    def lose_trainer(self, data: st.DataObject) -> None:
        self.lose(data.draw(st.sampled_from(sorted(self.joined))))

    def instance_of(self, pipeline: int) -> str:
        return self.rank(Coordinates(pipeline, 0, 0)).instance_id

    @rule(pipeline=st.integers(0, 1))
    def disconnect(self, pipeline: int) -> None:
        instance_id = self.instance_of(pipeline)
        self.break_stream(instance_id)
        self.take(self.cluster.handle(AgentDisconnected(instance_id)))

    @rule(pipeline=st.integers(0, 1))
    def end_agent(self, pipeline: int) -> None:
        """End an agent; the next one may be able to set clocks that this one could not."""
        instance_id = self.instance_of(pipeline)
        self.break_stream(instance_id)
        self.incarnations += 1
        for rank in self.cluster.ranks.values():
            if rank.place.pipeline == pipeline:
                rank.start_trainer()
                rank.instance_id = f"agent-{pipeline}.{self.incarnations}"
                rank.is_permitted, rank.missing_mhz = True, frozenset()
        self.take(self.cluster.handle(AgentLeft(instance_id)))

    @rule(place=st.sampled_from(PLACES))
    def run_one_iteration(self, place: Coordinates) -> None:
        self.step(self.rank(place))

    @rule(count=st.integers(1, 4))
    def run_iterations(self, count: int) -> None:
        for _ in range(count):
            for rank in self.cluster.ranks.values():
                self.step(rank)

    @rule(count=st.integers(1, 3))
    def run_and_deliver(self, count: int) -> None:
        for _ in range(count):
            while self.waiting:
                self.deliver_one()
            for rank in self.cluster.ranks.values():
                self.step(rank)

    @precondition(lambda self: self.waiting)
    @rule()
    def deliver(self) -> None:
        self.deliver_one()

    @precondition(lambda self: self.problems)
    @rule()
    def finish_solving(self) -> None:
        frontier = solve(self.problems.popleft().problem, point_count=4)
        self.take(self.cluster.handle(Solved(frontier)))

    @precondition(lambda self: len(self.waiting) > 1)
    @rule()
    def deliver_out_of_order(self) -> None:
        """Offers to different ranks have streams of their own, so the last may arrive first."""
        last = self.waiting[-1]
        if all(other.rank != last.rank for other in list(self.waiting)[:-1]):
            self.waiting.rotate(1)
            self.deliver_one()

    @rule(place=st.sampled_from(PLACES), luck=st.integers(0, 3))
    def lose_permission(self, place: Coordinates, luck: int) -> None:
        """The agent falls back to stock, and refuses all clocks from now on."""
        if not luck:
            fallen = self.rank(place).lose_permission()
            if place in self.joined:
                self.take(self.cluster.handle(fallen))

    @rule(place=st.sampled_from(PLACES), clock_mhz=st.sampled_from(CLOCKS_MHZ), luck=st.integers(0, 1))
    def lose_clock(self, place: Coordinates, clock_mhz: int, luck: int) -> None:
        """The clocks in force stay; from now on offers with this clock are refused."""
        if not luck:
            self.rank(place).missing_mhz |= {clock_mhz}

    @precondition(lambda self: self.reported is not None)
    @rule()
    def repeat_telemetry(self) -> None:
        """Repeated telemetry changes nothing."""
        assert self.reported is not None
        if self.reported.rank in self.joined:
            self.take_telemetry(self.reported)

    @precondition(lambda self: self.joined)
    @rule(data=st.data())
    def repeat_an_answer(self, data: st.DataObject) -> None:
        """An answer to an old offer, and one to a plan of another epoch, change nothing."""
        rank = self.rank(data.draw(st.sampled_from(sorted(self.joined))))
        epoch = data.draw(st.sampled_from([EPOCH, "of a coordinator that forgot"]))
        old = OfferAnswered(
            rank.place, rank.instance_id, epoch, 0, RefusalReason.NOT_PERMITTED, "", rank.iteration
        )
        self.take(self.cluster.handle(old))

    @rule(pipeline=st.integers(0, 1), factor=st.sampled_from([1.0, 1.1, 1.3, 5.0]))
    def report_straggler(self, pipeline: int, factor: float) -> None:
        self.take(self.cluster.handle(StragglerReported(Straggler(pipeline, slowdown_factor=factor))))

    @rule(pipeline=st.integers(0, 1))
    def clear_straggler(self, pipeline: int) -> None:
        self.take(self.cluster.handle(StragglerCleared(pipeline)))

    @rule(percent=st.sampled_from([0.0, 5.0, 20.0]))
    def set_policy(self, percent: float) -> None:
        self.take(self.cluster.handle(PolicySet(OperatingPolicy(percent))))

    @rule(target_time_s=st.sampled_from([None, 0.5, 0.9, 100.0]), is_urgent=st.booleans())
    def set_budget_target(self, target_time_s: float | None, is_urgent: bool) -> None:
        self.take(self.cluster.handle(BudgetTargetSet(target_time_s, is_urgent)))

    @rule(max_clock_mhz=st.sampled_from([None, None, 1400, 1150, 500]))
    def set_max_clock(self, max_clock_mhz: int | None) -> None:
        self.take(self.cluster.handle(MaxClockSet(max_clock_mhz)))
        for place in self.joined:
            assert self.rank(place).max_clock == self.cluster.machine.record.max_clock

    @rule()
    def resume(self) -> None:
        if self.cluster.machine.record.state is JobState.STOCK:
            self.may_be_at_stock = False
        self.take(self.cluster.handle(ResumeRequested()))

    @rule(seconds=st.sampled_from([0.1, 4.0, LEASE_S]))
    def let_time_pass(self, seconds: float) -> None:
        self.cluster.now_s += seconds
        self.take(self.cluster.handle(Tick()))

    @rule()
    def heartbeats(self) -> None:
        for instance_id in {self.rank(place).instance_id for place in self.joined}:
            self.take(self.cluster.handle(AgentHeard(instance_id)))

    @rule()
    def restart_coordinator(self) -> None:
        for pipeline in range(2):
            self.break_stream(self.instance_of(pipeline))
        self.problems.clear()
        self.cluster.restart_with(self.take)

    def cannot_be_clocked(self, stage: int) -> bool:
        """Whether one of its ranks has no permission, or too few common clocks are left."""
        ranks = [rank for rank in self.cluster.ranks.values() if rank.place.stage == stage]
        missing_mhz = frozenset().union(*(rank.missing_mhz for rank in ranks))
        return len(missing_mhz) > len(CLOCKS_MHZ) - 2 or not all(rank.is_permitted for rank in ranks)

    @invariant()
    def never_at_stock_for_no_reason(self) -> None:
        state = self.cluster.machine.record.state
        assert state is not JobState.FINISHED
        if state is JobState.STOCK and not self.may_be_at_stock:
            reported = [event.message for event in self.cluster.events()]
            assert all(self.cannot_be_clocked(stage) for stage in range(2)), reported[-5:]
            self.may_be_at_stock = True

    def teardown(self) -> None:
        self.calm_down()
        machine = self.cluster.machine
        reported = [event.message for event in self.cluster.events()]
        self.never_at_stock_for_no_reason()
        assert machine.record.state is (JobState.STOCK if self.may_be_at_stock else JobState.PLANNED), (
            reported[-5:]
        )
        self.cluster.expect_in_force()
        for place, rank in self.cluster.ranks.items():
            clocks_mhz = stage_clocks(rank.in_force.clocks, place.stage)
            others = [other for other in self.cluster.ranks.values() if other.place.stage == place.stage]
            if self.may_be_at_stock or not all(other.is_permitted for other in others):
                assert clocks_mhz == STOCK_MHZ
            else:
                assert isinstance(clocks_mhz, tuple) or self.cannot_be_clocked(place.stage)


pytestmark = pytest.mark.slow("a run has fifty steps, each of some iterations of a cluster")

TestRandomRun = RandomRun.TestCase
TestRandomRun.settings = settings(
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # Shrinking a run takes minutes.
    suppress_health_check=[HealthCheck.filter_too_much],
)
