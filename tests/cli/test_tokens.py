"""`perseus tokens`, and the search for tokens by commands and agents, with a real coordinator process."""

import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.cli.commands import perseus
from tests.cli.prepared import PreparedCoordinator
from tests.cli.processes import COMMAND
from tests.cli.test_requests import ANSWERS


def test_a_token_is_made_used_and_revoked(environment: Mapping[str, str], tmp_path: Path) -> None:
    path = tmp_path / "reader.token"
    made = perseus(f"tokens create dash --scope reader --lasting 1h --output {path}", **environment)
    assert made.exit_code == 0, made.stderr
    assert path.stat().st_mode & 0o777 == 0o600
    secret = path.read_text().strip()
    reader = {**environment, "PERSEUS_TOKEN_FILE": str(path)}
    assert perseus("jobs list", **reader).exit_code == 0
    assert perseus("jobs list", **{**environment, "PERSEUS_TOKEN": secret}).exit_code == 0
    refused = perseus("tokens list", **reader)
    assert refused.exit_code == 1
    assert "expected scope operator, found reader of token dash" in refused.stderr
    listed = perseus("tokens list", **environment)
    rows = [line.split()[1:4:2] for line in listed.stdout.splitlines() if "dash" in line]
    assert rows == [["dash", "reader"]]
    assert secret not in made.output + listed.output
    assert perseus("tokens revoke dash", **environment).exit_code == 0
    ended = perseus("jobs list", **reader)
    assert ended.exit_code == 1
    assert "token 'dash' is revoked" in ended.stderr
    for command, reason in (
        ("create dash --scope reader", "token 'dash' already exists"),
        ("create X --scope reader", "name: expected 1 to 63 of"),
        ("create x --scope agent --jobs a --hosts 'a b'", "host_patterns[0]: expected 1 to 253"),
        ("revoke nobody", "there is no token 'nobody'"),
    ):
        refused = perseus(f"tokens {command}", **environment)
        assert refused.exit_code == 2
        assert reason in refused.stderr


def test_a_refused_token_is_named_by_its_origin_with_what_to_do(
    environment: Mapping[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "other.token"
    path.write_text("perseus_unknown")
    for name, value, origin in (
        ("PERSEUS_TOKEN_FILE", str(path), path),
        ("PERSEUS_TOKEN", "perseus_unknown", "PERSEUS_TOKEN"),
    ):
        refused = perseus("jobs list", **{**environment, name: value})
        assert refused.exit_code == 1
        assert f"the coordinator does not know the token; the token is from {origin}. Give" in refused.stderr
        assert "--token-file or PERSEUS_TOKEN" in refused.stderr
        assert "perseus_unknown" not in refused.stderr
    empty = perseus("jobs list", **{**environment, "PERSEUS_TOKEN": " "})
    assert "PERSEUS_TOKEN: expected a token, found none" in empty.stderr


@pytest.mark.parametrize("form", ["json", "csv"])
def test_scripts_get_a_token_that_is_in_no_file_only(
    prepared: PreparedCoordinator, tmp_path: Path, form: str
) -> None:
    prepared.answers = ANSWERS
    command = f"tokens create dash --scope reader --format {form}"
    shown = prepared.perseus(command).stdout
    kept = prepared.perseus(f"{command} --output {tmp_path}/token").stdout
    assert ("perseus_s3cret" in shown, "perseus_s3cret" in kept) == (True, False)
    assert "dash" in kept
    assert (tmp_path / "token").read_text() == "perseus_s3cret\n"


@pytest.mark.parametrize(
    ("form", "shown"),
    [
        ("csv", "who,is_serving,status\ncoordinator,true,SERVING\n"),
        ("json", '{\n  "who": "coordinator",\n  "is_serving": true,\n  "status": "SERVING"\n}\n'),
    ],
)
def test_scripts_get_the_health(environment: Mapping[str, str], form: str, shown: str) -> None:
    done = perseus(f"health --format {form}", **environment)
    assert (done.exit_code, done.stdout) == (0, shown)


@pytest.mark.skipif(os.geteuid() == 0, reason="root's file is not under XDG_STATE_HOME")
def test_the_commands_of_the_coordinators_user_find_the_token(tmp_path: Path) -> None:
    home = {"XDG_STATE_HOME": str(tmp_path)}
    own = {
        name: value for name, value in os.environ.items() if name != "PERSEUS_COORDINATOR_OPERATOR_TOKEN_FILE"
    }
    socket = f"unix:{tmp_path / 'c.sock'}"
    command = [*COMMAND, "coordinator", f"--listen={socket}", f"--database={tmp_path / 'a.db'}"]
    with subprocess.Popen(command, env={**own, **home}, stderr=subprocess.DEVNULL) as process:
        try:
            deadline_s = time.monotonic() + 60
            while (done := perseus("jobs list", **home, PERSEUS_COORDINATOR=socket)).exit_code != 0:
                assert time.monotonic() < deadline_s, done.stderr
                time.sleep(0.2)
        finally:
            process.terminate()
