"""The probe: what a training process says to the agent on its node, and all of Perseus that runs in it.

    with Probe.connect(job_id="gpt", pipeline=0, stage=3, tensor=0, gpu_uuid=uuid) as probe:
        probe.register(pipeline_count=2, stage_count=4, schedule=NamedSchedule("1f1b", 8))
        for batch in batches:
            with probe.iteration():
                ...
                with probe.computation(Kind.FORWARD, microbatch=0):
                    ...

Before training, `connect` and `register` refuse what can only be a programming mistake (ValueError), and wait
for the agent's reply. After that everything is fire and forget: a mark costs a few microseconds, is dropped
(and counted) where the socket is full, and nothing that the agent or the socket does raises into training.
Without an agent the probe says so once, in the log, and does nothing: training goes on at stock. An agent
that appears later, or that was restarted, is joined between two iterations.

Every rank says what it computes before it is served, so that none is ever given clocks that were made for
other work: all call `register` with the same arguments, and the first of them registers the job.

A child that the trainer forks (a data loader, a checkpoint writer) closes the connection that it inherits at
once: it would keep the agent from seeing the trainer's end, and it is not the rank. Its probe does nothing.

Standard library only. One probe serves one rank; it is not to be shared between threads.
"""

import hashlib
import json
import logging
import os
import socket
import struct
import uuid
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic_ns
from types import TracebackType
from typing import Any, Self

from perseus.agent.link.address import DEFAULT_SOCKET_PATH, SOCKET_VARIABLE
from perseus.agent.link.computation import Computation, Kind, Rank
from perseus.agent.link.packets import (
    MAX_PACKET_BYTES,
    MAX_RELATIVE_WORK_PERMILLE,
    Finish,
    Hello,
    MalformedPacket,
    MarkType,
    Membership,
    Registration,
    Reply,
    decode,
    encode,
    mark_packer,
)
from perseus.agent.probe.rejoin import Rejoin

_log = logging.getLogger("perseus.probe")

# The names that operators use, and the numbers of perseus.v1.ScheduleName.
_SCHEDULE_NAMES = {"gpipe": 1, "1f1b": 2}
# Ranks that train otherwise than before are live for a moment: the registration is made again then.
_JOB_EXISTS = "JOB_ALREADY_EXISTS"
# How often a look is taken at what the agent says of itself: one costs the trainer a microsecond or two.
_NOTICE_PERIOD_NS = 10**9
_MOST_NOTICE_BYTES = 16 * 1024
_MOST_TOLD_DROPPED = 2**31 - 1  # what a mark has room for
# Training is over when finish() is called, so it may wait a moment for a full socket.
_FINISH_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class NamedSchedule:
    """A schedule that follows from its name, "1f1b" or "gpipe", and its microbatches per iteration."""

    name: str
    microbatch_count: int

    def __post_init__(self) -> None:
        if self.name not in _SCHEDULE_NAMES:
            raise ValueError(
                f"schedule name: expected one of {', '.join(_SCHEDULE_NAMES)}, found {self.name!r}"
            )
        _check_count("microbatch_count", self.microbatch_count, at_least=1)


# Each stage's computations in order, stage 0 first.
StageOrders = Sequence[Sequence[Computation]]
# How activations flow: (stage, chunk) after (stage, chunk).
Path = Sequence[tuple[int, int]]

_pack_iteration_begin = mark_packer(MarkType.ITERATION_BEGIN)
_pack_iteration_end = mark_packer(MarkType.ITERATION_END)
_pack_begin = mark_packer(MarkType.COMPUTATION_BEGIN)
_pack_end = mark_packer(MarkType.COMPUTATION_END)
_pack_wait_begin = mark_packer(MarkType.WAIT_BEGIN)
_pack_wait_end = mark_packer(MarkType.WAIT_END)


