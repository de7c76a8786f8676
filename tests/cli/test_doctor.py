"""`perseus doctor` against a real coordinator process, and on a node without an agent."""

import csv
import json
from pathlib import Path

import pytest
from typer.testing import Result

from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.physics import A100_SXM
from tests.cli.commands import perseus


@pytest.fixture
def agent(tmp_path: Path) -> dict[str, str]:
    """An agent's settings, as its environment."""
    (tmp_path / "gpus").mkdir()
    EmulatedGpu.create(tmp_path / "gpus" / "0", A100_SXM, "GPU-0").close()
    return {
        "PERSEUS_AGENT_COORDINATOR": "127.0.0.1:1",
        "PERSEUS_AGENT_SOCKET": str(tmp_path / "agent.sock"),
        "PERSEUS_AGENT_GPU_BACKEND": "emulated",
        "PERSEUS_AGENT_EMULATED_GPUS": str(tmp_path / "gpus"),
        "PERSEUS_AGENT_RESTORE_FOLDER": str(tmp_path / "restore"),
    }


def found(done: Result) -> dict[str, dict[str, str]]:
    """Return the rows of a report in JSON by the first word of their subject."""
    return {row["subject"].split(" ")[0]: row for row in json.loads(done.stdout)}


def test_a_good_set_up_is_reported_as_good(environment: dict[str, str]) -> None:
    reported = perseus("doctor --format json", **environment)
    assert reported.exit_code == 0, reported.output
    rows = found(reported)
    subjects = ("certificate", "coordinator", "credential", "versions", "clocks")
    assert {subject: row["verdict"] for subject, row in rows.items()} == dict.fromkeys(subjects, "good")
    assert rows["coordinator"]["found"] == "it answers, over TLS"
    assert rows["credential"]["found"].endswith("scope operator")
    assert "✘" not in perseus("doctor", **environment).stdout


def test_problems_end_in_1_with_advice(agent: dict[str, str]) -> None:
    reported = perseus("doctor --node --format csv", **agent)
    assert reported.exit_code == 1
    rows = {row["subject"].partition(" /")[0]: row for row in csv.DictReader(reported.stdout.splitlines())}
    assert rows["GPUs"]["verdict"] == "good"
    assert rows["socket"]["verdict"] == rows["coordinator 127.0.0.1:1"]["verdict"] == "bad"
    assert "systemctl start perseus-agent" in rows["socket"]["advice"]
    assert "✘" in perseus("doctor --node", **agent).stdout


def test_an_empty_token_file_is_a_finding(agent: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "token").write_text("")
    done = perseus("doctor --node --format json", **agent, PERSEUS_AGENT_TOKEN_FILE=str(tmp_path / "token"))
    row = found(done)["credential"]
    assert row["verdict"] == "bad"
    assert "expected a token, found none" in row["found"]


def test_a_missing_token_file_is_a_row_beside_the_checks_without_a_token(
    environment: dict[str, str], tmp_path: Path
) -> None:
    without = {**environment, "PERSEUS_TOKEN_FILE": str(tmp_path / "missing.token")}
    reported = perseus("doctor --format json", **without)
    assert reported.exit_code == 1
    rows = found(reported)
    verdicts = {"certificate": "good", "coordinator": "good", "credential": "bad"}
    assert {subject: row["verdict"] for subject, row in rows.items()} == verdicts
    missing = f"{tmp_path}/missing.token: can't be read: No such file or directory"
    assert rows["credential"]["found"] == missing
    assert "perseus tokens create" in rows["credential"]["advice"]
    table = perseus("doctor", **without)
    assert (table.stderr, "✘  credential" in table.stdout) == ("", True)


def test_an_unusable_certificate_is_a_row_of_the_table(tmp_path: Path) -> None:
    reported = perseus("doctor --format json", PERSEUS_TLS_CA=str(tmp_path / "missing.pem"))
    assert reported.exit_code == 1
    row = found(reported)["certificate"]
    assert row["verdict"] == "bad"
    assert "missing.pem" in row["found"]
    assert "docs/security.md" in row["advice"]
