"""A GPU's energy counter, and energy by regression, held against the counter itself.

Two known loads and waiting are executed in one sequence, from which powers are fitted as the agent fits them.
A second sequence has the same loads in another order and mix: what the powers say that it took must be what
the counter says, within `TOLERANCE`.
"""

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from perseus.agent.energy.counter import CounterChange
from perseus.agent.energy.regression import NotDetermined, PowerFit, Span, estimate_power
from perseus.agent.gpu import ClockEventReason, Gpu
from perseus.agent.sidecar.counter_poller import CounterPoller
from tests.gpu.report import Finding, judged

TOLERANCE = 0.03
MAX_PERIOD_S = 0.2
WAIT = "wait"
WAIT_S = 0.03


class Loads(Protocol):
    """Two kinds of work for a GPU, each of some 50 to 100 ms."""

    @property
    def kinds(self) -> tuple[str, str]:
        """Their names."""

    def run(self, kind: str) -> None:
        """Execute one unit; returns when the GPU is done."""


@dataclass(frozen=True, slots=True)
class Recording:
    """What the counter did while a sequence ran, and when each unit of it did."""

    changes: Sequence[CounterChange]
    spans: Sequence[Span[str]]
    begin_s: float
    end_s: float


def fitting_sequence(length: int) -> list[str]:
    """Both loads (0 and 1) by chance and as often, every other one followed by a wait."""
    chance = random.Random(1)
    return [each for _ in range(length) for each in (chance.choice("01"), *chance.choice(([], [WAIT])))]


def judging_sequence(length: int) -> list[str]:
    """In blocks, the first load four times as often, and fewer waits."""
    block = ["0"] * 8 + [WAIT] + ["1"] * 2 + [WAIT]
    return list(itertools.islice(itertools.cycle(block), length))


def record(gpu: Gpu, run: Callable[[], Sequence[Span[str]]]) -> Recording:
    """Run something that returns when each of its units ran. GpuError if the counter can't be read."""
    changes: list[CounterChange] = []
    errors: list[Exception] = []
    poller = CounterPoller(gpu, changes.append, errors.append)
    begin_s = time.monotonic()
    spans = run()
    end_s = time.monotonic()
    poller.close()
    if errors:
        raise errors[0]
    return Recording(changes, spans, begin_s, end_s)


def execute(loads: Loads, sequence: Sequence[str]) -> list[Span[str]]:
    """Execute a sequence, and return when each unit ran."""
    spans: list[Span[str]] = []
    for each in sequence:
        if each == WAIT:
            time.sleep(WAIT_S)
            continue
        kind = loads.kinds[int(each)]
        begun_s = time.monotonic()
        loads.run(kind)
        spans.append(Span(kind, begun_s, time.monotonic()))
    return spans


def predicted_and_counted_j(fit: PowerFit[str], recording: Recording) -> tuple[float, float]:
    """The energy between the first and the last move of the counter: by the powers, and by the counter."""
    within = [change for change in recording.changes if recording.begin_s <= change.time_s <= recording.end_s]
    first, last = within[0], within[-1]
    assert fit.blocking_power_w is not None
    waited_s, predicted_j = last.time_s - first.time_s, 0.0
    for span in recording.spans:
        inside_s = max(0.0, min(span.end_s, last.time_s) - max(span.begin_s, first.time_s))
        predicted_j += inside_s * fit.power_w[span.key].value
        waited_s -= inside_s
    return predicted_j + waited_s * fit.blocking_power_w.value, last.energy_j - first.energy_j


def counter_findings(recording: Recording) -> list[Finding]:
    """How often the counter moves, and by how little it can."""
    changes = recording.changes
    if len(changes) < 10:
        return [judged("energy counter", f"{len(changes)} changes", "at least 10", False)]
    steps_s = [later.time_s - earlier.time_s for earlier, later in itertools.pairwise(changes)]
    period_s = statistics.median(steps_s)
    energies_mj = [round(1000 * change.energy_j) for change in changes]
    resolution_mj = math.gcd(*(later - earlier for earlier, later in itertools.pairwise(energies_mj)))
    return [
        judged(
            "energy counter, period",
            f"{1000 * period_s:.1f} ms (quartiles {_quartiles_ms(steps_s)})",
            f"at most {1000 * MAX_PERIOD_S:.0f} ms",
            period_s <= MAX_PERIOD_S,
        ),
        Finding("energy counter, resolution", f"{resolution_mj} mJ"),
    ]


def regression_findings(gpu: Gpu, loads: Loads, *, fitted: int = 250, judged_by: int = 120) -> list[Finding]:
    """Fit on one sequence, judge on the other. GpuError if the counter can't be read."""
    first = record(gpu, lambda: execute(loads, fitting_sequence(fitted)))
    second = record(gpu, lambda: execute(loads, judging_sequence(judged_by)))
    return judge(loads.kinds, first, second)


def judge(kinds: Sequence[str], first: Recording, second: Recording) -> list[Finding]:
    """Whether counter and powers are as expected of them."""
    findings = [*counter_findings(first), Finding("clock events", _clock_events([first, second]))]
    return [*findings, *predicted("energy by regression", kinds, first, second)]


def predicted(name: str, kinds: Sequence[str], first: Recording, second: Recording) -> list[Finding]:
    """Whether the powers that the first recording tells predict the second one's energy."""
    expected = f"within {TOLERANCE:.0%} of the counter, on another sequence"
    fit = estimate_power(first.changes, first.spans, begin_s=first.begin_s, end_s=first.end_s)
    if isinstance(fit, NotDetermined):
        return [judged(name, fit.reason, expected, False)]
    if fit.blocking_power_w is None or set(kinds) - set(fit.power_w):
        found = ", ".join(map(str, fit.power_w)) or "none"
        of_windows = f"{fit.window_count} windows, {fit.dropped_window_count} dropped"
        return [judged(name, f"powers determined: {found} ({of_windows})", expected, False)]
    powers = {**fit.power_w, "waiting": fit.blocking_power_w}
    findings = [
        Finding(f"power, {kind}", f"{power_w.value:.1f} ± {power_w.standard_error:.1f} W")
        for kind, power_w in powers.items()
    ]
    predicted_j, counted_j = predicted_and_counted_j(fit, second)
    error = predicted_j / counted_j - 1
    found = f"{predicted_j:.1f} J, counted {counted_j:.1f} J ({error:+.2%})"
    return [*findings, judged(name, found, expected, abs(error) <= TOLERANCE)]


def _clock_events(recordings: Sequence[Recording]) -> str:
    changes = [change for recording in recordings for change in recording.changes]
    throttled = sum(bool(each.clock_event_reasons & ClockEventReason.THROTTLED) for each in changes)
    return f"{throttled} of {len(changes)} windows throttled"


def _quartiles_ms(steps_s: Sequence[float]) -> str:
    lower_s, _, upper_s = statistics.quantiles(steps_s, n=4)
    return f"{1000 * lower_s:.1f} to {1000 * upper_s:.1f}"
