"""What each principal has at once, held against its limits. Pure: the clock is given, nothing waits.

One account for each principal that was ever seen since the start: there are no more than tokens and mapped
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
    """Of what goes on now, by what it is."""


class RateLimiter:
    """How fast one stream may speak: as fast as streams may, and all those of its principal together."""

    __slots__ = ("_all", "_monotonic", "_own")

    def __init__(self, own: TokenBucket, all_: TokenBucket, monotonic: Callable[[], float]) -> None:
        self._own = own
        self._all = all_
        self._monotonic = monotonic

    def take(self, message_count: int = 1) -> float:
        """Note messages; return how many seconds to wait before any more are read."""
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
        """For the length of a block: one stream more.

        Raises:
            LimitReachedError: it would be too many.
        """
        with self._one_more(principal, "streams at once", self.limits.limit_streams) as account:
            yield RateLimiter(
                TokenBucket(self.limits.limit_stream_messages_per_s), account.bucket, self._monotonic
            )

    def solve(self, principal: str) -> AbstractContextManager[object]:
        """For the length of a block: one problem, or plan, more.

        Raises:
            LimitReachedError: it would be too many.
        """
        return self._one_more(principal, "solves at once", self.limits.limit_solves)

    def listing(self, principal: str) -> AbstractContextManager[object]:
        """For the length of a block: one listing of the ledger more. Nothing is stored while one is added up.

        Raises:
            LimitReachedError: it would be too many.
        """
        return self._one_more(principal, "ledger listings at once", self.limits.limit_solves)

    def check_job(self, principal: str, spec: JobSpec, others: Iterable[JobSpec]) -> None:
        """Refuse a job beside the others that a principal has.

        Raises:
            InvalidFieldError: it is too large by itself.
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
        """Refuse a power budget where a principal has as many already.

        Raises:
            LimitReachedError: it has.
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
