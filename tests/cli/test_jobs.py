"""`perseus jobs` and `perseus coordinator`, against a real coordinator process."""

import csv
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from typer.testing import CliRunner, Result

from perseus.cli import terminal
from perseus.cli.main import app
from perseus.demo.cluster import Cluster
from perseus.demo.security import Security
from perseus.demo.workload import DEMO
from perseus.v1 import computation_pb2, job_pb2, job_service_pb2, job_service_pb2_grpc


class Coordinator(NamedTuple):
    """A coordinator's address, and its clients' credentials."""

    address: str
    security: Security

    @contextmanager
    def jobs(self) -> Iterator[job_service_pb2_grpc.JobServiceStub]:
        with self.security.channels(self.address).open_blocking() as channel:
            yield job_service_pb2_grpc.JobServiceStub(channel)


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    run_dir = tmp_path_factory.mktemp("coordinator")
    with Cluster(DEMO, run_dir, run_dir / "logs") as cluster:
        coordinator = Coordinator(cluster.start_coordinator(), cluster.security)
        with coordinator.jobs() as jobs:
            register(jobs, "gpt3")
        yield coordinator


def register(jobs: job_service_pb2_grpc.JobServiceStub, job_id: str, request_id: str | None = None) -> None:
    spec = job_pb2.JobSpec(
        job_id=job_id,
        parallelism=job_pb2.Parallelism(pipeline_count=2, stage_count=4, tensor_count=1),
        schedule=computation_pb2.Schedule(
            named=computation_pb2.NamedSchedule(
                name=computation_pb2.SCHEDULE_NAME_ONE_FORWARD_ONE_BACKWARD, microbatch_count=8
            )
        ),
    )
    jobs.RegisterJob(
        job_service_pb2.RegisterJobRequest(
            spec=spec,
            request_id=request_id or job_id,
            labels=[job_pb2.Label(key="team", value="vision"), job_pb2.Label(key="stage", value="pre=1")],
        ),
        timeout=10,
    )


def run(coordinator: Coordinator, *arguments: object) -> Result:
    return CliRunner().invoke(
        app,
        ["jobs", *map(str, arguments), "--coordinator", coordinator.address],
        env={"COLUMNS": "160", **coordinator.security.of_operator()},
        catch_exceptions=False,
    )


def test_list_names_every_job(coordinator: Coordinator) -> None:
    result = run(coordinator, "list")
    assert result.exit_code == 0
    assert "gpt3" in result.output
    assert "waiting" in result.output
    assert "0/8" in result.output


def test_a_similar_job_is_asked_for(coordinator: Coordinator) -> None:
    for arguments in (("show", "gtp3"), ("ranks", "gpt-3"), ("events", "GPT3")):
        result = run(coordinator, *arguments)
        assert result.exit_code == 2
        assert f"job {arguments[1]!r} is not registered: did you mean gpt3?" in result.stderr
    assert run(coordinator, "show", "other").stderr.rstrip().endswith("job 'other' is not registered")


@pytest.mark.parametrize(
    ("labels", "is_listed"),
    [
        (["team=vision"], True),
        (["team=vision", "stage=pre=1"], True),
        (["team=vision", "stage=2"], False),
        (["team=visions"], False),
    ],
)
def test_jobs_are_listed_by_label(coordinator: Coordinator, labels: list[str], is_listed: bool) -> None:
    given = [text for label in labels for text in ("--label", label)]
    listed = json.loads(run(coordinator, "list", *given, "--format", "json").stdout)
    assert [job["job_id"] for job in listed] == ["gpt3"] * is_listed
    done = CliRunner().invoke(
        app,
        ["top", *given, "--format", "json", "--job", "gpt3", "--coordinator", coordinator.address],
        env=coordinator.security.of_operator(),
        catch_exceptions=False,
    )
    found = json.loads(done.stdout)
    assert [job["job_id"] for job in found["jobs"]] == ["gpt3"] * is_listed
    assert ([feed["feed"] for feed in found["feeds"]], len(found["ranks"])) == (["default"], 8)


