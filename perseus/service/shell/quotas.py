"""The resources of each principal, and its limits. Pure: the clock is given, nothing waits.

Every principal seen since the start has an account: there are at most as many as tokens and mapped
certificates. Under `--insecure` everybody is one principal.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

from perseus.service.domain.errors import LimitReachedError
from perseus.service.domain.limits import Limits, TokenBucket
from perseus.service.domain.specification import JobSpec


@dataclass(slots=True)
class _Account:
    bucket: TokenBucket
    counts: Counter[str] = field(default_factory=Counter)
    """How many of each resource are in use now, by its name."""


class RateLimiter:
    """Limits the messages of one stream, and those of all streams of its principal together."""

    __slots__ = ("_all", "_monotonic", "_own")

    def __init__(self, own: TokenBucket, all_: TokenBucket, monotonic: Callable[[], float]) -> None:
        self._own = own
        self._all = all_
        self._monotonic = monotonic

    def take(self, message_count: int = 1) -> float:
        """Count messages; return how many seconds to wait before more are read."""
        now_s = self._monotonic()
        own_s = self._own.take(now_s, message_count)
        all_s = self._all.take(now_s, message_count)
        return own_s if own_s > all_s else all_s


class Quotas:
    """The accounts of all principals, by their names."""

    def __init__(self, limits: Limits, monotonic: Callable[[], float]) -> None:
        self.limits = limits
        self._monotonic = monotonic
        self._accounts: dict[str, _Account] = {}

    @contextmanager
    def stream(self, principal: str) -> Iterator[RateLimiter]:
        """Count one more stream for the length of a block.

        Raises:
            LimitReachedError: it would be one too many.
        """
        with self._one_more(principal, "streams at once", self.limits.limit_streams) as account:
            yield RateLimiter(
                TokenBucket(self.limits.limit_stream_messages_per_s), account.bucket, self._monotonic
            )

    def solve(self, principal: str) -> AbstractContextManager[object]:
        """Count one more problem or plan to solve for the length of a block.

        Raises:
            LimitReachedError: it would be one too many.
        """
        return self._one_more(principal, "solves at once", self.limits.limit_solves)

    def listing(self, principal: str) -> AbstractContextManager[object]:
        """Count one more ledger listing for the length of a block: one after the other is added up.

        Raises:
            LimitReachedError: it would be one too many.
        """
        return self._one_more(principal, "ledger listings at once", self.limits.limit_solves)

    def check_job(self, principal: str, spec: JobSpec, others: Iterable[JobSpec]) -> None:
        """Check a new job together with the principal's other jobs.

        Raises:
            InvalidFieldError: the job is too large by itself.
            LimitReachedError: together they are too many, or too large.
        """
        limits = self.limits
        limits.check_job(spec)
        job_count, rank_count, computation_count = 1, spec.rank_count, spec.computation_count
        for other in others:
            job_count += 1
            rank_count += other.rank_count
            computation_count += other.computation_count
        _check(principal, "jobs", job_count, limits.limit_jobs)
        _check(principal, "ranks", rank_count, limits.limit_ranks)
        _check(principal, "computations", computation_count, limits.limit_computations)

    def check_budgets(self, principal: str, count: int) -> None:
        """Check that a principal may have one more power budget.

        Raises:
            LimitReachedError: it has as many as it may.
        """
        _check(principal, "power budgets that have not ended", count + 1, self.limits.limit_budgets)

    @contextmanager
    def _one_more(self, principal: str, what: str, limit: int) -> Iterator[_Account]:
        account = self._account(principal)
        _check(principal, what, account.counts[what] + 1, limit)
        account.counts[what] += 1
        try:
            yield account
        finally:
            account.counts[what] -= 1

    def _account(self, principal: str) -> _Account:
        account = self._accounts.get(principal)
        if account is None:
            account = self._accounts[principal] = _Account(TokenBucket(self.limits.limit_messages_per_s))
        return account


def _check(principal: str, what: str, count: int, limit: int) -> None:
    if count > limit:
        raise LimitReachedError(principal=principal, what=what, limit=limit, found=count)
