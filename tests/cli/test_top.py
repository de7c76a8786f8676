"""`perseus top`: its screen, and its life and end in a real terminal."""

import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from rich.console import Console
from rich.live import Live
from typer.testing import CliRunner

from perseus.cli.main import app
from perseus.cli.terminal import screen_console
from perseus.cli.top import _show_until_interrupted
from perseus.cli.top_tables import Snapshot, screen, summary
from perseus.demo.cluster import Cluster
from perseus.demo.workload import DEMO
from perseus.service.domain.stall import StockReason, next_step
from perseus.v1 import job_pb2, power_service_pb2, rank_pb2

PLANNED, STOCK, FINISHED = job_pb2.JOB_STATE_PLANNED, job_pb2.JOB_STATE_STOCK, job_pb2.JOB_STATE_FINISHED
TIMEOUT_S = 30.0


def make_job(job_id: str, power_w: float, **changes: object) -> job_pb2.Job:
    job = job_pb2.Job(
        job_id=job_id,
        state=PLANNED,
        parallelism=job_pb2.Parallelism(pipeline_count=2, stage_count=4, tensor_count=1),
        rank_counts=job_pb2.RankCounts(connected_count=7),
        figures=job_pb2.JobFigures(
            iteration_time_s=1.25,
            power_w=power_w,
            saving=job_pb2.Saving(energy_percent=12.5, slowdown_percent=-0.1),
        ),
    )
    job.MergeFrom(job_pb2.Job(**changes))  # type: ignore[arg-type]
    return job


def shown(snapshot: Snapshot, row_count: int = 100, trouble: str = "") -> list[str]:
    console = Console(file=io.StringIO(), width=160)
    console.print(screen(snapshot, row_count, trouble))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_jobs_are_sorted_by_power_without_ended_ones() -> None:
    jobs = [make_job("small", 900.0), make_job("large", 90_000.0), make_job("over", 0.0, state=FINISHED)]
    lines = shown(Snapshot(jobs))
    assert lines[0] == "2 jobs (2 planned), 14 GPUs served, 90.9 kW"
    assert [line.split()[0] for line in lines[2:]] == ["large", "small"]
    assert lines[2].split()[1:] == ["planned", "7/8", "1.250", "s", "+12.5", "%", "-0.1", "%", "90.00", "kW"]


def test_a_job_without_measurements_shows_none() -> None:
    (line,) = shown(
        Snapshot([job_pb2.Job(job_id="new", state=job_pb2.JOB_STATE_WAITING, state_reason="so")])
    )[2:]
    assert line.split() == ["new", "waiting", "0/0", "so"]
    assert summary([]) == "0 jobs, 0 GPUs served, 0.0 kW"


def test_the_reasons_of_a_slower_job_are_shown() -> None:
    jobs = [
        make_job("a", 3.0, straggler_count=2, budget_target_iteration_time_s=1.5),
        make_job("b", 2.0, state=STOCK, state_reason="the [model] fails"),
    ]
    first, second = shown(Snapshot(jobs))[2:]
    assert first.rstrip().endswith("2 stragglers; a power budget: 1.500 s")
    assert second.rstrip().endswith("the [model] fails")


def test_the_next_step_is_shown_where_a_job_stands_still() -> None:
    step = next_step(StockReason.PREDICTIONS_VIOLATED, "b")
    jobs = [
        make_job("a", 3.0),
        make_job("b", 2.0, state=STOCK, next_step=step),
        make_job("c", 1.0, next_step="wait"),
    ]
    assert f"b: {step} c: wait" in " ".join(" ".join(shown(Snapshot(jobs))).split())
    assert shown(Snapshot(jobs, job_id="c"))[5:] == ["c: wait"]
    for width in (80, 120):
        console = Console(file=io.StringIO(), width=width)
        console.print(screen(Snapshot(jobs, job_id="b"), 1))
        assert isinstance(console.file, io.StringIO)
        assert f"b: {step}" in " ".join(console.file.getvalue().split())


