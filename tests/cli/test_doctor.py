"""`perseus doctor` against a real coordinator process, and on a node without an agent."""

import csv
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from perseus.cli.main import app
from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.physics import A100_SXM


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


def doctor(environment: dict[str, str], *arguments: str) -> Result:
    return CliRunner().invoke(
        app, ["doctor", *arguments], env={"COLUMNS": "200", **environment}, catch_exceptions=False
    )


def test_a_good_set_up_is_reported_as_good(environment: dict[str, str]) -> None:
    reported = doctor(environment)
    assert reported.exit_code == 0, reported.output
    assert "it answers, over TLS" in reported.stdout
    assert "✘" not in reported.stdout
    rows = json.loads(doctor(environment, "--format", "json").stdout)
    assert {row["verdict"] for row in rows} == {"good"}
    assert "clocks" in [row["subject"] for row in rows]


def test_problems_end_in_1_with_advice(agent: dict[str, str]) -> None:
    reported = doctor(agent, "--node", "--format", "csv")
    assert reported.exit_code == 1
    found = {row["subject"].partition(" /")[0]: row for row in csv.DictReader(reported.stdout.splitlines())}
    assert found["GPUs"]["verdict"] == "good"
    assert found["socket"]["verdict"] == found["coordinator 127.0.0.1:1"]["verdict"] == "bad"
    assert "systemctl start perseus-agent" in found["socket"]["advice"]
    assert "✘" in doctor(agent, "--node").stdout


def test_an_empty_token_file_is_a_finding(agent: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "token").write_text("")
    rows = json.loads(
        doctor(
            {**agent, "PERSEUS_AGENT_TOKEN_FILE": str(tmp_path / "token")}, "--node", "--format", "json"
        ).stdout
    )
    assert rows[-1]["subject"] == "credential"
    assert rows[-1]["verdict"] == "bad"
    assert "expected a token, found none" in rows[-1]["found"]


def test_a_missing_token_file_is_a_row_beside_the_checks_without_a_token(
    environment: dict[str, str], tmp_path: Path
) -> None:
    missing = tmp_path / "missing.token"
    without = {**environment, "PERSEUS_TOKEN_FILE": str(missing)}
    reported = doctor(without, "--format", "json")
    assert reported.exit_code == 1
    rows = {row["subject"].partition(" ")[0]: row for row in json.loads(reported.stdout)}
    assert {subject: row["verdict"] for subject, row in rows.items()} == {
        "certificate": "good",
        "coordinator": "good",
        "credential": "bad",
    }
    assert rows["credential"]["found"] == f"{missing}: can't be read: No such file or directory"
    assert "perseus tokens create" in rows["credential"]["advice"]
    table = doctor(without)
    assert table.exit_code == 1
    assert "✘  credential" in table.stdout
    assert "missing.token" in table.stdout
    assert table.stderr == ""


def test_an_unusable_certificate_is_a_row_of_the_table(tmp_path: Path) -> None:
    reported = doctor({"PERSEUS_TLS_CA": str(tmp_path / "missing.pem")}, "--format", "json")
    assert reported.exit_code == 1
    (row,) = json.loads(reported.stdout)
    assert (row["subject"], row["verdict"]) == ("certificate", "bad")
    assert "missing.pem" in row["found"]
    assert "docs/security.md" in row["advice"]
