"""Chooses an engine's clock: the one of least predicted watts among those that keep the objectives.

A state machine: events with the time in, commands out. One machine per engine instance; all GPUs of a tensor-
or pipeline-parallel instance hold its clock.

- Down: one step of the clocks at a time, each after a dwell, and only to a clock whose predicted late shares,
  by upper bounds of times, keep the objectives.
- Up: at once. To the lowest clock that keeps the objectives, or to the highest if requests would wait for
  half of the first token's limit, or if an objective was missed in the last minutes.
- Stock: whenever there is no basis for a clock. Statistics are older than a second or contradict each other,
  the engine restarted, a clock was refused, the engine is not the profile's, or an objective is missed at
  the highest clock too. Control resumes when the reason has been gone for a while.
- The governor multiplies predicted times by up to 1.25, as the last half of the allowed late share is used.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from perseus.serving.live import LiveModel
from perseus.serving.model import StepModel
from perseus.serving.prediction import LATE_S, LateWindow, LoadPredictor, Prediction
from perseus.serving.stats import EngineLimits, EngineStats, Objectives

MAX_STATS_AGE_S = 1.0
DWELL_S = 2.0
"""Of a step down: some 100 set latencies, and long enough for each clock's step times to be measured."""
RAISED_S = 10.0
"""How long a raise to the highest clock lasts: waiting requests get through, and their latencies are seen."""
SETTLE_S = 5.0
"""Of good statistics before control begins or resumes."""
REFUSED_S = 60.0
"""Before a clock is tried again after a refusal: it takes an operator."""
_DECISION_S = 1.0
_LEAST_GAIN = 0.005
"""Of watts, for a step: below, steps would follow the noise of the load's rates."""
_STRICTEST = 0.25
"""What the governor adds to predicted times when all of the allowed late share is used up: more than the
errors of profile and load together. Beyond, the highest clock applies."""
_LOWERED_USE = 0.9
"""Of the allowed late shares that a lower clock may use; above, it would soon be raised again."""
_STALLED_S = 2.0
"""Requests that wait for so long while none runs: the engine hangs, or its statistics are wrong."""
_SCALES = 0.5, 2.0
"""Of measured over profiled times at the highest clock: beyond, it is another engine."""


class StockReason(Enum):
    """Why an instance is at stock."""

    STARTING = "statistics have just begun"
    NO_STATS = "no statistics for a second"
    CONTRADICTION = "statistics contradict each other"
    RESTARTED = "the engine restarted"
    CLOCK_REFUSED = "a clock was refused"
    OTHER_ENGINE = "step times are not the profile's"
    OBJECTIVE_MISSED = "an objective is missed at the highest clock"
    MEASURED = "stock is measured, for half a minute"
    NO_SAVING = "measured, lower clocks save nothing"


@dataclass(frozen=True, slots=True)
class SetClock:
    """Lock all the instance's GPUs to a clock."""

    clock_mhz: int


@dataclass(frozen=True, slots=True)
class SetStock:
    """Put all the instance's GPUs back to stock."""

    reason: StockReason


Command = SetClock | SetStock


