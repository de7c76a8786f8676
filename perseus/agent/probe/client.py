"""The probe: sends a training process's marks to the agent on its node. All of Perseus that runs there.

    with Probe.connect(job_id="gpt", pipeline=0, stage=3, tensor=0, gpu_uuid=uuid) as probe:
        probe.register(pipeline_count=2, stage_count=4, schedule=NamedSchedule("1f1b", 8))
        for batch in batches:
            with probe.iteration():
                ...
                with probe.computation(Kind.FORWARD, microbatch=0):
                    ...

Before training, `connect` and `register` raise ValueError for programming mistakes, and wait for the agent's
reply. After that everything is fire and forget: a mark costs a few microseconds, is dropped (and counted) if
the socket is full, and no failure of the agent or the socket raises into training. Without an agent the probe
logs that once, and does nothing: training continues at stock. It joins an agent that starts later, or
restarts, between two iterations (`probe.agent_connection`).

Every rank declares its work before it is served, so that no rank gets clocks that were made for other work:
all call `register` with the same arguments, and the first of them registers the job.

In a child that the trainer forks the probe does nothing.

Standard library only. One probe serves one rank; it must not be shared between threads.
"""

import logging
import os
import struct
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic_ns
from types import TracebackType
from typing import Any, Self

from perseus.agent.link.address import DEFAULT_SOCKET_PATH, SOCKET_VARIABLE
from perseus.agent.link.computation import Kind, Rank
from perseus.agent.link.packets import (
    MAX_RELATIVE_WORK_PERMILLE,
    MAX_UNMARKED_LENGTH,
    MAX_WORK,
    WORK_BASE,
    Finish,
    Hello,
    MarkType,
    Membership,
    Registration,
    Saving,
    Unmarked,
    encode,
    mark_packer,
)
from perseus.agent.probe.agent_connection import AgentConnection
from perseus.agent.probe.job_spec import (
    NamedSchedule,
    Path,
    StageOrders,
    check_count,
    check_job,
    job_spec,
    spec_fingerprint,
)

_log = logging.getLogger("perseus.probe")

# Training is over when finish() is called, so it may wait a moment for a full socket.
_FINISH_TIMEOUT_S = 1.0

_pack_iteration_begin = mark_packer(MarkType.ITERATION_BEGIN)
_pack_iteration_end = mark_packer(MarkType.ITERATION_END)
_pack_begin = mark_packer(MarkType.COMPUTATION_BEGIN)
_pack_end = mark_packer(MarkType.COMPUTATION_END)
_pack_wait_begin = mark_packer(MarkType.WAIT_BEGIN)
_pack_wait_end = mark_packer(MarkType.WAIT_END)


