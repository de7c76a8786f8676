"""Energy on an emulated GPU whose counter moves every 100 ms, under computations as short as that.

The truth is known: the trainer runs 50 ms forwards, 100 ms backwards and waits of 30 ms in simulated time, a
poller reads the counter as the agent's thread does, and all data goes through the sampler.
"""

import numpy as np

from perseus.agent.energy.counter import ChangeDetector, CounterChange
from perseus.agent.link.computation import Computation, Kind
from perseus.agent.rank.messages import EnergyEstimate
from perseus.agent.rank.sampling import EstimateRequest, FinishedComputation, FinishedIteration, estimate
from perseus.emulation.dynamics import GpuState
from perseus.emulation.physics import A100_SXM, Work

CLOCK_MHZ = 1200
ITERATIONS = 40
SEEDS = 24
WORKS = {Kind.FORWARD: (0.050, 0.85), Kind.BACKWARD: (0.100, 0.95)}


def measured(seed: int, *, late_mark_share: float = 0.0) -> EnergyEstimate:
    """The agent's estimate of a training of some 30 s."""
    random = np.random.default_rng(seed)
    state = GpuState(0.0, float(random.uniform(0, 0.1)), CLOCK_MHZ)
    detector = ChangeDetector()
    changes: list[CounterChange] = []
    iterations: list[FinishedIteration] = []
    polled_s = 0.0

    def go_to(time_s: float) -> None:
        nonlocal polled_s
        while polled_s < time_s:
            state.advance(A100_SXM, polled_s)
            change = detector.poll(polled_s, polled_s + 20e-6, state.counter_j, 0)
            if change is not None:
                changes.append(change)
            polled_s += 0.005 + float(random.exponential(150e-6))
        state.advance(A100_SXM, time_s)

    now_s = 0.0
    for _ in range(ITERATIONS):
        begin_s = now_s
        computations = []
        for microbatch in range(2):
            for kind, (duration_s, activity) in WORKS.items():
                now_s += 0.030
                go_to(now_s)
                noisy_s = duration_s * (1 + 0.01 * float(random.standard_normal()))
                work = Work(noisy_s * CLOCK_MHZ / A100_SXM.highest_clock_mhz, 0.0, activity)
                state.begin(work)
                end_s = marked_s = state.finish_s(A100_SXM)
                if random.random() < late_mark_share:
                    marked_s += float(random.exponential(0.010))
                go_to(end_s + 1e-9)
                state.remaining = 0.0
                go_to(marked_s)
                computations.append(
                    FinishedComputation(Computation(kind, microbatch), now_s, marked_s, CLOCK_MHZ, True)
                )
                now_s = marked_s
        iterations.append(FinishedIteration(begin_s, now_s, tuple(computations), True))
    go_to(now_s + 0.2)
    found = estimate(EstimateRequest(1, tuple(iterations), tuple(changes)))
    assert found is not None
    return found


def test_energies_and_blocking_power_are_right_within_their_stated_errors() -> None:
    errors: dict[str, list[float]] = {}
    deviations: list[float] = []
    blocking_w = A100_SXM.blocking_power_w(CLOCK_MHZ)
    for seed in range(SEEDS):
        found = measured(seed)
        assert {sample.kind for sample in found.samples} == set(WORKS)
        for sample in found.samples:
            duration_s, activity = WORKS[sample.kind]
            true_j = duration_s * A100_SXM.power_w(activity, CLOCK_MHZ)
            errors.setdefault(sample.kind.name, []).append(abs(sample.energy_j / true_j - 1))
            deviations.append(abs(sample.energy_j - true_j) / sample.energy_se_j)
        assert found.blocking_power_w is not None
        errors.setdefault("blocking", []).append(abs(found.blocking_power_w / blocking_w - 1))
        deviations.append(abs(found.blocking_power_w - blocking_w) / found.blocking_power_se_w)
    assert max(errors["FORWARD"]) <= 0.05
    assert max(errors["BACKWARD"]) <= 0.05
    assert max(errors["blocking"]) <= 0.10
    assert np.mean(np.array(deviations) <= 2) >= 0.9


def test_late_marks_do_not_stretch_the_time_of_a_computation() -> None:
    found = measured(1, late_mark_share=0.2)
    for sample in found.samples:
        duration_s, _ = WORKS[sample.kind]
        assert abs(sample.time_s / duration_s - 1) <= 0.005
