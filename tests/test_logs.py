"""The error that ends a process is in its log, once."""

import pytest
import structlog

from perseus import logs

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
    with structlog.testing.capture_logs() as entries, pytest.raises(SystemExit) as end:
        fail_with(error)
    (entry,) = entries
    assert (entry["event"], entry["log_level"], entry["cause"]) == ("ends with an error", "critical", cause)
    assert entry["exc_info"] is (code == 1), "a traceback is a bug"
    assert end.value.code == code


def test_a_missing_module_is_left_to_the_command_line() -> None:
    with pytest.raises(ModuleNotFoundError), logs.exiting({}):
        raise ModuleNotFoundError
