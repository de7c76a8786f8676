"""Limits on one principal's use of the coordinator: how much at once, how large, how often.

All agents of a cluster may share one token, so limits on a principal are wide: above any cluster known. Each
stream has its own limit as well. The coordinator refuses a request beyond a limit, with a retry delay where
time helps. It does not refuse messages that arrive too fast: they wait, and flow control makes their sender
wait.
"""

from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from perseus.service.domain.errors import InvalidFieldError

if TYPE_CHECKING:  # settings are also read where no solver is installed
    from perseus.service.domain.specification import JobSpec

MAX_SETTING = 2**53
"""The largest integer that fits a double, a database column and a protobuf field alike."""

ROWS_LIKE_A_MESSAGE = 1024
"""Every so many rows of telemetry count as one more message."""


class Limits(BaseModel):
    """The limits of each principal, as the operator sets them.

    Each rank that a job declares takes some 1.4 KB of memory, each computation some 0.4 KB.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    limit_streams: int = Field(
        default=16_384,
        ge=1,
        le=MAX_SETTING,
        description="Agents and watchers of one principal at once, at most.",
    )
    limit_messages_per_s: float = Field(
        default=20_000.0, ge=1, description="Messages a second that all agents of one principal may send."
    )
    limit_stream_messages_per_s: float = Field(
        default=1_000.0, ge=1, description="Messages a second that one agent may send."
    )
    limit_jobs: int = Field(
        default=1_024,
        ge=1,
        le=MAX_SETTING,
        description="Live jobs that one principal has registered, at most.",
    )
    limit_ranks: int = Field(
        default=524_288, ge=1, le=MAX_SETTING, description="Ranks of these jobs, at most."
    )
    limit_computations: int = Field(
        default=1_048_576,
        ge=1,
        le=MAX_SETTING,
        description="Computations of the schedules of these jobs, at most.",
    )
    limit_solves: int = Field(
        default=8,
        ge=1,
        le=MAX_SETTING,
        description="Solves and plans that one principal may wait for at once, and likewise listings of the "
        "ledger.",
    )
    limit_solve_computations: int = Field(
        default=8_192,
        ge=1,
        le=65_536,
        description="Computations of a problem that a client submits, at most.",
    )
    limit_batch_rows: int = Field(
        default=100_000, ge=1, le=1_000_000, description="Computations in one batch of telemetry, at most."
    )
    limit_message_bytes: int = Field(
        default=4_194_304, ge=65_536, le=2**30, description="Bytes of one message, unpacked, at most."
    )
    limit_budgets: int = Field(
        default=256,
        ge=1,
        le=MAX_SETTING,
        description="Power budgets of one principal that have not ended, at most.",
    )

    def check_job(self, spec: "JobSpec") -> None:
        """Refuse a job that exceeds the limits by itself, so that waiting can't help.

        Raises:
            InvalidFieldError: names the field.
        """
        spec.parallelism.check()
        if spec.rank_count > self.limit_ranks:
            expected = f"at most {self.limit_ranks} ranks, the limit for one principal"
            raise InvalidFieldError(field="parallelism", expected=expected, found=spec.rank_count)
        if spec.computation_count > self.limit_computations:
            expected = f"at most {self.limit_computations} computations, the limit for one principal"
            raise InvalidFieldError(field="schedule", expected=expected, found=spec.computation_count)

    def check_rows(self, row_count: int) -> None:
        """Refuse a batch of telemetry with too many computations.

        Raises:
            InvalidFieldError: names the field.
        """
        if row_count > self.limit_batch_rows:
            from perseus.service.domain.bounds import check_size

            check_size("computations.iteration", row_count, self.limit_batch_rows)


class TokenBucket:
    """A rate limit on messages that allows a burst of one second's worth after a silence. Pure.

    It rejects nothing: it returns how long an early message must wait, in order of arrival, so that later
    messages wait longer. (A leaky bucket as a virtual schedule: the generic cell rate algorithm, ITU-T I.371,
    with a queue.) Times are seconds of any monotonic clock.
    """

    __slots__ = ("_burst_s", "_next_s", "_s_per_message")

    def __init__(self, messages_per_s: float, burst_s: float = 1.0) -> None:
        self._s_per_message = 1.0 / messages_per_s
        self._burst_s = burst_s
        # When the next message is due in an evenly spaced stream.
        self._next_s = float("-inf")

    def take(self, now_s: float, message_count: int = 1) -> float:
        """Count messages; return how long they must wait in seconds, 0 for no wait."""
        due_s = self._next_s
        if due_s < now_s:
            due_s = now_s
        self._next_s = due_s = due_s + message_count * self._s_per_message
        wait_s = due_s - now_s - self._burst_s
        return wait_s if wait_s > 0.0 else 0.0
