"""`perseus grid`: errors are one line, and new keys let others verify signatures."""

import json
import stat
from pathlib import Path

import pytest
from joserfc import jws
from joserfc.jwk import ECKey
from typer.testing import CliRunner, Result

from perseus.cli.main import app
from perseus.grid.journal import Journal
from perseus.grid.signing import Signer


def perseus(*arguments: object, **environment: str) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments], env=environment, catch_exceptions=False)


@pytest.fixture
def given(tmp_path: Path) -> list[object]:
    """The required settings of a gateway."""
    key = tmp_path / "gateway.jwk"
    assert perseus("grid", "new-key", key, "--kid", "gateway-1").exit_code == 0
    return [
        "--identifier=a",
        f"--keys={tmp_path}",
        f"--signing-key={key}",
        f"--state={tmp_path / 'state.db'}",
    ]


def test_a_second_gateway_with_the_same_state_is_refused(given: list[object], tmp_path: Path) -> None:
    journal = Journal(tmp_path / "state.db")
    done = perseus("grid", "dsx-flex", *given, "--log-format=json")
    journal.close()
    assert done.exit_code == 1
    record = json.loads(done.stderr.splitlines()[-1])
    assert (record["event"], record["level"]) == ("ends with an error", "critical")
    assert "state.db: expected a file of this gateway alone" in record["cause"]


def test_a_new_key_is_private_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "gateway.jwk"
    made = perseus("grid", "new-key", path, "--kid", "gateway-1")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (public,) = json.loads(made.stdout)["keys"]
    assert (public["kid"], "d" in public) == ("gateway-1", False)
    signed = Signer(path).sign(b"{}")
    assert jws.deserialize_compact(signed, ECKey.import_key(public)).headers()["kid"] == "gateway-1"
    again = perseus("grid", "new-key", path, "--kid", "gateway-1")
    assert again.exit_code == 2
    assert "File exists" in again.stderr
