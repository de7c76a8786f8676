"""Settings: the configurations at which a computation can run.

In a running job a setting is a clock, everywhere a whole number of MHz. Offline it may be more: a clock
together with further settings, such as a power limit, a memory clock or a kernel's configuration, each with a
name and a value. To the solver a setting is only the label of a measured time and energy. The solver uses two
properties: its clock, which defines "the highest", and equality.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from perseus.solver.errors import ProfileError

Further = tuple[tuple[str, str | float], ...]
"""(name, value) of each further setting, always in the same order. See `check_further`."""

MAX_NAME_LENGTH = 100
MAX_VALUE_LENGTH = 200

UNITS: Mapping[str, str] = {"mhz": "MHz", "w": "watts", "s": "seconds", "j": "joules", "percent": "percent"}
"""Units of numeric values by the suffix of the name. Values of other names are texts."""

RESERVED_NAMES = frozenset(
    {
        "stage",
        "chunk",
        "kind",
        "microbatch",
        "clock_mhz",
        "start_s",
        "duration_s",
        "computation_count",
        "lowest_clock_mhz",
        "highest_clock_mhz",
        "time_s",
        "time_se_s",
        "energy_j",
        "energy_se_j",
    }
)
"""Names of fields that plans and measurements already have."""


class Setting(NamedTuple):
    """A clock with further settings; a clock alone is an int."""

    clock_mhz: int
    further: Further

    def __str__(self) -> str:
        values = (
            f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in self.further
        )
        return ", ".join([f"{self.clock_mhz} MHz", *values])


def clock_of(setting: int | Setting) -> int:
    """Return a setting's clock in MHz."""
    return setting if isinstance(setting, int) else setting.clock_mhz


def further_of(setting: int | Setting) -> Further:
    """Return a setting's further settings; empty for a clock."""
    return () if isinstance(setting, int) else setting.further


def in_order(setting: int | Setting) -> tuple[int, Further]:
    """Return the sort key of a setting: the clock, then the further settings."""
    return clock_of(setting), further_of(setting)


def name_of(setting: int | Setting) -> str:
    """Return a setting's name in messages."""
    return f"{setting} MHz" if isinstance(setting, int) else str(setting)


def unit_of(name: str) -> str | None:
    """Return the unit of a further setting's values, in words, by the suffix of its name; None for texts."""
    _, separator, end = name.rpartition("_")
    return UNITS.get(end) if separator else None


def check_name(name: str) -> None:
    """Check the name of a further setting.

    Raises:
        ProfileError: it is empty, too long, not printable, or reserved (`RESERVED_NAMES`).
    """
    if not (0 < len(name) <= MAX_NAME_LENGTH and name.isprintable() and name == name.strip()):
        raise ProfileError(
            f"further setting: expected a printable name of at most {MAX_NAME_LENGTH} characters without "
            f"spaces around it, found {name!r}",
            found=name,
        )
    if name in RESERVED_NAMES:
        raise ProfileError(
            f"further setting {name}: expected another name, as computations have a {name} of their own",
            found=name,
        )


def expected_value(name: str) -> str:
    """Describe the valid values of a further setting."""
    unit = unit_of(name)
    if unit is None:
        return f"a printable text of 1 to {MAX_VALUE_LENGTH} characters"
    return f"a finite number of {unit} (the name ends in _{name.rpartition('_')[2]})"


def is_value(name: str, value: object) -> bool:
    """Return whether the value is valid for a further setting of that name."""
    if unit_of(name) is not None:
        return isinstance(value, float) and math.isfinite(value)
    return (
        isinstance(value, str)
        and 0 < len(value) <= MAX_VALUE_LENGTH
        and value.isprintable()
        and value == value.strip()
    )


def check_further(further: Further) -> None:
    """Check further settings.

    Raises:
        ProfileError: there is none, a name is repeated or invalid (`check_name`), or a value does not fit its
            name: a finite float if the name ends in a unit (`UNITS`), else a printable text.
    """
    if not further:
        raise ProfileError("further: expected a setting beside the clock, found none")
    names = [name for name, _ in further]
    for name, value in further:
        check_name(name)
        if names.count(name) > 1:
            raise ProfileError(f"further: expected each name once, found {name} again", found=name)
        if not is_value(name, value):
            raise ProfileError(
                f"further setting {name}: expected {expected_value(name)}, found {value!r}",
                field=name,
                found=value,
            )
