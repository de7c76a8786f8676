"""Differences between a recorded run's current and recorded outputs."""

import math
from collections.abc import Iterator
from typing import Any

_TOLERANCE = 1e-9
"""Relative tolerance of figures: processors add in different orders."""


def differences(expected: Any, found: Any, path: str = "") -> Iterator[str]:
    """Yield the places where an output differs from the recorded one; figures may differ by rounding."""
    match expected, found:
        case (dict(), dict()):
            for name in expected.keys() | found.keys():
                yield from differences(expected.get(name), found.get(name), f"{path}.{name}")
        case (list(), list()) if len(expected) == len(found):
            for index, pair in enumerate(zip(expected, found, strict=True)):
                yield from differences(*pair, f"{path}[{index}]")
        case (float() | int(), float() | int()) if not isinstance(expected, bool):
            if not math.isclose(expected, found, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE):
                yield f"{path}: expected {expected}, found {found}"
        case _ if expected != found:
            yield f"{path}: expected {expected}, found {found}"
