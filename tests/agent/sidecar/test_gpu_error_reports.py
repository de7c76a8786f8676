"""What the coordinator is told of each way in which a GPU fails."""

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
from perseus.agent.rank.messages import GpuErrorReason, GpuErrorReport
from perseus.agent.sidecar.gpu_reports import GpuReports
from perseus.agent.sidecar.served import gpu_error_report
from perseus.agent.sidecar.vitals import Vitals


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
    told = gpu_error_report(rank, "GPU-0", error_class("what it says"), "somebody")
    assert told == GpuErrorReport(rank, "GPU-0", reason, "what it says", "somebody")


class Said:
    """Takes note of what is said to a coordinator."""

    def __init__(self) -> None:
        self.now: list[object] = []
        self.later: list[object] = []

    def say(self, message: object) -> None:
        self.now.append(message)

    def say_next(self, messages: list[object]) -> None:
        self.later += messages


def test_a_report_that_comes_after_its_trainer_s_end_is_said_and_is_not_the_next_one_s() -> None:
    said, rank = Said(), Rank("job", 0, 0, 0)
    reports = GpuReports(cast(Any, said), Vitals())
    report = GpuErrorReport(rank, "GPU-0", GpuErrorReason.LOST, "fell off the bus", "somebody")
    reports.begin(rank)
    own = reports.of(rank)
    reports.end(rank)
    reports.report(report, own)
    assert (said.now, said.later) == ([report], [report])
    reports.begin(rank)
    reports.report(report, own)
    assert not reports.has_any(rank)
    reports.report(report, reports.of(rank))
    assert reports.has_any(rank)
