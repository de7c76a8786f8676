"""Replays of requests through an engine, with a policy that sets its clock.

The policies besides the controller: a fixed clock, a perfect forecast of the next minute, and the rule of
throttLL'eM (HPCA '25): the lowest clock that a model of steps predicts to keep the objectives for the
requests that are here.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from perseus.serving.controller import Controller, SetClock, SetStock, StockReason
from perseus.serving.engine import Engine
from perseus.serving.model import StepModel
from perseus.serving.stats import EngineLimits, EngineStats, Objectives

INTERVAL_S = 0.25
"""Between two reports of the engine."""
SET_LATENCY_S = 0.02
"""Until a clock is in force: 10 to 20 ms on A100 and H100."""
FORESEEN_S = 60.0


class Policy(Protocol):
    """Chooses clocks."""

    def choose(self, now_s: float, engine: Engine, stats: EngineStats | None) -> int | None:
        """Return the wanted column of the engine's clocks, None for stock; `stats` may be missing."""


@dataclass(frozen=True, slots=True)
class FixedClock:
    """One clock; None for stock."""

    column: int | None

    def choose(self, now_s: float, engine: Engine, stats: EngineStats | None) -> int | None:
        """Return the clock."""
        return self.column


class Controlled:
    """A controller, whose commands take effect, except that clocks are refused from a time to a time."""

    def __init__(
        self, make: Callable[[float], Controller], refused_s: tuple[float, float] = (0.0, 0.0)
    ) -> None:
        self._make, self._refused_s = make, refused_s
        self.reasons: list[tuple[float, StockReason]] = []
        """(time, why), each time it went to stock."""
        self.restart(0.0)

    def restart(self, now_s: float) -> None:
        """Begin with a new controller, at stock."""
        self.controller = self._make(now_s)
        self._wanted: int | None = None

    def choose(self, now_s: float, engine: Engine, stats: EngineStats | None) -> int | None:
        """Return the controller's clock."""
        machine = self.controller
        commands = machine.on_tick(now_s) if stats is None else machine.on_stats(now_s, stats)
        for command in commands:
            if isinstance(command, SetClock) and self._refused_s[0] <= now_s < self._refused_s[1]:
                commands = (*commands, *self.controller.on_clock_refused(now_s))
        for command in commands:
            if isinstance(command, SetStock):
                self.reasons.append((now_s, command.reason))
        self.controller.validate()
        clock_mhz = self.controller.clock_mhz
        column = None if clock_mhz is None else engine.clocks_mhz.index(clock_mhz)
        if column != self._wanted:
            self._wanted = column
            self.controller.on_clock_set(now_s + SET_LATENCY_S, clock_mhz)
        return column


class Foreseen:
    """Tries every clock on the requests of the next minute, in a copy of the engine, and takes the best.

    The best draws the least energy, until all of the minute's requests are through, among those with no more
    late requests and tokens than the objectives allow, or than stock has.
    """

    def __init__(self, objectives: Objectives) -> None:
        self._objectives = objectives
        self._until_s = -np.inf
        self._column = 0

    def choose(self, now_s: float, engine: Engine, stats: EngineStats | None) -> int | None:
        """Return the best clock for the minute."""
        if now_s >= self._until_s:
            self._until_s = now_s + FORESEEN_S
            self._column = self._best(engine)
        return self._column

    def _best(self, engine: Engine) -> int:
        best, least_j, allowed = len(engine.clocks_mhz) - 1, np.inf, (0.0, 0.0)
        for column in reversed(range(len(engine.clocks_mhz))):
            trial = engine.copy()
            trial.column = column
            trial.run_until(self._until_s)
            # What is left then costs as much as it does at stock, and no clock gains by leaving it.
            trial.column = len(engine.clocks_mhz) - 1
            trial.finish()
            late = late_counts(trial, self._objectives)
            if not np.isfinite(least_j):
                allowed = (
                    max(late[0], self._objectives.ttft.allowed_share * len(trial.totals.ttft)),
                    max(late[1], self._objectives.itl.allowed_share * trial.totals.generated_tokens),
                )
            energy_j = trial.totals.energy_j - trial.idle_power_w * (trial.now_s - engine.now_s)
            if late[0] > allowed[0] or late[1] > allowed[1]:
                break
            if energy_j < least_j:
                best, least_j = column, energy_j
        return best


