"""The agents: their streams, the ranks that they serve, and their telemetry."""

import asyncio
import hmac
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import structlog

from perseus.clock_skew import SkewWatch
from perseus.rate_limited_log import RateLimitedLog
from perseus.service.domain.errors import (
    CoordinatorError,
    InstanceServedError,
    OwnerMismatchError,
    SpecMismatchError,
    StateLostError,
    StreamReplacedError,
)
from perseus.service.domain.gpu_claims import Place
from perseus.service.domain.inputs import (
    AgentDisconnected,
    AgentHeard,
    AgentLeft,
    GpuErrorReported,
    Input,
    OfferAnswered,
    PlanInForce,
    RankJoined,
    RankLeft,
    TelemetryArrived,
)
from perseus.service.domain.measured import Saving
from perseus.service.domain.members import Fleet
from perseus.service.domain.model import FaultyPart, Gpu, MaxClock, RankLeftReason
from perseus.service.domain.power_reading import PowerReading
from perseus.service.domain.principals import ANYBODY, Principal
from perseus.service.domain.specification import Coordinates
from perseus.service.fleet.gpus import GpuIndex
from perseus.service.fleet.power.feeds import Feeds
from perseus.service.fleet.power.readings import INTERVAL_S, JoinedGpu, PowerReadings, PowerTotals
from perseus.service.job import views
from perseus.service.shell.admission import Admission
from perseus.service.shell.gpu_claims import ClaimWriter
from perseus.service.shell.live_runs import LiveRuns
from perseus.service.shell.ports import AgentPort
from perseus.service.shell.thinning import Part, Thinning
from perseus.service.shell.writer import Writer
from perseus.service.storage.sql_store import SqlStore
from perseus.service.storage.store import Entry, TelemetrySequence

FIRST_RANK = Coordinates(0, 0, 0)
"""The rank of a job whose trainer logs its saving."""

LAST_PLAN_LEASE_S = 1e6
"""Eleven days: the longest lease that an agent accepts. It means that the agent keeps the last plan."""

MAX_UNMARKED_COUNT = 64
"""Reports of trainers without marked iterations that are kept of an agent: no node has more GPUs."""

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Agent:
    port: AgentPort
    principal: Principal = ANYBODY
    received_sequence: int = 0
    noted_sequence: int = 0
    """The highest that the writer has got."""
    is_greeted: bool = False
    job_ids: set[str] = field(default_factory=set)
    """Jobs with ranks that it joined; those without a live rank are dropped when it is next heard."""
    gpus: dict[str, tuple[Place, Gpu]] = field(default_factory=dict)
    """By UUID, the rank that it last joined on that GPU."""
    unmarked: dict[tuple[str, Coordinates], str] = field(default_factory=dict)
    """By job and rank, why trainers mark no iterations, for people."""
    clock: SkewWatch = field(default_factory=SkewWatch)
    """Its host's wall clock, against the coordinator's."""


