"""Every anticipated mistake: one line with what, where, expected and found; and an exit code."""

import contextlib
import json
import os
import re
import socket
import sqlite3
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from perseus.cli.main import app
from perseus.tls.diagnosis import diagnose
from tests.cli.conftest import PROFILE
from tests.cli.processes import call

HUGE = "1" + 308 * "0"


def frontier(path: Path) -> dict[str, object]:
    """Return the content of a frontier's file."""
    (path.parent / "p.csv").write_text(PROFILE)
    done = run("solve", path.parent / "p.csv", "--microbatches", 2, "--points", 3, "--output", path)
    assert done.exit_code == 0, done.output
    found: dict[str, object] = json.loads(path.read_text())
    return found


def run(*arguments: object, **environment: str) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments], env=environment)


def make_files(folder: Path) -> None:
    """Make the files at which the commands below fail."""
    (folder / "profile.csv").write_text(PROFILE)
    (folder / "huge.csv").write_text(PROFILE.replace("0.1,30", "0.1,1e308"))
    (folder / "late.csv").write_text(PROFILE.replace("0.1,30", "1e308,30"))
    (folder / "stage.csv").write_text(PROFILE.replace("0,forward,800", f"{HUGE},forward,800"))
    (folder / "latin1.csv").write_bytes((PROFILE + "é").encode("latin-1"))
    (folder / "utf16.csv").write_bytes(PROFILE.encode("utf-16"))
    (folder / "latin1.json").write_bytes('{"é": 1}'.encode("latin-1"))
    (folder / "deep.json").write_text("[" * 100_000)
    (folder / "deep.toml").write_text("x = " + "[" * 100_000)
    (folder / "latin1.toml").write_bytes("# é".encode("latin-1"))
    (folder / "huge.toml").write_text(f"profile_budget_iterations = {HUGE}")
    (folder / "long.toml").write_text("lease_s = 1e308")
    (folder / "kept.toml").write_text("keep_event_count = 9007199254740993")
    (folder / "link").symlink_to("profile.csv")
    (folder / "loop").symlink_to("loop")
    (folder / "garbage.db").write_bytes(os.urandom(5000))
    with contextlib.closing(sqlite3.connect(folder / "photos.db")) as connection:
        connection.execute("CREATE TABLE photos (x)")
        connection.execute("PRAGMA user_version = 8")
        connection.commit()
    with contextlib.closing(sqlite3.connect(folder / "cut.db")) as connection:
        connection.execute("CREATE TABLE coordinator (x)")
        connection.executemany("INSERT INTO coordinator VALUES (?)", [["x" * 4000]] * 20)
        connection.commit()
    os.truncate(folder / "cut.db", 9000)
    (folder / "folder").mkdir()
    (folder / "endless").mkdir()
    (folder / "endless" / "ca.pem").symlink_to("/dev/zero")


SOLVE = ["solve", "profile.csv", "--microbatches", "4"]
OWN_TOKEN = ["--operator-token-file", "operator.token"]
COORDINATOR = ["coordinator", "--listen", "127.0.0.1:0", *OWN_TOKEN, "--database"]
AGENT = ["agent", "--observe", "--gpu-backend", "emulated", "--emulated-gpus", "folder", "--socket"]

