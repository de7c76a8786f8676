"""What an agent says that its node's GPUs draw: one message a second, not one per rank."""

from dataclasses import dataclass

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
