"""Agents at the level of the wire: they join, follow offers, report, resend, reconnect, and check messages.

Agents record the coordinator's errors in `Findings`: a retracted acknowledgement, a version with two plans, a
new version below an earlier one, and any refusal. `Job` adds iterations under offers of two holders.
"""

import asyncio
import hashlib
import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.load import wire
from benchmarks.load.http2 import GrpcStream
from perseus.agent.stream.translate import about_rank
from perseus.bundles import MAX_BYTES, MAX_MESSAGES
from perseus.solver import Schedule
from perseus.v1 import agent_service_pb2 as pb
from perseus.v1 import rank_pb2

CONNECT = "/perseus.v1.AgentService/Connect"

_PAST_START = rank_pb2.PLAN_REFUSAL_REASON_PAST_START
_MESSAGES_LIMIT = 20
_HEADER_BYTES = 6
"""At most, before each message in a bundle."""
_HEARTBEAT_SHARE = 0.3
"""Share of the lease: a heartbeat is due every third of it."""
_SILENCE_LIMIT_S = 3.0
"""Where there are several coordinators: for how long one may leave a batch without an answer."""


@dataclass(slots=True)
class Findings:
    """Violations by the coordinator: the count by kind, and the first ones in words."""

    counts: dict[str, int] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def add(self, kind: str, message: str) -> None:
        """Add one."""
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if len(self.messages) < _MESSAGES_LIMIT:
            self.messages.append(f"{kind}: {message}")


class Bodies:
    """A stage's report of an iteration, made once for all pipelines under the same clocks."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._made: dict[int, dict[tuple[int, int, tuple[int, ...], int], bytes]] = {}

    def get(self, stage: int, iteration: int, version: int, clocks: tuple[int, ...], since: int) -> bytes:
        """Return it, made on first use; only those of the latest iterations are kept."""
        made = self._made.get(iteration)
        if made is None:
            made = self._made[iteration] = {}
            self._made.pop(iteration - 3, None)
        key = (stage, version, clocks, since)
        found = made.get(key)
        if found is None:
            order = self._schedule.orders[stage]
            is_one = len(clocks) == 1
            clocks_mhz = clocks * len(order) if is_one else clocks
            held = iteration - since + 1 if is_one else None
            found = made[key] = wire.stage_body(order, iteration, version, clocks_mhz, held)
        return found


def _clocks(offer: pb.PlanOffer) -> tuple[int, ...]:
    """Return one clock for each computation, or one for all; 0 for stock."""
    match offer.WhichOneof("clocks"):
        case "hold":
            return (offer.hold.clock_mhz,)
        case "stage_plan":
            return tuple(each.clock_mhz for each in offer.stage_plan.computations)
        case _:
            return (0,)


def _digest(clocks: tuple[int, ...]) -> bytes:
    return hashlib.blake2b(repr(clocks).encode(), digest_size=8).digest()


_STOCK = _digest((0,))


class Rank:
    """One rank: clocks in force, the offer that waits for its start iteration, and all earlier offers."""

    def __init__(self, job_id: str, place: wire.Place) -> None:
        self.job_id = job_id
        self.place = place
        self.prefix = wire.rank_prefix(job_id, place)
        self.epoch = ""
        self.version = 0
        self.clocks: tuple[int, ...] = (0,)
        self.since = 0
        self.pending: pb.PlanOffer | None = None
        self.history: list[tuple[int, int, int]] = [(0, 0, 0)]
        """First iteration, version and lease epoch of each offer that was in force."""
        self._highest_version: dict[str, int] = {}
        """By epoch."""
        self._clocks_of: dict[tuple[str, int], bytes] = {}

    @property
    def version_count(self) -> int:
        """Number of different versions with clocks of their own that were offered to it."""
        return sum(digest != _STOCK for digest in self._clocks_of.values())

    @property
    def stock_versions(self) -> set[int]:
        """The versions that had stock's clocks."""
        return {version for (_, version), digest in self._clocks_of.items() if digest == _STOCK}

    @property
    def gpu_uuid(self) -> str:
        """Its GPU."""
        return f"GPU-{self.job_id}-{self.place.pipeline}-{self.place.stage}"

    def check(self, offer: pb.PlanOffer, findings: Findings) -> None:
        """Compare an offer with all earlier ones."""
        output = f"{self.job_id} {self.place.pipeline}/{self.place.stage} version {offer.version}"
        # Only the clocks: start times may change if the other stages get other clocks.
        digest = _digest(_clocks(offer))
        is_again = (offer.epoch, offer.version) in self._clocks_of
        if self._clocks_of.setdefault((offer.epoch, offer.version), digest) != digest:
            findings.add("version reused", f"{output} carries other clocks than before")
        highest = self._highest_version.get(offer.epoch, 0)
        # A plan comes back after a block at stock.
        if offer.version < highest and (digest == _STOCK or not is_again):
            findings.add("version reversed", f"{output} after {highest}")
        self._highest_version[offer.epoch] = max(highest, offer.version)

    def begin(self, iteration: int) -> bytes | None:
        """Begin an iteration; return the message to send if it brings an offer into force."""
        offer = self.pending
        if offer is None or offer.start_iteration > iteration:
            return None
        self.pending = None
        self.epoch, self.version, self.since = offer.epoch, offer.version, iteration
        self.history.append((iteration, offer.version, offer.lease_epoch))
        self.clocks = _clocks(offer)
        in_force = pb.PlanInForce(
            job_id=self.job_id,
            rank=self.place.to_proto(),
            epoch=offer.epoch,
            version=offer.version,
            iteration=iteration,
        )
        return pb.ConnectRequest(plan_in_force=in_force).SerializeToString()

    def joined(self, iteration: int) -> bytes:
        """Return the message that announces the rank."""
        place = self.place
        message = pb.RankJoined(
            job_id=self.job_id,
            rank=place.to_proto(),
            gpu=pb.Gpu(
                uuid=self.gpu_uuid,
                model="Loaded",
                supported_clocks_mhz=wire.CLOCKS_MHZ,
            ),
            iteration=iteration,
            in_force_epoch=self.epoch,
            in_force_version=self.version,
        )
        return pb.ConnectRequest(rank_joined=message).SerializeToString()