MISTAKES: dict[str, tuple[list[str], int, str]] = {
    # Addresses.
    "listen: port too high": (
        ["coordinator", "--listen", "127.0.0.1:70000"], 2,
        "--listen: expected HOST:PORT with a port from 0 to 65535, or unix:PATH, found '127.0.0.1:70000'",
    ),
    "listen: port below 0": (["coordinator", "--listen", "127.0.0.1:-1"], 2, "a port from 0 to 65535"),
    "listen: no port": (["coordinator", "--listen", "127.0.0.1"], 2, "--listen: expected HOST:PORT"),
    "listen: nothing": (["coordinator", "--listen", ""], 2, "--listen: expected HOST:PORT"),
    "listen: no brackets": (["coordinator", "--listen", "::1:50051"], 2, "expected [HOST]:PORT"),
    "listen: long path": (["coordinator", "--listen", f"unix:{'a' * 108}"], 2, "a path of 1 to 107 bytes"),
    "agent: port 0": (
        ["agent", "--coordinator", "host:0", "--insecure"], 2, "--coordinator: expected a port from 1",
    ),
    "brackets around a name": (
        ["jobs", "list", "--coordinator", "[/x]:1"], 2, "--coordinator: expected a host name",
    ),
    "half a bracket": (["jobs", "list", "--coordinator", "x]:1"], 2, "--coordinator: expected a host name"),
    "no name": (["health", "--coordinator", "..:1", "--insecure"], 2, "--coordinator: expected a host name"),
    "port too high": (["jobs", "list", "--coordinator", "127.0.0.1:99999"], 2, "a port from 1 to 65535"),
    "nobody there": (["jobs", "list", "--coordinator", "127.0.0.1:1"], 1, "no coordinator at 127.0.0.1:1: "),
    # The agent's socket.
    "socket: a folder": ([*AGENT, "{folder}/folder"], 1, "{folder}/folder: expected no file, or an agent's"),
    "socket: a file": ([*AGENT, "{folder}/profile.csv"], 1, "{folder}/profile.csv: expected no file"),
    "socket: under a file": ([*AGENT, "{folder}/profile.csv/s"], 1, "profile.csv"),
    "socket: too long": (
        [*AGENT, f"/tmp/{'a' * 120}"], 1, "expected a socket path of at most 107 bytes, found 125",
    ),
    "health: no agent": (["health", "--agent", "{folder}/none"], 1, "no agent at {folder}/none: No such"),
    "health: a living coordinator": (["health", "--alive"], 2, "--alive: expected --agent, found none"),
    "health: a file": (["health", "--agent", "profile.csv"], 1, "no agent at profile.csv: Connection"),
    # Databases.
    "check: another's": (
        ["store", "check", "--database", "photos.db"], 1,
        "the database photos.db: expected an empty database or one of Perseus, found tables photos",
    ),
    "export: another's": (
        ["store", "export", "out.jsonl", "--database", "photos.db"], 1, "found tables photos",
    ),
    "coordinator: another's": ([*COORDINATOR, "photos.db"], 1, "found tables photos"),
    "coordinator: garbage": ([*COORDINATOR, "garbage.db"], 1, "it is not a SQLite database"),
    "coordinator: cut off": ([*COORDINATOR, "cut.db"], 1, "cut.db: "),
    "check: garbage": (["store", "check", "--database", "garbage.db"], 1, "it is not a SQLite database"),
    "check: cut off": (["store", "check", "--database", "cut.db"], 1, "cut.db"),
    "coordinator: a folder": ([*COORDINATOR, "folder"], 1, "cannot open the database folder"),
    "export: over its database": (
        ["store", "export", "photos.db", "--database", "photos.db"], 2, "FILE: expected a file other",
    ),
    # Numbers.
    "energy of 1e308": (
        ["solve", "huge.csv", "--microbatches", "4"], 2,
        "huge.csv, row 2, column energy: expected from 1e-12 to 1e+15 joules, found '1e308'",
    ),
    "time of 1e308": (["solve", "late.csv", "--microbatches", "4"], 2, "late.csv, row 2, column time"),
    "stage of 1e308": (["solve", "stage.csv", "--microbatches", "4"], 2, "stage.csv, row 3, column stage"),
    "power of 1e308": ([*SOLVE, "--blocking-power-w", "1e308"], 2, "blocking_power_w, stage 0: expected"),
    "lease of 1e308": (["coordinator", "--config", "long.toml"], 2, "long.toml: lease_s: "),
    "budget of 1e308": (
        ["coordinator", "--config", "huge.toml"], 2, "huge.toml: profile_budget_iterations: ",
    ),
    "more than is counted": (["coordinator", "--config", "kept.toml"], 2, "kept.toml: keep_event_count: "),
    "run too high": (["jobs", "show", "job", "--run", "2147483648"], 2, "--run"),
    "pipeline too high": (["jobs", "straggler", "job", "2147483648", "--clear"], 2, "pipeline"),
    "stage too high": (["jobs", "ranks", "job", "--stage", HUGE], 2, "--stage"),
    "more events than are counted": (["jobs", "events", "job", "--limit", HUGE], 2, "--limit"),
    "longer ago than time": (["jobs", "events", "job", "--since", "99999999d"], 2, "--since: expected"),
    "before time": (["jobs", "events", "job", "--since", "0001-01-01T00:00+14:00"], 2, "--since: expected"),
    # Encodings.
    "profile in Latin-1": (["solve", "latin1.csv", "--microbatches", "4"], 2, "latin1.csv: expected UTF-8"),
    "profile in UTF-16": (["solve", "utf16.csv", "--microbatches", "4"], 2, "utf16.csv: expected UTF-8 text"),
    "frontier in Latin-1": (["plan", "latin1.json", "--iteration-time", "1"], 2, "latin1.json: expected a"),
    "frontier too deep": (["plan", "deep.json", "--iteration-time", "1"], 2, "deep.json: expected a"),
    "settings in Latin-1": (["agent", "--config", "latin1.toml"], 2, "latin1.toml: expected TOML in UTF-8"),
    "job in no encoding": (["jobs", "show", "\udcff"], 2, "JOB_ID: expected UTF-8, found \\udcff"),
    "state in no encoding": (["jobs", "list", "--state", "\udcff"], 2, "expected UTF-8"),
    # Inputs without an end.
    "endless profile": (
        ["solve", "/dev/zero", "--microbatches", "4"], 2, "/dev/zero: expected a readable file, found: exp",
    ),
    "endless graph": (["solve", "--graph", "/dev/zero"], 2, "/dev/zero: can't be read: expected at most"),
    "endless frontier": (["plan", "/dev/zero", "--no-slowdown"], 2, "/dev/zero: can't be read: expected at"),
    "endless scenario": (["simulate", "/dev/zero"], 2, "/dev/zero: can't be read: expected at most"),
    "endless settings": (["agent", "--config", "/dev/zero"], 2, "/dev/zero: can't be read: expected at most"),
    "endless certificate": (
        ["health", "--coordinator", "localhost:1", "--tls-ca", "/dev/zero"], 2, "/dev/zero: can't be read: e",
    ),
    "endless authority": (["certificates", "client", "me", "--folder", "endless"], 2, "expected at most 1"),
    "endless token": (
        ["health", "--coordinator", "localhost:1", "--insecure", "--token-file", "/dev/zero"], 2,
        "/dev/zero: can't be read: expected a regular file",
    ),
    "settings too deep": (["agent", "--config", "deep.toml"], 2, "deep.toml: expected TOML in UTF-8"),
    # Outputs.
    "output over the input": ([*SOLVE, "--output", "profile.csv"], 2, "--output: expected a file other than"),
    "output over it by a link": ([*SOLVE, "--output", "link"], 2, "--output: expected a file other than"),
    "plot over the input": ([*SOLVE, "--plot", "./folder/../profile.csv"], 2, "expected a file other"),
    "output in a circle": ([*SOLVE, "--output", "loop"], 2, "loop: Too many levels of symbolic links"),
    "output to a folder": ([*SOLVE, "--output", "folder"], 2, "found the folder folder"),
    "output to nowhere": ([*SOLVE, "--output", "none/f.json"], 2, "expected a path in an existing folder"),
    "output under a file": ([*SOLVE, "--output", "profile.csv/f"], 2, "a path in an existing folder"),
    "output and plot in one": (
        [*SOLVE, "--output", "f.png", "--plot", "f.png"], 2, "--plot: expected a file other than that of --",
    ),
    "plot of no format": ([*SOLVE, "--plot", "f.docx"], 2, "--plot: expected a suffix of "),
    "token to a file that is there": (
        ["tokens", "create", "t", "--scope", "reader", "--output", "profile.csv"], 2, "a path for a new file",
    ),
    # Limits.
    "too many computations": (
        ["solve", "profile.csv", "--microbatches", "4097"], 2,
        "--microbatches: expected at most 8192 computations (--limit-computations), found 8194",
    ),
    "too many points for them": (
        ["solve", "profile.csv", "--microbatches", "4000", "--points", "10000"], 2, "--points: expected",
    ),
    "too many for the limit given": (
        [*SOLVE, "--limit-computations", "7"], 2, "--microbatches: expected at most 7 computations",
    ),
    # Markup is plain text.
    "state in brackets": (["jobs", "list", "--state", "[/x]"], 2, "found '[/x]'"),
    "command in brackets": (["[/x]"], 2, "[/x]"),
    "a title in a setting": (["agent", "--log-level", "\x1b]0;x\x07"], 2, "--log-level: "),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_an_exit_code(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, exit_code, message = MISTAKES[name]
    make_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    content = (tmp_path / "profile.csv").read_bytes()
    held, lifeline = os.pipe()  # no agent becomes a supervisor, in place of this process
    result = run(
        *(each.replace("{folder}", str(tmp_path)) for each in arguments),
        COLUMNS="200",
        PERSEUS_LIFELINE=str(lifeline),
    )
    os.close(held)
    os.close(lifeline)
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == exit_code, result.output
    assert message.replace("{folder}", str(tmp_path)) in result.stderr
    if not result.stderr.startswith("Usage"):
        assert re.search("^error: |^[^ ]+ \\[critical ] ends with an error ", result.stderr, re.MULTILINE)
    assert "\x1b" not in result.stderr
    assert "Traceback" not in result.output
    assert (tmp_path / "profile.csv").read_bytes() == content
    assert sorted(set(tmp_path.iterdir()) - set(before)) == []


@pytest.mark.parametrize(
    ("place", "figure", "expected"),
    [
        (("problem", "profiles", 0, "measurements", 0, "timeS"), 1e308, "time_s: expected at most 1e+06"),
        (("problem", "profiles", 0, "measurements", 0, "energyJ"), 1e308, "energy_j: expected at most"),
        (("problem", "profiles", 0, "measurements", 0, "energyJ"), "Infinity", "energy_j: expected"),
        (("problem", "profiles", 0, "measurements", 0, "energyJ"), "NaN", "energy_j: expected"),
        (("problem", "stageCount"), 1e308, "expected a frontier as JSON, found: Failed to parse"),
        (("problem", "stageCount"), 2**31 - 1, "stage_count"),
        (("problem", "transferLagS"), 1e308, "transfer_lag_s: expected"),
    ],
)
def test_a_figure_in_a_frontier_is_refused_by_its_name(
    tmp_path: Path, place: tuple[str | int, ...], figure: object, expected: str
) -> None:
    path = tmp_path / "frontier.json"
    content: object = frontier(path)
    found = content
    for step in place[:-1]:
        found = found[step]  # type: ignore[index]
    found[place[-1]] = figure  # type: ignore[index]
    path.write_text(json.dumps(content))
    result = run("plan", path, "--iteration-time", 5)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
    assert f"{path}: " in result.stderr
    assert expected in result.stderr
    assert len(result.stderr) < 600


def test_a_plan_is_not_expanded_beyond_the_limit(tmp_path: Path) -> None:
    frontier(tmp_path / "f.json")
    result = run("plan", tmp_path / "f.json", "--iteration-time", 5, "--limit-computations", 3)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "expected at most 3 computations, found 4" in result.stderr


@pytest.mark.parametrize("output", ["ca/ca", "link"])
def test_an_authority_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("certificates", "authority", "--folder", "ca").exit_code == 0
    (tmp_path / "link.key").symlink_to("ca/ca.key")
    before = (tmp_path / "ca" / "ca.key").read_bytes()
    result = run("certificates", "client", "me", "--folder", "ca", "--output", output)
    assert result.exit_code == 2
    assert f"{output}: expected another path than the authority's own files" in result.stderr
    assert (tmp_path / "ca" / "ca.key").read_bytes() == before
    (tmp_path / "other.pem").symlink_to("elsewhere.pem")
    assert run("certificates", "client", "me", "--folder", "ca", "--output", "other").exit_code == 0
    assert (tmp_path / "elsewhere.pem").read_bytes().startswith(b"-----BEGIN")


def test_solving_stops_at_its_time_limit(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text(PROFILE)
    ended = call(
        "solve", "p.csv", "--microbatches", 4000, "--limit-s", 0.05, "--output", "f.json", cwd=tmp_path
    )
    assert (ended.exit_code, ended.stdout) == (1, b"")
    assert ended.error == "error: expected to finish within 0.05 s (--limit-s), found more to do"
    assert [each.name for each in tmp_path.iterdir()] == ["p.csv"]


def test_a_silent_coordinator_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perseus.tls.channels.diagnose", partial(diagnose, timeout_s=0.1))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        result = run("health", "--coordinator", address, "--timeout-s", 0.2)
    assert result.exit_code == 1
    assert f"no answer in time from the coordinator at {address}: reason unknown" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["coordinator", "--lease-s", "30s"], "'30s'"),
        (["jobs", "ranks", "job", "--pipeline", "first"], "'first'"),
        (["jobs", "ranks", "job", "--pipeline", "-1"], "'-1'"),
        (["jobs", "list", "--format", "xml"], "'xml'"),
    ],
)
def test_a_value_that_does_not_fit_is_quoted(arguments: list[str], found: str) -> None:
    result = run(*arguments, COLUMNS="160")
    assert result.exit_code == 2
    assert f"Invalid value for '{arguments[-2]}'" in result.stderr
    assert f"found {found}" in result.stderr