def test_a_label_needs_a_key_and_a_value(coordinator: Coordinator) -> None:
    result = run(coordinator, "list", "--label", "vision")
    assert (result.exit_code, result.stderr) == (2, "error: --label: expected KEY=VALUE, found 'vision'\n")


@pytest.mark.parametrize(("state", "is_listed"), [("waiting", True), ("planned", False)])
def test_list_can_be_limited_to_states(coordinator: Coordinator, state: str, is_listed: bool) -> None:
    result = run(coordinator, "list", "--state", state, "--state", "stock")
    assert result.exit_code == 0
    assert ("gpt3" in result.output) is is_listed


def test_show_has_the_reason_of_a_job_s_state(coordinator: Coordinator) -> None:
    result = run(coordinator, "show", "gpt3")
    assert result.exit_code == 0
    assert "waiting: some ranks have not joined yet" in result.output
    assert "8 expected" in result.output


@pytest.mark.parametrize(
    ("limits", "count"),
    [
        ([], 8),
        (["--pipeline", 1], 4),
        (["--stage", 2], 2),
        (["--pipeline", 1, "--stage", 2, "--state", "expected"], 1),
        (["--state", "lost", "--state", "connected"], 0),
    ],
)
def test_ranks_lists_the_requested_ranks(coordinator: Coordinator, limits: list[object], count: int) -> None:
    result = run(coordinator, "ranks", "gpt3", *limits)
    assert result.exit_code == 0
    assert result.output.count("expected") == count


def test_show_has_the_reason_of_a_stalled_job(coordinator: Coordinator) -> None:
    shown = " ".join(run(coordinator, "show", "gpt3").output.split())
    assert "all 8 ranks are missing, since 2" in shown


def test_report_has_the_cost_of_profiling_and_its_budget(coordinator: Coordinator) -> None:
    found = " ".join(run(coordinator, "report", "gpt3").output.split())
    assert "profiling took 0 iterations" in found
    assert "budget: 30000 iterations, +360 s" in found


