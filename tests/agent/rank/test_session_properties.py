"""The session under random marks, offers, losses and ends: its invariants always hold."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from perseus.agent.clocks.sets import ClockSet, ResetClock, ScheduleClock, SetClock
from perseus.agent.energy.counter import CounterChange
from perseus.agent.link.computation import Computation, Kind
from perseus.agent.link.packets import ComputationMark, Edge, Finish, IterationMark, WaitMark
from perseus.agent.rank.commands import EstimateEnergy, Send
from perseus.agent.rank.events import (
    AgentStops,
    Connected,
    Disconnected,
    Event,
    GpuFailed,
    Heard,
    SetNotPermitted,
    Tick,
    TrainerGone,
    TrainerJoined,
)
from perseus.agent.rank.messages import (
    Hold,
    MaxClock,
    PlanId,
    PlanOffer,
    RankAccepted,
    RankMaxClock,
    RankRefused,
    StageClocks,
    Stock,
    Telemetry,
)
from perseus.agent.rank.sampling import EstimateRequest, estimate
from perseus.agent.rank.session import Session
from perseus.v1 import agent_service_pb2 as wire
from tests.agent.rank.bench import GPU, LEASE_S, RANK

ORDERS = (
    (Computation(Kind.FORWARD, 0), Computation(Kind.FORWARD, 1), Computation(Kind.BACKWARD, 0)),
    (Computation(Kind.FIXED, 0), Computation(Kind.FORWARD, 0)),
)
COMPUTATIONS = st.sampled_from([*ORDERS[0], *ORDERS[1]])
# Random choices are weighted so that most sessions make progress: plans in force, regular iterations.
CLOCKS = st.sampled_from([*GPU.supported_clocks_mhz * 6, 0, 999])
ORDER_INDICES = st.sampled_from([0] * 6 + [1])
MAX_CLOCKS = st.one_of(st.none(), st.builds(MaxClock, st.sampled_from([1400, 1100, 900, 100]), st.booleans()))


class SessionMachine(RuleBasedStateMachine):
    """Drives one session and tracks the outside view from its commands alone."""

    offers = Bundle("offers")

    @initialize(observe=st.booleans())
    def begin(self, observe: bool) -> None:
        self.observe = observe
        self.session = Session(RANK, GPU, observe=observe, is_registered=True)
        self.now_s = 100.0
        self.iteration = 0
        self.position = 0
        self.version = 0
        self.energy_j = 0.0
        self.connected = False
        self.heard_at_s = self.now_s
        self.clock_mhz: int | None = None
        self.scheduled: ScheduleClock | None = None
        self.requests: list[EstimateRequest] = []
        self.in_force = 0
        self.accepted: set[int] = set()
        self.reported: list[int] = []
        self.has_left = False
        self.max_clock: MaxClock | None = None
        # By version: the highest clock of a stage plan, 0 of other offers.
        self.planned_mhz = {0: 0}
        self.allowed_mhz = 0
        self.touched: set[int] = set()
        self.do(TrainerJoined())
        self.connect(0, None)

    def do(self, event: Event) -> None:
        had_ended = self.session.has_ended
        under_way = self.session._tracker.begun_iteration if self.session._tracker.has_iteration else None
        if self.scheduled is not None and self.scheduled.at_s <= self.now_s:
            self.clock_mhz, self.scheduled = self.scheduled.clock_mhz, None
        commands = self.session.handle(event, self.now_s)
        self.session.validate()
        assert not (had_ended and commands), "no command follows the end"
        for command in commands:
            match command:
                case SetClock(clock_mhz):
                    assert not self.observe
                    assert clock_mhz in GPU.supported_clocks_mhz
                    assert clock_mhz != self.clock_mhz or self.scheduled, "a clock is not set twice"
                    self.clock_mhz, self.scheduled = clock_mhz, None
                case ResetClock():
                    assert not self.observe
                    self.clock_mhz, self.scheduled = None, None
                case ScheduleClock(clock_mhz, at_s):
                    assert not self.observe
                    assert clock_mhz is None or clock_mhz in GPU.supported_clocks_mhz
                    assert at_s > self.now_s
                    self.scheduled = command
                case EstimateEnergy(request):
                    self.requests.append(request)
                case Send(Telemetry(_, iterations, computations)):
                    self.reported += [row.iteration for row in iterations]
                    assert all(row.duration_s >= 0 for row in iterations)
                    touched = {row.iteration for row in iterations if row.has_clock_change}
                    assert touched >= self.touched.intersection(row.iteration for row in iterations)
                    assert not touched.intersection(row.iteration for row in computations)
                    assert not any(row.is_regular for row in iterations if row.has_clock_change)
                case Send(wire.RankLeft()):
                    assert not self.has_left
                    self.has_left = True
                case Send(message):
                    assert self.connected, f"{message} without a connection"
                    match message:
                        case wire.PlanInForce(version=version):
                            assert version == 0 or version in self.accepted
                            self.in_force = version
                        case wire.PlanAnswer(accepted=True, version=version):
                            self.accepted.add(version)
                        case wire.RankJoined(in_force_version=version):
                            self.in_force = version
        is_urgent = isinstance(event, PlanOffer) and event.is_urgent
        sent = [command.message for command in commands if isinstance(command, Send)]
        if is_urgent and under_way is not None and any(isinstance(each, wire.PlanInForce) for each in sent):
            self.touched.add(under_way)
        self.check_max_clock(event)

    def check_max_clock(self, event: Event) -> None:
        """No clock is above the maximum clock, except those of a stage plan in force or pending."""
        match event:
            case RankAccepted() | RankRefused() | RankMaxClock():
                self.max_clock = event.max_clock
            case Tick() if self.max_clock is not None and not self.max_clock.outlasts_lease:
                if self.now_s - self.heard_at_s > LEASE_S:
                    self.max_clock = None
        plans = self.session._plans
        stage_mhz = max(
            self.planned_mhz[plan.plan.version] if plan else 0 for plan in (plans.in_force, plans.pending)
        )
        # A clock that was requested in the gap for the next computation stays until it comes or the gap is
        # long.
        is_in_gap = self.session._tracker.keeper._is_in_gap
        self.allowed_mhz = max(stage_mhz, self.allowed_mhz if is_in_gap else 0)
        if self.max_clock is None or self.observe or self.session.has_ended:
            return
        own_mhz = max(
            (mhz for mhz in GPU.supported_clocks_mhz if mhz <= self.max_clock.clock_mhz), default=800
        )
        max_mhz = max(own_mhz, self.allowed_mhz)
        assert self.clock_mhz is not None
        assert self.clock_mhz <= max_mhz
        if self.scheduled is not None:
            assert self.scheduled.clock_mhz is not None
            assert self.scheduled.clock_mhz <= max_mhz

    @rule(duration_s=st.sampled_from([0.0, 0.1, 0.1, 0.4, 0.4, LEASE_S + 0.1]))
    def pass_time(self, duration_s: float) -> None:
        self.now_s += duration_s
        self.do(Tick())

    @precondition(lambda self: not self.connected)
    @rule(index=ORDER_INDICES, max_clock=MAX_CLOCKS)
    def connect(self, index: int, max_clock: MaxClock | None) -> None:
        self.connected = True
        self.heard_at_s = self.now_s
        self.do(Connected(LEASE_S))
        self.do(RankAccepted(RANK, ORDERS[index], max_clock))

    @precondition(lambda self: self.connected)
    @rule(max_clock=MAX_CLOCKS)
    def limit(self, max_clock: MaxClock | None) -> None:
        self.heard()
        self.do(RankMaxClock(RANK, max_clock))

    @precondition(lambda self: self.connected)
    @rule(refuses=st.booleans(), max_clock=MAX_CLOCKS)
    def disconnect(self, refuses: bool, max_clock: MaxClock | None) -> None:
        if refuses:
            self.heard()
            self.do(RankRefused(RANK, "JOB_NOT_FOUND", "", max_clock))
        self.connected = False
        self.do(Disconnected())

    @precondition(lambda self: self.connected)
    @rule()
    def heard(self) -> None:
        self.heard_at_s = self.now_s
        self.do(Heard())

    @rule(target=offers, ahead=st.integers(-1, 2), is_urgent=st.booleans(), data=st.data())
    def offer(self, ahead: int, is_urgent: bool, data: st.DataObject) -> PlanOffer:
        self.version += 1
        order = ORDERS[data.draw(ORDER_INDICES)]
        clocks = data.draw(
            st.one_of(
                st.builds(Stock),
                st.builds(Hold, CLOCKS),
                st.builds(StageClocks, st.just(order), st.tuples(*[CLOCKS] * len(order))),
            )
        )
        start_iteration = max(0, self.iteration + ahead)
        offer = PlanOffer(RANK, PlanId("e", self.version), start_iteration, LEASE_S, clocks, is_urgent)
        self.repeat(offer)
        return offer

    @rule(clock_mhz=st.sampled_from(GPU.supported_clocks_mhz))
    def train_under_a_new_plan(self, clock_mhz: int) -> None:
        self.version += 1
        clocks = StageClocks(ORDERS[0], (clock_mhz, 1000, 800))
        self.repeat(PlanOffer(RANK, PlanId("e", self.version), self.iteration + 1, LEASE_S, clocks))
        self.train_to_order()

    @rule(offer=offers)
    def repeat(self, offer: PlanOffer) -> None:
        clocks = offer.clocks
        self.planned_mhz[offer.plan.version] = (
            max(clocks.clocks_mhz) if isinstance(clocks, StageClocks) else 0
        )
        if self.connected:
            self.heard()
            self.do(offer)

    @rule()
    def train_to_order(self) -> None:
        """The next iteration as registered, the counter moving in it."""
        order = ORDERS[0]
        self.iteration += 1
        self.do(IterationMark(Edge.BEGIN, self.iteration, self._now_ns()))
        for ordinal, computation in enumerate(order):
            self.now_s += 0.03
            self.do(ComputationMark(Edge.BEGIN, self.iteration, ordinal, computation, self._now_ns()))
            for edge in Edge:
                self.now_s += 0.01
                self.do(WaitMark(edge, self.iteration, self._now_ns()))
            self.now_s += 0.03
            self.do(ComputationMark(Edge.END, self.iteration, ordinal, computation, self._now_ns()))
            self.count()
        self.do(IterationMark(Edge.END, self.iteration, self._now_ns()))

    @rule(edge=st.sampled_from(Edge), ahead=st.integers(-1, 1), skew_s=st.floats(-1, 1))
    def iteration_mark(self, edge: Edge, ahead: int, skew_s: float) -> None:
        self.iteration = max(0, self.iteration + ahead)
        self.do(IterationMark(edge, self.iteration, self._now_ns(skew_s)))

    @rule(
        edge=st.sampled_from(Edge),
        ordinal=st.integers(0, 3),
        computation=COMPUTATIONS,
        skew_s=st.floats(-1, 1),
    )
    def computation_mark(self, edge: Edge, ordinal: int, computation: Computation, skew_s: float) -> None:
        self.do(ComputationMark(edge, self.iteration, ordinal, computation, self._now_ns(skew_s)))

    @rule(edge=st.sampled_from(Edge), skew_s=st.floats(-1, 1))
    def wait_mark(self, edge: Edge, skew_s: float) -> None:
        self.do(WaitMark(edge, self.iteration, self._now_ns(skew_s)))

    @rule(power_w=st.sampled_from([0.1, 80.0, 400.0]))
    def count(self, power_w: float = 200.0) -> None:
        self.now_s += 0.001
        self.energy_j += power_w * 0.1
        self.do(CounterChange(self.now_s, self.energy_j, 0.0005))

    @rule(late_s=st.sampled_from([0.0, 0.005]))
    def set_clock(self, late_s: float) -> None:
        begun_at_s = self.now_s - late_s - 0.015
        self.do(ClockSet(self.clock_mhz, self.now_s - late_s, begun_at_s, begun_at_s))

    @precondition(lambda self: self.requests)
    @rule()
    def estimate(self) -> None:
        if (found := estimate(self.requests.pop())) is not None:
            self.do(found)

    @precondition(lambda self: self.iteration > 8)
    @rule(
        end=st.sampled_from(
            [Finish(0), TrainerGone(), GpuFailed("lost"), AgentStops(), SetNotPermitted("root")]
        )
    )
    def end(self, end: Event) -> None:
        if not isinstance(end, SetNotPermitted):
            self.do(end)
            assert self.session.has_ended
            assert self.clock_mhz is None
        elif not self.observe and self.clock_mhz is None:  # it fails at the first set, or never
            self.observe = True
            self.do(end)

    @invariant()
    def a_clock_needs_a_plan_within_its_lease(self) -> None:
        if self.clock_mhz is not None:
            assert self.accepted or self.max_clock
            self.do(Tick())
            if self.max_clock is None or not self.max_clock.outlasts_lease:
                assert self.clock_mhz is None or self.now_s - self.heard_at_s <= LEASE_S

    @invariant()
    def iterations_are_reported_once_and_in_order(self) -> None:
        assert self.reported == sorted(set(self.reported))

    def _now_ns(self, skew_s: float = 0.0) -> int:
        return int((self.now_s + skew_s) * 1e9)


TestSession = SessionMachine.TestCase
TestSession.settings = settings(stateful_step_count=30)