@pytest.mark.slow("starts a coordinator as a process")
def test_grpc_adds_no_line_of_its_own(tmp_path: Path) -> None:
    ended = call(
        *("coordinator", "--listen", f"unix:{tmp_path}", "--database", "a.db", "--log-level", "error"),
        *("--operator-token-file", "operator.token"),
        cwd=tmp_path,
    )
    assert ended.exit_code == 1
    (record,) = ended.error.splitlines()
    assert f"cause='cannot listen on unix:{tmp_path}" in record


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("PERSEUS_AGENT_SOKCET", ": did you mean PERSEUS_AGENT_SOCKET?"),
        ("PERSEUS_COORDINATOR_LEASE", ": did you mean PERSEUS_COORDINATOR_LEASE_S?"),
        ("PERSEUS_TLS_CAS", ": did you mean PERSEUS_TLS_CA?"),
        ("PERSEUS_\x1b", ""),
    ],
)
def test_an_unknown_variable_gives_a_warning(name: str, hint: str, tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text(PROFILE)
    result = run("solve", tmp_path / "p.csv", "--microbatches", 1, **{name: "x"})
    assert result.exit_code == 0
    shown = name.replace("\x1b", "\\x1b")
    warned = " ".join(result.stderr.split())
    assert f"warning: environment variable {shown} is unknown to Perseus{hint}" in warned


def test_known_variables_give_no_warning(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text(PROFILE)
    known = {
        "PERSEUS_TOKEN": "x",
        "PERSEUS_TOKEN_FILE": "x",
        "PERSEUS_COORDINATOR": "host:1",
        "PERSEUS_AGENT_TOKEN": "x",
        "PERSEUS_COORDINATOR_KEEP_EVENT_COUNT": "7",
        "OTHER_PERSEUS_THING": "x",
    }
    assert run("solve", tmp_path / "p.csv", "--microbatches", 1, **known).stderr == ""