class Agents:
    """All agents with a stream. Only the async methods wait.

    Attributes:
        taken_count, repeated_count, passed_count: batches of telemetry that were stored, that were sent
            again,
            and that were refused and acknowledged all the same.
        thinning: what is left out of their telemetry.
        thinned_counts: how many batches by the most that was left out of them.
        power_interval_s: how often agents report what their GPUs draw; 0 while nobody needs it.
        claim_writer: claims ranks' GPUs where other slots' ranks may be on them; else None.
    """

    def __init__(
        self,
        store: SqlStore,
        writer: Writer,
        live: LiveRuns,
        feeds: Feeds,
        monotonic: Callable[[], float] = time.monotonic,
        claim_writer: ClaimWriter | None = None,
    ) -> None:
        self._store = store
        self._feeds = feeds
        self._writer = writer
        self._live = live
        self._agents: dict[str, _Agent] = {}
        self._with_unmarked: dict[str, _Agent] = {}
        self._gpus = GpuIndex(self._lease_on_gpu_s, self._principal_of)
        self._monotonic = monotonic
        self._readings = PowerReadings()
        self._checking = asyncio.Lock()
        self._clock_log = RateLimitedLog(log)
        self.taken_count = self.repeated_count = self.passed_count = 0
        self.thinning = Thinning()
        self.thinned_counts: Counter[Part] = Counter()
        self._ticked_count, self._ticked_s = 0, monotonic()
        self.power_interval_s = 0.0
        self.claim_writer = claim_writer

    @property
    def stream_count(self) -> int:
        """How many agents have a stream."""
        return len(self._agents)

    @property
    def fleet(self) -> Fleet:
        """Where jobs of other slots are served."""
        return self._live.fleet

    @property
    def lease_s(self) -> float:
        """How long a rank whose agent is silent keeps its plan."""
        return self._live.rules.lease_s

    def plan_lease_s(self, hostname: str) -> float:
        """How long plans on a host outlive the coordinator's last message: its feed's fail-safe decides."""
        is_lasting = self._feeds.of_host(hostname) in self._feeds.with_last_plan
        return LAST_PLAN_LEASE_S if is_lasting else self.lease_s

    def ask_for_power(self) -> None:
        """Ask all agents, present and future, to report what their GPUs draw."""
        self.power_interval_s = INTERVAL_S
        for instance_id, agent in self._agents.items():
            if agent.is_greeted:  # otherwise its Welcome, which comes first, carries the interval
                agent.port.heartbeat(INTERVAL_S, self.savings(instance_id))

    @property
    def commit_marker(self) -> str:
        """The commit marker of everything that is stored so far."""
        return self._store.commit_marker

    @property
    def lease_epoch(self) -> int:
        """The lease epoch of the hold on all jobs; 0 where no other coordinator can take over."""
        return self._store.lease_epoch

    async def load(self) -> None:
        """Learn which GPUs the loaded runs' ranks are on, and which are claimed."""
        if self.claim_writer is not None:
            await self.claim_writer.load()
        for run in self._live:
            for place, gpu_uuid in self._live.read(run, views.gpus, lambda _: {}).items():
                if self._lease_on_gpu_s(run.job_id, place, gpu_uuid) is not None:
                    self._gpus.put("", run.job_id, place, gpu_uuid)

    def drain(self) -> None:
        """Announce to all agents that the coordinator is about to stop."""
        for agent in self._agents.values():
            agent.port.drain()

    def instance_key(self, instance_id: str) -> str:
        """Return the key that proves that an agent is this instance. Only that agent receives it."""
        return self._store.instance_key(instance_id)

    async def greet(
        self,
        instance_id: str,
        port: AgentPort,
        commit_marker: str = "",
        principal: Principal = ANYBODY,
        instance_key: str = "",
    ) -> tuple[str, int]:
        """Take an agent's new stream, which replaces its older one.

        `commit_marker` is the last one that the agent received, `principal` the one that it authenticates as.
        An instance belongs to the principal that last used it, unless its key proves that it is the same
        agent with another credential. The caller must call `part` afterwards, whatever the outcome.

        Returns the epoch and the highest telemetry sequence that is stored.

        Raises:
            InstanceServedError: the instance belongs to another principal.
        """
        await self._check_state(commit_marker, instance_id)
        is_same = hmac.compare_digest(instance_key.encode(), self.instance_key(instance_id).encode())
        stored = "" if is_same else await self._stored_principal(instance_id)
        self._readings.forget(instance_id)
        older = self._agents.get(instance_id)
        theirs = older.principal.name if older is not None else stored
        if not is_same and theirs not in (principal.name, "", ANYBODY.name):
            raise InstanceServedError(instance_id=instance_id, principal=principal.name)
        # Register the agent before anything else is awaited: of many that come at once, the last one stays.
        self._agents[instance_id] = agent = _Agent(port, principal)
        self._with_unmarked.pop(instance_id, None)
        self._live.ports[instance_id] = port
        if older is not None:
            older.port.end(StreamReplacedError(instance_id=instance_id))
            self._dispatch_to_jobs(older, AgentDisconnected(instance_id))
        await self._writer.flush()
        agent.noted_sequence = await self._store.telemetry_sequence(instance_id)
        agent.received_sequence = agent.noted_sequence
        agent.is_greeted = True
        return self._live.epoch, agent.received_sequence

    async def _stored_principal(self, instance_id: str) -> str:
        await self._writer.flush()  # Its row may not be written yet.
        return await self._store.telemetry_principal(instance_id)

    async def _check_state(self, commit_marker: str, instance_id: str) -> None:
        """Begin a new epoch, and end all streams, if an agent knows of state that is lost."""
        if not commit_marker:
            return
        async with self._checking:  # Another agent's hello may have revealed it already.
            if not self._store.has_lost(commit_marker):
                return
            epoch = await self._store.renew_epoch()
        log.error(
            "acknowledged state is lost, a new epoch begins: was the database restored from an older copy, "
            "or its log damaged?",
            epoch=epoch,
            instance_id=instance_id,
        )
        self._live.renew(epoch)
        for agent in self._agents.values():
            agent.port.end(StateLostError(epoch=epoch))

    def part(self, instance_id: str, port: AgentPort, is_goodbye: bool) -> None:
        """Handle the end of an agent's stream; do nothing if a newer stream has replaced it."""
        agent = self._agents.get(instance_id)
        if agent is not None and agent.port is port:
            del self._agents[instance_id]
            del self._live.ports[instance_id]
            self._with_unmarked.pop(instance_id, None)
            self._readings.forget(instance_id)
            self._dispatch_to_jobs(
                agent, AgentLeft(instance_id) if is_goodbye else AgentDisconnected(instance_id)
            )

    def hear(self, instance_id: str) -> None:
        """Take an agent's sign of life."""
        agent = self._agents.get(instance_id)
        if agent is not None:
            self._dispatch_to_jobs(agent, AgentHeard(instance_id))

    def savings(self, instance_id: str) -> dict[str, Saving]:
        """Return the known savings of the jobs whose first ranks an agent serves."""
        savings: dict[str, Saving] = {}
        agent = self._agents.get(instance_id)
        if agent is None:
            return savings
        for (job_id, rank), _ in agent.gpus.values():
            run = self._live.get(job_id) if rank == FIRST_RANK and job_id in agent.job_ids else None
            saving = self._live.read(run, views.saving, lambda _: None) if run is not None else None
            if saving is not None:
                savings[job_id] = saving
        return savings

    async def claim(self, instance_id: str, wanted: Mapping[str, Place]) -> None:
        """Claim GPUs by their UUIDs for ranks that an agent announces: call it before `join`.

        Other slots' ranks may be on GPUs if `claim_writer` is set.
        """
        agent = self._agents.get(instance_id)
        if agent is not None and self.claim_writer is not None:
            name = agent.principal.name
            await self.claim_writer.claim(
                {
                    (name, uuid): place
                    for uuid, place in wanted.items()
                    if self._live.get(place[0]) is not None
                }
            )

    def join(self, job_id: str, event: RankJoined, owner: str = "") -> None:
        """Add a rank that an agent serves; `owner` is its trainer's, "" if it is unknown.

        Raises:
            JobNotFoundError, JobFinishedError, RankOutOfRangeError, RankAlreadyServedError,
            GpuAlreadyServedError, SpecMismatchError, OwnerMismatchError: the rank is refused.
        """
        run = self._live.find(job_id)
        if not run.machine.registrations.is_owner(owner):
            raise OwnerMismatchError(job_id=job_id, owner=owner)
        self._live.tick_run(run)  # An older lease may have run out since the last tick.
        agent = self._agents.get(event.instance_id)
        principal = ANYBODY if agent is None else agent.principal
        self._gpus.check(principal, job_id, event.rank, event.gpu.uuid)
        if self.claim_writer is not None:
            self.claim_writer.check(principal, event.gpu.uuid)
        try:
            self._live.handle(run, event)
        except SpecMismatchError:
            # This agent may still serve the rank with the order that its trainer computed before.
            left = RankLeft(event.rank, event.instance_id, RankLeftReason.TRAINER_GONE)
            self._live.handle(run, left)
            raise
        self._gpus.put(principal.name, job_id, event.rank, event.gpu.uuid)
        if self.claim_writer is not None:
            self.claim_writer.put((principal.name, event.gpu.uuid), (job_id, event.rank))
        if agent is not None:
            agent.job_ids.add(job_id)
            agent.gpus[event.gpu.uuid] = (job_id, event.rank), event.gpu

    def dispatch(self, job_id: str, event: RankLeft | OfferAnswered | PlanInForce) -> None:
        """Give a job's run an agent's message about a rank.

        Raises:
            JobNotFoundError: the agent may have served the job under a coordinator that has lost its state.
            RankOutOfRangeError: the job has no such rank.
        """
        run = self._live.find(job_id)
        self._live.handle(run, event)

    def note_gpu_error(self, job_id: str, event: GpuErrorReported) -> None:
        """Give a job's run an agent's report of a GPU error.

        Raises:
            JobNotFoundError: the job is not registered (yet); the agent may report it again.
            RankOutOfRangeError: the job has no such rank.
        """
        run = self._live.find(job_id)
        self._live.handle(run, event)

    def note_clock(self, instance_id: str, hostname: str, ahead_s: float) -> None:
        """Note how far the clock of an agent's host is ahead of the coordinator's, which its heartbeats tell.

        Nothing else of an agent goes by its wall clock than the validity of certificates, and its log.
        """
        if (agent := self._agents.get(instance_id)) is not None and agent.clock.take(ahead_s):
            self._clock_log.warning(
                "an agent's clock differs from the coordinator's: keep both by NTP, as certificates and logs "
                "go by each host's own"
                if agent.clock.is_large
                else "an agent's clock agrees with the coordinator's again",
                hostname,
                hostname=hostname,
                instance_id=instance_id,
                ahead_s=round(ahead_s, 3),
            )

    def clock_skew_s(self) -> float | None:
        """Return the largest difference of an agent's clock; None if none is known."""
        known = [abs(a.clock.ahead_s) for a in self._agents.values() if a.clock.ahead_s is not None]
        return max(known, default=None)

    def note_unmarked(
        self, instance_id: str, hostname: str, job_id: str, place: Coordinates, why: str
    ) -> None:
        """Note a trainer that trains without marked iterations; with an empty reason it no longer does."""
        if (agent := self._agents.get(instance_id)) is None:
            return
        agent.unmarked.pop((job_id, place), None)
        if why and len(agent.unmarked) < MAX_UNMARKED_COUNT:
            agent.unmarked[job_id, place] = f"{place} on {hostname or 'an unnamed host'}: {why}"
        if agent.unmarked:
            self._with_unmarked[instance_id] = agent
        else:
            self._with_unmarked.pop(instance_id, None)

    def unmarked(self, job_id: str) -> str:
        """Return which rank of a job trains without marked iterations, and why; empty if none is known.

        The first rank of those that have reported, which usually have the same reason.
        """
        found = [
            (place, text)
            for agent in self._with_unmarked.values()
            for (other, place), text in agent.unmarked.items()
            if other == job_id
        ]
        return min(found)[1] if found else ""

    def take_power(self, instance_id: str, hostname: str, reading: PowerReading) -> None:
        """Take an agent's power reading, which counts until the next one, or for a few seconds."""
        agent = self._agents.get(instance_id)
        if agent is not None:
            feed, is_of_host = self._feeds.of_host(hostname), agent.principal.vouches_for(hostname)
            self._readings.take(instance_id, feed, reading, self._monotonic(), is_of_host=is_of_host)

    def totals(self, job_ids: Collection[str]) -> PowerTotals:
        """Return what GPUs draw now, as far as agents report it: of these jobs, and of everything else."""
        return self._readings.totals(self._monotonic(), self._joined_by, self._gpus.jobs_on, job_ids)

    def _joined_by(self, instance_id: str) -> Mapping[str, JoinedGpu]:
        agent = self._agents.get(instance_id)
        if agent is None:
            return {}
        return {
            gpu.uuid: JoinedGpu(place[0], gpu.model)
            for place, gpu in agent.gpus.values()
            if self._gpus.is_last_on(agent.principal.name, place, gpu.uuid)
        }

    def take_telemetry(
        self, instance_id: str, job_id: str, events: Iterable[TelemetryArrived]
    ) -> list[tuple[TelemetryArrived, CoordinatorError]]:
        """Take an agent's batches of a job that arrived together, but for repeated ones.

        Return those that are refused, as they don't fit their rank or their job: they are not stored, and
        count as taken. Call `acknowledge_telemetry` before awaiting anything.
        """
        agent = self._agents.get(instance_id)
        if agent is None or not agent.is_greeted:  # the last message of a stream that is being replaced
            return []
        new: list[TelemetryArrived] = []
        for event in events:
            if event.batch.sequence > agent.received_sequence:
                agent.received_sequence = event.batch.sequence
                new.append(event)
            else:
                self.repeated_count += 1
        answers: Sequence[CoordinatorError | None]
        try:
            answers = self._live.handle_telemetry(self._live.find(job_id), new)
        except CoordinatorError as error:  # there is no such job
            answers = [error] * len(new)
        refused = [(event, error) for event, error in zip(new, answers, strict=True) if error is not None]
        self.taken_count += len(new) - len(refused)
        self.passed_count += len(refused)
        return refused

    def pass_telemetry(self, instance_id: str, sequence: int) -> None:
        """Count an unreadable batch as taken, so that the agent doesn't send it again."""
        self.passed_count += 1
        self.skip(instance_id, sequence)

    def skip(self, instance_id: str, sequence: int) -> None:
        """Acknowledge a batch, with the others, though it is not taken."""
        agent = self._agents.get(instance_id)
        if agent is not None and agent.is_greeted:  # else the last message of a stream that is being replaced
            agent.received_sequence = max(agent.received_sequence, sequence)

    def acknowledge_telemetry(self, instance_id: str) -> None:
        """Acknowledge all batches taken so far, once they are stored.

        Nothing may be awaited since they were taken: the writer stores together what comes in one turn.
        """
        agent = self._agents.get(instance_id)
        if agent is None or not agent.is_greeted:
            return
        entries: list[Entry] = []
        if agent.received_sequence > agent.noted_sequence:
            agent.noted_sequence = agent.received_sequence
            entries = [TelemetrySequence(instance_id, agent.noted_sequence, agent.principal.name)]
        self._writer.later(entries, [partial(agent.port.acknowledge, agent.noted_sequence)])

    @property
    def admission(self) -> Admission:
        """Admits agents' messages."""
        return self._writer.admission

    def tick(self, busy_share: float) -> None:
        """Decide, once a second, how much is thinned; `busy_share`: of the time since, the event loop's."""
        batch_count = self.taken_count + self.passed_count + self.thinned_counts[Part.SUMS]
        now_s, before = self._monotonic(), self.thinning.part
        per_s = (batch_count - self._ticked_count) / max(now_s - self._ticked_s, 1e-9)
        self._ticked_count, self._ticked_s = batch_count, now_s
        if self.claim_writer is not None:
            self.claim_writer.tick()
        self.thinning.tick(busy_share, per_s)
        if (part := self.thinning.part) is not before:
            log.warning(
                "telemetry is thinned: agents send more than is taken in time"
                if part
                else "telemetry is whole again",
                left_out=part.value if part else None,
                batches_per_s=round(per_s),
            )

    def thin(self, instance_id: str, job_id: str, sequence: int, iterations: Sequence[int]) -> Part | None:
        """Return what is left out of a batch, and count it."""
        agent = self._agents.get(instance_id)
        part = self.thinning.left_out(iterations)
        if part is None or agent is None or sequence <= agent.received_sequence:
            return None
        self.thinned_counts[part] += 1
        if (run := self._live.get(job_id)) is not None:
            run.thinned_count += 1
        return part

    async def flush(self) -> None:
        """Wait until everything that agents have sent so far is stored and carried out."""
        await self._writer.flush()

    def max_clock(self, job_id: str) -> MaxClock | None:
        """Return the maximum clock of a job's ranks, whether they are served or not; None without one."""
        run = self._live.get(job_id)
        return run.machine.record.max_clock if run is not None else None

    def _principal_of(self, job_id: str, rank: Coordinates) -> str:
        run = self._live.get(job_id)
        if run is None:
            return ""
        instance_id = self._live.read(
            run, partial(views.instance_of, place=rank), lambda _: "", FaultyPart.MACHINE
        )
        agent = self._agents.get(instance_id)
        return "" if agent is None else agent.principal.name

    def _lease_on_gpu_s(self, job_id: str, rank: Coordinates, gpu_uuid: str) -> float | None:
        run = self._live.get(job_id)
        if run is None:
            return None
        self._live.tick_run(run)
        now_s = self._live.clock.now_s()
        return self._live.read(
            run,
            partial(views.lease_on_gpu_s, place=rank, gpu_uuid=gpu_uuid, now_s=now_s),
            lambda _: None,
            FaultyPart.MACHINE,
        )

    def _dispatch_to_jobs(self, agent: _Agent, event: Input) -> None:
        for job_id in list(agent.job_ids):
            run = self._live.get(job_id)
            if run is not None and run.machine.has_live_rank:
                self._live.handle(run, event)
            else:
                agent.job_ids.remove(job_id)