def test_report_of_a_job_without_measurements_is_empty(coordinator: Coordinator) -> None:
    result = run(coordinator, "report", "gpt3")
    assert result.exit_code == 0
    assert "baseline" not in result.output.splitlines()[3:]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["show", "nosuch"], "nosuch"),
        (["straggler", "nosuch", 0, "--factor", 1.2], "nosuch"),
        (["straggler", "gpt3", 7, "--factor", 1.2], "pipeline"),
        (["straggler", "gpt3", 0, "--factor", "nan"], "slowdown_factor"),
        (["straggler", "gpt3", 0, "--factor", 0.5], "slowdown_factor"),
        (["straggler", "gpt3", 0, "--iteration-time-s", -1], "iteration_time_s"),
        (["straggler", "gpt3", 0], "--factor"),
        (["straggler", "gpt3", 0, "--factor", 1.2, "--clear"], "--clear"),
        (["policy", "gpt3"], "--no-slowdown"),
        (["policy", "gpt3", "--no-slowdown", "--max-average-power-w", 900], "--no-slowdown"),
        (["policy", "gpt3", "--deadline-s", 60], "--iterations"),
        (["policy", "gpt3", "--max-slowdown-percent", 101], "max_slowdown_percent"),
        (["policy", "gpt3", "--deadline-s", 0, "--iterations", 5], "time_s"),
        (["policy", "gpt3", "--deadline-s", 60, "--iterations", 0], "--iterations"),
        (["policy", "gpt3", "--max-average-power-w", "nan"], "max_average_power_w"),
        (["policy", "gpt3", "--carbon"], "--extra-time-percent"),
        (["policy", "gpt3", "--carbon", "--cost", "--extra-time-percent", 5, "--horizon", "1d"], "--carbon"),
        (["policy", "gpt3", "--carbon", "--extra-time-percent", 5], "--horizon"),
        (["policy", "gpt3", "--carbon", "--extra-time-percent", 5, "--horizon", "soon"], "--horizon"),
        (["policy", "gpt3", "--carbon", "--extra-time-percent", 5, "--horizon", "9s"], "horizon_s"),
        (["policy", "gpt3", "--cost", "--iterations", 5], "--until"),
        (["policy", "gpt3", "--cost", "--iterations", 5, "--until", "someday"], "--until"),
        (["policy", "gpt3", "--no-slowdown", "--horizon", "1d"], "--horizon"),
        (["rebaseline", "gpt3"], "frontier"),
        (["delete", "gpt3"], "has not finished: it is waiting"),
        (["delete", "nosuch"], "nosuch"),
        (["resume", "nosuch"], "nosuch"),
        (["runs", "nosuch"], "nosuch"),
        (["show", "gpt3", "--run", 7], "no run 7"),
        (["report", "gpt3", "--run", 7], "no run 7"),
        (["watch", "gpt3", "--run", 7], "no run 7"),
        (["events", "gpt3", "--run", 7], "no run 7"),
        (["events", "nosuch"], "nosuch"),
        (["events", "gpt3", "--type", "nosuch"], "plan_refused"),
        (["events", "gpt3", "--since", "yesterday"], "2026-01-31T12:00"),
        (["events", "gpt3", "--since", "99999999999d"], "found '99999999999d'"),
        (["events", "gpt3", "--limit", 0], "--limit"),
        (["list", "--state", "lost"], "waiting, baseline"),
        (["ranks", "gpt3", "--state", "planned"], "expected, connected"),
        (["ranks", "gpt3", "--pipeline", 2], "0 to 1"),
        (["ranks", "gpt3", "--stage", -1], "--stage"),
    ],
)
def test_mistakes_get_one_line_and_exit_code_2(
    coordinator: Coordinator, arguments: list[object], expected: str
) -> None:
    result = run(coordinator, *arguments)
    assert result.exit_code == 2, result.output
    assert expected in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (["--max-slowdown-percent", 5], job_pb2.OperatingPolicy(max_slowdown_percent=5)),
        (
            ["--deadline-s", 60, "--iterations", 30],
            job_pb2.OperatingPolicy(deadline=job_pb2.Deadline(iteration_count=30, time_s=60)),
        ),
        (["--max-average-power-w", 900], job_pb2.OperatingPolicy(max_average_power_w=900)),
        (
            ["--carbon", "--extra-time-percent", 5, "--horizon", "1d"],
            job_pb2.OperatingPolicy(
                least_carbon=job_pb2.LeastSignal(extra_time=job_pb2.ExtraTime(percent=5, horizon_s=86_400))
            ),
        ),
        (
            ["--cost", "--iterations", 40, "--until", "2100-01-01T00:00"],
            job_pb2.OperatingPolicy(
                least_cost=job_pb2.LeastSignal(
                    work_until=job_pb2.WorkUntil(
                        iteration_count=40, end_time=Timestamp(seconds=4_102_444_800)
                    )
                )
            ),
        ),
        (["--no-slowdown"], job_pb2.OperatingPolicy(no_slowdown=job_pb2.NoSlowdown())),
    ],
)
def test_a_policy_is_set(
    coordinator: Coordinator, rule: list[object], expected: job_pb2.OperatingPolicy
) -> None:
    assert run(coordinator, "policy", "gpt3", *rule).exit_code == 0
    with coordinator.jobs() as jobs:
        job = jobs.GetJob(job_service_pb2.GetJobRequest(job_id="gpt3"), timeout=10).job
    assert job.policy == expected


def test_watch_ends_with_its_job(coordinator: Coordinator) -> None:
    with coordinator.jobs() as jobs:
        register(jobs, "short")
    finished = run(coordinator, "finish", "short")
    assert finished.exit_code == 0
    assert "finished" in finished.output
    watched = run(coordinator, "watch", "short")
    assert watched.exit_code == 0
    assert "registered" in watched.output
    assert "new events follow" in watched.output


