"""Every anticipated mistake: one line with what, where, expected and found; and an exit code."""

import contextlib
import json
import os
import re
import socket
import sqlite3
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from perseus.cli.terminal import BAD_INPUT, FAILURE
from perseus.grid.signing import new_key, write_private
from perseus.tls.diagnosis import diagnose
from tests.cli.commands import perseus
from tests.cli.conftest import PROFILE
from tests.cli.processes import call
from tests.cli.test_simulate import PRICES, SCENARIO

HUGE = "1" + 308 * "0"
GRAPH = Path(__file__).parents[2] / "examples" / "graph" / "workflow.json"


def graph_with(part: str, **members: object) -> str:
    """Return the example of a graph whose first part of a kind has other members."""
    document = json.loads(GRAPH.read_text())
    document[part][0].update(members)
    return json.dumps(document)


HEADER, *MEASURED = PROFILE.splitlines()
TWO_STAGES = [*MEASURED, *(f"1{row.removeprefix('0')}" for row in MEASURED)]

FILES: dict[str, str | bytes] = {
    "profile.csv": PROFILE,
    "two.csv": "\n".join([HEADER, *TWO_STAGES]),
    "huge.csv": PROFILE.replace("0.1,30", "0.1,1e308"),
    "chunks.csv": "\n".join([f"{HEADER},chunk", *(f"{row},{chunk}" for row in MEASURED for chunk in (0, 1))]),
    "settings.csv": "\n".join(
        [
            f"{HEADER},kernel",
            *(f"0,forward,1000,0.1,30,k{i}" for i in range(1025)),
            "0,backward,1000,0.1,30,k",
        ]
    ),
    "latin1.json": '{"é": 1}'.encode("latin-1"),
    "deep.json": "[" * 100_000,
    "open.json": "{",
    "name.json": '{"pointz": []}',
    "member.json": r'{"\ud800": []}',
    "empty.json": "{}",
    "huge.json": '{"problem": {"stageCount": 1e308}}',
    "many.json": f'{{"problem": {{"stageCount": {2**31 - 1}}}}}',
    "sure.json": '{"confidence": 1.5}',
    "doubtful.json": '{"confidence": -0.1}',
    "schedule.json": '{"problem": {"stageCount": 1, "schedule": {"named": {"name": 7}}}}',
    "member-twice.json": '{"problem": {"stageCount": 1, "stageCount": 2}}',
    "deep.toml": "x = " + "[" * 100_000,
    "latin1.toml": "# é".encode("latin-1"),
    "huge.toml": f"profile_budget_iterations = {HUGE}",
    "long.toml": "lease_s = 1e308",
    "kept.toml": "keep_event_count = 9007199254740993",
    "scenario.toml": SCENARIO,
    "no-start.toml": "duration_h = 1",
    "no-profile.toml": SCENARIO.replace("profile.csv", "empty.json"),
    "limited.toml": SCENARIO.replace("profile.csv", "limited.csv"),
    "limited.csv": "\n".join([f"{HEADER},power_limit_w", *(f"{row},300" for row in MEASURED)]),
    "no-time.toml": SCENARIO.replace("price.csv", "now.csv"),
    "price.csv": PRICES,
    "now.csv": "timestamp,eur\nnow,1\n",
    "nothing.toml": "",
    "twice.toml": "seeds = [1, 1]",
    "good.toml": 'forecasts = ["good"]',
    "carbon.toml": '[[policies]]\nname = "y"\n'
    'policy = { signal = "carbon", extra_time_percent = 1, horizon_h = 2 }',
    "cycle.json": graph_with("edges", earlier="answer"),
    "unprofiled.json": graph_with("nodes", profile=""),
    "clock.json": graph_with("nodes", clock=5),
    "watts.json": graph_with("resources", blockingPowerW=-1),
    "garbage.db": os.urandom(5000),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files at which the commands below fail."""
    folder = tmp_path_factory.mktemp("mistakes")
    for name, content in FILES.items():
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    (folder / "link").symlink_to("profile.csv")
    (folder / "loop").symlink_to("loop")
    (folder / "hard").hardlink_to(folder / "profile.csv")
    (folder / "own.key").symlink_to("authority/ca.key")
    with contextlib.closing(sqlite3.connect(folder / "photos.db")) as connection:
        connection.execute("CREATE TABLE photos (x)")
        connection.execute("PRAGMA user_version = 8")
        connection.commit()
    with contextlib.closing(sqlite3.connect(folder / "cut.db")) as connection:
        connection.execute("CREATE TABLE coordinator (x)")
        connection.executemany("INSERT INTO coordinator VALUES (?)", [["x" * 4000]] * 20)
        connection.commit()
    os.truncate(folder / "cut.db", 9000)
    assert perseus("certificates authority --folder", folder / "authority").exit_code == 0
    for name in ("folder", "endless", "keys"):
        (folder / name).mkdir()
    (folder / "endless" / "two.csv").symlink_to("../two.csv")
    (folder / "endless" / "ca.pem").symlink_to("/dev/zero")
    write_private(folder / "gateway.jwk", new_key("gateway-1")[0])
    flags = ("--microbatches", 2, "--points", 3, "--output", folder / "frontier.json")
    assert perseus("solve", folder / "profile.csv", *flags).exit_code == 0
    return folder


SHORT = {
    "solve4": "solve profile.csv --microbatches 4",
    "coordinator": "coordinator --listen 127.0.0.1:0 --operator-token-file operator.token --database",
    "agent": "agent --observe --gpu-backend emulated --emulated-gpus folder --socket",
    "gateway": "grid dsx-flex --identifier a --keys keys --signing-key gateway.jwk --state ../state.db",
    "sweep": "simulate scenario.toml --sweep",
    "plain": "--coordinator localhost:1 --insecure",
    "long": "a" * 108,
    "huge": HUGE,
    "graph": str(GRAPH),
}
EXPOSED = "or insecure, for an address that other machines can reach, found"
OWN_FILES = "expected another path than the authority's own files"

MISTAKES = {
    # Addresses.
    "coordinator --listen 127.0.0.1:70000": "a port from 0 to 65535, or unix:PATH, found '127.0.0.1:70000'",
    "agent --coordinator host:0 --insecure": "--coordinator: expected a port from 1",
    "jobs list --coordinator [/x]:1": "--coordinator: expected a host name",
    # TLS.
    "coordinator --listen 0.0.0.0:0": f"--listen: expected tls_certificate and tls_key, {EXPOSED} '0",
    "coordinator --tls-certificate a.pem": "COORDINATOR_TLS_KEY: expected a path",
    "coordinator --tls-key a.key": "--tls-key: expected tls_certificate beside it",
    "coordinator --tls-client-ca ca.pem": "--tls-client-ca: expected tls_certificate beside it",
    "coordinator --tls-certificate a --tls-key b --insecure": "--insecure: expected no tls_certificate",
    "agent --coordinator host.example:1": f"--coordinator: expected tls_ca, {EXPOSED} 'host.example:1'",
    "agent --tls-certificate a": "--tls-certificate: expected tls_ca beside it",
    "agent --tls-ca a --insecure": "--insecure: expected no tls_ca beside it",
    "jobs list --coordinator host.example:1": f"--coordinator: expected tls_ca, {EXPOSED} host.example:1",
    "jobs list --tls-key a": "--tls-key: expected tls_certificate beside it, found a",
    "jobs list --tls-certificate a --tls-key b": "--tls-certificate: expected tls_ca",
    "jobs list --tls-ca a --insecure": "--insecure: expected no tls_ca beside it",
    "jobs list --tls-ca /nowhere/ca.pem": "/nowhere/ca.pem: can't be read: No such file",
    "jobs list --token-file none": "none: can't be read: No such file",
    # Settings.
    "coordinator --lease-s 30s": "Invalid value for '--lease-s' … found '30s'",
    "coordinator --lease-s -1": "--lease-s",
    "coordinator --log-format xml": "--log-format",
    "coordinator --config long.toml": "long.toml: lease_s: ",
    "coordinator --config huge.toml": "huge.toml: profile_budget_iterations: ",
    "coordinator --config kept.toml": "kept.toml: keep_event_count: ",
    "coordinator --slots 2 --database a.db": "slots: expected 1, as SQLite serves one coordinator",
    "store import jobs.jsonl --slots 2 --database a.db": "slots: expected 1, as SQLite serves one",
    "agent --gpu-backend abacus": "--gpu-backend",
    "agent --gpu-backend emulated": "EMULATED_GPUS",
    "agent --config /nowhere/agent.toml": "agent.toml",
    "agent --log-level '\x1b]0;x\x07'": "--log-level: ",
    "doctor --config agent.toml": "--config: expected --node beside it",
    "doctor --node --config missing.toml": "missing.toml",
    "health --alive": "--alive: expected --agent, found none",
    "grid dsx-flex": "PERSEUS_GRID_IDENTIFIER: expected a value, found none",
    "{gateway} --identifier a/b": "--identifier: String should match pattern",
    "{gateway} --broker far:8883": "--broker: expected broker_tls_ca, or insecure",
    "{gateway} --broker unix:/run/broker": "--broker: expected HOST:PORT",
    "{gateway} --coordinator far:1": "--coordinator: expected tls_ca, or insecure",
    "{gateway} --broker-tls-key k": "--broker-tls-key: expected broker_tls_certificate beside it",
    "{gateway} --heartbeat-s 0": "--heartbeat-s: Input should be greater than or equal to 1",
    # Numbers, times and names.
    "solve huge.csv --microbatches 4": (
        "huge.csv, row 2, column energy: expected from 1e-12 to 1e+15 joules, found '1e308'"
    ),
    "{solve4} --blocking-power-w 1e308": "blocking_power_w, stage 0: expected",
    "jobs show job --run 2147483648": "--run",
    "jobs straggler job 2147483648 --clear": "pipeline",
    "jobs straggler job 0": "expected one of --factor, --iteration-time-s and --clear",
    "jobs straggler job 0 --factor 1.2 --clear": "expected one of --factor, --iteration-time-s and --clear",
    "jobs ranks job --stage {huge}": "--stage",
    "jobs ranks job --stage -1": "--stage",
    "jobs ranks job --pipeline -1": "Invalid value for '--pipeline' … found '-1'",
    "jobs ranks job --state planned": "expected, connected",
    "jobs rebalancing job --layers 4,0": "--layers: expected at least one layer everywhere, found 0",
    "jobs list --format xml": "Invalid value for '--format' … found 'xml'",
    "jobs list --label vision": "--label: expected KEY=VALUE, found 'vision'",
    "jobs list --state lost": "waiting, baseline",
    "jobs list --state [/x]": "found '[/x]'",
    "jobs events job --limit {huge}": "--limit",
    "jobs events job --limit 0": "--limit",
    "jobs events job --type nosuch": "plan_refused",
    "jobs events job --since yesterday": "--since: expected a time such as 2026-01-31T12:00",
    "jobs events job --since 99999999d": "--since: expected … found '99999999d'",
    "jobs events job --since 0001-01-01T00:00+14:00": "--since: expected",
    "jobs policy job": "expected one of --no-slowdown, --max-slowdown-percent",
    "jobs policy job --no-slowdown --max-average-power-w 900": "expected one of --no-slowdown",
    "jobs policy job --deadline-s 60": "expected --deadline-s and --iterations together",
    "jobs policy job --deadline-s 60 --iterations 0": "--iterations",
    "jobs policy job --carbon": "expected --extra-time-percent and --horizon, or --iterations and --until",
    "jobs policy job --carbon --cost --extra-time-percent 5 --horizon 1d": "--carbon and --cost",
    "jobs policy job --carbon --extra-time-percent 5": "expected --extra-time-percent and --horizon",
    "jobs policy job --carbon --extra-time-percent 5 --horizon soon": "--horizon: expected a duration",
    "jobs policy job --cost --iterations 5": "or --iterations and --until",
    "jobs policy job --cost --iterations 5 --until someday": "--until: expected a time",
    "jobs policy job --no-slowdown --horizon 1d": "with --carbon or --cost only",
    "jobs policy job --no-slowdown --weight 1": "expected --tolerance-percent and --weight together",
    "ledger --since yesterday": "--since: expected a time such as 2026-01-31T12:00",
    "ledger --until soon": "--until: expected a time such as 2026-01-31T12:00",
    "power set b": "expected one of --limit-w and --percent",
    "power set b --limit-w 1 --percent 2": "expected one of --limit-w and --percent",
    "power set b --limit-w 1 --end soon": "--end: expected a time such as",
    "tokens create x --scope root": "--scope: expected agent, operator, reader, grid, found 'root'",
    "tokens create x --scope reader --lasting 0d": "--lasting: expected a time such as 90d",
    "tokens create x --scope agent": "--jobs: expected a job, or a pattern",
    "[/x]": "[/x]",
    # Flags of solve, of plan, and of graphs.
    "{solve4} --rebalance": "--rebalance: expected together with --layers",
    "{solve4} --layers 4": "--rebalance: expected together with --layers",
    "{solve4} --rebalance --layers 4,four": "a whole number for each stage",
    "solve two.csv --microbatches 4 --rebalance --layers 4,4,4": "for each stage, 2 in all, found 3",
    "solve two.csv --microbatches 4 --rebalance --layers 4,0": "1 to 10000 in stage 1, chunk 0, found 0",
    "solve profile.csv --microbatches 0": "--microbatches",
    "{solve4} --gpus-per-stage 0": "--gpus-per-stage",
    "{solve4} --blocking-power-w -1": "--blocking-power-w",
    "{solve4} --blocking-power-w nan": "--blocking-power-w",
    "{solve4} --blocking-power-w 1400=80,700": "--blocking-power-w",
    "{solve4} --blocking-power-w 1400=80,1400=70": "--blocking-power-w",
    "{solve4} --blocking-power-w 1400=-1": "--blocking-power-w",
    "{solve4} --points 1": "--points",
    "{solve4} --schedule zigzag": "--schedule",
    "{solve4} --schedule zb-h1": "stage 0, chunk 0, backward-input: expected at least one measured clock",
    "solve": "PROFILE: expected a profile or --graph, found none",
    "solve profile.csv": "--microbatches: expected the number of microbatches of an iteration, found none",
    "solve {graph} --graph {graph}": "PROFILE: expected a profile or --graph, found both",
    "solve --graph {graph} --microbatches 4": "--microbatches: expected without --graph",
    "solve --graph {graph} --blocking-power-w 4": "--blocking-power-w: expected without --graph",
    "solve --graph {graph} --compare": "--compare: expected without --graph",
    "solve --graph {graph} --processes 2": "--processes: expected without --graph",
    "solve --graph {graph} --limit-computations 7": "graph.nodes: expected at most 7 of them, found 8",
    "solve --graph cycle.json": "cycle.json: … found 'read-1' → 'draft' → 'answer' → 'read-1'",
    "solve --graph unprofiled.json": "unprofiled.json: node 'plan': expected a profile, found none",
    "solve --graph clock.json": 'clock.json: … has no field named "clock" at "GraphProblem.nodes[0]"',
    "solve --graph watts.json": "watts.json: resource 'large': expected a blocking power of 0 to 1e+10 W",
    "solve --graph missing.json": "missing.json: can't be read",
    "plan frontier.json": "expected one of --iteration-time and --no-slowdown",
    "plan frontier.json --no-slowdown --iteration-time 5": "one of --iteration-time and --no-slowdown",
    "plan frontier.json --iteration-time 0.01 --output plan.json": "--iteration-time",
    "plan frontier.json --iteration-time -1 --output plan.json": "--iteration-time",
    "plan frontier.json --iteration-time nan --output plan.json": "--iteration-time",
    # Many profiles, and simulations.
    "solve two.csv nothing-*.csv --microbatches 4": "nothing-*.csv: expected at least one file, found none",
    "solve two.csv profile.csv --plot x.png --microbatches 4": "--plot: expected one profile, and no --dask",
    "solve two.csv endless/two.csv --output all --microbatches 4": "profiles of different names, found",
    "solve two.csv empty.json --microbatches 4": "empty.json",
    "solve two.csv --dask tcp://host:8786 --microbatches 4": "tls://, or --dask-insecure for plaintext",
    "solve two.csv --dask host:8 --dask-insecure --microbatches 4": "expected tls://HOST:PORT, found host:8",
    "simulate none.toml": "none.toml: can't be read: No such file",
    "simulate no-start.toml": "start: Field required",
    "simulate no-profile.toml": "job 'x': ",
    "simulate limited.toml": (
        "job 'x': expected clocks alone in … as agents set nothing else, "
        "found the further settings power_limit_w"
    ),
    "simulate no-time.toml": "now.csv, line 2, column timestamp: expected a time",
    "{sweep} nothing.toml": "expected at least one of budgets, forecasts, policies, seeds",
    "{sweep} twice.toml": "seeds: expected each once, found '1' twice",
    "{sweep} good.toml": "forecasts.0: Input should be",
    "{sweep} carbon.toml": "policy 'y': job 'x': expected a signal 'carbon', found none",
    # Contents of files.
    "solve chunks.csv --microbatches 4": "chunk_count: expected 1 on each stage for 1f1b, found 2",
    "solve settings.csv --microbatches 4": "at most 1024 rows … found 1025 of stage 0 forward",
    "plan open.json --no-slowdown": "open.json: expected a frontier as JSON",
    "plan name.json --no-slowdown": "name.json … pointz",
    "plan member.json --no-slowdown": "member.json … surrogates not allowed",
    "plan empty.json --no-slowdown": "empty.json … stage_count",
    "plan huge.json --no-slowdown": "expected a frontier as JSON, found: Failed to parse",
    "plan many.json --no-slowdown": "many.json: … stage_count",
    "plan sure.json --no-slowdown": "sure.json: confidence: expected",
    "plan doubtful.json --no-slowdown": "doubtful.json: confidence: expected",
    "plan schedule.json --no-slowdown": "schedule.json … schedule",
    "plan member-twice.json --no-slowdown": "as JSON, found: member 'stageCount' twice in one object",
    # Encodings.
    "plan latin1.json --iteration-time 1": "latin1.json: expected a",
    "plan deep.json --iteration-time 1": "deep.json: expected a",
    "agent --config latin1.toml": "latin1.toml: expected TOML in UTF-8",
    "agent --config deep.toml": "deep.toml: expected TOML in UTF-8",
    "jobs show \udcff": "JOB_ID: expected UTF-8, found \\udcff",
    "jobs list --state \udcff": "expected UTF-8",
    # Inputs without an end.
    "solve /dev/zero --microbatches 4": "/dev/zero: expected a readable file, found: exp",
    "solve --graph /dev/zero": "/dev/zero: can't be read: expected at most",
    "plan /dev/zero --no-slowdown": "/dev/zero: can't be read: expected at",
    "simulate /dev/zero": "/dev/zero: can't be read: expected at most",
    "agent --config /dev/zero": "/dev/zero: can't be read: expected at most",
    "health --coordinator localhost:1 --tls-ca /dev/zero": "/dev/zero: can't be read: e",
    "certificates authority --folder authority": "expected no authority there yet",
    "certificates client x --folder folder": "expected ca.pem and ca.key of an authority",
    "certificates client {long} --folder authority --output x": "expected a name of 1 to 64 characters",
    "certificates client x --folder authority --output none/x": "No such file or directory",
    "certificates client me --folder authority --output authority/ca": f"authority/ca: {OWN_FILES}",
    "certificates client me --folder authority --output own": f"own: {OWN_FILES}",
    "certificates client me --folder endless": "expected at most 1",
    "health {plain} --token-file /dev/zero": "/dev/zero: can't be read: expected a regular file",
    # Outputs.
    "{solve4} --output profile.csv": "--output: expected a file other than",
    "{solve4} --output hard": "--output: expected a file other than",
    "{solve4} --output link": "--output: expected a file other than",
    "{solve4} --plot ./folder/../profile.csv": "expected a file other",
    "{solve4} --output loop": "loop: Too many levels of symbolic links",
    "{solve4} --output folder": "found the folder folder",
    "{solve4} --output none/f.json": "--output … expected a path in an existing folder",
    "{solve4} --plot none/f.png": "--plot … expected a path in an existing folder",
    "{solve4} --output profile.csv/f": "a path in an existing folder",
    "{solve4} --output f.png --plot f.png": "--plot: expected a file other than that of --",
    "{solve4} --plot f.docx": "--plot: expected a suffix of ",
    "tokens create t --scope reader --output profile.csv": "a path for a new file",
    "store export photos.db --database photos.db": "FILE: expected a file other",
    "store export none/out.jsonl --database none.db": "expected a path in an existing folder",
    # Limits.
    "solve profile.csv --microbatches 4097": "at most 8192 computations (--limit-computations), found 8194",
    "solve profile.csv --microbatches 4000 --points 10000": "--points: expected",
    "{solve4} --limit-computations 7": "--microbatches: expected at most 7 computations",
    "plan frontier.json --iteration-time 5 --limit-computations 3": "at most 3 computations, found 4",
}
FAILURES = {
    "jobs list --coordinator 127.0.0.1:1": "no coordinator at 127.0.0.1:1: ",
    "{agent} {folder}/folder": "{folder}/folder: expected no file, or an agent's",
    "{agent} {folder}/profile.csv": "{folder}/profile.csv: expected no file",
    "{agent} {folder}/profile.csv/s": "profile.csv",
    "{agent} /tmp/{long}": "expected a socket path of at most 107 bytes, found 113",
    "{coordinator} ../x.db --tls-certificate profile.csv --tls-key profile.csv": "profile.csv: ",
    "{agent} ../a.sock --tls-ca profile.csv": "profile.csv: ",
    "health --agent {folder}/none": "no agent at {folder}/none: No such",
    "health --agent profile.csv": "no agent at profile.csv: Connection",
    "serving list --socket none.sock": "no agent at none.sock",
    "{gateway} --signing-key none": "none: can't be read: No such file",
    "{gateway} --broker-token-file none": "none: can't be read: No such file",
    "{gateway} --broker-tls-ca none": "none: can't be read: No such file",
    "{gateway} --state garbage.db": "garbage.db: expected ",
    "store check --database photos.db": "expected an empty database or one of Perseus, found tables photos",
    "store export out.jsonl --database photos.db": "the database photos.db: … found tables photos",
    "store check --database garbage.db": "it is not a SQLite database",
    "store check --database cut.db": "cut.db",
    "store check --database none.db": "there is no such file",
    "store export out.jsonl --database none.db": "there is no such file",
    "store import none.jsonl --database none.db": "No such file",
    "{coordinator} photos.db": "found tables photos",
    "{coordinator} garbage.db": "it is not a SQLite database",
    "{coordinator} cut.db": "cut.db: ",
    "{coordinator} folder": "cannot open the database folder",
}
"""The line for each mistake, in parts that "…" separates."""


@pytest.fixture
def _no_supervisor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No agent becomes a supervisor, in place of this process."""
    ours, lifeline = os.pipe()
    monkeypatch.setenv("PERSEUS_LIFELINE", str(lifeline))
    yield
    os.close(ours)
    os.close(lifeline)


def contents(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.iterdir()}


@pytest.mark.usefixtures("_no_supervisor")
@pytest.mark.parametrize(
    ("exit_code", "command", "message"),
    [
        *((BAD_INPUT, command, message) for command, message in MISTAKES.items()),
        *((FAILURE, command, message) for command, message in FAILURES.items()),
    ],
    ids=[ascii(command) for command in (*MISTAKES, *FAILURES)],
)
def test_a_mistake_is_one_line_and_an_exit_code(
    exit_code: int, command: str, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    names = {**SHORT, "folder": str(folder)}
    before = contents(folder)
    result = perseus(command.format(**names), PERSEUS_GRID_TOKEN="s3cret")
    assert result.exit_code == exit_code, result.output
    assert all(part in result.stderr for part in message.format(**names).split(" … "))
    if not result.stderr.startswith("Usage"):
        shown = re.findall("^error: |^[^ ]+ \\[critical ] ends with an error ", result.stderr, re.MULTILINE)
        assert len(shown) == 1
    assert "\x1b" not in result.stderr
    assert "Traceback" not in result.output
    assert len(result.stderr) < 600 or result.stderr.startswith("Usage")
    assert "s3cret" not in result.output
    assert contents(folder) == before


def test_solving_stops_at_its_time_limit(profile_file: Path, tmp_path: Path) -> None:
    command = "solve profile.csv --microbatches 4000 --limit-s 0.05 --output f.json"
    ended = call(*command.split(), cwd=tmp_path)
    assert (ended.exit_code, ended.stdout) == (1, b"")
    assert ended.error == "error: expected to finish within 0.05 s (--limit-s), found more to do"
    assert [*tmp_path.iterdir()] == [profile_file]


def test_a_silent_coordinator_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perseus.tls.channels.diagnose", partial(diagnose, timeout_s=0.1))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        result = perseus("health --timeout-s 0.2 --coordinator", address)
    assert result.exit_code == 1
    assert f"no answer in time from the coordinator at {address}: reason unknown" in result.stderr


@pytest.mark.slow("starts a coordinator as a process: gRPC keeps files open of a port that it did not get")
@pytest.mark.parametrize("is_taken_port", [False, True])
def test_grpc_adds_no_line_of_its_own(tmp_path: Path, is_taken_port: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}" if is_taken_port else f"unix:{tmp_path}"
        flags = "--database a.db --log-level error --operator-token-file operator.token --listen"
        ended = call("coordinator", *flags.split(), address, cwd=tmp_path)
    assert ended.exit_code == 1
    assert f"cause='cannot listen on {address}" in ended.error


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("PERSEUS_AGENT_SOKCET", ": did you mean PERSEUS_AGENT_SOCKET?"),
        ("PERSEUS_COORDINATOR_LEASE", ": did you mean PERSEUS_COORDINATOR_LEASE_S?"),
        ("PERSEUS_TLS_CAS", ": did you mean PERSEUS_TLS_CA?"),
        ("PERSEUS_\x1b", r"warning: environment variable PERSEUS_\x1b is unknown to Perseus"),
        ("PERSEUS_TOKEN", ""),
        ("PERSEUS_TOKEN_FILE", ""),
        ("PERSEUS_COORDINATOR", ""),
        ("PERSEUS_AGENT_TOKEN", ""),
        ("PERSEUS_COORDINATOR_KEEP_EVENT_COUNT", ""),
        ("OTHER_PERSEUS_THING", ""),
    ],
)
def test_an_unknown_variable_gives_a_warning(name: str, hint: str, profile_file: Path) -> None:
    result = perseus("solve --microbatches 1", profile_file, **{name: "7"})
    assert result.exit_code == 0
    assert bool(result.stderr) == bool(hint)
    assert hint in " ".join(result.stderr.split())