class Probe:
    """One rank's line to the agent. Made by `connect`."""

    def __init__(self, rank: Rank, line: socket.socket | None, path: str, hello: Callable[[], bytes]) -> None:
        self._rank = rank
        self._path = path
        self._hello = hello
        self._socket = line
        self._rejoin = Rejoin(path, hello, monotonic_ns()) if line is None else None
        # What the rank belongs to, once it has said so: its registration, or that of the first rank.
        self._membership: bytes | None = None
        self._fingerprint = ""
        self._request_id = uuid.uuid4().hex
        # While training: what it belongs to is to be sent; what became of the registration is yet to be said.
        self._is_unsent = False
        self._is_registering = False
        self._has_refused_work = False
        self._notice_at_ns = 0
        # What marks are sent by; bound once, as marks must cost little.
        self._send: Callable[[bytes], object] = line.send if line is not None else _discard
        self._has_begun = False
        self._iteration = 0
        self._ordinal = -1
        self._dropped_mark_count = 0
        # Since the connection of now began: an agent counts what it is told on each.
        self._dropped_on_line = 0
        self._has_mistaken_mark = False
        _probes.add(self)

    @classmethod
    def connect(
        cls,
        socket_path: str | os.PathLike[str] | None = None,
        *,
        job_id: str,
        pipeline: int,
        stage: int,
        tensor: int = 0,
        gpu_uuid: str,
        is_registered: bool = False,
        timeout_s: float = 5.0,
    ) -> "Probe":
        """Introduce a rank to the agent of its node and wait for the reply.

        `socket_path` is PERSEUS_AGENT_SOCKET by default, and /run/perseus/agent.sock where that is not set.
        `is_registered`: somebody else registers the job, and no rank calls `register`; that the ranks compute
        what was registered is then nobody's to check.
        ValueError for coordinates that can not be; an agent that is absent, does not answer or refuses is
        logged, and the probe then does nothing.
        """
        if not job_id:
            raise ValueError("job_id: expected a name, found an empty string")
        for name, value in (("pipeline", pipeline), ("stage", stage), ("tensor", tensor)):
            _check_count(name, value, at_least=0)
        if not gpu_uuid:
            raise ValueError("gpu_uuid: expected the GPU's NVML UUID, found an empty string")
        path = os.fspath(socket_path or os.environ.get(SOCKET_VARIABLE) or DEFAULT_SOCKET_PATH)
        rank = Rank(job_id, pipeline, stage, tensor)

        def hello() -> bytes:
            return encode(Hello(rank, gpu_uuid, is_registered, monotonic_ns()))

        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            line.settimeout(timeout_s)
            line.connect(path)
            line.send(hello())
            reply = _receive_reply(line)
        except (OSError, MalformedPacket) as error:
            _log.warning("%s: no agent at %s (%s): training goes on at stock clocks", rank, path, error)
            line.close()
            return cls(rank, None, path, hello)
        if not reply.ok:
            _log.warning(
                "%s: the agent at %s refuses: %s: training goes on at stock clocks", rank, path, reply.message
            )
            line.close()
            return cls(rank, None, path, hello)
        if reply.message:
            _log.warning(
                "%s: the agent at %s: %s: training goes on at stock clocks", rank, path, reply.message
            )
        line.setblocking(False)
        return cls(rank, line, path, hello)

    @property
    def is_connected(self) -> bool:
        """Whether an agent listens, as far as known."""
        return self._socket is not None

    @property
    def dropped_mark_count(self) -> int:
        """Marks dropped so far because the socket was full."""
        return self._dropped_mark_count

    def register(
        self,
        *,
        pipeline_count: int,
        stage_count: int,
        tensor_count: int = 1,
        schedule: NamedSchedule | StageOrders,
        paths: Sequence[Path] = (),
        max_slowdown_percent: float = 0.0,
        stage_work: Sequence[str] = (),
        timeout_s: float = 15.0,
        waits: bool = True,
    ) -> bool:
        """Say what the job computes; called by all of its ranks, with the same arguments.

        The first one (pipeline, stage and tensor 0) registers the job with the coordinator, and waits for the
        answer; the others only say that this is what they belong to. A rank is served once it has said so.

        `paths`, with explicit orders: how activations flow through the stages' chunks, where that is not
        chunk by chunk. `max_slowdown_percent` is how much slower than stock plans may be. `stage_work`: for
        each stage a text that is the same wherever its computations are (model, microbatch shape, versions),
        by which its profile is found again. Registering the same job again, after a restart say, changes
        nothing while it has not finished. Where another order is to go by from now on, in the midst of
        training, say so between two iterations with `waits` off: the trainer is not kept waiting, and what
        becomes of it is logged. Returns whether the job is registered, or will be as soon as the
        agent reaches the coordinator, as far as this rank knows; a refusal and its reason are logged. An
        agent that is joined later is told then. ValueError for counts that can not be, for a schedule that
        does not have `stage_count` stages and for paths of a named schedule.
        """
        spec = job_spec(
            self._rank.job_id,
            pipeline_count=pipeline_count,
            stage_count=stage_count,
            tensor_count=tensor_count,
            schedule=schedule,
            paths=paths,
            max_slowdown_percent=max_slowdown_percent,
            stage_work=stage_work,
        )
        fingerprint = spec_fingerprint(spec)
        if self._fingerprint not in ("", fingerprint):
            self._request_id = uuid.uuid4().hex
        self._fingerprint = fingerprint
        if self._registers:
            self._membership = encode(Registration(spec, self._request_id, fingerprint))
        else:
            self._membership = encode(Membership(fingerprint))
        if self._socket is None:
            return False
        if not waits:
            self._is_unsent = True
            self._look_after_agent()
            return True
        try:
            self._socket.settimeout(timeout_s)
            self._socket.send(self._membership)
            reply = self._receive_answer(self._socket) if self._registers else Reply(True)
            self._socket.setblocking(False)
        except (OSError, MalformedPacket) as error:
            self._lose(error)
            return False
        self._log_registration(reply)
        return reply.ok

    @property
    def _registers(self) -> bool:
        return (self._rank.pipeline, self._rank.stage, self._rank.tensor) == (0, 0, 0)

    def begin_iteration(self, time_ns: int | None = None, *, relative_work: float | None = None) -> None:
        """The next iteration begins: now, or at a time of CLOCK_MONOTONIC. So for all marks.

        `relative_work`: how much there is to compute in it for this rank's pipeline, where that depends on
        the data, relative to a typical iteration: 0.001 to 1000. A pipeline that takes longer for more work
        is no straggler. Anything else counts as not told, and is said once.
        """
        self._iteration += self._has_begun
        self._has_begun = True
        self._ordinal = -1
        if self._rejoin is not None or self._is_unsent or self._is_registering:
            self._look_after_agent()
        elif monotonic_ns() >= self._notice_at_ns:
            self._hear_notices()
        try:
            work = 0 if relative_work is None else self._permille(relative_work)
            self._send(_pack_iteration_begin(0, 0, 0, work, self._iteration, time_ns or monotonic_ns()))
        except (OSError, struct.error) as error:
            self._not_sent(error)

    def end_iteration(self, time_ns: int | None = None) -> None:
        """The iteration ends."""
        try:
            self._send(
                _pack_iteration_end(
                    0, 0, 0, self._dropped_on_line, self._iteration, time_ns or monotonic_ns()
                )
            )
        except (OSError, struct.error) as error:
            self._not_sent(error)

    def begin_computation(
        self, kind: Kind, microbatch: int, chunk: int = 0, time_ns: int | None = None
    ) -> None:
        """A computation of this iteration begins."""
        self._ordinal += 1
        try:
            self._send(
                _pack_begin(
                    kind, microbatch, chunk, self._ordinal, self._iteration, time_ns or monotonic_ns()
                )
            )
        except (OSError, struct.error) as error:
            self._not_sent(error)

    def end_computation(
        self, kind: Kind, microbatch: int, chunk: int = 0, time_ns: int | None = None
    ) -> None:
        """The computation ends."""
        ordinal = self._ordinal if self._ordinal >= 0 else 0
        try:
            self._send(
                _pack_end(kind, microbatch, chunk, ordinal, self._iteration, time_ns or monotonic_ns())
            )
        except (OSError, struct.error) as error:
            self._not_sent(error)

    def begin_wait(self, time_ns: int | None = None) -> None:
        """The computation under way begins to wait for other ranks: such time is none of its own."""
        try:
            self._send(_pack_wait_begin(0, 0, 0, 0, self._iteration, time_ns or monotonic_ns()))
        except (OSError, struct.error) as error:
            self._not_sent(error)

    def end_wait(self, time_ns: int | None = None) -> None:
        """It computes again."""
        try:
            self._send(_pack_wait_end(0, 0, 0, 0, self._iteration, time_ns or monotonic_ns()))
        except (OSError, struct.error) as error:
            self._not_sent(error)

    def iteration(self, *, relative_work: float | None = None) -> "_Block":
        """`with probe.iteration():` begins and ends an iteration. `relative_work` as in `begin_iteration`."""
        begin = self.begin_iteration
        if relative_work is not None:
            begin = partial(begin, relative_work=relative_work)
        return _Block(begin, self.end_iteration, ())

    def computation(self, kind: Kind, microbatch: int, chunk: int = 0) -> "_Block":
        """`with probe.computation(kind, microbatch, chunk):` begins and ends a computation."""
        return _Block(self.begin_computation, self.end_computation, (kind, microbatch, chunk))

    def finish(self) -> None:
        """Training is done: the job needs this rank no more. Waits up to a second for a full socket."""
        if self._socket is None:
            return
        try:
            self._socket.settimeout(_FINISH_TIMEOUT_S)
            self._socket.send(encode(Finish(monotonic_ns())))
            self._socket.setblocking(False)
        except OSError as error:
            self._lose(error)

    def close(self) -> None:
        """Close the connection. Without `finish` before, the agent takes it for a failure of the trainer."""
        if self._rejoin is not None:
            self._rejoin.close()
            self._rejoin = None
        if self._socket is None:
            return
        if self._dropped_mark_count:
            _log.warning(
                "%s: %d marks dropped because the agent's socket was full",
                self._rank,
                self._dropped_mark_count,
            )
        self._socket.close()
        self._socket, self._send = None, _discard

    def _permille(self, relative_work: float) -> int:
        """Relative work in thousandths, 0 for what is none."""
        try:
            permille = round(1000 * relative_work)
        except (TypeError, ValueError, OverflowError):
            permille = 0
        if 1 <= permille <= MAX_RELATIVE_WORK_PERMILLE:
            return permille
        if not self._has_refused_work:
            self._has_refused_work = True
            _log.warning("%s: relative_work: expected 0.001 to 1000, found %r", self._rank, relative_work)
        return 0

    def _after_fork(self) -> None:
        """In the child: the parent's connection goes on, without us."""
        if self._rejoin is not None:
            self._rejoin.close()
            self._rejoin = None
        if self._socket is not None:
            self._socket.close()
            self._socket, self._send = None, _discard
        self._is_registering = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self.finish()
        self.close()

    def _not_sent(self, error: OSError | struct.error) -> None:
        if isinstance(error, BlockingIOError):
            self._dropped_mark_count += 1
            self._dropped_on_line = min(self._dropped_on_line + 1, _MOST_TOLD_DROPPED)
        elif isinstance(error, OSError):
            self._lose(error)
        else:
            if not self._has_mistaken_mark:
                _log.error("%s: marks that can not be are left out: %s", self._rank, error)
            self._has_mistaken_mark = True

    def _lose(self, error: Exception) -> None:
        """The line is of no use any more: say so once, and do nothing until there is another."""
        if self._socket is not None and (refusal := _last_words(self._socket)) is not None:
            _log.warning(
                "%s: the agent refuses: %s: training goes on at stock clocks", self._rank, refusal.message
            )
        else:
            _log.warning("%s: lost the agent (%s): training goes on at stock clocks", self._rank, error)
        if self._socket is not None:
            self._socket.close()
            self._socket, self._send = None, _discard
        self._is_unsent = self._is_registering = False
        self._rejoin = Rejoin(self._path, self._hello, monotonic_ns())

    def _look_after_agent(self) -> None:
        """Between two iterations: join an agent if there is one, say what the rank belongs to, hear of it."""
        try:
            if self._rejoin is not None and (line := self._rejoin.look(monotonic_ns())) is not None:
                _log.info("%s: joined the agent at %s", self._rank, self._path)
                self._rejoin, self._socket, self._send = None, line, line.send
                self._dropped_on_line = 0
                self._is_unsent = self._membership is not None
            if self._socket is None:
                return
            if self._is_unsent and self._membership is not None:
                self._socket.send(self._membership)
                self._is_unsent, self._is_registering = False, self._registers
            elif self._is_registering:
                reply = self._receive_answer(self._socket)
                self._is_registering = False
                self._log_registration(reply, is_known=True)
        except BlockingIOError:
            pass  # no room for it yet, or no reply
        except (OSError, MalformedPacket) as error:
            self._lose(error)

    def _hear_notices(self) -> None:
        """Between two iterations, now and then: hear what became of the rank, if the agent says something."""
        self._notice_at_ns = monotonic_ns() + _NOTICE_PERIOD_NS
        if self._socket is None:
            return
        try:
            self._log_notice(_receive_reply(self._socket, _MOST_NOTICE_BYTES, socket.MSG_DONTWAIT))
        except BlockingIOError:
            pass  # nothing, as nearly always
        except (OSError, MalformedPacket) as error:
            self._lose(error)

    def _receive_answer(self, line: socket.socket) -> Reply:
        """The answer to a registration; notices that came before it are logged."""
        while (reply := _receive_reply(line)).is_notice:
            self._log_notice(reply)
        return reply

    def _log_notice(self, notice: Reply) -> None:
        _log.log(logging.INFO if notice.ok else logging.WARNING, "%s: %s", self._rank, notice.message)

    def _log_registration(self, reply: Reply, *, is_known: bool = False) -> None:
        """`is_known`: the job was registered before, and its ranks may be live as they were until now."""
        if not reply.ok and is_known and reply.reason == _JOB_EXISTS:
            _log.info(
                "%s: the job is registered anew once all of its ranks are: %s", self._rank, reply.message
            )
        elif not reply.ok:
            _log.error("%s: job not registered: %s", self._rank, reply.message)
        elif reply.message:
            _log.info("%s: %s", self._rank, reply.message)