class Probe:
    """One rank's connection to the agent. Made by `connect`."""

    def __init__(self, rank: Rank, connection: AgentConnection) -> None:
        self._rank = rank
        self._connection = connection
        self._fingerprint = ""
        self._request_id = uuid.uuid4().hex
        self._has_begun = False
        self._iteration = 0
        self._ordinal = -1
        self._work = 0
        self._has_refused_work = False
        self._has_mistaken_mark = False

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

        `socket_path` is PERSEUS_AGENT_SOCKET by default, and /run/perseus/agent.sock if that is not set.
        `is_registered`: another client registers the job, and no rank calls `register`; then nothing checks
        that the ranks compute what was registered. Raises ValueError for a job identifier that the
        coordinator would refuse, and for impossible coordinates. If the agent is absent, does not answer or
        refuses, the probe logs that and does nothing.
        """
        check_job(job_id)
        for name, value in (("pipeline", pipeline), ("stage", stage), ("tensor", tensor)):
            check_count(name, value, at_least=0)
        if not gpu_uuid:
            raise ValueError("gpu_uuid: expected the GPU's NVML UUID, found an empty string")
        path = os.fspath(socket_path or os.environ.get(SOCKET_VARIABLE) or DEFAULT_SOCKET_PATH)
        rank = Rank(job_id, pipeline, stage, tensor)

        def hello() -> bytes:
            return encode(Hello(rank, gpu_uuid, is_registered, monotonic_ns(), packs_marks=True))

        return cls(rank, AgentConnection.introduce(rank, path, hello, timeout_s))

    @property
    def is_connected(self) -> bool:
        """Whether an agent is connected, as far as known."""
        return self._connection.is_connected

    @property
    def dropped_mark_count(self) -> int:
        """Marks dropped so far because the socket was full."""
        return self._connection.dropped_count

    @property
    def saving(self) -> Saving | None:
        """What the job's plans save; None while that is unknown, and on all ranks but the job's first."""
        return self._connection.saving

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
        stage_layers: Sequence[Sequence[int]] = (),
        timeout_s: float = 15.0,
        waits: bool = True,
    ) -> bool:
        """Register the job's computations; all of its ranks call this, with the same arguments.

        The first one (pipeline, stage and tensor 0) registers the job with the coordinator, and waits for the
        answer; the others only declare their membership. A rank is served once it has done so.

        `paths`, with explicit orders: how activations flow through the stages' chunks, if not chunk by chunk.
        `max_slowdown_percent` is how much slower than stock plans may be. `stage_work`: for each stage a text
        that is equal wherever its computations are (model, microbatch shape, versions), which identifies its
        stored profile. `stage_layers`: for each stage the number of layers of each chunk, for the advice on
        moving them. Registering an unfinished job again, such as after a restart, changes nothing. During
        training, as to change the order, call this between two iterations with `waits` off: it does not block
        the trainer, and the outcome is logged. Returns whether the job is registered, or will be as soon as
        the agent reaches the coordinator, as far as this rank knows; a refusal and its reason are logged. An
        agent that is joined later receives the registration then. Raises ValueError for impossible counts,
        for a schedule that does not have `stage_count` stages and for paths of a named schedule.
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
            stage_layers=stage_layers,
        )
        fingerprint = spec_fingerprint(spec)
        if self._fingerprint not in ("", fingerprint):
            self._request_id = uuid.uuid4().hex
        self._fingerprint = fingerprint
        registers = (self._rank.pipeline, self._rank.stage, self._rank.tensor) == (0, 0, 0)
        membership = (
            Registration(spec, self._request_id, fingerprint) if registers else Membership(fingerprint)
        )
        return self._connection.join_job(
            encode(membership), is_answered=registers, timeout_s=timeout_s, waits=waits
        )

    def begin_iteration(self, time_ns: int | None = None, *, relative_work: float | None = None) -> None:
        """Mark the begin of the next iteration, now or at a time of CLOCK_MONOTONIC; the same for all marks.

        `relative_work`: the work of this rank's pipeline in the iteration, if it depends on the data,
        relative to a typical iteration: 0.001 to 1000. A pipeline that takes longer for more work is no
        straggler. Any other value counts as unknown, and is logged once.
        """
        self._iteration += self._has_begun
        self._has_begun = True
        self._ordinal = -1
        self._work = 0
        self._connection.maintain()
        try:
            work = 0 if relative_work is None else self._permille(relative_work)
            self._connection.send(
                _pack_iteration_begin(0, 0, 0, work, self._iteration, time_ns or monotonic_ns())
            )
            self._connection.flush()
        except (OSError, struct.error) as error:
            self._not_sent(error)

    def end_iteration(self, time_ns: int | None = None) -> None:
        """Mark the end of the iteration."""
        high, low = divmod(min(self._work, MAX_WORK), WORK_BASE)
        dropped = self._connection.dropped_here_count
        try:
            self._connection.send(
                _pack_iteration_end(0, low, high, dropped, self._iteration, time_ns or monotonic_ns())
            )
            self._connection.flush()
        except (OSError, struct.error) as error:
            self._not_sent(error)

    def begin_computation(
        self, kind: Kind, microbatch: int, chunk: int = 0, time_ns: int | None = None
    ) -> None:
        """Mark the begin of a computation of this iteration."""
        self._ordinal += 1
        try:
            self._connection.send(
                _pack_begin(
                    kind, microbatch, chunk, self._ordinal, self._iteration, time_ns or monotonic_ns()
                )
            )
        except (OSError, struct.error) as error:
            self._not_sent(error)

    def end_computation(
        self, kind: Kind, microbatch: int, chunk: int = 0, time_ns: int | None = None
    ) -> None:
        """Mark the end of the computation."""
        ordinal = self._ordinal if self._ordinal >= 0 else 0
        try:
            self._connection.send(
                _pack_end(kind, microbatch, chunk, ordinal, self._iteration, time_ns or monotonic_ns())
            )
        except (OSError, struct.error) as error:
            self._not_sent(error)

    def count_work(self, elements: int) -> None:
        """Add to the work of this iteration, if it depends on the data: the elements of the model's inputs.

        How iterations' times follow it is learned. Where `relative_work` is stated, that counts.
        """
        self._work += elements

    def begin_wait(self, time_ns: int | None = None) -> None:
        """Mark the begin of a wait for other ranks: the wait does not count for the current computation."""
        try:
            self._connection.send(_pack_wait_begin(0, 0, 0, 0, self._iteration, time_ns or monotonic_ns()))
        except (OSError, struct.error) as error:
            self._not_sent(error)

    def end_wait(self, time_ns: int | None = None) -> None:
        """Mark the end of the wait."""
        try:
            self._connection.send(_pack_wait_end(0, 0, 0, 0, self._iteration, time_ns or monotonic_ns()))
        except (OSError, struct.error) as error:
            self._not_sent(error)

    def report_unmarked(self, message: str) -> None:
        """Report that training goes on without marked iterations, and why; until the next mark."""
        self._connection.send_report(encode(Unmarked(message[:MAX_UNMARKED_LENGTH])))

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
        """Report that the job no longer needs this rank. Waits up to a second for a full socket."""
        self._connection.send_last(encode(Finish(monotonic_ns())), _FINISH_TIMEOUT_S)

    def close(self) -> None:
        """Close the connection. Without a prior `finish`, the agent treats this as a trainer's failure."""
        self._connection.close()

    def _permille(self, relative_work: float) -> int:
        """Return relative work in thousandths, 0 if it is invalid."""
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self.finish()
        self.close()

    def _not_sent(self, error: OSError | struct.error) -> None:
        if isinstance(error, OSError):
            self._connection.not_sent(error)
            return
        if not self._has_mistaken_mark:
            _log.error("%s: invalid marks are dropped: %s", self._rank, error)
        self._has_mistaken_mark = True


class _Block:
    """Marks a block's begin and end. A block left by an exception was not completed and gets no end."""

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
