"""Output of `perseus jobs watch`, and progress: shown on a terminal only, for work that takes a while."""

import io
import json
from unittest.mock import Mock

import pytest
from rich.console import Console
from rich.progress import Progress

from perseus.cli import progress
from perseus.cli.watching import Watching
from perseus.v1 import event_pb2, job_pb2, job_service_pb2


def job(tried_count: int, remaining_s: float | None) -> job_service_pb2.WatchJobResponse:
    progress = job_pb2.ProfilingProgress(tried_clock_count=tried_count, max_clock_count=12)
    if remaining_s is not None:
        progress.remaining_s = remaining_s
    shown = job_pb2.Job(job_id="gpt3", state=job_pb2.JOB_STATE_PROFILING, profiling_progress=progress)
    return job_service_pb2.WatchJobResponse(job=shown)


UPDATES = [
    job(0, None),
    job(0, None),
    job_service_pb2.WatchJobResponse(event=event_pb2.JobEvent(sequence=7, message="[1] clock is measured")),
    job_service_pb2.WatchJobResponse(caught_up=job_service_pb2.CaughtUp()),
    job(1, 61.0),
    job(1, 60.0),
    job_service_pb2.WatchJobResponse(job=job_pb2.Job(state=job_pb2.JOB_STATE_SOLVING)),
    job_service_pb2.WatchJobResponse(iteration=job_pb2.IterationSummary(iteration=3, iteration_time_s=0.5)),
]


def test_without_a_bar_each_tried_clock_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with Watching(as_json=False) as watching:
        for update in UPDATES:
            watching.show(update)
    printed = capsys.readouterr()
    assert [line.strip() for line in printed.out.splitlines()] == [
        "profiling: 0 of at most 12 clocks tried",
        "00:00:00  [1] clock is measured",
        "so far; new events follow",
        "profiling: 1 of at most 12 clocks tried, done within 1 min 01 s",
        "pipeline 0 iteration 3: 0.500 s, 0 J, plan 0",
    ]
    assert printed.err == ""


def test_json_is_an_object_on_a_line_for_each_update(capsys: pytest.CaptureFixture[str]) -> None:
    with Watching(as_json=True) as watching:
        for update in UPDATES:
            watching.show(update)
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [list(each) for each in found] == [
        ["job"], ["job"], ["event"], ["caught_up"], ["job"], ["job"], ["job"], ["iteration"]
    ]  # fmt: skip
    assert found[4]["job"]["profiling_progress"]["remaining_s"] == 61.0
    assert found[6]["job"]["profiling_progress"] is None


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What is shown on a terminal."""
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, _environ={"TERM": "xterm", "COLUMNS": "100"})
    for module in ("progress", "watching"):
        monkeypatch.setattr(f"perseus.cli.{module}.has_terminal", lambda: True)
        monkeypatch.setattr(f"perseus.cli.{module}.error_console", console)
    return shown


def test_a_bar_is_below_the_lines_on_a_terminal(
    capsys: pytest.CaptureFixture[str], terminal: io.StringIO
) -> None:
    with Watching(as_json=False) as watching:
        for update in UPDATES[:6]:
            watching.show(update)
        watching._bar.refresh()
    assert "1 of at most 12 clocks tried, done within 1 min 00 s" in terminal.getvalue()
    assert capsys.readouterr().out == "00:00:00  [1] clock is measured\n          so far; new events follow\n"


def test_progress_is_shown_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, terminal: io.StringIO
) -> None:
    monkeypatch.setattr(progress, "SHOW_AFTER_S", 0.0)
    with progress.working("Solving [/x]", is_measured=True) as report:
        report(0.25)
    assert "Solving [/x]" in terminal.getvalue()
    assert "25 %" in terminal.getvalue()
    assert capsys.readouterr() == ("", "")


def test_without_a_terminal_nothing_is_shown_and_invisible_steps_are_not_drawn_but_the_last_one_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    update = Mock()
    monkeypatch.setattr(Progress, "update", update)
    with progress.working("Solving", is_measured=True) as report:
        for step in range(10_001):
            report(step / 10_000)
    drawn = [call.kwargs["completed"] for call in update.call_args_list]
    assert 100 <= len(drawn) <= 201
    assert (drawn[-1], drawn) == (1.0, sorted(drawn))
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
