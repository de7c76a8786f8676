"""A scripted agent on a real stream, made from the stubs; and a coordinator to talk to."""

import asyncio
import pickle
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from unittest.mock import patch

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import ErrorInfo
from grpc_status import rpc_status

from perseus.agent.stream.call import Call
from perseus.demo.security import Security
from perseus.service.domain.inputs import PlanInForce
from perseus.service.domain.members import ALONE, Fleet, Slot
from perseus.service.domain.model import STOCK, Clocks, HoldClocks, Offer, PlannedClocks
from perseus.service.domain.retention import Retention
from perseus.service.domain.specification import Coordinates
from perseus.service.domain.telemetry import KINDS
from perseus.service.job.rules import Rules
from perseus.service.server import running as running_server
from perseus.service.settings import CoordinatorSettings
from perseus.service.shell import coordinator, power, run_tasks, signal_targets, writer
from perseus.service.shell.coordinator import Coordinator
from perseus.service.signals.csv_source import CsvSource
from perseus.service.solving.worker import Answer, Worker, WorkError
from perseus.service.solving.worker_pool import JOBS, REQUESTS, WorkerPool
from perseus.service.storage.sql_store import SqlStore
from perseus.solver import Pipeline, Plan, PlannedComputation, Schedule, SolverError, one_forward_one_backward
from perseus.tls.channels import Channels
from perseus.tls.files import TlsFiles
from perseus.tls.tokens import TokenSource
from perseus.v1 import (
    agent_service_pb2,
    computation_pb2,
    event_pb2,
    frontier_service_pb2,
    info_service_pb2,
    job_pb2,
    job_service_pb2,
    ledger_service_pb2,
    power_service_pb2,
    rank_pb2,
    token_service_pb2,
)
from perseus.v1.agent_service_pb2 import ConnectRequest, ConnectResponse
from perseus.v1.agent_service_pb2_grpc import AgentServiceStub
from perseus.v1.frontier_service_pb2_grpc import FrontierServiceStub
from perseus.v1.job_service_pb2_grpc import JobServiceStub
from tests.service import service_fakes

if TYPE_CHECKING:
    from perseus.v1.agent_service_pb2_grpc import AgentServiceAsyncStub
    from perseus.v1.frontier_service_pb2_grpc import FrontierServiceAsyncStub
    from perseus.v1.job_service_pb2_grpc import JobServiceAsyncStub

