"""Progress is shown only on a terminal, and only for work that takes a while."""

import io
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress

from perseus.cli import progress


def test_nothing_is_shown_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.working("Working", is_measured=True) as report:
        report(0.5)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("passed_s", "is_shown"), [(0.4, False), (0.6, True)])
def test_quick_work_shows_nothing(monkeypatch: pytest.MonkeyPatch, passed_s: float, is_shown: bool) -> None:
    now_s = 7.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    shown = progress.DelayedProgress()
    shown.add_task("Working")
    assert list(shown.get_renderables()) == []
    now_s += passed_s
    assert bool(list(shown.get_renderables())) == is_shown


def test_progress_is_shown_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "has_terminal", lambda: True)
    monkeypatch.setattr(progress, "SHOW_AFTER_S", 0.0)
    terminal = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "xterm", "COLUMNS": "100"})
    monkeypatch.setattr(progress, "error_console", terminal)
    with progress.working("Solving [/x]", is_measured=True) as report:
        report(0.25)
    assert isinstance(terminal.file, io.StringIO)
    assert "Solving [/x]" in terminal.file.getvalue()
    assert "25 %" in terminal.file.getvalue()
    assert capsys.readouterr() == ("", "")


def test_invisible_steps_are_not_drawn_but_the_last_one_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: list[float] = []
    update = Progress.update

    def noting(self: Progress, *args: Any, **changes: Any) -> None:
        drawn.append(changes["completed"])
        update(self, *args, **changes)

    monkeypatch.setattr(Progress, "update", noting)
    with progress.working("Solving", is_measured=True) as report:
        for step in range(10_001):
            report(step / 10_000)
    assert 100 <= len(drawn) <= 201
    assert drawn == sorted(drawn)
    assert drawn[-1] == 1.0
