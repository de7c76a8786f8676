"""Scenarios of the recorded runs: each function is one run, with an emulated GPU for each rank."""

from typing import Any

from perseus.agent.link.computation import Computation, Kind, Rank
from perseus.agent.link.packets import ComputationMark, Edge, Finish, IterationMark, WaitMark, encode
from tests.agent.recorded.runs import CLOCKS_MHZ, RecordedRun, Step, place_of

FIRST, SECOND = Rank("job", 0, 1, 0), Rank("job", 1, 1, 0)
ORDER = (
    Computation(Kind.FORWARD, 0),
    Computation(Kind.FORWARD, 1),
    Computation(Kind.BACKWARD, 0),
    Computation(Kind.BACKWARD, 1),
    Computation(Kind.FIXED, 0),
)
LEASE_S = 3.0
_TICK_S = 0.1
_SET_S = 0.008
_COUNTER_TICKS = 4


class _Gpu:
    def __init__(self) -> None:
        self.clock_mhz: int | None = None
        self.set_at: tuple[int | None, float] | None = None
        self.energy_j = 1000.0
        self.counted_s = 0.0
        self.refuses = False


class Node:
    """Executes steps, keeps them with their output, and emulates the GPUs: sets, counters and power."""

    def __init__(self) -> None:
        self.steps: list[tuple[Step, list[Any]]] = []
        self.recorded_run = RecordedRun()
        self.now_s = 100.0
        self._gpus: dict[Rank, _Gpu] = {}
        self._ticked_s = 100.0
        self._tick_count = 0
        self._iterations: dict[Rank, int] = {}

    def do(self, rank: Rank | None = None, **step: Any) -> list[Any]:
        """Execute a step, of a rank if one is named."""
        if rank is not None:
            step["rank"] = place_of(rank)
        step["at_s"] = self.now_s
        went = self.recorded_run.take(step)
        self.steps.append((step, went))
        for each in went:
            if "set_mhz" in each:
                self._gpus[Rank(*each["rank"])].set_at = (each["set_mhz"], self.now_s)
            elif "schedule_mhz" in each:
                self._gpus[Rank(*each["rank"])].set_at = (each["schedule_mhz"], each["at_s"])
        return went

    def pass_time(self, duration_s: float) -> None:
        """Let time pass: GPUs set clocks and count energy, and ticks occur."""
        end_s = self.now_s + duration_s
        while True:
            due = [
                (gpu.set_at[1] + _SET_S, rank) for rank, gpu in self._gpus.items() if gpu.set_at is not None
            ]
            next_s = min([self._ticked_s + _TICK_S, *(at_s for at_s, _ in due)])
            if next_s > end_s:
                break
            self._until(next_s)
            set_now = [rank for at_s, rank in due if at_s == next_s]
            for rank in set_now:
                gpu = self._gpus[rank]
                assert gpu.set_at is not None
                (clock_mhz, due_s), gpu.set_at = gpu.set_at, None
                gpu.clock_mhz = clock_mhz
                self.do(rank, clock_set=[clock_mhz, next_s, due_s, due_s])
            if not set_now:
                self._ticked_s = next_s
                self._tick_count += 1
                self.do(tick=True)
                if self._tick_count % _COUNTER_TICKS == 0:
                    for rank, gpu in self._gpus.items():
                        self.do(rank, counter=[self.now_s - 0.001, round(gpu.energy_j, 3), 0.001])
        self._until(end_s)

    def _until(self, time_s: float) -> None:
        for gpu in self._gpus.values():
            watts = 100.0 + 200.0 * ((gpu.clock_mhz or CLOCKS_MHZ[0]) / CLOCKS_MHZ[0]) ** 2
            gpu.energy_j += watts * (time_s - self.now_s)
        self.now_s = time_s

    # --- Trainers -------------------------------------------------------------------------------------------

    def serve(
        self, rank: Rank = FIRST, gpu: str = "GPU-1", *, observe: bool = False, is_registered: bool = True
    ) -> None:
        self._gpus[rank] = _Gpu()
        self._iterations[rank] = 0
        self.do(serve=place_of(rank), gpu=gpu, observe=observe, is_registered=is_registered)

    def leave(self, rank: Rank = FIRST) -> None:
        """End the trainer's process."""
        self.do(gone=place_of(rank))
        del self._gpus[rank]

    def packet(self, message: Any, rank: Rank = FIRST) -> list[Any]:
        return self.do(rank, packet=encode(message).hex())

    def computation(self, edge: Edge, number: int, ordinal: int, rank: Rank = FIRST) -> None:
        time_ns = int(self.now_s * 1e9)
        self.packet(ComputationMark(edge, number, ordinal, ORDER[ordinal], time_ns), rank)

    def run(
        self,
        count: int = 1,
        rank: Rank = FIRST,
        *,
        duration_s: float = 0.05,
        left_out: int | None = None,
        waits: bool = False,
    ) -> None:
        """Run complete iterations; a computation's time depends on its clock; `left_out` omits one."""
        for _ in range(count):
            number = self._iterations[rank]
            self._iterations[rank] += 1
            self.packet(IterationMark(Edge.BEGIN, number, int(self.now_s * 1e9)), rank)
            for ordinal in range(len(ORDER)):
                self.pass_time(0.02)
                if ordinal == left_out:
                    continue
                self.computation(Edge.BEGIN, number, ordinal, rank)
                slowness = CLOCKS_MHZ[0] / (self._gpus[rank].clock_mhz or CLOCKS_MHZ[0])
                self.pass_time(duration_s * slowness / 2)
                if waits and ordinal == 1:
                    self.packet(WaitMark(Edge.BEGIN, number, int(self.now_s * 1e9)), rank)
                    self.pass_time(0.03)
                    self.packet(WaitMark(Edge.END, number, int(self.now_s * 1e9)), rank)
                self.pass_time(duration_s * slowness / 2)
                self.computation(Edge.END, number, ordinal, rank)
            self.packet(IterationMark(Edge.END, number, int(self.now_s * 1e9)), rank)
            self.pass_time(0.01)

    # --- The coordinator ------------------------------------------------------------------------------------

    def hears(self, **message: Any) -> list[Any]:
        return self.do(hears=message)

    def welcome(self, epoch: str = "e", acknowledged: int = 0) -> None:
        self.hears(welcome={"epoch": epoch, "lease_s": LEASE_S, "acknowledged_sequence": acknowledged})

    def lost(self) -> None:
        self.do(lost=True)

    def about(self, kind: str, rank: Rank = FIRST, **message: Any) -> None:
        """Send a message of the coordinator about a rank."""
        place = {"pipeline": rank.pipeline, "stage": rank.stage, "tensor": rank.tensor}
        self.do(hears={kind: {"job_id": rank.job_id, "rank": place, **message}})

    def accept(self, rank: Rank = FIRST, order: tuple[Computation, ...] = ORDER, **more: Any) -> None:
        computations = [
            {"kind": int(each.kind), "microbatch": each.microbatch, "chunk": each.chunk} for each in order
        ]
        self.about("rank_accepted", rank, order={"computations": computations}, **more)

    def offer(
        self,
        version: int,
        rank: Rank = FIRST,
        *,
        start: int | None = None,
        epoch: str = "e",
        urgent: bool = False,
        **clocks: Any,
    ) -> None:
        start = self._iterations[rank] + 1 if start is None else start
        self.about(
            "plan_offer",
            rank,
            epoch=epoch,
            version=version,
            start_iteration=start,
            lease_s=LEASE_S,
            is_urgent=urgent,
            **(clocks or {"stock": {}}),
        )

    def acknowledge(self) -> None:
        sequences = [
            int(each["say"]["telemetry"]["sequence"])
            for _, went in self.steps
            for each in went
            if "telemetry" in each.get("say", {})
        ]
        self.hears(telemetry_ack={"sequence": max(sequences)})

    def joined(self, rank: Rank = FIRST) -> "Node":
        """Start a rank that is served and accepted."""
        self.welcome()
        self.serve(rank)
        self.accept(rank)
        return self

    def finish(self, rank: Rank = FIRST) -> None:
        self.packet(Finish(int(self.now_s * 1e9)), rank)
        self.leave(rank)


