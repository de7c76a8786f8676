"""Estimates on a separate thread, from iterations with a simulated counter."""

import queue
import threading

import pytest

from perseus.agent.link.computation import Computation, Kind, Rank
from perseus.agent.rank.messages import EnergyEstimate
from perseus.agent.rank.sampling import EstimateRequest, FinishedComputation, FinishedIteration
from perseus.agent.sidecar.served import Estimator
from tests.agent.counter_simulation import POWER_W, one_forward_one_backward, simulate

RANK = Rank("job", 0, 0, 0)
KINDS = {"forward": Kind.FORWARD, "backward": Kind.BACKWARD}


def request(version: int) -> EstimateRequest:
    """Return a simulated training as one long iteration."""
    simulation = simulate(
        one_forward_one_backward(1, stage_count=4, microbatch_count=8), seed=version, iterations=20
    )
    computations = tuple(
        FinishedComputation(Computation(KINDS[span.key], 0), span.begin_s, span.end_s, 1000, True)
        for span in simulation.spans
    )
    whole = FinishedIteration(0.0, simulation.end_s, computations, True)
    return EstimateRequest(version, (whole,), tuple(simulation.changes))


def test_an_estimate_comes_from_another_thread() -> None:
    worker = Estimator()
    found: queue.Queue[tuple[EnergyEstimate, str]] = queue.Queue()
    worker.request(RANK, request(3), lambda estimate: found.put((estimate, threading.current_thread().name)))
    estimate, thread = found.get(timeout=30)
    worker.close()
    assert thread == "energy estimates"
    assert estimate.plan_version == 3
    assert {sample.kind for sample in estimate.samples} == set(KINDS.values())
    for sample in estimate.samples:
        assert sample.energy_j / sample.time_s == pytest.approx(POWER_W[sample.kind.name.lower()], rel=0.05)


def test_only_the_newest_request_under_a_plan_counts() -> None:
    begun, permit = threading.Semaphore(0), threading.Event()
    taken: list[EstimateRequest] = []

    def estimate(request: EstimateRequest) -> None:
        begun.release()
        taken.append(request)
        assert permit.wait(60)

    worker = Estimator(estimate)
    requests = [EstimateRequest(version, (), ()) for version in (1, 2, 2, 3)]
    for each in requests:
        worker.request(RANK, each, lambda _: None)
        if each is requests[0]:
            assert begun.acquire(timeout=60)
    permit.set()
    for _ in range(2):
        assert begun.acquire(timeout=60)
    worker.close()
    assert [id(each) for each in taken] == [id(requests[i]) for i in (0, 2, 3)]


def test_a_failing_estimate_does_not_end_the_thread() -> None:
    done = threading.Semaphore(0)

    def estimate(request: EstimateRequest) -> None:
        done.release()
        raise ArithmeticError(request.plan_version)

    worker = Estimator(estimate)
    for version in (1, 2):
        worker.request(RANK, EstimateRequest(version, (), ()), lambda _: None)
        assert done.acquire(timeout=60)
    worker.close()
