"""A simulated GPU under a trainer: its energy counter as polled, and its true energy."""

from dataclasses import dataclass

import numpy as np

from perseus.agent.energy.counter import ChangeDetector, CounterChange
from perseus.agent.energy.regression import Span

POWER_W = {"forward": 280.0, "backward": 300.0, "wait": 75.0}


@dataclass(frozen=True)
class Simulation:
    """`readings`: when each reading of the counter began and ended, s, and what it showed, J."""

    readings: list[tuple[float, float, float]]
    changes: list[CounterChange]
    spans: list[Span[str]]
    end_s: float


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
) -> Simulation:
    """Run a program of (key, seconds), key "wait" for waiting, and poll the counter with a jittery thread."""
    random = np.random.default_rng(seed)
    edges_s, cumulative_j, spans = [0.0], [0.0], []
    for key, duration_s in program * iterations:
        begin_s = edges_s[-1]
        end_s = begin_s + duration_s * max(0.1, 1 + duration_noise * random.standard_normal())
        drawn_w = POWER_W[key] * (1 + power_noise * random.standard_normal())
        edges_s.append(end_s)
        cumulative_j.append(cumulative_j[-1] + drawn_w * (end_s - begin_s))
        if key == "wait":
            continue
        if random.random() < late_mark_share:  # the host sleeps on: the GPU waits, but no mark says so
            late_s = random.exponential(0.020)
            end_s += late_s
            edges_s.append(end_s)
            cumulative_j.append(cumulative_j[-1] + POWER_W["wait"] * late_s)
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
    return Simulation(readings, changes, spans, edges_s[-1])


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
    orders: list[list[tuple[str, int]]] = []
    for each in range(stage_count):
        warm_up = min(stage_count - 1 - each, microbatch_count)
        order = [("forward", microbatch) for microbatch in range(warm_up)]
        for microbatch in range(microbatch_count - warm_up):
            order += [("forward", warm_up + microbatch), ("backward", microbatch)]
        order += [("backward", microbatch_count - warm_up + late) for late in range(warm_up)]
        orders.append(order)

    done_s: dict[tuple[str, int, int], float] = {}
    programs: list[list[tuple[str, float]]] = [[] for _ in orders]
    free_s = [0.0] * stage_count
    while any(orders):
        for each, order in enumerate(orders):
            while order:
                kind, microbatch = order[0]
                source = each - 1 if kind == "forward" else each + 1
                ready_s = done_s.get((kind, source, microbatch)) if 0 <= source < stage_count else 0.0
                if ready_s is None:
                    break
                begin_s = max(free_s[each], ready_s)
                duration_s = {"forward": forward_s, "backward": backward_s}[kind]
                duration_s *= 1.1 if each == stage_count - 1 else 1.0
                programs[each] += [("wait", begin_s - free_s[each]), (kind, duration_s)]
                free_s[each] = done_s[kind, each, microbatch] = begin_s + duration_s
                order.pop(0)
    programs[stage].append(("wait", max(free_s) - free_s[stage] + 0.01))
    return programs[stage]
