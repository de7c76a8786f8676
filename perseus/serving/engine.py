"""An inference engine, event by event: continuous batching, chunked prefill, a limit of the KV cache.

Each step decodes one token for every running request and fills the batch up with tokens of prompts, oldest
first, as vLLM's scheduler does. A request is admitted when its whole context fits the KV cache, so nothing is
preempted. Steps take the time and watts of a model of steps at the clock in force when they begin.
"""

import copy
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

import numpy as np

from perseus.serving.errors import ServingError
from perseus.serving.model import StepModel
from perseus.serving.stats import EngineLimits, EngineStats, LatencyCount

_CONTEXT = 1e6
"""Tokens of context by which the tables' slope is taken: times are linear in it."""


@dataclass(frozen=True, slots=True)
class Request:
    """`prompt_tokens` in, `generated_tokens` out, the first of them by the prompt's last step."""

    arrival_s: float
    prompt_tokens: int
    generated_tokens: int


class StepTable:
    """Times and watts of a model of steps for whole token counts: lists, as replays look up millions."""

    def __init__(self, model: StepModel, limits: EngineLimits) -> None:
        self.clocks_mhz = model.clocks_mhz
        self.idle_power_w = model.idle_power_w
        tokens = np.arange(limits.max_batched_tokens + 1, dtype=float)[:, None]
        times = model.time_s(tokens, 0.0, 0.0)
        self.time_s: list[list[float]] = times.T.tolist()
        self.time_per_context_s: list[float] = (
            (model.time_s(1.0, 0.0, _CONTEXT) - model.time_s(1.0, 0.0, 0.0)) / _CONTEXT
        ).tolist()
        # A token more for decoding instead of for a prompt: the model is linear in these, too.
        self.time_per_decoding_s: list[float] = (
            model.time_s(0.0, 1.0, 0.0) - model.time_s(1.0, 0.0, 0.0)
        ).tolist()
        self.power_w: list[list[float]] = model.power_w(tokens, 0.0).T.tolist()


@dataclass(slots=True)
class Totals:
    """What a replay counts. Latencies in seconds, with the time and, for tokens, the number."""

    energy_j: float = 0.0
    busy_s: float = 0.0
    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    ttft: list[tuple[float, float]] = field(default_factory=list)
    """(end of the first token's step, latency)."""
    itl: list[tuple[float, float, int]] = field(default_factory=list)
    """(end of a step, its time, tokens)."""


@dataclass(frozen=True, slots=True)
class _Reported:
    """The totals at the last report."""

    energy_j: float = 0.0
    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    ttft_count: int = 0
    itl_count: int = 0


