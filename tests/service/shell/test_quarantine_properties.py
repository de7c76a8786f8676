"""Random faults in one job: agents and watchers of another job see the same as without it."""

import asyncio
import pickle
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from perseus.service.domain.commands import SlowPlan
from perseus.service.domain.errors import CoordinatorError
from perseus.service.domain.inputs import OfferAnswered, PlanInForce, TelemetryArrived
from perseus.service.domain.specification import JobSpec, Registration
from perseus.service.job import views
from perseus.service.job.machine import JobMachine
from perseus.service.job.rules import Rules
from perseus.service.job.run import Run
from perseus.service.shell import writer
from perseus.service.shell.coordinator import Coordinator
from perseus.service.shell.jobs import LATEST
from perseus.service.shell.ports import AgentPort
from perseus.service.solving.work import solve_explaining
from perseus.service.solving.worker_pool import JOBS, WorkerPool
from perseus.solver import Frontier, Pipeline
from perseus.v1 import job_pb2
from tests.service.grpc_fakes import coordinator_without_api
from tests.service.service_fakes import FakeRank, make_spec


class BrokenError(Exception):
    """A bug in the coordinator that affects one job."""


RULES = Rules(lease_s=30.0, baseline_iterations=2, profile_iterations=1)
QUIET, FAULTY = "quiet", "faulty"
ITERATIONS = 24


class InlineSolver(WorkerPool):
    """Remembers its answers: the jobs are the same in every example."""

    _known: ClassVar[dict[bytes, Frontier]] = {}

    async def solve(
        self,
        problem: Pipeline,
        point_count: int,
        *,
        slow: SlowPlan | None = None,
        set_latency_s: float = 0.0,
        **_: object,
    ) -> Frontier:
        key = pickle.dumps((problem, slow, set_latency_s))
        if key not in self._known:
            self._known[key] = solve_explaining(problem, 5, slow, set_latency_s)
        return self._known[key]


class Dice:
    """The faults of the faulty job: one throw for each point where one may occur."""

    def __init__(self, seed: int, share: float) -> None:
        self.random = random.Random(seed)
        self.share = share
        self.faults = 0

    def throw(self, job_id: str) -> None:
        if job_id == FAULTY and self.random.random() < self.share:
            self.faults += 1
            raise BrokenError(f"fault {self.faults}")


class Port:
    """An agent's end, as the coordinator sees it: follows offers, and records all messages."""

    epoch = ""

    def __init__(self, dice: Dice) -> None:
        self.reported: list[object] = []
        self.offers: list[tuple[Any, ...]] = []
        self._dice = dice

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Return what records a message, by the name of the port's method; it may fail about a job."""
        assert hasattr(AgentPort, name), name

        def record(*arguments: Any) -> None:
            if name in ("accept_rank", "limit_rank", "refuse_rank", "offer"):
                self._dice.throw(arguments[0])
            if name == "offer":
                self.offers.append(arguments[1:])
            figures = arguments[:1] if name == "heartbeat" else arguments
            self.reported.append((name, *(type(a) if isinstance(a, Exception) else a for a in figures)))

        return record


class World:
    """One job, its ranks and their agent."""

    def __init__(self, coordinator: Coordinator, spec: JobSpec, dice: Dice) -> None:
        self.coordinator, self.spec, self.port = coordinator, spec, Port(dice)
        self.agents = coordinator.agents
        orders = spec.check().orders
        self.ranks = {
            place: FakeRank(place, spec.job_id, orders[place.stage])
            for place in spec.parallelism.all_coordinates()
        }
        self.sequence = 0
        self.events: list[object] = []

    async def begin(self) -> None:
        await self.coordinator.jobs.register(self.spec, Registration(self.spec.job_id))
        await self.agents.greet(self.spec.job_id, cast(AgentPort, self.port))
        self.join()

    def join(self) -> None:
        for rank in self.ranks.values():
            with suppress(CoordinatorError):
                joined = rank.joined()
                gpu = replace(joined.gpu, uuid=f"{self.spec.job_id}-{rank.place}")
                self.agents.join(self.spec.job_id, replace(joined, gpu=gpu))

    async def iterate(self) -> None:
        offers, self.port.offers = self.port.offers, []
        for place, offer in offers:
            self.dispatch(self.ranks[place].answer(offer))
        batches = []
        for rank in self.ranks.values():
            if (in_force := rank.begin()) is not None:
                self.dispatch(in_force)
            self.sequence += 1
            rank.sequence = self.sequence - 1
            batches.append(rank.end(0.8))
        await asyncio.gather(*map(self.send, batches))

    def dispatch(self, event: OfferAnswered | PlanInForce) -> None:
        with suppress(CoordinatorError):
            self.agents.dispatch(self.spec.job_id, event)

    async def send(self, event: TelemetryArrived) -> None:
        self.agents.take_telemetry(event.instance_id, self.spec.job_id, [event])
        self.agents.acknowledge_telemetry(event.instance_id)

    async def seen(self) -> list[object]:
        """Everything that agents and watchers have seen of the job, apart from wall-clock times."""
        view = await self.coordinator.jobs.job(self.spec.job_id, LATEST, is_full=True)
        found = await self.coordinator.live._store.events(self.spec.job_id, view.run_number, 0, 10_000)
        for event in found:
            event.ClearField("create_time")
        return [self.port.reported, found, view.state, view.rank_counts, view.spec, [*view.stragglers]]


