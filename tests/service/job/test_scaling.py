"""What an input costs in jobs of other shapes: what it changes, not what the job has.

The cost is the number of bytecode instructions that the machine executes, which any computer counts alike. A
pass within C, such as a set's union, counts as nothing: what is left of these takes some 10 ns a rank.
Small and large jobs, with all ranks in one pipeline, in a few, or in a pipeline each, go through the same
inputs.
"""

import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from types import FrameType
from typing import Any, get_args

import pytest

from perseus.service.domain.commands import Command, Refine, SendOffer, Store
from perseus.service.domain.inputs import (
    Abandoned,
    AgentDisconnected,
    AgentHeard,
    AgentLeft,
    BaselineRequested,
    BudgetTargetSet,
    EpochRenewed,
    FinishRequested,
    GpuErrorReported,
    Input,
    LagNotFound,
    MaxClockSet,
    OfferAnswered,
    PlanInForce,
    PolicySet,
    ProfileFound,
    RankLeft,
    RefineFailed,
    RegisteredAgain,
    ResumeRequested,
    SignalTargetSet,
    SolveFailed,
    SolveRetried,
    StragglerCleared,
    StragglerReported,
    Tick,
)
from perseus.service.domain.model import GpuErrorReason, JobState, RankLeftReason, RefusalReason, Straggler
from perseus.service.domain.signals import ExtraTime, SignalKind, SignalRule, SignalTargetState, WorkWindow
from perseus.service.domain.specification import OperatingPolicy, Registration
from perseus.service.domain.telemetry import GpuLimits
from perseus.service.job.rules import Rules
from perseus.v1 import event_pb2
from tests.service.job.clusters import PatientCluster
from tests.service.service_fakes import EPOCH, START_S, FakeRank, make_spec, refined, solved

Shape = tuple[int, int, int]

LONG, WIDE = ((1, 4, 8), (1, 8, 16)), ((16, 2, 1), (64, 2, 1))
_LARGE = pytest.mark.slow("1,024 ranks go through a whole run")
SHAPES = (
    LONG,
    WIDE,
    pytest.param(((1, 4, 8), (1, 64, 16)), marks=_LARGE),
    pytest.param(((2, 4, 4), (16, 8, 8)), marks=_LARGE),
    pytest.param(((16, 8, 8), (1, 64, 16)), marks=_LARGE),
)
"""A job, and the one that it is compared with: pipelines, stages and tensor-parallel ranks."""

RANKS_PER_AGENT = 8
INSTRUCTIONS_PER_RANK = 1.5
"""What an input may need more in the larger job; a loop over all its ranks takes at least four for each."""

SIGNAL = SignalRule(SignalKind.CARBON, ExtraTime(10.0, 86_400.0))

WHOLE = {
    "the last rank joins": "the baseline begins on all pipelines",
    "the last rank ends an iteration": "the iteration of the whole job is judged, once for all its reports",
    "another policy": "all pipelines get a new plan",
    "a plan": "all pipelines get it",
    "no plan": "all pipelines get the nearest one",
    "a straggler": "all other pipelines get a new plan",
    "no straggler": "all other pipelines get a new plan",
    "a budget's target": "all pipelines get a new plan",
    "a signal's target": "all pipelines get a new plan",
    "a maximum clock": "it goes to all ranks",
    "a rank is too late": "its whole pipeline gets a later start",
    "the first refusal of a clock, no frontier": "all pipelines go to stock until there is another frontier",
    "the first refusal of a clock, no lag": "all pipelines go to stock until there is another frontier",
    "no frontier": "the job goes to stock",
    "no lag": "the baseline begins on all pipelines",
    "resumed after no frontier": "the baseline begins on all pipelines",
    "the first other limits": "all pipelines go to stock to be measured anew",
    "a frontier": "all pipelines get a plan",
    "another baseline": "all pipelines go to stock to be measured",
    "the first agent leaves": "all pipelines go to stock until all ranks are back",
    "finished": "all pipelines go to stock",
    "abandoned": "all pipelines go to stock",
}
"""The inputs that concern the whole job, and why."""


@dataclass(frozen=True)
class Cost:
    kind: type[Input]
    instruction_count: int


