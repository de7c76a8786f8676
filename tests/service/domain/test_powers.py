"""The profiled power of computations."""

import pytest

from perseus.service.domain.measured import Powers, StageProfile
from perseus.solver import Kind, Measurement

FORWARD = (0, Kind.FORWARD)


def profile(clock_mhz: int, power_w: float, stage: int = 0) -> StageProfile:
    measurement = Measurement(clock_mhz, 0.5, power_w * 0.5)
    return StageProfile(stage, clock_mhz, {FORWARD: measurement}, None, 0.0)


@pytest.mark.parametrize(
    ("clock_mhz", "power_w"),
    [(0, 400), (1500, 400), (1400, 400), (1300, 300), (1200, 200), (1100, 150), (1000, 100), (900, 100)],
)
def test_power_is_interpolated_between_clocks_and_stock_is_the_highest(
    clock_mhz: int, power_w: float
) -> None:
    powers = Powers([profile(1200, 200), profile(1400, 400), profile(1000, 100)])
    assert powers.at(0, FORWARD, clock_mhz) == pytest.approx(power_w)


def test_power_without_a_measurement_is_unknown() -> None:
    powers = Powers([profile(1200, 200)])
    assert powers.at(1, FORWARD, 1200) is None
    assert powers.at(0, (0, Kind.BACKWARD), 1200) is None
    assert powers.at(0, (1, Kind.FORWARD), 1200) is None
    assert Powers([]).at(0, FORWARD, 0) is None