@dataclass(slots=True)
class Back:
    """Times of an agent's latest stream: welcome, all ranks joined, all resent batches acknowledged."""

    opened_s: float = 0.0
    welcomed_s: float = 0.0
    joined_s: float = 0.0
    resent_s: float = 0.0


class Agent:
    """One agent: its ranks, its stream, and its unacknowledged batches."""

    def __init__(
        self,
        instance_id: str,
        ranks: Sequence[Rank],
        bodies: Bodies,
        findings: Findings,
        reconnect_within_s: float,
        is_echo: bool,
        slot: int = 0,
    ) -> None:
        self.ranks = ranks
        self.sequence = 0
        self.acknowledged = 0
        self.connection_count = 0
        self.iteration = -1
        self.latencies_s: list[float] = []
        self.back = Back()
        self.offered: Callable[[Rank, bool], None] | None = None
        self.instance_id = instance_id
        self._bodies = bodies
        self._findings = findings
        self._reconnect_within_s = reconnect_within_s
        self._is_echo = is_echo
        self._slot = slot
        self._by_place = {rank.place: rank for rank in ranks}
        self._unacknowledged: deque[tuple[int, bytes, float]] = deque()
        self._resent_through = 0
        self._accepted_count = 0
        self._epoch = ""
        self._lease_epoch = 0
        self._attempt_count = 0
        self._commit_marker = ""
        self._heartbeat_interval_s = math.inf
        self._next_heartbeat_s = math.inf
        self._stream: GrpcStream | None = None
        self._is_welcome = False
        self._welcomed_s = 0.0
        self._max_bundle_bytes = 0
        self._answers: list[bytes] = []
        self._is_closed = False
        self._task: asyncio.Task[None] | None = None

    @property
    def is_joined(self) -> bool:
        """Whether all its ranks are served on its current stream."""
        return self._is_welcome and self._accepted_count == len(self.ranks)

    @property
    def standing(self) -> str:
        """Its state, for people."""
        return (
            f"{self.connection_count} connections, welcome {self._is_welcome}, {self._accepted_count} ranks "
            f"accepted, {self.unacknowledged_count} batches after {self.acknowledged} not acknowledged"
        )

    @property
    def unacknowledged_count(self) -> int:
        """Number of unacknowledged batches."""
        return len(self._unacknowledged)

    def connect(self, target: str, wait_s: float = 0.0) -> None:
        """Open the stream after a delay, and retry after random delays until it is open.

        Of several targets, separated by commas, each attempt takes the next.
        """
        self._task = asyncio.get_running_loop().create_task(self._open(target, wait_s))

    def report(self) -> None:
        """Report that an iteration has ended on every rank, and that the next one begins."""
        ended = self.iteration = max(0, self.iteration)
        self.iteration += 1
        now_s = time.perf_counter()
        messages = []
        for rank in self.ranks:
            self.sequence += 1
            body = self._bodies.get(rank.place.stage, ended, rank.version, rank.clocks, rank.since)
            message = wire.telemetry(rank.prefix, body, self.sequence)
            messages.append(message)
            self._unacknowledged.append((self.sequence, message, now_s))
            if (in_force := rank.begin(self.iteration)) is not None:
                messages.append(in_force)
        if self._is_welcome and self._stream is not None:
            if now_s >= self._next_heartbeat_s:
                messages.append(_HEARTBEAT)
                self._next_heartbeat_s = now_s + self._heartbeat_interval_s
            self._send(*messages)

    def _send(self, *messages: bytes) -> None:
        """Send messages, in bundles if the server takes them."""
        assert self._stream is not None
        together: list[bytes] = []
        size = 0
        for message in messages:
            size += len(message) + _HEADER_BYTES
            if together and (size > self._max_bundle_bytes or len(together) == MAX_MESSAGES):
                self._stream.send(wire.bundle(together) if len(together) > 1 else together[0])
                together, size = [], len(message) + _HEADER_BYTES
            together.append(message)
        self._stream.send(wire.bundle(together) if len(together) > 1 else together[0])

    def report_power(self, power_w: float) -> None:
        """Report the power of its ranks' GPUs, the same for each."""
        if self._is_welcome and self._stream is not None:
            uuids = [rank.gpu_uuid for rank in self.ranks]
            reading = pb.PowerReading(duration_s=1.0, gpu_uuid=uuids, power_w=[power_w] * len(uuids))
            self._stream.send(pb.ConnectRequest(power_reading=reading).SerializeToString())

    def leave(self) -> None:
        """Report that all ranks have ended, and say goodbye; the coordinator then closes the connection."""
        if self._stream is not None:
            left = [
                pb.ConnectRequest(
                    rank_left=pb.RankLeft(
                        job_id=rank.job_id,
                        rank=rank.place.to_proto(),
                        reason=rank_pb2.RANK_LEFT_REASON_FINISHED,
                    )
                ).SerializeToString()
                for rank in self.ranks
            ]
            goodbye = pb.ConnectRequest(goodbye=pb.Goodbye(reason="done")).SerializeToString()
            self._stream.send(*left, goodbye)
        self._is_closed = True

    def close(self) -> None:
        """Drop the stream."""
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
        if self._stream is not None:
            self._stream.abort()
            self._stream = None

    async def _open(self, target: str, wait_s: float) -> None:
        while not self._is_closed:
            await asyncio.sleep(wait_s)
            wait_s = random.uniform(0.0, self._reconnect_within_s)
            try:
                addresses = target.split(",")
                self._attempt_count += 1
                stream = await GrpcStream.open(
                    addresses[self._attempt_count % len(addresses)],
                    CONNECT,
                    self._take,
                    lambda why: self._ended(target, why),
                )
            except OSError:
                continue
            self._stream = stream
            self.connection_count += 1
            self.back = Back(opened_s=time.monotonic())
            stream.send(pb.ConnectRequest(hello=self._hello()).SerializeToString())
            if self._is_echo:
                self._is_welcome, self._accepted_count = True, len(self.ranks)
                self._max_bundle_bytes = MAX_BYTES
            return

    def _hello(self) -> pb.Hello:
        return pb.Hello(
            instance_id=self.instance_id,
            hostname="load",
            protocol_version=1,
            commit_marker=self._commit_marker,
            max_bundle_bytes=MAX_BYTES,
            slot=self._slot,
        )

    def _ended(self, target: str, why: str) -> None:
        was_welcome, self._is_welcome = self._is_welcome, False
        self._stream, self._accepted_count = None, 0
        if not self._is_closed:
            if "frame 1:" in why and was_welcome:
                self._findings.add("stream ended", f"{self.instance_id}: {why}")
            self.connect(target, random.uniform(0.0, self._reconnect_within_s))

    def _take(self, data: bytes) -> None:
        if self._is_echo:
            if self._unacknowledged:  # one answer for a bundle of one report of each rank
                self._acknowledge(self._unacknowledged[0][0] + len(self.ranks) - 1)
            return
        message = pb.ConnectResponse.FromString(data)
        if message.HasField("bundle"):
            for each in message.bundle.messages:
                self._take_one(each)
        else:
            self._take_one(message)
        if self._answers:
            answers, self._answers = self._answers, []
            self._send(*answers)

    def leave_if_silent(self, target: str) -> None:
        """Try the next of several coordinators if this one does not answer."""
        if self._is_welcome and self._stream is not None and self._unacknowledged:
            since_s = max(self._unacknowledged[0][2], self._welcomed_s)
            if time.perf_counter() - since_s > _SILENCE_LIMIT_S:
                self._stream.abort()
                self._ended(target, "silence")

    def _take_one(self, message: pb.ConnectResponse) -> None:
        if (about := about_rank(message)) is not None:
            if about.lease_epoch < self._lease_epoch:
                found = f"{self.instance_id}: {about.lease_epoch} after {self._lease_epoch}"
                self._findings.add("lease epoch reversed", found)
            self._lease_epoch = about.lease_epoch
        match message.WhichOneof("message"):
            case "telemetry_ack":
                self._commit_marker = message.telemetry_ack.commit_marker
                self._acknowledge(message.telemetry_ack.sequence)
            case "plan_offer":
                self._commit_marker = message.plan_offer.commit_marker
                self._take_offer(message.plan_offer)
            case "rank_accepted":
                self._accepted_count += 1
                if self.is_joined:
                    self.back.joined_s = time.monotonic()
            case "welcome":
                self._commit_marker = message.welcome.commit_marker
                self._take_welcome(message.welcome)
            case "heartbeat" | "drain":
                pass
            case kind:
                self._findings.add(f"{kind}", f"{self.instance_id}: {message}".replace("\n", " "))

    def _take_welcome(self, welcome: pb.Welcome) -> None:
        self.back.welcomed_s = time.monotonic()
        self._welcomed_s = time.perf_counter()
        if welcome.acknowledged_sequence < self.acknowledged:
            found = f"{self.instance_id}: {welcome.acknowledged_sequence} of {self.acknowledged} are stored"
            self._findings.add("acknowledged and lost", found)
        if welcome.acknowledged_sequence > self.sequence:
            found = f"{self.instance_id}: {welcome.acknowledged_sequence} of {self.sequence} are stored"
            self._findings.add("stored and never sent", found)
        if self._epoch and welcome.epoch != self._epoch:
            self._findings.add("epoch changed", f"{self.instance_id}: {self._epoch} to {welcome.epoch}")
        self._epoch = welcome.epoch
        self._heartbeat_interval_s = welcome.lease_s * _HEARTBEAT_SHARE
        self._next_heartbeat_s = time.perf_counter() + random.uniform(0.0, self._heartbeat_interval_s)
        self._acknowledge(welcome.acknowledged_sequence, is_measured=False)
        self._is_welcome = True
        self._max_bundle_bytes = min(welcome.max_bundle_bytes, MAX_BYTES)
        self._resent_through = self._unacknowledged[-1][0] if self._unacknowledged else 0
        if not self._resent_through:
            self.back.resent_s = time.monotonic()
        self._send(
            *(rank.joined(self.iteration) for rank in self.ranks),
            *(batch for _, batch, _ in self._unacknowledged),
        )

    def _acknowledge(self, sequence: int, is_measured: bool = True) -> None:
        now_s = time.perf_counter()
        waiting = self._unacknowledged
        while waiting and waiting[0][0] <= sequence:
            number, _, sent_s = waiting.popleft()
            if is_measured and number > self._resent_through:
                self.latencies_s.append(now_s - sent_s)
        self.acknowledged = max(self.acknowledged, sequence)
        if not self.back.resent_s and self.acknowledged >= self._resent_through > 0:
            self.back.resent_s = time.monotonic()

    def _take_offer(self, offer: pb.PlanOffer) -> None:
        rank = self._by_place[wire.Place(offer.rank.pipeline, offer.rank.stage)]
        rank.check(offer, self._findings)
        is_late = offer.start_iteration <= self.iteration and offer.version != rank.version
        answer = pb.PlanAnswer(
            job_id=rank.job_id,
            rank=offer.rank,
            epoch=offer.epoch,
            version=offer.version,
            accepted=not is_late,
            refusal_reason=_PAST_START if is_late else rank_pb2.PLAN_REFUSAL_REASON_UNSPECIFIED,
            iteration=self.iteration,
        )
        self._answers.append(pb.ConnectRequest(plan_answer=answer).SerializeToString())
        if not is_late:
            rank.pending = offer if offer.version != rank.version else None
        if self.offered is not None:
            self.offered(rank, is_late)


_HEARTBEAT = pb.ConnectRequest(heartbeat=pb.Heartbeat()).SerializeToString()
