"""`perseus grid`: new keys let others verify signatures."""

import json
import stat
from pathlib import Path

from joserfc import jws
from joserfc.jwk import ECKey

from perseus.grid.signing import Signer
from tests.cli.commands import perseus


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
