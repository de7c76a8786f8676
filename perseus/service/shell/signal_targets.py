"""Jobs that follow a signal, and the task that sets their target iteration times for the present hour.

A job's target is decided again when its signal enters another hour or is read anew, when the job's plans or
policy change, and a few times in between, as its progress is measured. Targets are kept with the job, so that
a restarted coordinator continues with them. This module ignores power budgets: a job takes the slower of both
targets.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import structlog

from perseus.service.domain.errors import CoordinatorError
from perseus.service.domain.inputs import SignalTargetSet
from perseus.service.domain.job_signal import JobSignal, SpeedCurveBasis
from perseus.service.fleet.signal_targets.decision import MIN_INTERVAL_S, Decision, decide
from perseus.service.fleet.signal_targets.from_frontier import speed_curve
from perseus.service.fleet.signal_targets.speed_curve import SpeedCurve
from perseus.service.fleet.signals.history import SignalHistory
from perseus.service.job import views
from perseus.service.shell.live_run import LiveRun
from perseus.service.shell.live_runs import LiveRuns
from perseus.service.shell.signals import Signals

STARTUP_GRACE_S = 60.0
"""After the start, sources may not have been read yet, and jobs' feeds may be unknown."""

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Followed:
    """A job that follows a signal: its curve, the signal's version last used, and when it is due again."""

    basis: SpeedCurveBasis
    curve: SpeedCurve
    next_s: float = 0.0
    version: int = -1


class SignalTargets:
    """All jobs that follow a signal.

    `shares_of` returns the share of a job's GPUs on each feed, `clock` is the wall clock.
    """

    def __init__(
        self,
        live: LiveRuns,
        signals: Signals,
        shares_of: Callable[[str], Mapping[str, float]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._live = live
        self._signals = signals
        self._shares_of = shares_of
        self._clock = clock
        self._jobs: dict[str, _Followed] = {}
        # Jobs without a target because of a fault, already logged.
        self._left_out: set[str] = set()
        self._began_s = 0.0

    async def run(self) -> None:
        """Tick once a second until cancelled."""
        self._began_s = self._clock()
        with self._live.changes() as changed:
            changed.update(self._live.job_ids)
            while True:
                await self._tick(changed)
                await asyncio.sleep(MIN_INTERVAL_S)

    async def _tick(self, changed: set[str]) -> None:
        """Update the changed jobs, emptying the set, and those that are due."""
        changed_ids = list(changed)
        changed.clear()
        for job_id in {*changed_ids, *self._jobs}:
            try:
                await self._update(job_id)
            except Exception as error:
                self._jobs.pop(job_id, None)
                if job_id not in self._left_out:
                    self._left_out.add(job_id)
                    log.error("a job gets no target from its signal", job_id=job_id, exc_info=error)

    async def _update(self, job_id: str) -> None:
        run = self._live.get(job_id)
        job = None if run is None else self._live.read(run, views.signal_target, lambda _: None)
        if run is None or job is None or job.basis is None or not run.machine.has_live_rank:
            self._jobs.pop(job_id, None)
            return
        followed = await self._followed(job_id, job.basis)
        now_s = self._clock()
        shares = self._shares_of(job_id)
        history = self._signals.history(job.rule.kind, shares)
        version = 0 if history is None else history.version
        if not version and job.signal_target is not None and now_s < self._began_s + STARTUP_GRACE_S:
            return  # it keeps its target from before the restart
        has_no_signal = history is None or history.value_at(now_s) is None
        is_due = now_s >= followed.next_s or followed.version != version
        had_no_signal = job.signal_target is not None and job.signal_target.value is None
        if job.signal_target is not None and not is_due and has_no_signal == had_no_signal:
            return
        # In a thread, one job after the other: a forecast may have to be fitted.
        made = await asyncio.to_thread(_decide, job, followed.curve, now_s, history)
        followed.next_s, followed.version = made.next_s, version
        if _is_news(job, made.order):
            self._send(run, made.order)
        self._left_out.discard(job_id)

    async def _followed(self, job_id: str, basis: SpeedCurveBasis) -> _Followed:
        followed = self._jobs.get(job_id)
        if followed is None or not followed.basis.is_same(basis):
            followed = _Followed(basis, await asyncio.to_thread(speed_curve, basis))
            self._jobs[job_id] = followed
        return followed

    def _send(self, run: LiveRun, order: SignalTargetSet) -> None:
        with suppress(CoordinatorError):  # it has ended or is quarantined; the next tick sees that
            self._live.handle(run, order)


def _decide(job: JobSignal, curve: SpeedCurve, now_s: float, history: SignalHistory | None) -> Decision:
    return decide(job, curve, now_s, None if history is None else history.forecast_at(now_s))


def _is_news(job: JobSignal, order: SignalTargetSet) -> bool:
    current = job.signal_target
    return current is None or (current.window, current.state, current.target_time_s, current.value) != (
        order.window,
        order.state,
        order.target_time_s,
        order.value,
    )
