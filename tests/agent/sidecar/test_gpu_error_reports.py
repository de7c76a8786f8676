"""The reports of GPU errors to the coordinator."""

from typing import Any, cast

import pytest

from perseus.agent.gpu import (
    GpuDriverError,
    GpuError,
    GpuHungError,
    GpuInUseError,
    GpuLostError,
    GpuNotFoundError,
    GpuPermissionError,
    GpuUnsupportedError,
    RecordError,
    RecordHeldError,
)
from perseus.agent.link.computation import Rank
from perseus.agent.rank.messages import GpuErrorReason
from perseus.agent.sidecar.gpus import AgentCounters
from perseus.agent.sidecar.served import gpu_error_report
from perseus.agent.sidecar.uplink import GpuReports
from perseus.v1 import rank_pb2


@pytest.mark.parametrize(
    ("error_class", "reason"),
    [
        (GpuNotFoundError, GpuErrorReason.NOT_FOUND),
        (GpuDriverError, GpuErrorReason.DRIVER_FAILED),
        (GpuHungError, GpuErrorReason.DRIVER_FAILED),
        (GpuPermissionError, GpuErrorReason.NO_PERMISSION),
        (GpuLostError, GpuErrorReason.LOST),
        (GpuUnsupportedError, GpuErrorReason.NOT_SUPPORTED),
        (GpuInUseError, GpuErrorReason.IN_USE),
        (RecordError, GpuErrorReason.NOT_RECORDED),
        (RecordHeldError, GpuErrorReason.NOT_RECORDED),
    ],
)
def test_every_error_has_its_reason(error_class: type[GpuError], reason: GpuErrorReason) -> None:
    rank = Rank("job", 0, 0, 0)
    reported = gpu_error_report(rank, "GPU-0", error_class("what it says"), "somebody")
    assert (reported.job_id, reported.rank, reported.gpu_uuid) == ("job", rank_pb2.RankCoordinates(), "GPU-0")
    assert (GpuErrorReason(reported.reason), reported.message, reported.owner) == (
        reason,
        "what it says",
        "somebody",
    )


def test_a_drivers_message_is_made_to_fit_the_contract() -> None:
    error = GpuLostError("fell\noff the bus\x00" + "x" * 2000)
    text = gpu_error_report(Rank("job", 0, 0, 0), "GPU-0", error, "somebody").message
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
    output, rank = Sent(), Rank("job", 0, 0, 0)
    reports = GpuReports(lambda job_id: cast(Any, output), AgentCounters())
    report = gpu_error_report(rank, "GPU-0", GpuLostError("fell off the bus"), "somebody")
    reports.begin(rank)
    own = reports.of(rank)
    reports.end(rank)
    reports.report(rank, report, own)
    assert (output.now, output.later) == ([report], [report])
    reports.begin(rank)
    reports.report(rank, report, own)
    assert not reports.has_any(rank)
    reports.report(rank, report, reports.of(rank))
    assert reports.has_any(rank)