def test_events_are_listed_by_type_and_time(coordinator: Coordinator) -> None:
    with coordinator.jobs() as jobs:
        register(jobs, "eventful")
    for percent in (1, 2, 3):
        assert run(coordinator, "policy", "eventful", "--max-slowdown-percent", percent).exit_code == 0
    everything = run(coordinator, "events", "eventful")
    assert everything.exit_code == 0
    assert everything.output.count("policy_set") == 3
    assert "registered with 2 pipelines" in everything.output
    only = run(
        coordinator, "events", "eventful", "--type", "registered", "--type", "policy_set", "--limit", 2
    )
    assert (only.output.count("policy_set"), only.output.count("registered with")) == (2, 0)
    assert "these are the latest 2; there are earlier ones" in only.output
    latest = run(coordinator, "events", "eventful", "--limit", 2, "--format", "json")
    sequences = [event["sequence"] for event in json.loads(latest.stdout)]
    assert sequences == sorted(sequences), "in order of time"
    earliest = run(coordinator, "events", "eventful", "--limit", 1, "--first")
    assert "registered with" in earliest.output
    assert "these are the first 1; there are later ones" in earliest.output
    for since in ("1h", "7d", "2020-01-31", "2020-01-31T12:00:00+01:00"):
        assert run(coordinator, "events", "eventful", "--since", since).output == everything.output
    later = run(coordinator, "events", "eventful", "--since", "2999-01-01T00:00")
    assert (later.exit_code, later.output.count("policy_set")) == (0, 0)


def test_show_ends_with_the_latest_events_and_a_watch_begins_with_them(coordinator: Coordinator) -> None:
    with coordinator.jobs() as jobs:
        register(jobs, "long")
    for percent in range(12):
        assert run(coordinator, "policy", "long", "--max-slowdown-percent", percent).exit_code == 0
    shown = run(coordinator, "show", "long").output.splitlines()
    assert [line for line in shown if "policy_set" in line] == shown[-6:-1], "and then the table's border"
    assert run(coordinator, "finish", "long").exit_code == 0
    watched = run(coordinator, "watch", "long")
    assert watched.exit_code == 0
    assert "registered with" not in watched.output
    assert "ended on request" in watched.output


