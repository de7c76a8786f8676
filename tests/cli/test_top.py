"""`perseus top`: its screen, and its life and end in a real terminal."""

import io
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest.mock import Mock

import pytest
from rich.console import Console
from rich.live import Live

from perseus.cli.terminal import screen_console
from perseus.cli.top import show_until_interrupted
from perseus.cli.top_tables import Snapshot, screen, summary
from perseus.demo.cluster import Cluster
from perseus.demo.processes import Process, until
from perseus.demo.workload import DEMO
from perseus.service.domain.stall import StockReason, next_step
from perseus.v1 import job_pb2, job_service_pb2, power_service_pb2, rank_pb2
from tests.cli.commands import lines
from tests.cli.prepared import PreparedCoordinator
from tests.cli.test_requests import ANSWERS

STOCK = job_pb2.JOB_STATE_STOCK
TIMEOUT_S = 30.0


def make_job(job_id: str, power_w: float, **changes: object) -> job_pb2.Job:
    job = job_pb2.Job(
        job_id=job_id,
        state=job_pb2.JOB_STATE_PLANNED,
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


def feed(name: str, limit_w: float | None) -> power_service_pb2.FeedState:
    return power_service_pb2.FeedState(feed=name, limit_w=limit_w, measured_w=812.0)


STEP = next_step(StockReason.PREDICTIONS_VIOLATED, "b")
FIGURES = "1.250 s +12.5 % -0.1 %"
SLOWED = make_job("a", 3.0, straggler_count=2, budget_target_iteration_time_s=1.5)
AT_STOCK = make_job("b", 2.0, state=STOCK, state_reason="the [model] fails", next_step=STEP)
NEW = job_pb2.Job(job_id="new", state=job_pb2.JOB_STATE_WAITING, state_reason="so", next_step="wait")
ENDED = make_job("over", 0.0, state=job_pb2.JOB_STATE_FINISHED)
RANKS = [rank_pb2.Rank(coordinates=rank_pb2.RankCoordinates(stage=stage)) for stage in range(4)]


def test_jobs_are_sorted_by_power_with_the_reasons_and_next_steps_of_slower_ones() -> None:
    large = make_job("large", 90_000.0)
    assert lines(screen(Snapshot([NEW, ENDED, AT_STOCK, SLOWED, large]), 100))[1:] == [
        "job state GPUs iteration saved slowdown power held by",
        f"large planned 7/8 {FIGURES} 90.00 kW",
        f"a planned 7/8 {FIGURES} 0.00 kW 2 stragglers; a power budget: 1.500 s",
        f"b stock 7/8 {FIGURES} 0.00 kW the [model] fails",
        "new waiting 0/0 so",
        *[" ".join(f"b: {STEP}".split())],
        "new: wait",
    ]
    assert lines(screen(Snapshot([NEW, AT_STOCK], job_id="new"), 100))[4:] == ["new: wait"]


def test_the_summary_counts_jobs_by_state() -> None:
    jobs = [make_job("large", 90_000.0), SLOWED, AT_STOCK]
    assert summary(jobs) == "3 jobs (2 planned, 1 stock), 21 GPUs served, 90.0 kW"
    assert summary([]) == "0 jobs, 0 GPUs served, 0.0 kW"


@pytest.mark.parametrize("width", [80, 120])
def test_a_next_step_is_whole_on_a_narrow_screen(width: int) -> None:
    assert f"b: {STEP}" in " ".join(lines(screen(Snapshot([SLOWED, AT_STOCK], job_id="b"), 1), width))


def test_on_the_screen_long_lines_wrap(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = Console(
        file=io.StringIO(), width=80, height=40, soft_wrap=screen_console.soft_wrap, force_terminal=True
    )
    monkeypatch.setattr("perseus.cli.top.screen_console", drawn)
    monkeypatch.setattr("time.sleep", Mock(side_effect=KeyboardInterrupt))
    snapshot = Snapshot([AT_STOCK])
    live = Live(console=drawn, screen=True, auto_refresh=False)
    with live, pytest.raises(KeyboardInterrupt):
        show_until_interrupted(live, lambda: snapshot, 1.0, snapshot)
    assert isinstance(drawn.file, io.StringIO)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", drawn.file.getvalue())
    assert STEP in " ".join(plain.split())


def test_trouble_feeds_with_a_limit_and_the_counts_of_hidden_rows_are_shown() -> None:
    jobs = [make_job(f"job-{number}", number) for number in range(5)]
    snapshot = Snapshot(jobs, [feed("hall", 800.0), feed("free", None)], RANKS)
    shown = lines(screen(snapshot, 2, "no answer for 4 s"))
    assert shown[1:3] == ["no answer for 4 s", "hall: 812 W drawn, limit 800 W, NOT KEPT"]
    assert [line.split()[0] for line in shown[4:6]] == ["job-4", "job-3"]
    assert shown[6] == "… and 3 more"
    assert shown[-1] == "… and 2 more"


def test_in_a_narrow_pipe_no_word_is_cut(prepared: PreparedCoordinator) -> None:
    job = make_job("a-job-with-a-long-name", 3.0, state=STOCK, state_reason="no stage can have other clocks")
    prepared.answers = {**ANSWERS, "ListJobs": job_service_pb2.ListJobsResponse(jobs=[job])}
    done = prepared.perseus("top", COLUMNS="40")
    (line,) = [line for line in done.stdout.splitlines() if job.job_id in line]
    assert line.rstrip().endswith(job.state_reason)


@pytest.mark.slow("a coordinator and a command start and end as processes")
def test_in_a_terminal_it_survives_the_coordinator_s_end_until_ctrl_c(tmp_path: Path) -> None:
    with Cluster(DEMO, tmp_path, tmp_path / "logs") as site, terminal() as (ours, theirs):
        address = site.start_coordinator()
        size = {"TERM": "xterm", "COLUMNS": "160", "LINES": "40"}
        environment = {**site.security.of_operator(), "PERSEUS_COORDINATOR": address, **size}
        command = ("-m", "perseus.cli", "top", "--interval-s", "0.5")
        screen_bytes = b""

        def shows(text: bytes) -> bool:
            nonlocal screen_bytes
            with suppress(BlockingIOError):
                screen_bytes += os.read(ours, 65_536)
            return text in screen_bytes

        with Process(tmp_path / "top.log", *command, environment=environment) as process:
            process.launch(theirs)
            until(lambda: shows(b"0 jobs, 0 GPUs served"), "the jobs", TIMEOUT_S)
            site.stop_services()
            until(lambda: shows(b"no answer for"), "that it gets no answer", TIMEOUT_S)
            process.signal(signal.SIGINT)
            until(lambda: shows(b"\x1b[?1049l"), "the screen from before", TIMEOUT_S)
            assert process.wait(TIMEOUT_S) == 128 + signal.SIGINT


@contextmanager
def terminal() -> Iterator[tuple[int, int]]:
    """Yield the ends of a terminal, ours without waiting."""
    ends = os.openpty()
    os.set_blocking(ends[0], False)
    yield ends
    for end in ends:
        os.close(end)