class Meter(PatientCluster):
    """A cluster without checks, which counts what `measure` does; eight ranks have an agent in any shape."""

    def __init__(self, shape: Shape) -> None:
        spec = make_spec("job", *shape, microbatches=2)
        rules = Rules(lease_s=30.0, baseline_iterations=2, profile_iterations=1, profile_clocks=2)
        super().__init__(spec, rules)
        for index, rank in enumerate(self.ranks.values()):
            rank.instance_id = f"agent-{index // RANKS_PER_AGENT}"
            rank.limits = GpuLimits(300.0)
        self.costs: dict[str, Cost] = {}

    def handle(self, event: Input) -> list[Command]:
        commands = self.machine.handle(event, self.now_s, START_S + self.now_s)
        return [command for command in commands if not isinstance(command, Store)]

    def measure(self, what: str, event: Input) -> list[Command]:
        """Give the machine an input, count its instructions, and return the commands, for `carry_out`."""
        found: list[Command] = []
        count = instructions_of(lambda: found.extend(self.handle(event)))
        assert what not in self.costs
        self.costs[what] = Cost(type(event), count)
        return found

    def pose(self, what: str, event: Input) -> None:
        """Measure an input, and carry out its commands."""
        self.carry_out(self.measure(what, event))

    def plan(self) -> None:
        self.waiting = None
        self.iterate_until(JobState.PLANNED)
        self.iterate(6)
        self.expect_in_force()

    def budget(self, factor: float) -> BudgetTargetSet:
        """Return the order of a budget to run at a multiple of T_min."""
        frontier = self.machine.run.planner.frontier
        assert frontier is not None
        return BudgetTargetSet(factor * frontier.t_min_s, is_urgent=False)

    def of_agent(self, number: int) -> list[FakeRank]:
        return [rank for rank in self.ranks.values() if rank.instance_id == f"agent-{number}"]


def offers(commands: Iterable[Command]) -> list[SendOffer]:
    return [command for command in commands if isinstance(command, SendOffer)]