async def live(
    path: Path, dice: Dice, *, with_faulty: bool
) -> tuple[list[object], job_pb2.JobState.ValueType]:
    """Run both jobs for a while, and return the observations of the quiet one."""
    async with coordinator_without_api(path, RULES, InlineSolver(JOBS, 0, 60.0)) as coordinator:
        quiet = World(coordinator, make_spec(QUIET, microbatches=2), dice)
        for rank in quiet.ranks.values():
            rank.instance_id = QUIET
        worlds = [quiet]
        if with_faulty:
            worlds.insert(0, World(coordinator, make_spec(FAULTY, pipelines=1, microbatches=2), dice))
        for world in worlds:
            await world.begin()
        for iteration in range(ITERATIONS):
            for world in worlds:
                await world.iterate()
            for _ in range(3):
                await coordinator.flush()
            if with_faulty and iteration % 6 == 5:
                listed = coordinator.jobs.jobs("", (), is_full=True)
                assert [(job_id, job.job_id) for job_id, job in listed] == [(FAULTY, FAULTY), (QUIET, QUIET)]
                with suppress(CoordinatorError):
                    await coordinator.jobs.resume(FAULTY)
                worlds[0].join()
        state = (await coordinator.jobs.job(QUIET, LATEST, is_full=False)).state
        assert sum(coordinator.live.fault_counts.values()) == (dice.faults if with_faulty else 0)
        return await quiet.seen(), state


@pytest.fixture
def faults_at_random(monkeypatch: pytest.MonkeyPatch) -> list[Dice]:
    """Make machines fail as the dice in the list decide: before an input, after it, and in views."""
    current: list[Dice] = []

    def fail(owner: object, name: str, *, after: bool = False) -> None:
        """Let a function fail before it runs, or after it, too."""
        function = getattr(owner, name)

        @wraps(function)
        def failing(of_job: Any, *arguments: Any, **options: Any) -> Any:
            current[0].throw(of_job.spec.job_id)
            answer = function(of_job, *arguments, **options)
            if after:
                current[0].throw(of_job.spec.job_id)
            return answer

        monkeypatch.setattr(owner, name, failing)

    monkeypatch.setattr(writer, "GATHERING_S", 0.0)
    fail(JobMachine, "handle", after=True)
    fail(JobMachine, "_take_telemetry", after=True)
    fail(views, "job")
    fail(Run, "next_deadline_s")
    fail(views, "lease_on_gpu_s")
    return current


@pytest.fixture
def alone() -> list[object]:
    """The observations of the quiet job without another one; filled by the first example."""
    return []


@pytest.mark.slow("every example lets two jobs live through profiling to their plans")
@pytest.mark.timeout(600)
@settings(phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), share=st.sampled_from([0.002, 0.02, 0.2]))
def test_faults_of_one_job_do_not_change_another(
    tmp_path_factory: pytest.TempPathFactory,
    faults_at_random: list[Dice],
    alone: list[object],
    seed: int,
    share: float,
) -> None:
    faults_at_random[:] = [Dice(seed, share)]
    path = tmp_path_factory.mktemp("store")
    with capture_logs():  # printing tracebacks would take longer than everything else here
        if not alone:  # it is the same every time
            alone[:] = asyncio.run(live(path / "alone.db", faults_at_random[0], with_faulty=False))
        beside = asyncio.run(live(path / "beside.db", faults_at_random[0], with_faulty=True))
    assert alone[1] == job_pb2.JOB_STATE_PLANNED
    assert list(beside) == alone
