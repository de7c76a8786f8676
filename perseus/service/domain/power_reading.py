"""An agent's report of the power that its node's GPUs draw: one message a second, not one per rank."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from perseus.service.domain.bounds import (
    MAX_NAME_LENGTH,
    MAX_RANK_POWER_W,
    MAX_READING_ROWS,
    check_range,
    check_size,
    check_text,
)
from perseus.service.domain.errors import InvalidFieldError

MIN_DURATION_S, MAX_DURATION_S = 1e-3, 600.0


@dataclass(frozen=True, slots=True)
class PowerReading:
    """Mean powers of some GPUs over the time until now, by UUID.

    Raises:
        InvalidFieldError: a figure is out of range, a GPU is in it twice, or the columns differ in length.
    """

    duration_s: float
    gpu_uuids: list[str]
    powers_w: list[float]

    def __post_init__(self) -> None:
        check_range("power_reading.duration_s", self.duration_s, MIN_DURATION_S, MAX_DURATION_S)
        count = len(self.gpu_uuids)
        check_size("power_reading.gpu_uuid", count, MAX_READING_ROWS)
        if len(self.powers_w) != count:
            if not count:
                expected = f"{len(self.powers_w)} of them, as of power_w"
                raise InvalidFieldError(field="power_reading.gpu_uuid", expected=expected, found=0)
            expected = f"{count} of them, as of gpu_uuid"
            raise InvalidFieldError(
                field="power_reading.power_w", expected=expected, found=len(self.powers_w)
            )
        for row, gpu_uuid in enumerate(self.gpu_uuids):
            check_text(f"power_reading.gpu_uuid[{row}]", gpu_uuid, 1, MAX_NAME_LENGTH)
        if len(set(self.gpu_uuids)) < count:
            raise InvalidFieldError(
                field="power_reading.gpu_uuid", expected="each once", found="one of them twice"
            )
        for row, power_w in enumerate(self.powers_w):
            check_range(f"power_reading.power_w[{row}]", power_w, 0, MAX_RANK_POWER_W)


BOARD_POWERS_W: Mapping[str, float] = {
    "V100": 350,
    "T4": 70,
    "A10": 150,
    "A30": 165,
    "A40": 300,
    "A100": 400,
    "A800": 400,
    "L4": 72,
    "L40": 300,
    "L40S": 350,
    "H20": 500,
    "H100": 700,
    "H800": 700,
    "H200": 700,
    "GH200": 1000,
    "B200": 1000,
    "GB200": 1200,
    "B300": 1400,
    "GB300": 1400,
    "MI210": 300,
    "MI250": 560,
    "MI250X": 560,
    "MI300A": 760,
    "MI300X": 750,
    "MI325X": 1000,
    "MI350X": 1000,
    "MI355X": 1400,
}
"""The highest power limit of any board of a model, from NVIDIA's and AMD's data sheets, watts."""

_UNKNOWN_BOARD_W = 2000.0
_EXCESS = 1.25
"""Boards regulate their power over some tenths of a second and exceed their limit in between."""


@lru_cache(1024)  # called for every GPU, every second
def max_power_w(model: str) -> float:
    """Return the most power that a GPU can draw, by its model's name in NVML or AMD SMI, watts.

    The coordinator trusts no reading above it.
    """
    words = re.split(r"[^A-Z0-9]+", model.upper())
    return _EXCESS * next(
        (BOARD_POWERS_W[word] for word in words if word in BOARD_POWERS_W), _UNKNOWN_BOARD_W
    )
