"""What clocks save, measured: windows at stock among the controlled time, and their energy by tokens. Pure.

Power at stock is regressed on the rates of prompt and generated tokens, over windows of 30 s. With the rates
of the controlled time that gives what stock would have drawn there. Windows come at irregular times, for at
most 3 % of all time: too little for a claim about late requests at stock, so there is none.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import numpy as np

from perseus.serving.errors import ServingError
from perseus.serving.stats import EngineStats, Objectives

SETTLE_S, MEASURED_S = 5.0, 30.0
"""Of a window: discarded, and measured. Requests that began at a lower clock are mostly through by then."""
WINDOW_S = SETTLE_S + MEASURED_S
MAX_STOCK_SHARE = 0.03
MIN_WINDOWS = 8
"""Of three coefficients: with fewer, their errors are unknown."""
USEFUL_SHARE = 0.05
"""Half the width of a useful interval: small against savings of 20 to 40 %."""
MAX_H = 24.0
"""By then a saving must show, however wide the interval."""
_MAX_WINDOWS = 500
_GAP_S = WINDOW_S / MAX_STOCK_SHARE - WINDOW_S
_GOLDEN = 0.618
"""Windows spread by its multiples never keep step with what happens every few minutes."""


@dataclass(slots=True)
class _Amounts:
    time_s: float = 0.0
    prompt_tokens: float = 0.0
    generation_tokens: float = 0.0
    energy_j: float = 0.0

    def add(self, stats: EngineStats, power_w: float) -> None:
        self.time_s += stats.length_s
        self.prompt_tokens += stats.prompt_tokens
        self.generation_tokens += stats.generation_tokens
        self.energy_j += power_w * stats.length_s

    @property
    def row(self) -> list[float]:
        return [self.time_s, self.prompt_tokens, self.generation_tokens, self.energy_j]


@dataclass(frozen=True, slots=True)
class Savings:
    """Figures since the measurement began. Shares are None while unknown.

    `saving` ± `uncertainty`: of the energy that stock would have used, at 95 %. `attainment_*`: of the
    controlled time. `useful_after_h`: hours until the interval is useful, as far as can be foreseen.
    """

    controlled_h: float
    energy_j: float
    stock_h: float
    window_count: int
    generation_tokens: float
    joules_per_token: float | None
    stock_joules_per_token: float | None
    saving: float | None
    uncertainty: float | None
    useful_after_h: float
    attainment_ttft: float | None
    attainment_itl: float | None

    @property
    def is_useful(self) -> bool:
        """Whether the interval is narrow enough for a claim."""
        return self.uncertainty is not None and self.uncertainty <= USEFUL_SHARE


@dataclass(slots=True)
class SavingsMeter:
    """Counts the controlled time and the windows, and says when the next one is due."""

    objectives: Objectives
    _controlled: _Amounts = field(default_factory=_Amounts)
    _windows: list[_Amounts] = field(default_factory=list)
    _late: list[float] = field(default_factory=lambda: [0.0] * 4)
    """Late and all first tokens, late and all later tokens."""
    _waited_s: float = _GAP_S / 2
    """Controlled time since the last window; the first one comes sooner."""
    _window: _Amounts | None = None
    _settling_s: float = 0.0

    def is_due(self, waiting_count: int) -> bool:
        """Whether a window should begin now: none does with a backlog."""
        spread = 1 + (len(self._windows) * _GOLDEN % 1) / 2
        return self._window is None and not waiting_count and self._waited_s >= _GAP_S * spread

    def begin_window(self) -> None:
        """The clocks are going to stock for `WINDOW_S`."""
        self._window, self._settling_s, self._waited_s = _Amounts(), 0.0, 0.0

    def end_window(self) -> None:
        """The window is over, or was broken off; then it does not count."""
        if self._window is not None and self._window.time_s >= MEASURED_S - 1:
            self._windows.append(self._window)
            del self._windows[:-_MAX_WINDOWS]
        self._window = None

    @property
    def is_in_window(self) -> bool:
        """Whether a window is in progress."""
        return self._window is not None

    def add(self, stats: EngineStats) -> None:
        """Add an interval; without power it does not count."""
        if stats.power_w is None:
            return
        if self._window is not None:
            if self._settling_s < SETTLE_S:
                self._settling_s += stats.length_s
            else:
                self._window.add(stats, stats.power_w)
            return
        self._waited_s += stats.length_s
        self._controlled.add(stats, stats.power_w)
        counts = (*self.objectives.ttft.late(stats.ttft), *self.objectives.itl.late(stats.itl))
        self._late = [before + new for before, new in zip(self._late, counts, strict=True)]

    def savings(self) -> Savings:
        """Return the figures so far."""
        controlled, windows = self._controlled, self._windows
        saving = uncertainty = stock_w = None
        if len(windows) >= MIN_WINDOWS and controlled.time_s > 0:
            stock_w, error_w = _expected_w(windows, controlled)
            if stock_w > 0:
                kept = controlled.energy_j / controlled.time_s / stock_w
                # Student's t at 95 %, to 1 %.
                uncertainty = (1.96 + 3 / (len(windows) - 3)) * kept * error_w / stock_w
                saving = 1 - kept
        hours = controlled.time_s / 3600
        tokens = controlled.generation_tokens
        if uncertainty is None:
            useful_after_h = 1.25 * MIN_WINDOWS * _GAP_S / 3600
        else:
            useful_after_h = hours * max(1.0, uncertainty / USEFUL_SHARE) ** 2
        ttft_late, ttft_count, itl_late, itl_count = self._late
        return Savings(
            controlled_h=hours,
            energy_j=controlled.energy_j,
            stock_h=sum(each.time_s for each in windows) / 3600,
            window_count=len(windows),
            generation_tokens=tokens,
            joules_per_token=controlled.energy_j / tokens if tokens else None,
            stock_joules_per_token=stock_w * controlled.time_s / tokens if stock_w and tokens else None,
            saving=saving,
            uncertainty=uncertainty,
            useful_after_h=useful_after_h,
            attainment_ttft=1 - ttft_late / ttft_count if ttft_count else None,
            attainment_itl=1 - itl_late / itl_count if itl_count else None,
        )

    @property
    def saves_nothing(self) -> bool:
        """Whether the interval was useful, or had a day to become so, and no saving shows."""
        found = self.savings()
        if found.saving is None or found.uncertainty is None:
            return False
        has_had_time = found.is_useful or found.controlled_h >= MAX_H
        return has_had_time and found.saving <= found.uncertainty

    def to_json(self) -> dict[str, Any]:
        """Return what a new meter needs to go on."""
        return {
            "controlled": self._controlled.row,
            "windows": [each.row for each in self._windows],
            "late": self._late,
            "waited_s": self._waited_s,
        }

    @classmethod
    def from_json(cls, objectives: Objectives, found: Any) -> "SavingsMeter":
        """Go on from `to_json`.

        Raises:
            ServingError: it is something else.
        """
        try:
            assert isinstance(found, Mapping)
            rows = [found["controlled"], *found["windows"], found["late"], [found["waited_s"]]]
            if not all(isfinite(each) and each >= 0 for row in rows for each in row):
                raise ValueError
            late = [float(each) for each in found["late"]]
            assert len(late) == 4
            return cls(
                objectives,
                _Amounts(*map(float, found["controlled"])),
                [_Amounts(*map(float, row)) for row in found["windows"]],
                late,
                float(found["waited_s"]),
            )
        except (KeyError, TypeError, ValueError, AssertionError):
            raise ServingError(
                f"savings: expected those of an instance, found {str(found)[:100]!r}"
            ) from None


def _expected_w(windows: list[_Amounts], controlled: _Amounts) -> tuple[float, float]:
    """Return the mean watts at stock for the controlled time's rates, and their standard error."""
    rows = np.array([each.row for each in [*windows, controlled]])
    features = np.column_stack([np.ones(len(rows)), rows[:, 1:3] / rows[:, :1]])
    features /= np.maximum(features.max(axis=0), 1e-9)
    known, wanted, power_w = features[:-1], features[-1], rows[:-1, 3] / rows[:-1, 0]
    inverse = np.linalg.pinv(known.T @ known)
    coefficients = inverse @ known.T @ power_w
    left_w = power_w - known @ coefficients
    variance = float(left_w @ left_w) / (len(windows) - 3)
    return float(wanted @ coefficients), float(np.sqrt(variance * (wanted @ inverse @ wanted)))