_probes: "weakref.WeakSet[Probe]" = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for probe in list(_probes):
        probe._after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)


class _Block:
    """A begin and an end around a block. A block left by an exception has no end: it was not completed."""

    __slots__ = ("_arguments", "_begin", "_end")

    def __init__(
        self, begin: Callable[..., None], end: Callable[..., None], arguments: tuple[Any, ...]
    ) -> None:
        self._begin = begin
        self._end = end
        self._arguments = arguments

    def __enter__(self) -> None:
        self._begin(*self._arguments)

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error_type is None:
            self._end(*self._arguments)


def job_spec(
    job_id: str,
    *,
    pipeline_count: int,
    stage_count: int,
    tensor_count: int,
    schedule: NamedSchedule | StageOrders,
    paths: Sequence[Path] = (),
    max_slowdown_percent: float,
    stage_work: Sequence[str] = (),
) -> dict[str, Any]:
    """The job as proto3 JSON of `perseus.v1.JobSpec`. ValueError for what can not be."""
    _check_count("pipeline_count", pipeline_count, at_least=1)
    _check_count("stage_count", stage_count, at_least=1)
    _check_count("tensor_count", tensor_count, at_least=1)
    if not 0 <= max_slowdown_percent <= 100:
        raise ValueError(f"max_slowdown_percent: expected 0 to 100, found {max_slowdown_percent}")
    if stage_work and len(stage_work) != stage_count:
        raise ValueError(f"stage_work: expected none or {stage_count} texts, found {len(stage_work)}")
    order: dict[str, Any]
    if isinstance(schedule, NamedSchedule):
        if paths:
            raise ValueError(f"paths: expected none for schedule {schedule.name!r}, found {len(paths)}")
        order = {
            "named": {"name": _SCHEDULE_NAMES[schedule.name], "microbatchCount": schedule.microbatch_count}
        }
    else:
        if len(schedule) != stage_count:
            raise ValueError(f"schedule: expected the orders of {stage_count} stages, found {len(schedule)}")
        order = {
            "explicit": {
                "stages": [{"computations": [*map(_computation_json, stage)]} for stage in schedule],
                "paths": [
                    {"steps": [{"stage": stage, "chunk": chunk} for stage, chunk in path]} for path in paths
                ],
            }
        }
    policy: dict[str, Any] = (
        {"maxSlowdownPercent": max_slowdown_percent} if max_slowdown_percent else {"noSlowdown": {}}
    )
    return {
        "jobId": job_id,
        "parallelism": {
            "pipelineCount": pipeline_count,
            "stageCount": stage_count,
            "tensorCount": tensor_count,
        },
        "schedule": order,
        "policy": policy,
        "stageWork": [{"fingerprint": fingerprint} for fingerprint in stage_work],
    }


