"""A simulated GPU under a trainer: its energy counter as polled, and its true energy."""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from perseus.agent.energy.counter import ChangeDetector, CounterChange
from perseus.agent.energy.regression import Span
from perseus.agent.link.computation import Computation, Kind
from perseus.agent.rank.sampling import EstimateRequest, FinishedComputation, FinishedIteration

POWER_W = {"forward": 280.0, "backward": 300.0, "wait": 75.0}
GAP_W = 120.0


@dataclass(frozen=True)
class Simulation:
    """`readings`: when each reading of the counter began and ended, s, and what it showed, J.

    `iterations_s`: begin and end of each iteration, without the gap after it.
    """

    readings: list[tuple[float, float, float]]
    changes: list[CounterChange]
    spans: list[Span[str]]
    iterations_s: list[tuple[float, float]]
    end_s: float

    def request(self, iteration_count: int, clock_mhz: int) -> EstimateRequest:
        """Return the agent's request for an estimate after so many iterations at a clock."""
        iterations_s = self.iterations_s[:iteration_count]
        begins_s, last_s = [begin_s for begin_s, _ in iterations_s], iterations_s[-1][1]
        own: list[list[FinishedComputation]] = [[] for _ in begins_s]
        for span in takewhile(lambda span: span.begin_s < last_s, self.spans):
            what = Computation(Kind[span.key.upper()], 0)
            own[bisect_right(begins_s, span.begin_s) - 1].append(
                FinishedComputation(what, span.begin_s, span.end_s, clock_mhz, is_pure=True)
            )
        found = tuple(
            FinishedIteration(begin_s, end_s, tuple(computations), is_regular=True)
            for (begin_s, end_s), computations in zip(iterations_s, own, strict=True)
        )
        changes = tuple(takewhile(lambda change: change.time_s <= last_s, self.changes))
        return EstimateRequest(1, found, changes)


def simulate(
    program: list[tuple[str, float]],
    *,
    seed: int,
    iterations: int,
    duration_noise: float = 0.01,
    power_noise: float = 0.0,
    late_mark_share: float = 0.0,
    counter_period_s: float = 0.1,
    counter_jitter_s: float = 0.0,
    poll_interval_s: float = 0.005,
    power_w: Mapping[str, float] = POWER_W,
) -> Simulation:
    """Run a program of (key, seconds), and poll the counter with a jittery thread.

    The key "wait" is for waiting, "gap" for what comes after an iteration.
    """
    random = np.random.default_rng(seed)
    edges_s, cumulative_j, spans = [0.0], [0.0], []
    iterations_s: list[tuple[float, float]] = []
    for number, (key, duration_s) in enumerate(program * iterations):
        begin_s = edges_s[-1]
        if number % len(program) == 0:
            iteration_begin_s = begin_s
        end_s = begin_s + duration_s * max(0.1, 1 + duration_noise * random.standard_normal())
        drawn_w = {**power_w, "gap": GAP_W}[key] * (1 + power_noise * random.standard_normal())
        edges_s.append(end_s)
        cumulative_j.append(cumulative_j[-1] + drawn_w * (end_s - begin_s))
        if number % len(program) == len(program) - 1:
            iterations_s.append((iteration_begin_s, begin_s if key == "gap" else end_s))
        if key in ("wait", "gap"):
            continue
        if random.random() < late_mark_share:  # the host sleeps on: the GPU waits, but no mark says so
            late_s = random.exponential(0.020)
            end_s += late_s
            edges_s.append(end_s)
            cumulative_j.append(cumulative_j[-1] + power_w["wait"] * late_s)
        spans.append(Span(key, begin_s, end_s))

    ticks_s = np.arange(random.uniform(0, counter_period_s), edges_s[-1], counter_period_s)
    ticks_s += random.uniform(-counter_jitter_s, counter_jitter_s, len(ticks_s))
    shown_j = np.concatenate([[0.0], np.interp(ticks_s, edges_s, cumulative_j)])
    # A read takes some microseconds; a sleep overshoots a little, sometimes a lot.
    read_s, overshoot_s = 20e-6, 150e-6
    poll_count = int(edges_s[-1] / (read_s + poll_interval_s)) + 1
    pauses_s = read_s + poll_interval_s + random.exponential(overshoot_s, poll_count)
    polls_s = np.concatenate([[0.0], np.cumsum(pauses_s)])
    polls_s = polls_s[polls_s < edges_s[-1]]
    energies_j = shown_j[np.searchsorted(ticks_s, polls_s + read_s / 2)]
    readings = [
        (before_s, before_s + read_s, energy_j)
        for before_s, energy_j in zip(polls_s.tolist(), energies_j.tolist(), strict=True)
    ]
    detector = ChangeDetector()
    changes = [change for each in readings if (change := detector.poll(*each, 0)) is not None]
    return Simulation(readings, changes, spans, iterations_s, edges_s[-1])


def one_forward_one_backward(
    stage: int,
    *,
    stage_count: int,
    microbatch_count: int,
    forward_s: float = 0.024,
    backward_s: float = 0.048,
) -> list[tuple[str, float]]:
    """One iteration of one stage under 1F1B, as a program: computations and the waits between them.

    The last stage is a tenth slower than the others, so that the others wait now and then.
    """
    from perseus import solver  # only here: not every machine that measures has it

    profiles = {
        (each, 0, kind): (solver.Measurement(1000, time_s * (1.1 if each == stage_count - 1 else 1.0), 1.0),)
        for each in range(stage_count)
        for kind, time_s in ((solver.Kind.FORWARD, forward_s), (solver.Kind.BACKWARD, backward_s))
    }
    schedule = solver.one_forward_one_backward(stage_count, microbatch_count)
    pipeline = solver.Pipeline(schedule, profiles, (0.0,) * stage_count)
    plan = solver.replay(pipeline, dict.fromkeys(schedule.computations, 1000))
    program, now_s = [], 0.0
    for planned in plan.stages[stage]:
        kind = planned.computation.kind.name.lower()
        program += [("wait", max(0.0, planned.start_s - now_s)), (kind, planned.duration_s)]
        now_s = planned.start_s + planned.duration_s
    return [*program, ("wait", plan.iteration_time_s - now_s + 0.01)]
