"""What may come through the door: every number between bounds, every text of a length and printable.

Wide, but finite. Bounds are there so that no sum, product or ratio of figures overflows, no counter leaves
the 64 bits of the store, and no text fills the memory; they say nothing about what is plausible. The
contract's comments repeat them (`protos/perseus/v1`). Energies and powers are of one rank's GPU, if nothing
else is said; those of whole stages, and clocks, are the solver's.
"""

from perseus.service.domain.errors import InvalidFieldError
from perseus.solver import MAX_POWER_W, MAX_TIME_S

MAX_COUNT = 2**53
"""Iterations, versions, sequences and counts: whole numbers that doubles hold, too."""

MAX_DURATION_S = MAX_TIME_S
"""Of an iteration, a computation or a set: eleven days."""
MIN_DURATION_S = 1e-9
"""Of what must take time."""
MAX_TOTAL_TIME_S = 1e10
"""Of all iterations under a plan, or until a deadline: three centuries."""
MAX_RANK_ENERGY_J = 1e12
MAX_RANK_POWER_W = 1e7
MIN_POWER_W = 1e-3
"""Of what draws power."""
MAX_PIPELINE_POWER_W = MAX_POWER_W
MAX_SLOWDOWN_FACTOR = 1e6

MIN_RELATIVE_WORK, MAX_RELATIVE_WORK = 1e-3, 1e3
"""Of an iteration, relative to a typical one."""

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
MAX_PROFILE_COUNT = 10_000

MAX_NAME_LENGTH = 256
"""Characters of an identifier, a host, a model."""
MAX_SENTENCE_LENGTH = 1024
"""Characters of a sentence for people."""


def check_range(field: str, value: float, minimum: float, maximum: float) -> None:
    """Refuse a number that is not between two bounds, both included; NaN is not.

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
    """Return a text, if it has a number of characters between two bounds, all printable.

    Raises:
        InvalidFieldError: it has not.
    """
    if not minimum <= len(text) <= maximum:
        raise InvalidFieldError(field=field, expected=f"{minimum} to {maximum} characters", found=len(text))
    if not text.isprintable():
        raise InvalidFieldError(field=field, expected="printable characters", found=repr(text))
    return text


def check_ascii(field: str, text: str, minimum: int, maximum: int) -> None:
    """Refuse an identifier of another length, or with characters other than printable ASCII.

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
    """Return bounds for an error's text."""
    return f"{_shown(minimum)} to {_shown(maximum)}"


def _shown(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"