class Engine:
    """The engine. Requests must be in order of their arrival.

    Raises:
        ServingError: a request has no token, or its context never fits the KV cache.
    """

    def __init__(
        self,
        table: StepTable,
        limits: EngineLimits,
        requests: Sequence[Request],
        noise: Sequence[float] = (1.0,),
    ) -> None:
        for request in requests:
            context = request.prompt_tokens + request.generated_tokens
            if (
                min(request.prompt_tokens, request.generated_tokens) < 1
                or context > limits.kv_capacity_tokens
            ):
                raise ServingError(
                    f"request: expected a prompt and an answer of at most {limits.kv_capacity_tokens} tokens "
                    f"together, found {request}"
                )
        self._table, self._limits, self._requests, self._noise = table, limits, requests, noise
        self.column = len(table.clocks_mhz) - 1
        self.now_s = requests[0].arrival_s if requests else 0.0
        self.totals = Totals()
        self.first_tokens: list[int] = []
        """Requests whose first token the latest step generated, by their number."""
        self._next = 0
        self._waiting: deque[int] = deque()
        self._prefilling: deque[list[int]] = deque()
        """(request, tokens of its prompt still to compute)."""
        self._decoding: list[tuple[int, int]] = []
        """Heap of (number of the step that generates the last token, request)."""
        self._decode_steps = 0
        self._context = 0
        """Tokens in the KV cache that the next step's attention reads."""
        self._reserved = 0
        self._reported = _Reported()
        self._reported_s = self.now_s

    # ------------------------------------------------------------------ running

    def copy(self) -> "Engine":
        """Return an engine in the same state, with latencies and energy counted from here on."""
        other = copy.copy(self)
        other.totals, other._reported = Totals(), _Reported()
        other._reported_s = self.now_s
        other._waiting = deque(self._waiting)
        other._prefilling = deque(list(each) for each in self._prefilling)
        other._decoding = list(self._decoding)
        return other

    @property
    def is_busy(self) -> bool:
        """Whether a request is here."""
        return bool(self._waiting or self._prefilling or self._decoding)

    @property
    def clocks_mhz(self) -> tuple[int, ...]:
        """The clocks that `column` indexes."""
        return self._table.clocks_mhz

    @property
    def idle_power_w(self) -> float:
        """What an idle engine draws."""
        return self._table.idle_power_w

    @property
    def load(self) -> tuple[int, int, int, float]:
        """Requests that decode, tokens of context, tokens of prompts to compute, the longest wait (s)."""
        here = [number for number, _ in self._prefilling] + list(self._waiting)
        left = sum(left for _, left in self._prefilling)
        left += sum(self._requests[number].prompt_tokens for number in self._waiting)
        waited_s = max((self.now_s - self._requests[number].arrival_s for number in here), default=0.0)
        return len(self._decoding), self._context, left, waited_s

    @property
    def decoding(self) -> list[int]:
        """The requests whose next token the next step generates, by their number."""
        return [number for _, number in self._decoding]

    @property
    def occupancy(self) -> tuple[int, int, float]:
        """Requests that run, requests that wait, and the share of the KV cache in use."""
        running = len(self._decoding) + len(self._prefilling)
        return running, len(self._waiting), self._context / self._limits.kv_capacity_tokens

    @property
    def next_arrival_s(self) -> float:
        """When the next request arrives; infinite after the last."""
        return self._requests[self._next].arrival_s if self._next < len(self._requests) else inf

    def run_until(self, end_s: float) -> None:
        """Run steps that begin before a time, and wait for requests until then."""
        while self.now_s < end_s:
            self._arrive()
            if self.is_busy:
                self._step()
            else:
                until_s = min(end_s, self.next_arrival_s)
                self.totals.energy_j += self._table.idle_power_w * (until_s - self.now_s)
                self.now_s = until_s

    def finish(self) -> None:
        """Run until every request that is here is through; no other arrives."""
        while self.is_busy:
            self._step()

    def stop(self, until_s: float) -> None:
        """Be away until a time: the requests here start over then."""
        running = [each[0] for each in self._prefilling] + [number for _, number in self._decoding]
        self._waiting.extendleft(sorted(running, reverse=True))
        self._prefilling.clear()
        self._decoding.clear()
        self._context = self._reserved = 0
        self.totals.energy_j += self._table.idle_power_w * max(0.0, until_s - self.now_s)
        self.now_s = max(self.now_s, until_s)

    def _arrive(self) -> None:
        while self.next_arrival_s <= self.now_s:
            self._waiting.append(self._next)
            self._next += 1

    def _admit(self) -> bool:
        if not self._waiting:
            return False
        request = self._requests[self._waiting[0]]
        context = request.prompt_tokens + request.generated_tokens
        full = len(self._decoding) + len(self._prefilling) + 1 > self._limits.max_batched_tokens
        if self._reserved + context > self._limits.kv_capacity_tokens or full:
            return False
        self._reserved += context
        self._prefilling.append([self._waiting.popleft(), request.prompt_tokens])
        return True

    def _step(self) -> None:
        decoding = len(self._decoding)
        room = self._limits.max_batched_tokens - decoding
        through = []
        while room and (self._prefilling or self._admit()):
            first = self._prefilling[0]
            chunk = min(room, first[1])
            first[1] -= chunk
            room -= chunk
            self._context += chunk
            if first[1] == 0:
                through.append(self._prefilling.popleft()[0])
        self.first_tokens = through
        tokens = self._limits.max_batched_tokens - room
        table, column, totals = self._table, self.column, self.totals
        time_s = table.time_s[column][tokens] + table.time_per_decoding_s[column] * decoding
        time_s += table.time_per_context_s[column] * self._context
        time_s *= self._noise[totals.steps % len(self._noise)]
        self.now_s += time_s
        totals.energy_j += table.power_w[column][tokens] * time_s
        totals.busy_s += time_s
        totals.steps += 1
        if decoding:
            self._decode_steps += 1
            self._context += decoding
            totals.generated_tokens += decoding
            totals.itl.append((self.now_s, time_s, decoding))
            while self._decoding and self._decoding[0][0] <= self._decode_steps:
                self._end(heappop(self._decoding)[1])
        for number in through:
            request = self._requests[number]
            totals.prompt_tokens += request.prompt_tokens
            totals.generated_tokens += 1
            totals.ttft.append((self.now_s, self.now_s - request.arrival_s))
            self._context += 1
            if request.generated_tokens == 1:
                self._end(number)
            else:
                heappush(self._decoding, (self._decode_steps + request.generated_tokens - 1, number))

    def _end(self, number: int) -> None:
        request = self._requests[number]
        self._context -= request.prompt_tokens + request.generated_tokens
        self._reserved -= request.prompt_tokens + request.generated_tokens

    # ------------------------------------------------------------------ reporting

    def stats(self) -> EngineStats:
        """Return what happened since the last call, as an engine's plug-in sees it."""
        totals, last = self.totals, self._reported
        itl = totals.itl[last.itl_count :]
        running, waiting, kv_usage = self.occupancy
        stats = EngineStats(
            length_s=max(self.now_s - self._reported_s, 1e-6),
            running_count=running,
            waiting_count=waiting,
            kv_usage=kv_usage,
            prompt_tokens=totals.prompt_tokens - last.prompt_tokens,
            generation_tokens=totals.generated_tokens - last.generated_tokens,
            ttft=[LatencyCount(each, each, 1) for _, each in totals.ttft[last.ttft_count :]],
            itl=[LatencyCount(each, each, count) for _, each, count in itl],
            itl_sum_s=sum(each * count for _, each, count in itl),
            step_count=totals.steps - last.steps,
            power_w=(totals.energy_j - last.energy_j) / max(self.now_s - self._reported_s, 1e-6),
        )
        self._reported_s = self.now_s
        self._reported = _Reported(
            totals.energy_j,
            totals.steps,
            totals.prompt_tokens,
            totals.generated_tokens,
            len(totals.ttft),
            len(totals.itl),
        )
        return stats
