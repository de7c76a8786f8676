"""Times that commands take as durations from now."""

from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from perseus.cli.listing import later, moment


@pytest.mark.parametrize(("parsed", "sign"), [(moment, -1), (later, 1)])
@pytest.mark.parametrize(("text", "duration_s"), [("90s", 90), ("15m", 900), ("2h", 7200), ("7d", 604_800)])
def test_a_duration_is_before_or_after_now(
    parsed: Callable[[str, str], datetime], sign: int, text: str, duration_s: float
) -> None:
    delay_s = (parsed("--x", text) - datetime.now(UTC)).total_seconds()
    assert delay_s == pytest.approx(sign * duration_s, abs=60)
