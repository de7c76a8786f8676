"""`perseus tokens`, and the search for tokens by commands and agents, with a real coordinator process."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from perseus.demo.processes import Coordinator
from tests.cli.commands import perseus
from tests.cli.prepared import PreparedCoordinator
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
    for given, origin in (
        ({"PERSEUS_TOKEN_FILE": str(path)}, path),
        ({"PERSEUS_TOKEN": "perseus_unknown"}, "PERSEUS_TOKEN"),
    ):
        refused = perseus("jobs list", **{**environment, **given})
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


@pytest.mark.skipif(os.geteuid() == 0, reason="root's file is not under XDG_STATE_HOME")
def test_the_commands_of_the_coordinators_user_find_the_token(tmp_path: Path) -> None:
    home = {"XDG_STATE_HOME": str(tmp_path)}
    with Coordinator(tmp_path, tmp_path / "a.db", environment=home, address=f"unix:{tmp_path}/c.sock") as own:
        done = perseus("jobs list", **home, PERSEUS_COORDINATOR=own.start())
    assert done.exit_code == 0, done.stderr
