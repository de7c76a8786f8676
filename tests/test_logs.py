"""The error that ends a process is in its log, once.

The rate-limited log has each kind, with the number of omitted entries, in bounded memory.
"""

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from perseus import logs
from perseus.rate_limited_log import RateLimitedLog

CODES = {ValueError: 3, OSError: 4}


def fail_with(error: Exception) -> None:
    with logs.exiting(CODES):
        logs.log_end(error, *CODES)  # where it is noticed
        raise error


@pytest.mark.parametrize(
    ("error", "cause", "code"),
    [
        (ValueError("no room"), "no room", 3),
        (FileNotFoundError(2, "No such file or directory", "a.db"), "a.db: No such file or directory", 4),
        (KeyError("bug"), "'bug'", 1),
    ],
)
def test_the_cause_is_logged_once(error: Exception, cause: str, code: int) -> None:
    with capture_logs() as entries, pytest.raises(SystemExit) as end:
        fail_with(error)
    (entry,) = entries
    assert (entry["event"], entry["log_level"], entry["cause"]) == ("ends with an error", "critical", cause)
    assert entry["exc_info"] is (code == 1), "a traceback is a bug"
    assert end.value.code == code


def test_a_missing_module_is_left_to_the_command_line() -> None:
    with pytest.raises(ModuleNotFoundError), logs.exiting({}):
        raise ModuleNotFoundError


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_a_kind_is_logged_again_after_the_period_with_its_omitted_count() -> None:
    clock = Clock()
    with capture_logs() as entries:
        limited = RateLimitedLog(structlog.get_logger(), 10.0, monotonic=clock)
        for uid in [*[1] * 1000, 2]:
            limited.warning("refused", uid, "A", uid=uid)
        clock.now_s += 10.0
        limited.warning("refused", 1, "A", uid=1)
        limited.warning("refused", 1, "A", uid=1)
    alike = {"event": "refused", "log_level": "warning"}
    assert entries == [alike | {"uid": 1}, alike | {"uid": 2}, alike | {"uid": 1, "left_out": 999}]


def test_events_and_kinds_are_distinct_and_errors_have_their_level() -> None:
    with capture_logs() as entries:
        limited = RateLimitedLog(structlog.get_logger(), monotonic=Clock())
        for attempt in range(2):
            limited.error("refused", "token revoked", attempt=attempt)
            limited.warning("nobody there", "token revoked", attempt=attempt)
            limited.warning("nobody there", "no address", attempt=attempt)
    assert [(line["log_level"], line["event"]) for line in entries] == [
        ("error", "refused"),
        ("warning", "nobody there"),
        ("warning", "nobody there"),
    ]


def test_without_a_kind_details_distinguish_entries_but_row_numbers_do_not() -> None:
    with capture_logs() as entries:
        limited = RateLimitedLog(structlog.get_logger(), monotonic=Clock())
        limited.warning("not read", gpu="GPU-0", field="rows[1].time_s")
        limited.warning("not read", gpu="GPU-0", field="rows[27].time_s")
        limited.warning("not read", gpu="GPU-1", field="rows[1].time_s")
    assert [line["gpu"] for line in entries] == ["GPU-0", "GPU-1"]


def test_a_reset_forgets_all_kinds() -> None:
    with capture_logs() as entries:
        limited = RateLimitedLog(structlog.get_logger(), monotonic=Clock())
        limited.warning("no coordinator", "nobody there")
        limited.reset()
        limited.warning("no coordinator", "nobody there")
    assert len(entries) == 2


@given(kinds=st.lists(st.integers(0, 9), max_size=60), max_kinds=st.integers(1, 5))
def test_the_number_of_kinds_is_bounded_and_the_oldest_is_dropped(kinds: list[int], max_kinds: int) -> None:
    remembered: list[int] = []
    with capture_logs() as entries:
        limited = RateLimitedLog(structlog.get_logger(), 10.0, max_kinds, lambda: 0.0)
        for kind in kinds:
            is_new = kind not in remembered
            before_count = len(entries)
            limited.warning("event", kind)
            assert (len(entries) > before_count) == is_new
            if is_new:
                remembered = [*remembered, kind][-max_kinds:]