class Controller:
    """The machine. `steps`: the profile at the clocks to choose from; the highest is what stock runs at.

    Call `on_tick` when `deadline_s` has come, at the latest.
    """

    def __init__(self, steps: StepModel, limits: EngineLimits, objectives: Objectives, now_s: float) -> None:
        self._steps, self._limits, self._objectives = steps, limits, objectives
        self._highest = len(steps.clocks_mhz) - 1
        self._model = LiveModel(steps)
        self._predictor = LoadPredictor(self._model, limits, objectives)
        self._late = (LateWindow(), LateWindow())
        self.prediction: Prediction | None = None
        self._column: int | None = None
        self._in_force: int | None = None
        self._in_force_s = now_s
        self._reason: StockReason | None = StockReason.STARTING
        self._stock_until_s = now_s + SETTLE_S
        self._heard_s = now_s
        self._changed_s = self._decided_s = self._highest_s = now_s
        self._raised_until_s = now_s
        self._running_s = now_s

    # ------------------------------------------------------------------ state

    @property
    def clock_mhz(self) -> int | None:
        """The wanted clock; None is stock."""
        return None if self._column is None else self._steps.clocks_mhz[self._column]

    @property
    def stock_reason(self) -> StockReason | None:
        """Why the instance is at stock; None if a clock is wanted."""
        return self._reason

    @property
    def model(self) -> LiveModel:
        """The profile with what was learned."""
        return self._model

    @property
    def deadline_s(self) -> float:
        """When statistics become too old."""
        return self._heard_s + MAX_STATS_AGE_S

    def validate(self) -> None:
        """Assert what holds between any two events."""
        assert (self._column is None) == (self._reason is not None)
        assert self._column is None or 0 <= self._column <= self._highest

    # ------------------------------------------------------------------ events

    def on_tick(self, now_s: float) -> Sequence[Command]:
        """Time has passed."""
        if now_s < self.deadline_s:
            return ()
        return self._stock(now_s, StockReason.NO_STATS, SETTLE_S)

    def on_clock_set(self, now_s: float, clock_mhz: int | None) -> Sequence[Command]:
        """A clock came into force on all GPUs; None: stock."""
        self._in_force = None if clock_mhz is None else self._steps.clocks_mhz.index(clock_mhz)
        self._in_force_s = now_s
        return ()

    def on_clock_refused(self, now_s: float) -> Sequence[Command]:
        """A GPU could not be set."""
        return self._stock(now_s, StockReason.CLOCK_REFUSED, REFUSED_S)

    def on_engine_restarted(self, now_s: float) -> Sequence[Command]:
        """The engine's counters went back, or its process changed: its load so far says nothing."""
        self._predictor = LoadPredictor(self._model, self._limits, self._objectives)
        return self._stock(now_s, StockReason.RESTARTED, SETTLE_S)

    def on_stock_wanted(self, now_s: float, reason: StockReason, for_s: float) -> Sequence[Command]:
        """Stock is to be measured, or clocks save nothing: for a time, the instance is at stock."""
        return self._stock(now_s, reason, for_s)

    def on_stats(self, now_s: float, stats: EngineStats) -> Sequence[Command]:
        """The engine reported an interval that ends now."""
        late = list(self.on_tick(now_s))
        self._heard_s = now_s
        if stats.contradiction is not None:
            return [*late, *self._stock(now_s, StockReason.CONTRADICTION, SETTLE_S)]
        if stats.running_count or stats.generation_tokens or not stats.waiting_count:
            self._running_s = now_s
        if now_s - self._running_s > _STALLED_S:
            return [*late, *self._stock(now_s, StockReason.CONTRADICTION, SETTLE_S)]
        for window, objective, latencies in (
            (self._late[0], self._objectives.ttft, stats.ttft),
            (self._late[1], self._objectives.itl, stats.itl),
        ):
            window.add(stats.length_s, *objective.late(latencies))
        is_constant = self._in_force_s <= now_s - stats.length_s
        column = self._highest if self._in_force is None else self._in_force
        self._predictor.observe(stats, column if is_constant else None)
        return [*late, *self._decide(now_s)]

    # ------------------------------------------------------------------ decisions

    def _decide(self, now_s: float) -> Sequence[Command]:
        used = [
            float(window.late[0]) / max(1.0, objective.allowed_share * window.count)
            for window, objective in zip(
                self._late, (self._objectives.ttft, self._objectives.itl), strict=True
            )
        ]
        is_missed = max(used) > 1
        if not _SCALES[0] <= self._model.time.scale <= _SCALES[1]:
            return self._stock(now_s, StockReason.OTHER_ENGINE, REFUSED_S)
        if self._column is None:
            if now_s < self._stock_until_s or (self._reason is StockReason.OBJECTIVE_MISSED and is_missed):
                return ()
            return self._set(now_s, self._highest)
        if is_missed or self._predictor.waiting_s(self._column) > self._objectives.ttft.limit_s / 2:
            self._raised_until_s = now_s + RAISED_S
            if self._column != self._highest:
                return self._set(now_s, self._highest)
            if is_missed and now_s - self._highest_s > LATE_S:
                return self._stock(now_s, StockReason.OBJECTIVE_MISSED, SETTLE_S)
        if now_s - self._decided_s < _DECISION_S:
            return ()
        self._decided_s = now_s
        strictness = (1 + _STRICTEST * min(1.0, max(0.0, 2 * share - 1)) for share in used)
        self.prediction = self._predictor.predict(*strictness)
        return self._move(now_s, self.prediction)

    def _move(self, now_s: float, prediction: Prediction) -> Sequence[Command]:
        assert self._column is not None
        lowest = self._lowest(prediction, 1.0)
        if lowest > self._column:
            return self._set(now_s, lowest)
        if now_s < self._raised_until_s or now_s - self._changed_s < DWELL_S:
            return ()
        if self._predictor.is_idle:
            # No clock saves anything, and nothing is known about what comes.
            return self._set(now_s, self._highest) if self._column != self._highest else ()
        lowest = min(self._column, self._lowest(prediction, _LOWERED_USE))
        best = lowest + int(np.argmin(prediction.power_w[lowest:]))
        step = int(np.sign(best - self._column))
        power_w = prediction.power_w
        if step == 0 or power_w[best] > (1 - _LEAST_GAIN) * power_w[self._column]:
            return ()
        return self._set(now_s, self._column + step)

    def _lowest(self, prediction: Prediction, used: float) -> int:
        """Return the lowest clock that keeps the objectives; the highest if none does."""
        is_kept = prediction.is_kept(self._objectives, used)
        return int(np.argmax(is_kept)) if is_kept.any() else self._highest

    def _set(self, now_s: float, column: int) -> Sequence[Command]:
        self._column, self._reason = column, None
        self._changed_s = now_s
        if column == self._highest:
            self._highest_s = now_s
        return (SetClock(self._steps.clocks_mhz[column]),)

    def _stock(self, now_s: float, reason: StockReason, for_s: float) -> Sequence[Command]:
        was_at_stock = self._column is None
        self._column, self._reason = None, reason
        self._stock_until_s = max(self._stock_until_s, now_s + for_s)
        return () if was_at_stock else (SetStock(reason),)
