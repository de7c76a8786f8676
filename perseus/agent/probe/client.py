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
that appears later, or that was restarted, is joined between two iterations (`probe.line`).

Every rank says what it computes before it is served, so that none is ever given clocks that were made for
other work: all call `register` with the same arguments, and the first of them registers the job.

In a child that the trainer forks the probe does nothing.

Standard library only. One probe serves one rank; it is not to be shared between threads.
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
    Finish,
    Hello,
    MarkType,
    Membership,
    Registration,
    encode,
    mark_packer,
)
from perseus.agent.probe.agent_connection import AgentConnection
from perseus.agent.probe.job_spec import (
    NamedSchedule,
    Path,
    StageOrders,
    check_count,
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
    """One rank's line to the agent. Made by `connect`."""

    def __init__(self, rank: Rank, connection: AgentConnection) -> None:
        self._rank = rank
        self._connection = connection
        self._fingerprint = ""
        self._request_id = uuid.uuid4().hex
        self._has_begun = False
        self._iteration = 0
        self._ordinal = -1
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

        `socket_path` is PERSEUS_AGENT_SOCKET by default, and /run/perseus/agent.sock where that is not set.
        `is_registered`: somebody else registers the job, and no rank calls `register`; that the ranks compute
        what was registered is then nobody's to check.
        ValueError for coordinates that can not be; an agent that is absent, does not answer or refuses is
        logged, and the probe then does nothing.
        """
        if not job_id:
            raise ValueError("job_id: expected a name, found an empty string")
        for name, value in (("pipeline", pipeline), ("stage", stage), ("tensor", tensor)):
            check_count(name, value, at_least=0)
        if not gpu_uuid:
            raise ValueError("gpu_uuid: expected the GPU's NVML UUID, found an empty string")
        path = os.fspath(socket_path or os.environ.get(SOCKET_VARIABLE) or DEFAULT_SOCKET_PATH)
        rank = Rank(job_id, pipeline, stage, tensor)

        def hello() -> bytes:
            return encode(Hello(rank, gpu_uuid, is_registered, monotonic_ns()))

        return cls(rank, AgentConnection.introduce(rank, path, hello, timeout_s))

    @property
    def is_connected(self) -> bool:
        """Whether an agent listens, as far as known."""
        return self._connection.is_connected

    @property
    def dropped_mark_count(self) -> int:
        """Marks dropped so far because the socket was full."""
        return self._connection.dropped_count

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
        registers = (self._rank.pipeline, self._rank.stage, self._rank.tensor) == (0, 0, 0)
        membership = (
            Registration(spec, self._request_id, fingerprint) if registers else Membership(fingerprint)
        )
        return self._connection.join_job(
            encode(membership), is_answered=registers, timeout_s=timeout_s, waits=waits
        )

    def begin_iteration(self, time_ns: int | None = None, *, relative_work: float | None = None) -> None:
        """The next iteration begins: now, or at a time of CLOCK_MONOTONIC. So for all marks.

        `relative_work`: how much there is to compute in it for this rank's pipeline, where that depends on
        the data, relative to a typical iteration: 0.001 to 1000. A pipeline that takes longer for more work
        is no straggler. Anything else counts as not told, and is said once.
        """
        self._iteration += self._has_begun
        self._has_begun = True
        self._ordinal = -1
        self._connection.maintain()
        try:
            work = 0 if relative_work is None else self._permille(relative_work)
            self._connection.send(
                _pack_iteration_begin(0, 0, 0, work, self._iteration, time_ns or monotonic_ns())
            )
        except (OSError, struct.error) as error:
            self._not_sent(error)

    def end_iteration(self, time_ns: int | None = None) -> None:
        """The iteration ends."""
        try:
            self._connection.send(
                _pack_iteration_end(
                    0, 0, 0, self._connection.dropped_here_count, self._iteration, time_ns or monotonic_ns()
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
        """The computation ends."""
        ordinal = self._ordinal if self._ordinal >= 0 else 0
        try:
            self._connection.send(
                _pack_end(kind, microbatch, chunk, ordinal, self._iteration, time_ns or monotonic_ns())
            )
        except (OSError, struct.error) as error:
            self._not_sent(error)

    def begin_wait(self, time_ns: int | None = None) -> None:
        """The computation under way begins to wait for other ranks: such time is none of its own."""
        try:
            self._connection.send(_pack_wait_begin(0, 0, 0, 0, self._iteration, time_ns or monotonic_ns()))
        except (OSError, struct.error) as error:
            self._not_sent(error)

    def end_wait(self, time_ns: int | None = None) -> None:
        """It computes again."""
        try:
            self._connection.send(_pack_wait_end(0, 0, 0, 0, self._iteration, time_ns or monotonic_ns()))
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
        self._connection.send_last(encode(Finish(monotonic_ns())), _FINISH_TIMEOUT_S)

    def close(self) -> None:
        """Close the connection. Without `finish` before, the agent takes it for a failure of the trainer."""
        self._connection.close()

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
            _log.error("%s: marks that can not be are left out: %s", self._rank, error)
        self._has_mistaken_mark = True


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
