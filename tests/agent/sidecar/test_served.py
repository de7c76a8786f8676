"""What surrounds a served rank: the reports of its GPU's errors, and the thread for energy estimates."""

import threading
from typing import Any, cast

import pytest

from perseus.agent.gpu import GpuError, GpuHungError, GpuLostError, RecordHeldError
from perseus.agent.link.computation import Rank
from perseus.agent.rank.messages import GpuErrorReason
from perseus.agent.rank.sampling import EstimateRequest
from perseus.agent.sidecar.gpus import AgentCounters
from perseus.agent.sidecar.served import Estimator, gpu_error_report
from perseus.agent.sidecar.uplink import GpuReports
from perseus.v1 import rank_pb2

RANK = Rank("job", 0, 0, 0)


@pytest.mark.parametrize(
    ("error_class", "reason"),
    [
        (GpuLostError, GpuErrorReason.LOST),
        (GpuHungError, GpuErrorReason.DRIVER_FAILED),
        (RecordHeldError, GpuErrorReason.NOT_RECORDED),
    ],
)
def test_an_error_has_the_reason_of_its_kind(error_class: type[GpuError], reason: GpuErrorReason) -> None:
    """That NVML's errors have theirs is in the tests of NVML's errors."""
    reported = gpu_error_report(RANK, "GPU-0", error_class("what it says"), "somebody")
    assert (reported.job_id, reported.rank, reported.gpu_uuid) == ("job", rank_pb2.RankCoordinates(), "GPU-0")
    assert (GpuErrorReason(reported.reason), reported.message, reported.owner) == (
        reason,
        "what it says",
        "somebody",
    )


def test_a_drivers_message_is_made_to_fit_the_contract() -> None:
    error = GpuLostError("fell\noff the bus\x00" + "x" * 2000)
    text = gpu_error_report(RANK, "GPU-0", error, "somebody").message
    assert text.startswith("fell off the bus xx")
    assert text.endswith("x…")
    assert len(text) == 1024
    assert text.isprintable()


class Sent:
    """Records messages to a coordinator."""

    def __init__(self) -> None:
        self.now: list[object] = []
        self.later: list[object] = []

    def send(self, message: object) -> None:
        self.now.append(message)

    def send_next(self, messages: list[object]) -> None:
        self.later += messages


def test_a_report_after_its_trainers_end_is_sent_but_not_as_the_next_trainers() -> None:
    output = Sent()
    reports = GpuReports(lambda job_id: cast(Any, output), AgentCounters())
    report = gpu_error_report(RANK, "GPU-0", GpuLostError("fell off the bus"), "somebody")
    reports.begin(RANK)
    own = reports.of(RANK)
    reports.end(RANK)
    reports.report(RANK, report, own)
    assert (output.now, output.later) == ([report], [report])
    reports.begin(RANK)
    reports.report(RANK, report, own)
    assert not reports.has_any(RANK)
    reports.report(RANK, report, reports.of(RANK))
    assert reports.has_any(RANK)


# --- Energy estimates ---------------------------------------------------------------------------------------


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
