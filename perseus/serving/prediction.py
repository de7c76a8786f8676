"""What the load of the last minutes would do at every clock: late requests, late tokens, watts.

Arrivals pass through a virtual queue at each clock, so bursts count as they came. Watts follow
from the rates by a fluid model: steps with prompts take the time
that their tokens need, and in the rest of the time the requests in flight (by Little's law; Poisson, so that
there are idle times) decode one token per step.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from perseus.serving.live import LiveModel
from perseus.serving.model import Floats
from perseus.serving.stats import EngineLimits, EngineStats, Objectives

_SLOW_S, _FAST_S = 30.0, 5.0
"""Half-lives of the rates. The higher of both bounds the load: a rise counts at once, a lull later."""
LATE_S = 180.0
"""The last minutes, of which late ones count."""
_LATE_COUNT = 200.0
"""Late requests and tokens count for longer if there are fewer: no share of 1 % can be judged from them."""
_MAX_UTILISATION = 0.9
"""Of the time for prompts: beyond, queues are as long as bursts make them."""
_MAX_KV_USAGE = 0.9
_ROUNDS = 3
"""Of the fixed point of concurrency and step time; it goes on from where the last one ended."""
_LEAST_BUSY = 0.3
"""Watts are learned from intervals that are busy for this share: idle watts hide them in others."""
_WINDOW_S = 5.0
"""Of a comparison with the profile."""
_QUIET_S = 60.0
"""Without a request, until a load counts as gone: its rates have fallen to a quarter by then."""
_NOTHING = 1e-9


@dataclass(frozen=True, slots=True)
class Prediction:
    """By clock, ascending. Late shares and times are upper bounds; watts include idle times."""

    late_ttft_share: Floats
    late_itl_share: Floats
    utilisation: Floats
    kv_usage: Floats
    power_w: Floats

    def is_kept(self, objectives: Objectives, used: float = 1.0) -> NDArray[np.bool_]:
        """Return which clocks keep the objectives with that much of the allowed late shares used."""
        kept = (
            (self.late_ttft_share <= used * objectives.ttft.allowed_share)
            & (self.late_itl_share <= used * objectives.itl.allowed_share)
            & (self.utilisation <= _MAX_UTILISATION)
            & (self.kv_usage <= _MAX_KV_USAGE)
        )
        # A higher clock is never slower, so what one keeps, all above keep.
        return np.logical_or.accumulate(kept)


class LateWindow:
    """Counts late ones, at one clock or at each, over the last minutes and at least `min_count`."""

    def __init__(self, clock_count: int = 1, min_count: float = 0.0) -> None:
        self._min_count = min_count
        self._intervals: deque[tuple[float, Floats | float, float]] = deque()
        self._length_s, self._late, self.count = 0.0, np.zeros(clock_count), 0.0

    def add(self, length_s: float, late: Floats | float, count: float) -> None:
        """Add an interval."""
        self._intervals.append((length_s, late, count))
        self._length_s, self._late, self.count = (
            self._length_s + length_s,
            self._late + late,
            self.count + count,
        )
        while self._length_s > LATE_S and self.count - self._intervals[0][2] >= self._min_count:
            length_s, late, count = self._intervals.popleft()
            self._length_s, self._late, self.count = (
                self._length_s - length_s,
                self._late - late,
                self.count - count,
            )

    @property
    def late(self) -> Floats:
        """How many are late; not below 0 by rounding."""
        return np.maximum(self._late, 0.0)

    @property
    def share(self) -> Floats:
        """How many of all are late; 0 if there are none."""
        return self.late / max(self.count, _NOTHING)


@dataclass(slots=True)
class _Window:
    """Sums over some seconds at one clock."""

    column: int | None
    length_s: float = 0.0
    running: float = 0.0
    """Mean, as is the usage."""
    kv_usage: float = 0.0
    prompt_tokens: float = 0.0
    generation_tokens: float = 0.0
    steps: int = 0
    itl_sum_s: float = 0.0
    itl_count: float = 0.0
    energy_j: float = 0.0
    has_power: bool = True

    def add(self, stats: EngineStats) -> None:
        self.length_s += stats.length_s
        share = stats.length_s / self.length_s
        self.running += share * (stats.running_count - self.running)
        self.kv_usage += share * (stats.kv_usage - self.kv_usage)
        self.prompt_tokens += stats.prompt_tokens
        self.generation_tokens += stats.generation_tokens
        self.steps += stats.step_count or 0
        self.itl_sum_s += stats.itl_sum_s
        self.itl_count += sum(each.count for each in stats.itl)
        self.energy_j += (stats.power_w or 0.0) * stats.length_s
        self.has_power &= stats.power_w is not None


class LoadPredictor:
    """Learns the load from what engines report, and from it the model's live scale."""

    def __init__(self, model: LiveModel, limits: EngineLimits, objectives: Objectives) -> None:
        self._model, self._limits, self._objectives = model, limits, objectives
        clock_count = len(model.steps.clocks_mhz)
        self._rates = {half_life_s: np.zeros(3) for half_life_s in (_SLOW_S, _FAST_S)}
        self._context = 0.0
        self._waiting = 0
        self._quiet_s = 0.0
        self._prompt_tokens = float(limits.max_batched_tokens)
        self._queue_s = np.zeros(clock_count)
        self._late_ttft = LateWindow(clock_count, _LATE_COUNT)
        self._late_itl = LateWindow(clock_count, _LATE_COUNT)
        self._decoding = np.zeros(clock_count)
        self._strictness_of_ttft = self._strictness_of_itl = 1.0
        self._window = _Window(None)
        self._update_times()

    @property
    def is_idle(self) -> bool:
        """Whether there has been no request for a while."""
        return self._quiet_s >= _QUIET_S

    def waiting_s(self, column: int) -> float:
        """Return an upper bound of how long the requests that wait now will wait, at a clock."""
        return float(self._waiting * self._prompt_tokens * self._second_per_prompt_token[column])

    def observe(self, stats: EngineStats, column: int | None) -> None:
        """Take an interval into account; `column`: the clock that held during all of it, None if none did."""
        prompts = sum(each.count for each in stats.ttft)
        # A queue's growth is load that has not been counted yet, and its shrinking load that counted before.
        growth = (stats.waiting_count - self._waiting) * self._prompt_tokens
        arrived_tokens = max(0.0, stats.prompt_tokens + growth)
        arrived = max(0.0, prompts + stats.waiting_count - self._waiting)
        self._waiting = stats.waiting_count
        is_quiet = not (arrived or stats.generation_tokens or stats.running_count)
        self._quiet_s = self._quiet_s + stats.length_s if is_quiet else 0.0
        amounts = np.array([arrived, arrived_tokens, stats.generation_tokens])
        for half_life_s, rates in self._rates.items():
            rates += (1 - 0.5 ** (stats.length_s / half_life_s)) * (amounts / stats.length_s - rates)
            rates[rates < _NOTHING] = 0.0
        weight = 1 - 0.5 ** (stats.length_s / _SLOW_S)
        if prompts:
            self._prompt_tokens += weight * (stats.prompt_tokens / prompts - self._prompt_tokens)
        if stats.running_count:
            context = stats.kv_usage * self._limits.kv_capacity_tokens / stats.running_count
            self._context += weight * (context - self._context)
        self._count_late(stats, arrived, arrived_tokens, -1 if column is None else column)
        self._learn(stats, column)

    def _count_late(self, stats: EngineStats, arrived: float, arrived_tokens: float, column: int) -> None:
        self._queue_s = (
            np.maximum(0.0, self._queue_s - stats.length_s) + arrived_tokens * self._second_per_prompt_token
        )
        ttft_s = self._queue_s + self._decode_upper_s
        self._late_ttft.add(stats.length_s, arrived * (ttft_s > self._objectives.ttft.limit_s), arrived)
        # Prompts fill steps up to the limit; their last tokens make a smaller step.
        room = max(1.0, self._limits.max_batched_tokens - float(stats.running_count))
        full, left = divmod(arrived_tokens, room)
        # At another clock, as many more requests decode at once as steps take longer.
        decoding = stats.running_count * self._decoding / max(self._decoding[column], _NOTHING)
        tokens = np.full(len(decoding), float(stats.generation_tokens))
        late = np.zeros(len(decoding))
        for steps, size in ((full, room), (float(left > 0), left)):
            if steps:
                beside = np.minimum(tokens, steps * decoding)
                tokens -= beside
                late += beside * self._is_late(self._upper_s(size, decoding))
        late += tokens * self._is_late(self._decode_upper_s)
        self._late_itl.add(stats.length_s, late, stats.generation_tokens)

    def _is_late(self, itl_s: Floats) -> NDArray[np.bool_]:
        return self._strictness_of_itl * itl_s > self._objectives.itl.limit_s

    def _upper_s(self, prefill_tokens: ArrayLike, decoding_count: Floats | float) -> Floats:
        steps = self._model.steps
        times_s = steps.time_s(prefill_tokens, decoding_count, decoding_count * self._context)
        return self._model.time.upper(times_s, steps.time_error)

    def _learn(self, stats: EngineStats, column: int | None) -> None:
        """Compare latencies and watts of a window at one clock with the profile's for such a window.

        Engines count prompts when they are through, so a shorter window would miss or repeat much of them.
        """
        window = self._window
        if column is None or column != window.column:
            self._window = window = _Window(column)
        if column is None:
            return
        window.add(stats)
        if window.length_s < _WINDOW_S:
            return
        self._window = _Window(column)
        if window.itl_count < 1 or window.running < 1:
            return
        decoding = max(1.0, window.running if not window.steps else window.generation_tokens / window.steps)
        context = window.kv_usage * self._limits.kv_capacity_tokens
        chunk = min(self._limits.max_batched_tokens - decoding, self._chunk())
        prefill_steps = window.prompt_tokens / chunk
        decode_steps = max(0.0, window.generation_tokens / decoding - prefill_steps)
        steps = self._model.steps
        prefill_s = steps.time_s(chunk, decoding, context)
        decode_s = steps.time_s(0.0, decoding, context)
        total_s = prefill_steps * prefill_s + decode_steps * decode_s
        if prefill_steps + decode_steps < 1:
            return
        measured_s = window.itl_sum_s / window.itl_count
        prior_s = total_s / (prefill_steps + decode_steps)
        self._model.time.learn(measured_s, float(prior_s[column]), float(prior_s[-1]))
        busy_s = min(window.length_s, float(total_s[column]) * measured_s / float(prior_s[column]))
        busy_j = window.energy_j - steps.idle_power_w * (window.length_s - busy_s)
        if window.has_power and busy_s > _LEAST_BUSY * window.length_s and busy_j > 0:
            energy_j = prefill_steps * prefill_s * steps.power_w(chunk, decoding)
            energy_j = energy_j + decode_steps * decode_s * steps.power_w(0.0, decoding)
            prior_w = energy_j / total_s
            self._model.power.learn(busy_j / busy_s, float(prior_w[column]), float(prior_w[-1]))

    def predict(self, strictness_of_ttft: float, strictness_of_itl: float) -> Prediction:
        """Return the prediction; from now on times count that much more for late requests and tokens."""
        self._strictness_of_ttft, self._strictness_of_itl = strictness_of_ttft, strictness_of_itl
        self._update_times()
        rates = np.maximum(*self._rates.values())
        chunk, decoding = self._chunk(), self._decoding
        return Prediction(
            late_ttft_share=self._late_ttft.share,
            late_itl_share=self._late_itl.share,
            utilisation=rates[1] * self._second_per_prompt_token,
            kv_usage=decoding * self._context / self._limits.kv_capacity_tokens,
            power_w=self._power_w(chunk),
        )

    def _chunk(self) -> float:
        return float(np.clip(self._prompt_tokens, 1.0, self._limits.max_batched_tokens))

    def _update_times(self) -> None:
        """Derive concurrency and upper bounds of times at every clock from the rates."""
        model, limit = self._model, float(self._limits.max_batched_tokens)
        _, prompt_rate, token_rate = np.maximum(*self._rates.values())
        chunk = self._chunk()
        decoding = np.minimum(self._decoding, limit - 1)
        for _ in range(_ROUNDS):
            each = np.minimum(chunk, limit - decoding)
            prefill_s, decode_s = model.time_s(np.stack([each, 0 * each]), decoding, decoding * self._context)
            prefill_share = np.minimum(1.0, prompt_rate / each * prefill_s)
            steps_per_s = prefill_share / prefill_s + (1 - prefill_share) / decode_s
            decoding = np.minimum(token_rate / steps_per_s, limit - 1)
        self._decoding = decoding
        many = np.minimum(limit - 1, np.maximum(1.0, decoding + 2 * np.sqrt(decoding)))
        each = np.minimum(chunk, limit - many)
        prefill_s, self._decode_upper_s = self._upper_s(np.stack([each, 0 * each]), many)
        self._second_per_prompt_token = self._strictness_of_ttft * prefill_s / each

    def _power_w(self, chunk: float) -> Floats:
        model, limit = self._model, float(self._limits.max_batched_tokens)
        _, prompt_rate, token_rate = self._rates[_SLOW_S]
        decoding = self._decoding * token_rate / max(_NOTHING, np.maximum(*self._rates.values())[2])
        context = decoding * self._context
        chunk_tokens = np.minimum(chunk, limit - decoding)
        prefill_s = model.time_s(chunk_tokens, decoding, context)
        prefill_share = np.minimum(1.0, prompt_rate / chunk_tokens * prefill_s)
        is_any = 1 - np.exp(-decoding)
        decode_share = (1 - prefill_share) * is_any
        at_once = np.maximum(1.0, decoding / np.maximum(is_any, _NOTHING))
        power: Floats = (
            prefill_share * model.power_w(chunk_tokens, decoding)
            + decode_share * model.power_w(np.zeros(1), at_once)
            + (1 - prefill_share - decode_share) * model.steps.idle_power_w
        )
        return power
