"""`perseus tokens`, and the search for tokens by commands and agents, with a real coordinator process."""

import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from perseus.cli.main import app


def perseus(environment: Mapping[str, str], *arguments: object) -> Result:
    return CliRunner().invoke(
        app, list(map(str, arguments)), env={"COLUMNS": "160", "NO_COLOR": "1", **environment}
    )


def test_a_token_is_made_used_and_revoked(environment: Mapping[str, str], tmp_path: Path) -> None:
    path = tmp_path / "reader.token"
    done = perseus(
        environment, "tokens", "create", "dash", "--scope=reader", "--lasting=1h", "--output", path
    )
    assert done.exit_code == 0, done.stderr
    assert path.stat().st_mode & 0o777 == 0o600
    secret = path.read_text().strip()
    assert secret not in done.stdout + done.stderr
    reader = {**environment, "PERSEUS_TOKEN_FILE": str(path)}
    assert perseus(reader, "jobs", "list").exit_code == 0
    refused = perseus(reader, "tokens", "list")
    assert refused.exit_code == 1
    assert "expected scope operator, found reader of token dash" in refused.stderr
    by_environment = {**environment, "PERSEUS_TOKEN": secret}
    assert perseus(by_environment, "jobs", "list").exit_code == 0
    listed = perseus(environment, "tokens", "list")
    assert [line.split()[1:4:2] for line in listed.stdout.splitlines() if "dash" in line] == [
        ["dash", "reader"]
    ]
    assert secret not in listed.stdout
    assert perseus(environment, "tokens", "revoke", "dash").exit_code == 0
    ended = perseus(reader, "jobs", "list")
    assert ended.exit_code == 1
    assert "token 'dash' is revoked" in ended.stderr
    again = perseus(environment, "tokens", "create", "dash", "--scope=reader")
    assert again.exit_code == 2
    assert "token 'dash' already exists" in again.stderr


def test_a_refused_token_is_named_by_its_origin_with_what_to_do(
    environment: Mapping[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "other.token"
    path.write_text("perseus_unknown")
    by_file = {**environment, "PERSEUS_TOKEN_FILE": str(path)}
    by_variable = {**environment, "PERSEUS_TOKEN": "perseus_unknown"}
    for credentials, origin in ((by_file, path), (by_variable, "PERSEUS_TOKEN")):
        refused = perseus(credentials, "jobs", "list")
        assert refused.exit_code == 1
        assert f"the coordinator does not know the token; the token is from {origin}. Give" in refused.stderr
        assert "--token-file or PERSEUS_TOKEN" in refused.stderr
        assert "perseus_unknown" not in refused.stderr
    empty = perseus({**environment, "PERSEUS_TOKEN": " "}, "jobs", "list")
    assert "PERSEUS_TOKEN: expected a token, found none" in empty.stderr


def test_scripts_get_a_token_and_its_revocation(environment: Mapping[str, str], tmp_path: Path) -> None:
    made = perseus(
        environment,
        *("tokens", "create", "ci", "--scope=agent", "--jobs=llama-*", "--hosts=node-1*", "--format=json"),
    )
    token = json.loads(made.stdout)
    assert (token["name"], token["scope"]) == ("ci", "agent")
    assert (token["job_patterns"], token["host_patterns"]) == (["llama-*"], ["node-1*"])
    assert token["expire_time"] is None
    bare = perseus(environment, "tokens", "create", "bare", "--scope=reader").stdout
    assert len(bare.split()) == 1
    assert len(bare.strip()) == len(token["secret"])
    path = tmp_path / "token"
    kept = perseus(
        environment, "tokens", "create", "kept", "--scope=reader", "--output", path, "--format=csv"
    )
    (row,) = csv.DictReader(kept.stdout.splitlines())
    assert (row["name"], row["secret"]) == ("kept", "")
    ended = json.loads(perseus(environment, "tokens", "revoke", "ci", "--format=json").stdout)
    assert ended["name"] == "ci"
    assert ended["revoke_time"].endswith("Z")
    assert "secret" not in ended


def test_scripts_get_the_health(environment: Mapping[str, str]) -> None:
    serves = perseus(environment, "health", "--format=json")
    assert (serves.exit_code, json.loads(serves.stdout)) == (
        0,
        {"who": "coordinator", "is_serving": True, "status": "SERVING"},
    )
    assert (
        perseus(environment, "health", "--format=csv").stdout
        == "who,is_serving,status\ncoordinator,true,SERVING\n"
    )
    assert perseus(environment, "health").stdout == "SERVING\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["create", "x", "--scope=root"], "--scope: expected agent, operator, reader, grid, found 'root'"),
        (["create", "x", "--scope=reader", "--lasting=0d"], "--lasting: expected a time such as 90d"),
        (["create", "x", "--scope=agent"], "--jobs: expected a job, or a pattern"),
        (["create", "x", "--scope=reader", "--jobs=a"], "job_patterns: expected none"),
        (["create", "x", "--scope=reader", "--hosts=a"], "host_patterns: expected none"),
        (["create", "x", "--scope=agent", "--jobs=a", "--hosts=a b"], "host_patterns[0]: expected 1 to 253"),
        (["create", "X", "--scope=reader"], "name: expected 1 to 63 of"),
        (["revoke", "nobody"], "there is no token 'nobody'"),
    ],
)
def test_mistakes_get_one_line(environment: Mapping[str, str], arguments: list[str], expected: str) -> None:
    done = perseus(environment, "tokens", *arguments)
    assert done.exit_code == 2
    assert expected in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_missing_token_file_is_named(environment: Mapping[str, str], tmp_path: Path) -> None:
    done = perseus({**environment, "PERSEUS_TOKEN_FILE": str(tmp_path / "none")}, "jobs", "list")
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert "none: can't be read: No such file" in done.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root's file is not under XDG_STATE_HOME")
def test_the_commands_of_the_coordinators_user_find_the_token(tmp_path: Path) -> None:
    home = {"XDG_STATE_HOME": str(tmp_path)}
    own = {
        name: value for name, value in os.environ.items() if name != "PERSEUS_COORDINATOR_OPERATOR_TOKEN_FILE"
    }
    socket = f"unix:{tmp_path / 'c.sock'}"
    with subprocess.Popen(
        [
            *[sys.executable, "-m", "perseus.cli", "coordinator"],
            *[f"--listen={socket}", f"--database={tmp_path / 'a.db'}"],
        ],
        env={**own, **home},
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            deadline_s = time.monotonic() + 60
            while (done := perseus({**home, "PERSEUS_COORDINATOR": socket}, "jobs", "list")).exit_code != 0:
                assert time.monotonic() < deadline_s, done.stderr
                time.sleep(0.2)
        finally:
            process.terminate()