def _stage(*clocks_mhz: int) -> dict[str, Any]:
    planned = [
        {"kind": int(each.kind), "microbatch": each.microbatch, "chunk": each.chunk, "clock_mhz": clock_mhz}
        for each, clock_mhz in zip(ORDER, clocks_mhz, strict=True)
    ]
    return {"stage_plan": {"computations": planned}}


PLAN = _stage(1000, 1200, 800, 1400, 0)


def from_hello_to_finish(node: Node) -> None:
    node.serve(is_registered=False)
    node.welcome()
    node.do(FIRST, specified="f1")
    node.accept()
    node.run(3)
    node.acknowledge()
    node.finish()


def profiling_at_several_clocks(node: Node) -> None:
    node.joined().run(2)
    for version, clock_mhz in enumerate((1200, 1000, 800), 1):
        node.offer(version, hold={"clock_mhz": clock_mhz})
        node.run(5, waits=True)
        node.acknowledge()
    node.offer(4)
    node.run(2)
    node.finish()


def plans_one_after_another(node: Node) -> None:
    node.joined().run(1)
    node.offer(1, **PLAN)
    node.run(8)
    node.offer(2, start=20, **PLAN)
    node.offer(3, **_stage(800, 800, 800, 800, 0))
    node.offer(3, **_stage(800, 800, 800, 800, 0))
    node.run(6)
    node.acknowledge()
    node.finish()