def instructions_of(work: Callable[[], object]) -> int:
    """Return how many bytecode instructions are executed."""
    count = 0

    def note(_frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        count += event == "opcode"
        return note

    def trace(frame: FrameType, _event: str, _argument: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return note

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


@cache
def costs_of(shape: Shape) -> dict[str, Cost]:
    """Return the costs of a job's inputs, from its first rank to its end."""
    job = Meter(shape)
    _begin(job)
    _switch(job)
    _slow_down(job)
    _refuse(job)
    _measure_anew(job)
    _lose(job)
    other = Meter(shape)
    other.pose("abandoned", Abandoned("another job has its name"))
    return {**job.costs, **other.costs}


def _begin(job: Meter) -> None:
    *early, late, last = job.ranks.values()
    for rank in early:
        job.send(rank.joined())
    job.pose("a rank joins", late.joined())
    job.pose("the last rank joins", last.joined())
    job.plan()
    first, second, *others = job.ranks.values()
    for rank in job.ranks.values():
        rank.begin()
    job.send(first.end(0.8))
    job.pose("a rank ends an iteration", second.end(0.8))
    for rank in others[:-1]:
        job.send(rank.end(0.8))
    job.pose("the last rank ends an iteration", others[-1].end(0.8))
    job.pose("an agent is heard", AgentHeard(first.instance_id))
    job.send(Tick())  # it looks up when agents were heard last, once per lease
    job.pose("nothing is due", Tick())
    job.pose("a GPU fails", GpuErrorReported(first.place, "GPU-0", GpuErrorReason.LOST, "gone"))
    job.pose("registered again", RegisteredAgain(Registration("again", "other")))
    job.pose("known profiles", ProfileFound(()))
    job.pose("solving restarts", SolveRetried("killed", 1, 1.0))
    job.pose("nothing to resume", ResumeRequested())


def _switch(job: Meter) -> None:
    """Let the ranks accept other plans one by one, and take them up one by one."""
    job.waiting = []
    slower = job.budget(1.1)
    commands = job.measure("a budget's target", slower)
    job.waiting += [command for command in commands if isinstance(command, Refine)]
    offered = offers(commands)
    answers = [job.ranks[command.rank].answer(command.offer) for command in offered]
    job.send(answers[0])
    job.pose("a rank accepts", answers[1])
    for answer in answers[2:]:
        job.send(answer)
    taken: list[PlanInForce] = []
    while len(taken) < len(answers):
        taken = [event for rank in job.ranks.values() if (event := rank.begin()) is not None]
        if taken:
            job.send(taken[0])
            job.pose("a rank takes up a plan", taken[1])
        for event in taken[2:]:
            job.send(event)
        for rank in job.ranks.values():
            job.send(rank.end(0.8))
    job.pose("the same target", slower)
    refinement = job.refinements()[-1]
    job.pose("no plan", RefineFailed(refinement, "for the test"))
    job.send(job.budget(1.05))
    job.pose("a plan", refined(job.refinements()[-1]))
    job.waiting = None
    job.iterate(4)
    job.expect_in_force()


def _slow_down(job: Meter) -> None:
    straggler = Straggler(0, slowdown_factor=1.2)
    job.pose("a straggler", StragglerReported(straggler))
    job.pose("the same straggler", StragglerReported(straggler))
    job.iterate(4)
    job.pose("no straggler", StragglerCleared(0))
    job.iterate(4)
    job.send(BudgetTargetSet(None, is_urgent=False))
    job.pose("another policy", PolicySet(OperatingPolicy(signal=SIGNAL)))
    job.pose("the same policy", PolicySet(OperatingPolicy(signal=SIGNAL)))
    job.iterate(4)
    target_s = 1.1 * max(job.planned_times_s())
    window = WorkWindow(START_S, START_S + 1e5, 1e5)
    signal = SignalTargetSet(SIGNAL, window, SignalTargetState.FOLLOWING, target_s, 1.0)
    job.pose("a signal's target", signal)
    job.pose("the same signal", signal)
    job.pose("a maximum clock", MaxClockSet(1000))
    job.pose("the same maximum clock", MaxClockSet(1000))
    job.send(MaxClockSet(None))
    job.send(PolicySet(OperatingPolicy()))
    job.iterate(4)
    job.expect_in_force()


def _refuse(job: Meter) -> None:
    first, *others = offers(job.handle(job.budget(1.1)))
    job.carry_out(others)
    job.pose("a rank is too late", _refusal(first, first.offer.start_iteration))
    job.pose("a rank was too late before", _refusal(first, first.offer.start_iteration))
    job.plan()
    for factor, (what, failure) in zip((1.05, 1.1), _FAILURES.items(), strict=True):
        job.waiting = []
        first, second = offers(job.handle(job.budget(factor)))[:2]
        before = first.offer.start_iteration - 2
        job.pose(f"the first refusal of a clock, {what}", _refusal(first, before, 900))
        job.pose(f"another refusal of a clock, {what}", _refusal(second, before, 900))
        job.expect(JobState.SOLVING)
        job.pose(what, failure)
        if isinstance(failure, LagNotFound):
            job.expect(JobState.BASELINE)  # measured anew, the first time
        else:
            job.expect(JobState.STOCK)
            job.carry_out(job.measure(f"resumed after {what}", ResumeRequested()))
        job.plan()


_FAILURES: dict[str, Input] = {
    "no frontier": SolveFailed("for the test"),
    "no lag": LagNotFound(event_pb2.MeasurementsUnexplained()),
}


def _refusal(command: SendOffer, iteration: int, clock_mhz: int | None = None) -> OfferAnswered:
    reason = RefusalReason.PAST_START if clock_mhz is None else RefusalReason.CLOCK_NOT_SUPPORTED
    clocks_mhz = () if clock_mhz is None else (clock_mhz,)
    version = command.offer.version
    return OfferAnswered(command.rank, command.instance_id, EPOCH, version, reason, "", iteration, clocks_mhz)


def _measure_anew(job: Meter) -> None:
    first, *others = job.ranks.values()
    second, last = others[0], others[-1]
    for rank in job.ranks.values():
        rank.begin()
    for what, rank in {
        "the first other limits": first,
        "other limits": second,
        "limits elsewhere": last,
    }.items():
        rank.limits = GpuLimits(250.0)
        job.pose(what, rank.end(0.8))
    job.waiting = []
    job.iterate_until(JobState.SOLVING)
    job.pose("a frontier", solved(job.problems()[-1]))
    job.plan()
    job.pose("another baseline", BaselineRequested("request"))
    job.plan()


def _lose(job: Meter) -> None:
    job.pose("an agent is disconnected", AgentDisconnected("agent-0"))
    *early, last = job.of_agent(0)
    for rank in early:
        job.send(rank.joined())
    job.pose("a rank is back", last.joined())
    job.pose("the first agent leaves", AgentLeft("agent-1"))
    job.pose("another agent leaves", AgentLeft("agent-2"))
    gone, done, *_ = job.of_agent(3)
    job.pose("another rank is lost", RankLeft(gone.place, gone.instance_id, RankLeftReason.TRAINER_GONE))
    job.pose("a rank is done", RankLeft(done.place, done.instance_id, RankLeftReason.FINISHED))
    job.now_s += 29.0
    for number in range(1, len(job.ranks) // RANKS_PER_AGENT):
        job.send(AgentHeard(f"agent-{number}"))
    job.send(Tick())
    job.now_s += 2.0
    job.pose("an agent's lease has run out", Tick())
    job.pose("lost state", EpochRenewed("another"))
    job.pose("finished", FinishRequested())


def surplus(small: Shape, large: Shape) -> dict[str, int]:
    """Return the instructions by which inputs need more in the large job, beyond what they may."""
    before, after = costs_of(small), costs_of(large)
    more = {what: cost.instruction_count - before[what].instruction_count for what, cost in after.items()}
    allowed = INSTRUCTIONS_PER_RANK * math.prod(large)
    return {what: count for what, count in more.items() if count > allowed}


def test_every_kind_of_input_is_tried() -> None:
    assert {cost.kind for cost in costs_of(LONG[0]).values()} == set(get_args(Input))


@pytest.mark.parametrize("shapes", SHAPES)
def test_only_an_input_that_concerns_the_whole_job_costs_more_in_a_larger_one(
    shapes: tuple[Shape, Shape],
) -> None:
    assert {what: more for what, more in surplus(*shapes).items() if what not in WHOLE} == {}


def test_an_exception_that_is_none_any_more_has_to_go() -> None:
    assert surplus(*LONG).keys() | surplus(*WIDE).keys() == WHOLE.keys()
