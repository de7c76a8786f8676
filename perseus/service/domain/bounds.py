"""Bounds on inputs: every number has a range, every text a maximum length and printable characters.

The bounds are wide, but finite. They ensure that no sum, product or ratio of figures overflows, no counter
exceeds the 64 bits of the store, and no text fills the memory; they don't judge plausibility. The contract's
comments repeat them (`protos/perseus/v1`). Energies and powers are of one rank's GPU unless noted otherwise;
the solver has the bounds on clocks and on whole stages.
"""

from perseus.service.domain.errors import InvalidFieldError
from perseus.solver import MAX_POWER_W, MAX_TIME_S

MAX_COUNT = 2**53
"""For iterations, versions, sequences and counts: integers that a double represents exactly."""

MAX_DURATION_S = MAX_TIME_S
"""For an iteration, a computation or the setting of a clock: eleven days."""
MIN_DURATION_S = 1e-9
"""For durations that can't be 0."""
MAX_TOTAL_TIME_S = 1e10
"""For all iterations under a plan, or until a deadline: three centuries."""
MAX_RANK_ENERGY_J = 1e12
MAX_RANK_POWER_W = 1e7
MIN_POWER_W = 1e-3
"""For powers that can't be 0."""
MAX_PIPELINE_POWER_W = MAX_POWER_W
MAX_SLOWDOWN_FACTOR = 1e6

MIN_RELATIVE_WORK, MAX_RELATIVE_WORK = 1e-3, 1e3
"""Bounds on an iteration's work, relative to a typical one."""

MAX_CLOCK_COUNT = 1024
"""Clocks of one GPU; real ones have some 100."""
MAX_POWER_PROFILE_COUNT = 256
MAX_POWER_PROFILE = 255
"""NVML's numbers of workload power profiles."""
MAX_ITERATION_ROWS = 10_000
MAX_READING_ROWS = 256
"""GPUs of a node; real ones have 16 at most."""
MAX_COMPUTATION_ROWS = 1_000_000
MAX_SAMPLE_COUNT = 10_000
MAX_JOINT_SAMPLE_COUNT = 64
"""Samples with joint information, whose size grows with the square."""
MAX_INFORMATION = 1e30
"""About powers, 1/W² and 1/W."""
MAX_PROFILE_COUNT = 10_000

MAX_NAME_LENGTH = 256
"""Characters of an identifier, a host, a model."""
MAX_SENTENCE_LENGTH = 1024
"""Characters of a sentence for people."""


def check_range(field: str, value: float, minimum: float, maximum: float) -> None:
    """Refuse a number outside an inclusive range; NaN is always outside.

    Raises:
        InvalidFieldError: names the field and the bounds.
    """
    if not minimum <= value <= maximum:
        raise InvalidFieldError(field=field, expected=between(minimum, maximum), found=value)


def check_size(field: str, size: int, maximum: int) -> None:
    """Refuse a repeated field with too many elements.

    Raises:
        InvalidFieldError: names the field and the bound.
    """
    if size > maximum:
        raise InvalidFieldError(field=field, expected=f"at most {maximum} of them", found=size)


def check_text(field: str, text: str, minimum: int = 0, maximum: int = MAX_NAME_LENGTH) -> str:
    """Return a text after checking its length and that all its characters are printable.

    Raises:
        InvalidFieldError: the check failed.
    """
    if not minimum <= len(text) <= maximum:
        raise InvalidFieldError(field=field, expected=f"{minimum} to {maximum} characters", found=len(text))
    if not text.isprintable():
        raise InvalidFieldError(field=field, expected="printable characters", found=repr(text))
    return text


def check_ascii(field: str, text: str, minimum: int, maximum: int) -> None:
    """Refuse an identifier whose length is out of range, or with characters other than printable ASCII.

    Raises:
        InvalidFieldError: names the field.
    """
    if not (minimum <= len(text) <= maximum and text.isascii() and text.isprintable()):
        raise InvalidFieldError(
            field=field,
            expected=f"{minimum} to {maximum} printable ASCII characters",
            found=repr(text[: maximum + 1]),
        )


def between(minimum: float, maximum: float) -> str:
    """Format a range for an error message."""
    return f"{_shown(minimum)} to {_shown(maximum)}"


def _shown(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"
