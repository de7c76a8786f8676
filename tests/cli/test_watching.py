"""Output of `perseus jobs watch` for a coordinator's updates."""

import io
import json

import pytest
from rich.console import Console

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


def test_a_bar_is_below_the_lines_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perseus.cli.watching.has_terminal", lambda: True)
    terminal = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "xterm", "COLUMNS": "100"})
    monkeypatch.setattr("perseus.cli.watching.error_console", terminal)
    with Watching(as_json=False) as watching:
        for update in UPDATES[:6]:
            watching.show(update)
        watching._bar.refresh()
    printed = capsys.readouterr()
    assert isinstance(terminal.file, io.StringIO)
    assert "1 of at most 12 clocks tried, done within 1 min 00 s" in terminal.file.getvalue()
    assert printed.out == "00:00:00  [1] clock is measured\n          so far; new events follow\n"