def spec_fingerprint(spec: dict[str, Any]) -> str:
    """What all ranks of a job say that they belong to: the same for the same specification, and short."""
    return hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:32]


def _computation_json(computation: Computation) -> dict[str, int]:
    return {
        "kind": int(computation.kind),
        "microbatch": computation.microbatch,
        "chunk": computation.chunk,
    }


def _discard(_packet: bytes) -> None:
    """Send nothing: there is no agent."""


def _check_count(name: str, value: int, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value < 2**31:
        raise ValueError(f"{name}: expected an integer of at least {at_least}, found {value!r}")


def _last_words(line: socket.socket) -> Reply | None:
    """Why the agent has closed a connection, if it said so."""
    line.setblocking(False)
    for _ in range(3):  # Linux reports a reset once, before what is still queued
        try:
            reply = _receive_reply(line)
        except ConnectionResetError:
            continue
        except (OSError, MalformedPacket):
            return None
        if not reply.ok:
            return reply
    return None


def _receive_reply(line: socket.socket, most_bytes: int = MAX_PACKET_BYTES, flags: int = 0) -> Reply:
    packet = line.recv(most_bytes, flags)
    if not packet:
        raise ConnectionResetError("the agent closed the connection")
    reply = decode(packet)
    if not isinstance(reply, Reply):
        raise MalformedPacket(f"expected a reply, found {type(reply).__name__}")
    return reply