class TrainingJobs(job_service_pb2_grpc.JobServiceServicer):
    """Has jobs with 4 connected ranks, of which one is finished; notes what was ended."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    def GetJob(  # noqa: N802 - gRPC's name
        self, request: job_service_pb2.GetJobRequest, context: grpc.ServicerContext
    ) -> job_service_pb2.GetJobResponse:
        job = job_pb2.Job(job_id=request.job_id, rank_counts=job_pb2.RankCounts(connected_count=4))
        if request.job_id == "finished":
            job.state = job_pb2.JOB_STATE_FINISHED
        return job_service_pb2.GetJobResponse(job=job)

    def FinishJob(  # noqa: N802 - gRPC's name
        self, request: job_service_pb2.FinishJobRequest, context: grpc.ServicerContext
    ) -> job_service_pb2.FinishJobResponse:
        self.ended.append(request.job_id)
        return job_service_pb2.FinishJobResponse(job=job_pb2.Job(job_id=request.job_id))


def test_a_job_with_connected_ranks_is_ended_only_if_that_is_confirmed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = TrainingJobs()  # type: ignore[abstract]
    with futures.ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        job_service_pb2_grpc.add_JobServiceServicer_to_server(training, server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()

        def finish(*arguments: str, answer: str | None = None) -> Result:
            command = ["jobs", "finish", *arguments, "--coordinator", address]
            return CliRunner().invoke(app, command, input=answer, catch_exceptions=False)

        refused = finish("gpt3")
        assert refused.exit_code == 2
        assert refused.stderr == (
            "error: 4 connected ranks of job gpt3 would train on at stock: expected --yes, as there is "
            "no terminal to ask\n"
        )
        assert finish("finished").exit_code == 0
        monkeypatch.setattr(terminal, "can_ask", lambda: True)
        asked = finish("gpt3", answer="n\n")
        assert asked.exit_code == 1
        assert "4 connected ranks of job gpt3 would train on at stock. End it? [y/N]" in asked.stderr
        assert training.ended == ["finished"]
        assert finish("gpt3", answer="y\n").exit_code == 0
        assert finish("gpt4", "--yes").exit_code == 0
        server.stop(None).wait()
    assert training.ended == ["finished", "gpt3", "gpt4"]


def test_runs_are_listed_shown_and_deleted_together(coordinator: Coordinator) -> None:
    with coordinator.jobs() as jobs:
        for request_id in ("first", "second"):
            register(jobs, "again", request_id)
            assert run(coordinator, "finish", "again").exit_code == 0
        register(jobs, "again", "third")
    listed = run(coordinator, "runs", "again")
    assert listed.exit_code == 0
    assert [line.split()[1:4:2] for line in listed.output.splitlines() if "UTC" in line] == [
        ["3", "waiting:"],
        ["2", "finished:"],
        ["1", "finished:"],
    ]
    assert "finished" in run(coordinator, "show", "again", "--run", 1).output
    assert "waiting" in run(coordinator, "show", "again").output
    assert "ended on request" in run(coordinator, "watch", "again", "--run", 2).output
    assert "ended on request" in run(coordinator, "events", "again", "--run", 1).output
    assert "ended on request" not in run(coordinator, "events", "again").output
    assert run(coordinator, "report", "again", "--run", 1).exit_code == 0
    resumed = run(coordinator, "resume", "again")
    assert resumed.exit_code == 0
    assert "waiting" in resumed.output
    assert run(coordinator, "finish", "again").exit_code == 0
    assert run(coordinator, "delete", "again").exit_code == 0
    assert run(coordinator, "show", "again").exit_code == 2


def test_a_missing_coordinator_is_reported() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        result = CliRunner().invoke(app, ["jobs", "list", "--coordinator", address])
    assert result.exit_code == 1
    assert f"no coordinator at {address}" in result.output


@pytest.mark.slow("a coordinator starts as a process: gRPC keeps files open of a port that it did not get")
def test_coordinator_refuses_a_taken_port(coordinator: Coordinator, tmp_path: Path) -> None:
    command = ["coordinator", "--listen", coordinator.address, "--database", str(tmp_path / "other.db")]
    done = subprocess.run(
        [sys.executable, "-m", "perseus.cli", *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert coordinator.address in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("command", "flag", "value"),
    [
        ("coordinator", "--lease-s", "-1"),
        ("coordinator", "--log-format", "xml"),
        ("agent", "--gpu-backend", "abacus"),
        ("agent", "--config", "/nowhere/agent.toml"),
    ],
)
def test_bad_settings_name_their_flag(command: str, flag: str, value: str) -> None:
    result = CliRunner().invoke(app, [command, flag, value])
    assert result.exit_code == 2
    assert (flag if flag != "--config" else "agent.toml") in result.output


def test_agent_with_emulated_gpus_needs_their_folder() -> None:
    result = CliRunner().invoke(app, ["agent", "--gpu-backend", "emulated"])
    assert result.exit_code == 2
    assert "EMULATED_GPUS" in result.output


@pytest.mark.parametrize(
    "view", ["list", "runs gpt3", "show gpt3", "ranks gpt3", "events gpt3", "report gpt3"]
)
def test_every_list_and_view_has_a_format_for_scripts(coordinator: Coordinator, view: str) -> None:
    as_json = run(coordinator, *view.split(), "--format", "json")
    assert (as_json.exit_code, as_json.stderr) == (0, "")
    found = json.loads(as_json.stdout)
    assert isinstance(found, list) == (view.split()[0] not in ("show", "report"))
    as_csv = run(coordinator, *view.split(), "--format", "csv")
    assert (as_csv.exit_code, as_csv.stderr) == (0, "")
    header, *rows = csv.reader(as_csv.stdout.splitlines())
    assert all(len(row) == len(header) for row in rows)
    if view != "report gpt3":
        assert len(rows) == (len(found) if isinstance(found, list) else 1)
    if "job_id" in header:
        assert "gpt3" in {row[header.index("job_id")] for row in rows}
