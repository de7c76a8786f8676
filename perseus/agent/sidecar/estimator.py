"""Works energy estimates out on a thread of its own: the event loop and its clocks must not wait for them."""

import threading
from collections.abc import Callable

import structlog

from perseus.agent.link.computation import Rank
from perseus.agent.rank.messages import EnergyEstimate
from perseus.agent.rank.sampling import EstimateRequest, estimate

_log = structlog.get_logger(__name__)

Listener = Callable[[EnergyEstimate], None]


class Estimator:
    """One thread for all ranks of an agent. Of a rank's requests under one plan only the newest counts."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[tuple[Rank, int], tuple[EstimateRequest, Listener]] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="energy estimates", daemon=True)
        self._thread.start()

    def request(self, rank: Rank, request: EstimateRequest, on_estimate: Listener) -> None:
        """Estimate, and tell the listener, on the thread, what the windows determine; returns at once."""
        with self._changed:
            self._waiting[rank, request.plan_version] = (request, on_estimate)
            self._changed.notify()

    def close(self) -> None:
        """End the thread and drop what waits; blocks while an estimate is under way."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if self._closing:
                    return
                rank, plan_version = key = next(iter(self._waiting))
                request, on_estimate = self._waiting.pop(key)
            try:
                found = estimate(request)
                if found is not None:
                    on_estimate(found)
            except Exception:  # of one estimate; the others go on
                _log.exception("energy not estimated", rank=str(rank), version=plan_version)
