"""Another process's log of JSON lines."""

import json
import time
from pathlib import Path
from typing import Any

TIMEOUT_S = 60.0


def logged(log: Path, event: str) -> dict[str, Any]:
    """Return the first entry of an event as soon as it is there."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while True:
        lines = log.read_text().splitlines(keepends=True)
        # The last line may be incomplete.
        entries = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("\n")]
        for entry in entries:
            if entry["event"] == event:
                found: dict[str, Any] = entry
                return found
        assert time.monotonic() < deadline_s, f"{log.name}: expected {event!r}, found {entries[-3:]}"
        time.sleep(0.02)
