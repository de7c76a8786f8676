"""The signals of carbon intensity and price: one task for each reads its source periodically.

A failing source is logged once, and again when the cause changes; its last values count until they are too
old.
"""

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from perseus.retry import Retry
from perseus.service.domain.ledger import HOUR_S, UNKNOWN, Rates
from perseus.service.domain.signals import SignalKind
from perseus.service.fleet.signals.history import SignalHistory
from perseus.service.signals.source import Source, SourceError

log = structlog.get_logger(__name__)

FIRST_DELAY_S, MAX_DELAY_S = 5.0, 900.0


def retry_of(period_s: float, draw: Callable[[], float]) -> Retry:
    """Return the retry policy of a source that, while it works, is read every `period_s`."""
    if period_s < FIRST_DELAY_S:  # a file, say: reading it costs nothing
        return Retry(period_s, period_s)
    return Retry(FIRST_DELAY_S, MAX_DELAY_S, jitter=0.5, random=draw)  # so that many don't come at once


@dataclass(slots=True, eq=False)
class NamedSignal:
    """A signal as the operator configured it: for some feeds, or for all without their own if it names none.

    `failure_count`: how often its source could not be read.
    """

    name: str
    kind: SignalKind
    feeds: Sequence[str]
    source: Source
    history: SignalHistory = field(default_factory=SignalHistory)
    failure_count: int = 0


class Signals:
    """All signals. `clock` is the wall clock; `draw` returns a random number from 0 to 1."""

    def __init__(
        self,
        signals: Sequence[NamedSignal] = (),
        rates: Rates = UNKNOWN,
        clock: Callable[[], float] = time.time,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """`rates`: assumed where no signal gives a value."""
        self._signals = signals
        self._rates = rates
        self._clock = clock
        self._random = draw
        self._by_feed = {
            (signal.kind, feed): signal.history for signal in signals for feed in signal.feeds or [""]
        }

    async def run(self) -> None:
        """Read all sources, of which there must be at least one, until cancelled."""
        following = [asyncio.ensure_future(self._follow(signal)) for signal in self._signals]
        try:
            await asyncio.gather(*following)
        finally:
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)
            for signal in self._signals:
                await signal.source.close()

    def history(self, kind: SignalKind, shares: Mapping[str, float]) -> SignalHistory | None:
        """Return the signal that a job follows: that of the feed with most of its GPUs.

        `shares`: the shares of its GPUs, by feed; empty if they are unknown.
        """
        feed = max(shares, key=lambda name: shares[name], default="")
        return self._by_feed.get((kind, feed)) or self._by_feed.get((kind, ""))

    def states(self) -> Iterator[tuple[str, bool, int]]:
        """Yield each signal's name, whether its present value is known, and its number of failures so far."""
        now_s = self._clock()
        for signal in self._signals:
            yield signal.name, signal.history.value_at(now_s) is not None, signal.failure_count

    def rates_at(self, shares: Mapping[str, float], time_s: float) -> Rates:
        """Return the rates of an hour for GPUs on these feeds: from the signals, else the configured ones."""
        hour = int(time_s // HOUR_S)
        price, intensity = (self._mean(kind, shares, hour) for kind in (SignalKind.PRICE, SignalKind.CARBON))
        return Rates(
            self._rates.price_per_kwh if price is None else price,
            self._rates.intensity_g_per_kwh if intensity is None else intensity,
        )

    def _mean(self, kind: SignalKind, shares: Mapping[str, float], hour: int) -> float | None:
        total = 0.0
        for feed, share in (shares or {"": 1.0}).items():
            history = self._by_feed.get((kind, feed)) or self._by_feed.get((kind, ""))
            mean = None if history is None else history.mean_in_hour(hour)
            if mean is None:
                return None
            total += share * mean
        return total

    async def _follow(self, signal: NamedSignal) -> None:
        retry = retry_of(signal.source.period_s, self._random)
        logged = ""
        while True:
            try:
                found = await signal.source.read(self._clock())
                if found is not None:
                    signal.history.take(found, self._clock())
                    log.debug("signal read", signal=signal.name, value_count=len(found.values))
            except Exception as error:
                cause = str(error) if isinstance(error, SourceError) else f"a fault: {error!r}"
                retry_after_s = error.retry_after_s if isinstance(error, SourceError) else 0.0
                signal.failure_count += 1
                wait_s = max(retry_after_s, retry.failed())
                if cause != logged:
                    known = signal.history.value_at(self._clock()) is not None
                    log.warning(
                        "signal can't be read",
                        signal=signal.name,
                        cause=cause,
                        consequence="the last value counts for now" if known else "its value is unknown",
                        exc_info=None if isinstance(error, SourceError) else error,
                    )
                logged = cause
            else:
                if logged:
                    log.info("signal is read again", signal=signal.name, failure_count=retry.failure_count)
                logged = ""
                retry.succeeded()
                wait_s = signal.source.period_s
            await asyncio.sleep(wait_s)