class LowestClock:
    """throttLL'eM's rule on the same model of steps, without margins."""

    def __init__(self, steps: StepModel, limits: EngineLimits, objectives: Objectives) -> None:
        self._steps, self._limits, self._objectives = steps, limits, objectives

    def choose(self, now_s: float, engine: Engine, stats: EngineStats | None) -> int | None:
        """Return the lowest clock for the requests that are here."""
        decoding, context, prompt_tokens, waited_s = engine.load
        limit = float(self._limits.max_batched_tokens)
        chunk = min(limit - decoding, prompt_tokens)
        itl_s = self._steps.time_s(chunk, max(1, decoding), context)
        ttft_s = waited_s + prompt_tokens / max(1.0, limit - decoding) * self._steps.time_s(
            limit - decoding, decoding, context
        )
        is_kept = (itl_s <= self._objectives.itl.limit_s) & (ttft_s <= self._objectives.ttft.limit_s)
        return int(np.argmax(is_kept)) if is_kept.any() else len(is_kept) - 1


@dataclass(frozen=True, slots=True)
class Disturbance:
    """What goes wrong in a replay, each from a time to a time."""

    engine_away_s: tuple[float, float] = (0.0, 0.0)
    no_stats_s: tuple[float, float] = (0.0, 0.0)
    no_agent_s: tuple[float, float] = (0.0, 0.0)
    restored_after_s: float = 1.0
    """How long a dead agent's clock stays until its supervisor restores stock."""


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What a replay came to. Shares are of requests, and of tokens after the first."""

    energy_j: float
    tokens: int
    ttft_attainment: float
    itl_attainment: float
    busy_share: float
    clocks: list[tuple[float, int | None]] = field(repr=False)
    """(time, wanted column; None: stock), at each change."""
    engine: Engine = field(repr=False)

    @property
    def joules_per_token(self) -> float:
        """Energy over generated tokens."""
        return self.energy_j / self.tokens


def late_counts(engine: Engine, objectives: Objectives) -> tuple[int, int]:
    """Return how many requests and tokens were later than their limits."""
    ttft = sum(latency > objectives.ttft.limit_s for _, latency in engine.totals.ttft)
    itl = sum(count for _, latency, count in engine.totals.itl if latency > objectives.itl.limit_s)
    return ttft, itl


def replay(
    engine: Engine,
    policy: Policy,
    objectives: Objectives,
    end_s: float,
    disturbance: Disturbance | None = None,
    interval_s: float = INTERVAL_S,
) -> ReplayResult:
    """Run an engine until a time, and on until its requests are through; all of that counts.

    `interval_s`: between two reports, and choices.
    """
    disturbance = disturbance or Disturbance()
    away_s, agent_s = disturbance.engine_away_s, disturbance.no_agent_s
    start_s = now_s = engine.now_s
    clocks: list[tuple[float, int | None]] = []
    was_away = False
    while now_s < end_s or engine.is_busy:
        now_s += interval_s
        is_away = away_s[0] <= now_s < away_s[1]
        if is_away:
            engine.stop(away_s[1])
        engine.run_until(now_s)
        stats: EngineStats | None = engine.stats()
        if is_away or disturbance.no_stats_s[0] <= now_s < disturbance.no_stats_s[1]:
            stats = None
        if isinstance(policy, Controlled) and was_away and not is_away:
            policy.controller.on_engine_restarted(now_s)
        was_away = is_away
        wanted = None
        if not agent_s[0] <= now_s < agent_s[1]:
            wanted = policy.choose(now_s, engine, stats)
        elif now_s - agent_s[0] < disturbance.restored_after_s:
            continue
        elif isinstance(policy, Controlled):
            policy.restart(now_s)
        if not clocks or clocks[-1][1] != wanted:
            clocks.append((now_s, wanted))
            engine.run_until(now_s + SET_LATENCY_S)
            engine.column = len(engine.clocks_mhz) - 1 if wanted is None else wanted
    totals = engine.totals
    late = late_counts(engine, objectives)
    return ReplayResult(
        totals.energy_j,
        totals.generated_tokens,
        1 - late[0] / max(1, len(totals.ttft)),
        1 - late[1] / max(1, totals.generated_tokens - len(totals.ttft)),
        totals.busy_s / (engine.now_s - start_s),
        clocks,
        engine,
    )