ITERATION_TIME_S = 0.8
TIMEOUT_S = 60.0
_ALL_METHODS = [
    method
    for module in (
        agent_service_pb2,
        frontier_service_pb2,
        info_service_pb2,
        job_service_pb2,
        ledger_service_pb2,
        power_service_pb2,
        token_service_pb2,
    )
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
METHODS = {method.name: method for method in _ALL_METHODS}
"""The methods of all services."""
assert len(METHODS) == len(_ALL_METHODS), "no two methods have the same name"
ALL_PLACES = [Coordinates(pipeline, stage, 0) for pipeline in range(2) for stage in range(2)]


def make_settings(directory: Path, **changes: Any) -> CoordinatorSettings:
    return CoordinatorSettings(
        **{
            "listen": "127.0.0.1:0",
            "database": directory / "perseus.db",
            "baseline_iterations": 2,
            "profile_iterations": 2,
            "shutdown_grace_s": 0.5,
            "insecure": True,
            **changes,
        }
    )


def make_secured_settings(directory: Path, security: Security, **changes: Any) -> CoordinatorSettings:
    """Mutual TLS, and everybody is asked who they are."""
    return make_settings(
        directory,
        **{
            "insecure": False,
            "operator_token_file": security.token_file,
            "tls_certificate": security.coordinator_certificate,
            "tls_key": security.coordinator_key,
            "tls_client_ca": security.ca,
            **changes,
        },
    )


def spec_message(
    job_id: str = "job",
    pipelines: int = 2,
    stages: int = 2,
    microbatches: int = 3,
    max_slowdown_percent: float = 0.0,
    stage_work: Sequence[str] = (),
    layers: Sequence[Sequence[int]] = (),
) -> job_pb2.JobSpec:
    return job_pb2.JobSpec(
        job_id=job_id,
        parallelism=job_pb2.Parallelism(pipeline_count=pipelines, stage_count=stages, tensor_count=1),
        schedule=computation_pb2.Schedule(
            named=computation_pb2.NamedSchedule(
                name=computation_pb2.SCHEDULE_NAME_ONE_FORWARD_ONE_BACKWARD, microbatch_count=microbatches
            )
        ),
        policy=job_pb2.OperatingPolicy(max_slowdown_percent=max_slowdown_percent),
        stage_work=[
            job_pb2.StageWork(fingerprint=fingerprint, layer_counts=counts)
            for fingerprint, counts in zip_longest(stage_work, layers)
        ],
    )


def sent(**message: Any) -> ConnectRequest:
    """Return a message of an agent, of parts that are messages or their fields."""
    return ConnectRequest(**message)


def make_request(method: str, **fields: Any) -> Message:
    """Return a request for a method, with these fields."""
    return message_factory.GetMessageClass(METHODS[method].input_type)(**fields)


class Client:
    """Calls of all services on one channel, and the agents that were made for it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.jobs: JobServiceAsyncStub = JobServiceStub(channel)
        self.frontiers: FrontierServiceAsyncStub = FrontierServiceStub(channel)
        self.agents: AgentServiceAsyncStub = AgentServiceStub(channel)
        self.fake_agents: list[FakeAgent] = []

    def ask(
        self, method: str, message: Message | None = None, *, timeout_s: float = TIMEOUT_S, **fields: Any
    ) -> Any:
        """Call a method of any service with a request, or with one of these fields; return the call."""
        descriptor = METHODS[method]
        is_stream = descriptor.server_streaming
        open_call = self.channel.unary_stream if is_stream else self.channel.unary_unary
        call: Any = open_call(
            f"/{descriptor.containing_service.full_name}/{method}",
            lambda request: request.SerializeToString(),
            message_factory.GetMessageClass(descriptor.output_type).FromString,
        )
        return call(make_request(method, **fields) if message is None else message, timeout=timeout_s)

    async def job(self, job_id: str = "job", run_number: int = 0) -> job_pb2.Job:
        job: job_pb2.Job = (await self.ask("GetJob", job_id=job_id, run_number=run_number)).job
        return job

    async def ranks(self, job_id: str = "job", **wanted: Any) -> list[rank_pb2.Rank]:
        return list((await self.ask("ListRanks", job_id=job_id, page_size=1000, **wanted)).ranks)

    async def rank_states(self, job_id: str = "job") -> set[int]:
        return {rank.state for rank in await self.ranks(job_id)}

    async def events(self, job_id: str = "job", run_number: int = 0) -> list[event_pb2.JobEvent]:
        """Return the events of a run that has ended."""
        updates = self.ask("WatchJob", job_id=job_id, run_number=run_number)
        return [update.event async for update in updates if update.HasField("event")]

    async def finish(self, job_id: str = "job") -> job_pb2.Job:
        job: job_pb2.Job = (await self.ask("FinishJob", job_id=job_id)).job
        return job

    async def register(
        self, request_id: str | None = None, spec_fingerprint: str = "", **counts: Any
    ) -> job_pb2.Job:
        """Each registration is another request unless the test says otherwise."""
        request = job_service_pb2.RegisterJobRequest(
            spec=spec_message(**counts),
            request_id=uuid.uuid4().hex if request_id is None else request_id,
            spec_fingerprint=spec_fingerprint,
        )
        job: job_pb2.Job = (await self.ask("RegisterJob", request)).job
        return job

    async def all_lost(self, job_id: str = "job") -> None:
        """Wait until all ranks are lost."""

        async def are_lost() -> bool:
            return await self.rank_states(job_id) == {rank_pb2.RANK_STATE_LOST}

        await until(are_lost)


class ThreadWorker(Worker):
    """A worker that is no process: it solves tests' small problems at once, and large ones never."""

    MAX_COMPUTATIONS = 1000
    busy_count: ClassVar[int] = 0
    """Of all of them."""

    @property
    def is_alive(self) -> bool:
        return True

    def start(self) -> None:
        self.is_ready = True

    async def ready(self) -> None:
        if not self.is_ready:
            self.start()

    async def run(self, work: Callable[..., Answer], *arguments: object) -> Answer:
        await self.ready()
        for each in arguments:
            if isinstance(each, Pipeline) and sum(map(len, each.schedule.orders)) > self.MAX_COMPUTATIONS:
                await asyncio.Event().wait()
        ThreadWorker.busy_count += 1
        try:
            return await asyncio.to_thread(self._work, pickle.dumps((work, arguments)))
        except SolverError:
            raise
        except Exception as error:
            raise WorkError(repr(error)) from error
        finally:
            ThreadWorker.busy_count -= 1

    @staticmethod
    def _work(message: bytes) -> Any:
        work, arguments = pickle.loads(message)
        return pickle.loads(pickle.dumps(work(*arguments)))


_IN_A_HURRY: Sequence[tuple[object, str, float]] = (
    (writer, "GATHERING_S", 0.001),
    (coordinator, "TICK_S", 0.1),
    (power, "PERIOD_S", 0.02),
    (signal_targets, "MIN_INTERVAL_S", 0.05),
    (CsvSource, "period_s", 0.05),
    (run_tasks, "POINT_COUNT", 10),
)
"""Less waiting where nothing happens, and fewer points of frontiers: they prove nothing."""


@asynccontextmanager
async def running_here(
    settings: CoordinatorSettings, fence: Slot | None = None, fleet: Fleet = ALONE
) -> AsyncIterator[tuple[str, asyncio.Future[Any]]]:
    """Run a coordinator all of which is in this process, and which looks round more often than others do."""
    with ExitStack() as stack:
        for owner, name, time_s in _IN_A_HURRY:
            stack.enter_context(patch.object(owner, name, time_s))
        async with running_server(settings, fence, fleet, new_worker=ThreadWorker) as served:
            yield served


def unused_solvers() -> tuple[WorkerPool, WorkerPool]:
    """Return solvers without workers, for jobs and for requests."""
    return WorkerPool(JOBS, 0, 60.0), WorkerPool(REQUESTS, 0, 60.0)


@asynccontextmanager
async def coordinator_without_api(path: Path, rules: Rules) -> AsyncIterator[Coordinator]:
    """Run a coordinator on a store; it solves nothing."""
    store = await SqlStore.open(path)
    made = Coordinator(store, *unused_solvers(), rules, Retention())
    await made.start()
    running = asyncio.create_task(made.run())
    try:
        yield made
        assert not running.done()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await made.close()
        await store.close()


@asynccontextmanager
async def connected(settings: CoordinatorSettings, fleet: Fleet = ALONE) -> AsyncIterator[Client]:
    """Run a coordinator in this process, and connect to it."""
    async with running_here(settings, fleet=fleet) as (address, _), connected_to(address) as client:
        yield client


@asynccontextmanager
async def connected_to(
    address: str, files: TlsFiles | None = None, token: TokenSource | None = None
) -> AsyncIterator[Client]:
    """Connect to a coordinator that runs already; its agents end with the connection."""
    async with Channels(address, files, token).open() as channel:
        client = Client(channel)
        try:
            yield client
        finally:
            for agent in client.fake_agents:
                await agent.end()


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    async with connected(make_settings(tmp_path)) as client:
        yield client


def error_of(error: grpc.aio.AioRpcError) -> tuple[grpc.StatusCode, str, dict[str, str]]:
    """Return code, reason and metadata of a refusal."""
    status, info = rpc_status.from_call(error), ErrorInfo()
    assert status is not None, error
    assert status.details[0].Unpack(info)
    assert info.domain == "perseus"
    return error.code(), info.reason, dict(info.metadata)


async def refusal(call: Any) -> tuple[grpc.StatusCode, str, dict[str, str]]:
    """Return code, reason and metadata of the error that a call, or a stream of answers, ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (call.read() if hasattr(call, "read") else call)
    return error_of(caught.value)


async def outcome(call: Any) -> tuple[str, dict[str, str]]:
    """Return reason and metadata of a call's refusal; neither if it is answered."""
    try:
        await (call.read() if hasattr(call, "read") else call)
    except grpc.aio.AioRpcError as error:
        return error_of(error)[1:]
    if hasattr(call, "read"):
        call.cancel()
    return "", {}


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait for something that tells nobody when it comes about."""
    async with asyncio.timeout(TIMEOUT_S):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def job_once(client: Client, is_so: Callable[[job_pb2.Job], bool], job_id: str = "job") -> job_pb2.Job:
    """Wait until a job is so; return it."""
    latest = job_pb2.Job()

    async def is_it_so() -> bool:
        nonlocal latest
        latest = await client.job(job_id)
        return is_so(latest)

    await until(is_it_so)
    return latest


class FakeAgent:
    """An agent that serves some ranks of one job, iteration by iteration, as fast as it is acknowledged."""

    def __init__(
        self,
        client: Client,
        instance_id: str = "agent",
        places: Sequence[Coordinates] = ALL_PLACES,
        job_id: str = "job",
        spec_fingerprint: str = "",
    ) -> None:
        schedule: Schedule = one_forward_one_backward(2, 3)
        self.instance_id = instance_id
        self.job_id = job_id
        self.spec_fingerprint = spec_fingerprint
        self.hostname = "host"
        self.gpu_suffix = ""  # of its GPUs' UUIDs, where agents of several slots have GPUs of their own
        self.ranks = {
            place: service_fakes.FakeRank(place, instance_id, schedule.orders[place.stage])
            for place in places
        }
        self.received: list[ConnectResponse] = []
        self.offers: list[agent_service_pb2.PlanOffer] = []
        self.refused: list[agent_service_pb2.RankRefused] = []
        self.messages_refused: list[agent_service_pb2.MessageRefused] = []
        self.telemetry_refused: list[agent_service_pb2.TelemetryRefused] = []
        self.accepted: list[agent_service_pb2.RankAccepted] = []
        self.welcome = agent_service_pb2.Welcome()
        self.epoch = ""
        self.commit_marker = ""
        self.sequence = 0
        self.acknowledged = 0
        self.use(client)

    def use(self, client: Client) -> None:
        """Open a new stream."""
        client.fake_agents.append(self)
        self.call = Call(client.agents.Connect())
        self.reader = asyncio.create_task(self._read())
        # Only tests that ask want to know how it ends; else asyncio's log would keep the error.
        self.reader.add_done_callback(lambda reader: reader.cancelled() or reader.exception())
        self.news = asyncio.Condition()
        self.writing = asyncio.Lock()

    async def _read(self) -> None:
        while (message := await self.call.read()) is not None:
            self.received.append(message)
            match message.WhichOneof("message"):
                case "welcome":
                    self.welcome = message.welcome
                    self.acknowledged = message.welcome.acknowledged_sequence
                    self.commit_marker = message.welcome.commit_marker
                case "rank_accepted":
                    self.accepted.append(message.rank_accepted)
                case "rank_refused":
                    self.refused.append(message.rank_refused)
                case "message_refused":
                    self.messages_refused.append(message.message_refused)
                case "telemetry_refused":
                    self.telemetry_refused.append(message.telemetry_refused)
                case "telemetry_ack":
                    self.acknowledged = message.telemetry_ack.sequence
                    self.commit_marker = message.telemetry_ack.commit_marker
                case "plan_offer":
                    self.commit_marker = message.plan_offer.commit_marker
                    await self._answer(message.plan_offer)
            async with self.news:
                self.news.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(TIMEOUT_S), self.news:
            await self.news.wait_for(lambda: condition() or self.reader.done())
        if not condition():
            self.reader.result()
            raise AssertionError("the stream ended")

    async def send(self, request: ConnectRequest | None = None, **message: Any) -> None:
        async with self.writing:  # Two writes at once fail.
            await self.call.write(sent(**message) if request is None else request)

    @property
    def refusals(self) -> list[Any]:
        """The refusals of ranks, of messages and of telemetry."""
        return [*self.refused, *self.messages_refused, *self.telemetry_refused]

    def clear_refusals(self) -> None:
        for kind in (self.refused, self.messages_refused, self.telemetry_refused):
            kind.clear()

    def got(self, kind: str) -> list[Any]:
        """Return the messages of a kind that came since the hello."""
        return [getattr(message, kind) for message in self.received if message.HasField(kind)]  # type: ignore[arg-type]

    async def hello(self, protocol_version: int = 1) -> None:
        self.received.clear()
        hello = agent_service_pb2.Hello(
            instance_id=self.instance_id,
            agent_version="0",
            hostname=self.hostname,
            protocol_version=protocol_version,
            commit_marker=self.commit_marker,
        )
        await self.send(hello=hello)
        await self.until(lambda: bool(self.got("welcome")))
        self.epoch = self.welcome.epoch

    async def beat(self, request: ConnectRequest | None = None) -> agent_service_pb2.Heartbeat:
        """Send a heartbeat; its answer shows that everything before it has arrived."""
        count = len(self.got("heartbeat"))
        await self.send(request or sent(heartbeat={}))
        await self.until(lambda: len(self.got("heartbeat")) > count)
        heartbeat: agent_service_pb2.Heartbeat = self.got("heartbeat")[-1]
        return heartbeat

    async def leave(
        self,
        places: Iterable[Coordinates] | None = None,
        reason: int = rank_pb2.RANK_LEFT_REASON_TRAINER_GONE,
    ) -> None:
        """End trainers, by default all of them; the agent stays."""
        for place in self.ranks if places is None else places:
            await self.send(rank_left={"job_id": self.job_id, "rank": self.place(place), "reason": reason})

    async def join(self) -> None:
        """Say hello and announce all ranks."""
        await self.hello()
        await self.join_ranks()

    async def join_ranks(self) -> None:
        self.refused.clear()
        self.accepted.clear()
        await self.announce()
        await self.until(lambda: len(self.accepted) + len(self.refused) == len(self.ranks))

    async def announce(self) -> None:
        for rank in self.ranks.values():
            await self.send(rank_joined=self.joined(rank))

    def joined(self, rank: service_fakes.FakeRank) -> agent_service_pb2.RankJoined:
        gpu = service_fakes.make_gpu(rank.place)
        return agent_service_pb2.RankJoined(
            job_id=self.job_id,
            rank=self.place(rank.place),
            gpu=agent_service_pb2.Gpu(
                uuid=gpu.uuid + self.gpu_suffix,
                model=gpu.model,
                supported_clocks_mhz=gpu.supported_clocks_mhz,
            ),
            iteration=rank.iteration,
            in_force_epoch=self.epoch if rank.in_force.version else "",
            in_force_version=rank.in_force.version,
            after_sequence=rank.after_sequence,
            spec_fingerprint=self.spec_fingerprint,
        )

    @staticmethod
    def place(place: Coordinates) -> rank_pb2.RankCoordinates:
        return rank_pb2.RankCoordinates(pipeline=place.pipeline, stage=place.stage, tensor=place.tensor)

    async def _answer(self, offer: agent_service_pb2.PlanOffer) -> None:
        assert offer.epoch == self.epoch
        self.offers.append(offer)
        place = Coordinates(offer.rank.pipeline, offer.rank.stage, offer.rank.tensor)
        rank = self.ranks[place]
        kind = offer.WhichOneof("clocks")
        clocks: Clocks = STOCK
        if kind == "hold":
            clocks = HoldClocks((offer.hold.clock_mhz,) * (place.stage + 1))
        elif kind == "stage_plan":
            own = tuple(
                PlannedComputation(computation, planned.clock_mhz, planned.start_s, planned.duration_s)
                for computation, planned in zip(rank.order, offer.stage_plan.computations, strict=True)
            )
            clocks = PlannedClocks(Plan(0.0, 0.0, 0.0, ((),) * place.stage + (own,)))
        answer = rank.answer(Offer(offer.version, offer.start_iteration, clocks, offer.is_urgent))
        await self.send(
            plan_answer=agent_service_pb2.PlanAnswer(
                job_id=self.job_id,
                rank=offer.rank,
                epoch=offer.epoch,
                version=offer.version,
                accepted=answer.refusal is None,
                refusal_reason=rank_pb2.PLAN_REFUSAL_REASON_PAST_START
                if answer.refusal
                else rank_pb2.PLAN_REFUSAL_REASON_UNSPECIFIED,
                iteration=rank.iteration,
            )
        )
        if (in_force := rank.apply()) is not None:
            await self._report_in_force(in_force)

    async def _report_in_force(self, in_force: PlanInForce) -> None:
        message = agent_service_pb2.PlanInForce(
            job_id=self.job_id,
            rank=self.place(in_force.rank),
            epoch=self.epoch,
            version=in_force.version,
            iteration=in_force.iteration,
        )
        await self.send(plan_in_force=message)

    async def iterate(self, count: int = 1) -> None:
        """Let all ranks go through iterations in step; each waits until its telemetry is acknowledged."""
        for _ in range(count):
            for rank in self.ranks.values():
                in_force = rank.begin()
                if in_force is not None:
                    await self._report_in_force(in_force)
            for rank in self.ranks.values():
                await self.send(telemetry=self.telemetry(rank))
            await self.until(lambda: self.acknowledged >= self.sequence)

    def telemetry(self, rank: service_fakes.FakeRank) -> agent_service_pb2.TelemetryBatch:
        self.sequence += 1
        batch = rank.end(ITERATION_TIME_S).batch
        kinds = computation_pb2.ComputationKind.values()
        columns = batch.computations._asdict()
        computations = columns | {"kind": [kinds[1 + kind] for kind in batch.computations.kind]}
        message = agent_service_pb2.TelemetryBatch(
            sequence=self.sequence,
            job_id=self.job_id,
            rank=self.place(rank.place),
            iterations=agent_service_pb2.IterationColumns(**batch.iterations._asdict()),
            computations=agent_service_pb2.ComputationColumns(**computations),
        )
        if (energy := batch.energy) is not None:
            message.energy.plan_version = energy.plan_version
            message.energy.iteration_count = energy.iteration_count
            if energy.blocking_power_w is not None:
                message.energy.blocking_power_w = energy.blocking_power_w
            message.energy.blocking_power_se_w = energy.blocking_power_se_w
            for sample in energy.samples:
                message.energy.samples.add(**asdict(sample) | {"kind": 1 + KINDS.index(sample.kind)})
        return message

    async def iterate_until(self, client: Client, state: int) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while (found := (await client.job(self.job_id)).state) != state:
                await self.iterate()
                if found == job_pb2.JOB_STATE_SOLVING:
                    await asyncio.sleep(0.02)  # Leave the solver's process some of the machine.

    async def settle(self) -> None:
        """Let better plans that are being made come into force, until there are none."""
        async with asyncio.timeout(TIMEOUT_S):
            known_count = -1
            while known_count != len(self.offers):
                known_count = len(self.offers)
                while ThreadWorker.busy_count:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                await self.iterate(4)

    async def end(self) -> None:
        """Break the stream, without a goodbye."""
        self.call.cancel()
        await asyncio.gather(self.reader, return_exceptions=True)


async def joined(
    client: Client,
    instance_id: str = "agent",
    places: Sequence[Coordinates] = ALL_PLACES,
    job_id: str = "job",
    **registration: Any,
) -> FakeAgent:
    """Register a job, and join ranks of it."""
    await client.register(job_id=job_id, **registration)
    agent = FakeAgent(client, instance_id, places, job_id, registration.get("spec_fingerprint", ""))
    await agent.join()
    return agent


async def planned(client: Client, instance_id: str = "agent", **registration: Any) -> FakeAgent:
    """Register a job whose ranks join, are profiled, and run under plans for some iterations."""
    agent = await joined(client, instance_id, **registration)
    await agent.iterate_until(client, job_pb2.JOB_STATE_PLANNED)
    await agent.iterate(4)
    return agent