def offers_that_are_refused(node: Node) -> None:
    node.welcome()
    node.serve()
    node.offer(1, **PLAN)
    node.accept()
    node.run(2)
    node.offer(2, hold={"clock_mhz": 999})
    node.offer(3, start=0, **PLAN)
    node.offer(4, stage_plan={"computations": [{"kind": 1, "clock_mhz": 1000}]})
    node.offer(5, hold={"clock_mhz": 800})
    node.run(2)
    node.about("plan_offer", SECOND, epoch="e", version=6, start_iteration=9, lease_s=LEASE_S, stock={})
    node.hears(plan_offer={"job_id": "job", "version": 7})
    node.hears(rank_accepted={"job_id": "job", "rank": {}, "order": {}})
    node.finish()


def a_rank_that_the_coordinator_refuses(node: Node) -> None:
    node.welcome()
    node.serve()
    for _ in range(4):
        node.about("rank_refused", reason="JOB_QUARANTINED", message="quarantined")
        node.run(3)
    node.accept()
    node.run(2)
    node.about("rank_refused", reason="LEASE_EXPIRED", message="too long", max_clock={"clock_mhz": 1000})
    node.run(2)
    node.finish()


def a_clock_that_may_not_be_set(node: Node) -> None:
    node.joined()
    node.offer(1, **PLAN)
    node.run(3)
    node.do(FIRST, event="SetNotPermitted", **{"with": ["no permission"]})
    node.offer(2, **PLAN)
    node.offer(3)
    node.run(3)
    node.finish()


def an_agent_that_only_observes(node: Node) -> None:
    node.welcome()
    node.serve(observe=True)
    node.accept()
    node.offer(1, **PLAN)
    node.offer(2)
    node.run(4)
    node.about("rank_max_clock", max_clock={"clock_mhz": 900})
    node.run(2)
    node.finish()


def a_gpu_that_fails_under_a_plan(node: Node) -> None:
    node.joined()
    node.offer(1, **PLAN)
    node.run(3)
    node.do(FIRST, event="GpuFailed", **{"with": ["fell off the bus"]})
    node.offer(2, **PLAN)
    node.leave()
    node.serve()
    node.accept()
    node.run(2)
    node.finish()


def a_connection_that_is_lost_and_back(node: Node) -> None:
    node.joined()
    node.offer(1, **PLAN)
    node.run(3)
    node.lost()
    node.run(3)
    node.welcome(acknowledged=1)
    node.accept()
    node.run(3)
    node.acknowledge()
    node.finish()


def a_lease_that_runs_out(node: Node) -> None:
    node.joined()
    node.offer(1, **PLAN)
    node.run(3)
    node.lost()
    node.run(12)
    node.welcome()
    node.accept()
    node.offer(1, **PLAN)
    node.run(3)
    node.finish()


def a_coordinator_that_lost_its_state(node: Node) -> None:
    node.joined()
    node.offer(1, **PLAN)
    node.run(3)
    node.lost()
    node.welcome("other")
    node.about("rank_refused", reason="JOB_NOT_FOUND", message="unknown")
    node.run(2)
    node.accept()
    node.offer(1, epoch="other", hold={"clock_mhz": 1200})
    node.run(4)
    node.finish()


def an_order_that_changes(node: Node) -> None:
    node.joined()
    node.offer(1, **PLAN)
    node.run(3)
    node.accept(order=(*ORDER[:2], *ORDER[3:1:-1], ORDER[4]))
    node.run(2)
    node.do(FIRST, specified="another")
    node.accept()
    node.offer(2, **PLAN)
    node.run(4)
    node.finish()


