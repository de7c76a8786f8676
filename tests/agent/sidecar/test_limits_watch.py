"""The limits that others set on a GPU are read periodically."""

from collections.abc import Iterator

import pytest

from perseus.agent.gpu import GpuDriverError
from perseus.agent.rank.messages import GpuLimits
from perseus.agent.sidecar.counter_poller import LIMITS_INTERVAL_S, LimitsWatch
from tests.agent.fake_gpu import FakeGpu


class LimitedGpu(FakeGpu):
    """A GPU with a sequence of limits, or exceptions to raise."""

    def __init__(self, limits: Iterator[GpuLimits | GpuDriverError]) -> None:
        super().__init__()
        self._limits = limits
        self._profiles: tuple[int, ...] = ()

    def power_limit_w(self) -> float:
        limits = next(self._limits)
        if isinstance(limits, GpuDriverError):
            raise limits
        self._profiles = limits.power_profiles
        return limits.power_limit_w

    def power_profiles(self) -> tuple[int, ...]:
        return self._profiles


def test_only_changes_are_reported_and_reads_are_limited() -> None:
    known, lower, profiled = GpuLimits(400.0), GpuLimits(300.0), GpuLimits(300.0, (7,))
    reported: list[GpuLimits] = []
    watch = LimitsWatch(LimitedGpu(iter([known, lower, lower, profiled])), known, reported.append)
    for check in range(8):  # every second check comes too early
        watch.check(100.0 + check * LIMITS_INTERVAL_S / 2)
    assert reported == [lower, profiled]


def test_unreadable_limits_stay_as_they_were(capsys: pytest.CaptureFixture[str]) -> None:
    known, busy = GpuLimits(400.0), GpuDriverError("busy")
    reported: list[GpuLimits] = []
    watch = LimitsWatch(LimitedGpu(iter([busy, busy, known, GpuLimits(250.0)])), known, reported.append)
    for check in range(4):
        watch.check(100.0 + check * LIMITS_INTERVAL_S)
    assert reported == [GpuLimits(250.0)]
