"""`perseus grid`: errors are one line, and new keys let others verify signatures."""

import json
import stat
from pathlib import Path

from joserfc import jws
from joserfc.jwk import ECKey

from perseus.grid.journal import Journal
from perseus.grid.signing import Signer
from tests.cli.commands import perseus


def test_a_second_gateway_with_the_same_state_is_refused(tmp_path: Path) -> None:
    key, state = tmp_path / "gateway.jwk", tmp_path / "state.db"
    assert perseus("grid new-key --kid gateway-1", key).exit_code == 0
    journal = Journal(state)
    flags = f"--log-format json --identifier a --keys {tmp_path} --signing-key {key} --state {state}"
    done = perseus(f"grid dsx-flex {flags}")
    journal.close()
    assert done.exit_code == 1
    record = json.loads(done.stderr.splitlines()[-1])
    assert (record["event"], record["level"]) == ("ends with an error", "critical")
    assert "state.db: expected a file of this gateway alone" in record["cause"]


def test_a_new_key_is_private_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "gateway.jwk"
    made = perseus("grid new-key --kid gateway-1", path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (public,) = json.loads(made.stdout)["keys"]
    assert (public["kid"], "d" in public) == ("gateway-1", False)
    signed = Signer(path).sign(b"{}")
    assert jws.deserialize_compact(signed, ECKey.import_key(public)).headers()["kid"] == "gateway-1"
    again = perseus("grid new-key --kid gateway-1", path)
    assert again.exit_code == 2
    assert "File exists" in again.stderr