def maximum_clocks_that_come_and_go(node: Node) -> None:
    node.joined().run(2)
    node.about("rank_max_clock", max_clock={"clock_mhz": 1100})
    node.run(2)
    node.offer(1, hold={"clock_mhz": 1200})
    node.run(3)
    node.offer(2, **PLAN)
    node.run(3)
    node.about("rank_max_clock", max_clock={"clock_mhz": 900, "outlasts_lease": True})
    node.lost()
    node.run(10)
    node.welcome()
    node.accept(max_clock={"clock_mhz": 900})
    node.run(1)
    node.about("rank_max_clock")
    node.run(2)
    node.finish()


def an_urgent_offer_within_an_iteration(node: Node) -> None:
    node.joined()
    node.offer(1, **PLAN)
    node.run(3)
    number = node._iterations[FIRST]
    node.packet(IterationMark(Edge.BEGIN, number, int(node.now_s * 1e9)))
    node.computation(Edge.BEGIN, number, 0)
    node.pass_time(0.02)
    node.offer(2, urgent=True, **_stage(800, 800, 800, 800, 0))
    node.pass_time(0.05)
    node.computation(Edge.END, number, 0)
    for ordinal in range(1, len(ORDER)):
        node.computation(Edge.BEGIN, number, ordinal)
        node.pass_time(0.05)
        node.computation(Edge.END, number, ordinal)
    node.packet(IterationMark(Edge.END, number, int(node.now_s * 1e9)))
    node._iterations[FIRST] += 1
    node.run(3)
    node.finish()


def irregular_iterations_at_stock(node: Node) -> None:
    node.joined()
    node.offer(1, **PLAN)
    node.run(3)
    node.run(3, left_out=2)
    node.run(4)
    node.pass_time(2.0)
    node.run(2)
    node.finish()


def a_trainer_that_hangs_and_goes(node: Node) -> None:
    node.joined()
    node.offer(1, **PLAN)
    node.run(4)
    number = node._iterations[FIRST]
    node.packet(IterationMark(Edge.BEGIN, number, int(node.now_s * 1e9)))
    node.computation(Edge.BEGIN, number, 0)
    for _ in range(6):
        node.pass_time(1.0)
        node.hears(heartbeat={})
    node.lost()
    node.leave()
    node.welcome()
    node.serve()
    node.accept()
    node.run(1)
    node.finish()


def two_ranks_of_a_node(node: Node) -> None:
    node.welcome()
    node.serve(FIRST, "GPU-1")
    node.serve(SECOND, "GPU-2")
    node.accept(FIRST)
    node.accept(SECOND)
    node.offer(1, FIRST, **PLAN)
    node.offer(1, SECOND, hold={"clock_mhz": 800})
    for _ in range(4):
        node.run(1, FIRST)
        node.run(1, SECOND)
    node.finish(FIRST)
    node.run(1, SECOND)
    node.do(SECOND, event="AgentStops")


def another_trainer_of_a_rank_on_the_same_gpu(node: Node) -> None:
    node.joined()
    node.offer(1, **PLAN)
    node.run(3)
    node.leave()
    node.serve(SECOND, "GPU-1")
    node.accept(SECOND)
    node.run(2, SECOND)
    node.leave(SECOND)
    node.serve(FIRST, "GPU-1")
    node.accept(FIRST)
    node.run(2)
    node.finish()


def an_agent_that_is_started_again(node: Node) -> None:
    node.joined()
    node.offer(1, **PLAN)
    node.run(3)
    node.do(FIRST, event="AgentStops")
    node.do(agent=True)
    node.welcome()
    node.serve()
    node.accept()
    node.offer(1, **PLAN)
    node.run(3)
    node.finish()


def power_limits_and_refused_telemetry(node: Node) -> None:
    node.joined().run(2)
    node.do(FIRST, power_limit_w=250.0)
    node.run(2)
    node.hears(telemetry_refused={"sequence": "2", "reason": "INVALID_FIELD", "field": "iterations"})
    node.hears(telemetry_ack={"sequence": "1000"})
    node.hears(message_refused={"reason": "INVALID_FIELD", "field": "x", "expected": "y", "found": "z"})
    node.hears(drain={"reason": "upgrade"})
    node.run(3)
    node.acknowledge()
    node.finish()