def test_on_the_screen_long_lines_wrap(monkeypatch: pytest.MonkeyPatch) -> None:
    step = next_step(StockReason.PREDICTIONS_VIOLATED, "b")
    drawn = Console(
        file=io.StringIO(), width=80, height=40, soft_wrap=screen_console.soft_wrap, force_terminal=True
    )
    monkeypatch.setattr("perseus.cli.top.screen_console", drawn)
    monkeypatch.setattr("time.sleep", Mock(side_effect=KeyboardInterrupt))
    snapshot = Snapshot([make_job("b", 2.0, state=STOCK, next_step=step)])
    live = Live(console=drawn, screen=True, auto_refresh=False)
    with live, pytest.raises(KeyboardInterrupt):
        _show_until_interrupted(live, lambda: snapshot, 1.0, snapshot)
    assert isinstance(drawn.file, io.StringIO)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", drawn.file.getvalue())
    assert step in " ".join(plain.split())


def test_only_feeds_with_a_limit_are_shown() -> None:
    feeds = [
        power_service_pb2.FeedState(feed="hall", limit_w=800.0, measured_w=812.0),
        power_service_pb2.FeedState(feed="free", measured_w=5.0),
    ]
    lines = shown(Snapshot([], feeds))
    assert lines[1].startswith("hall: 812 W drawn, limit 800 W, NOT KEPT")
    assert "free" not in "".join(lines)


def test_hidden_rows_are_counted_and_trouble_is_on_top() -> None:
    jobs = [make_job(f"job-{number}", number) for number in range(5)]
    ranks = [rank_pb2.Rank(coordinates=rank_pb2.RankCoordinates(stage=stage)) for stage in range(4)]
    lines = shown(Snapshot(jobs, (), ranks), row_count=2, trouble="no answer for 4 s")
    assert lines[1] == "no answer for 4 s"
    assert "… and 3 more" in lines
    assert lines[-1] == "… and 2 more"


def test_without_a_terminal_it_prints_once(environment: dict[str, str]) -> None:
    done = CliRunner().invoke(app, ["top"], env=environment, catch_exceptions=False)
    assert (done.exit_code, done.stdout.splitlines()[0]) == (0, "0 jobs, 0 GPUs served, 0.0 kW")
    unknown = CliRunner().invoke(app, ["top", "--job", "none"], env=environment, catch_exceptions=False)
    assert unknown.exit_code == 2
    assert "none" in unknown.stderr


def test_in_a_narrow_pipe_no_word_is_cut(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "a-job-with-a-long-name"
    snapshot = Snapshot([make_job(name, 3.0, state=STOCK, state_reason="no stage can have other clocks")])
    monkeypatch.setattr("perseus.cli.top._fetch", lambda *_: snapshot)
    done = CliRunner().invoke(app, ["top"], env={**environment, "COLUMNS": "40"}, catch_exceptions=False)
    (line,) = [line for line in done.stdout.splitlines() if name in line]
    assert line.rstrip().endswith("no stage can have other clocks")


@pytest.mark.slow("a coordinator and a command start and end as processes")
def test_in_a_terminal_it_survives_the_coordinator_s_end_until_ctrl_c(tmp_path: Path) -> None:
    with Cluster(DEMO, tmp_path, tmp_path / "logs") as site:
        address = site.start_coordinator()
        watch_its_end(site, {**site.security.of_operator(), "PERSEUS_COORDINATOR": address})


def watch_its_end(site: Cluster, environment: dict[str, str]) -> None:
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "perseus.cli", "top", "--interval-s", "0.5"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, **environment, "TERM": "xterm", "COLUMNS": "160", "LINES": "40"},
        start_new_session=True,
    )
    os.close(theirs)
    os.set_blocking(ours, False)
    screen_bytes = b""

    def until(text: bytes) -> None:
        nonlocal screen_bytes
        deadline_s = time.monotonic() + TIMEOUT_S
        while text not in screen_bytes:
            assert time.monotonic() < deadline_s, screen_bytes[-2000:]
            try:
                screen_bytes += os.read(ours, 65_536)
            except BlockingIOError:
                time.sleep(0.05)

    try:
        until(b"0 jobs, 0 GPUs served")
        site.stop_services()
        until(b"no answer for")
        process.send_signal(signal.SIGINT)
        until(b"\x1b[?1049l")  # the screen from before is back
        assert process.wait(TIMEOUT_S) == 128 + signal.SIGINT
    finally:
        process.kill()
        process.wait()
        os.close(ours)
