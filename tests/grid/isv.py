"""An energy provider in tests: its key, and the messages that it sends."""

import json
import uuid
from pathlib import Path
from typing import Any

from joserfc import jws
from joserfc.jwk import ECKey, Key, KeyParameters, RSAKey

from perseus.grid.contract.messages import moment
from perseus.grid.signing import new_key, write_private

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def target_of(limit_w: float | None, **fields: Any) -> dict[str, Any]:
    limit = None if limit_w is None else {"value": limit_w, "unit": "watt"}
    return {"interval": {}, "load_constraint": limit, **fields}


class Sender:
    """A sender with its own key, whose public part is in a gateway's folder."""

    def __init__(
        self, keys: Path, identifier: str = "acme-energy", *, role: str = "isv", rsa: bool = False
    ) -> None:
        self.identifier, self.role, self.kid = identifier, role, f"{identifier}-1"
        self.algorithm = "RS256" if rsa else "ES256"
        parameters: KeyParameters = {"kid": self.kid}
        self.key: Key = (
            RSAKey.generate_key(2048, parameters) if rsa else ECKey.generate_key("P-256", parameters)
        )
        (keys / role).mkdir(parents=True, exist_ok=True)
        public = {"keys": [self.key.as_dict(private=False)]}
        (keys / role / f"{identifier}.json").write_text(json.dumps(public))

    @property
    def topic(self) -> str:
        return f"grid/v1/isv/{self.identifier}/loadtarget/set"

    def signed(self, data: object) -> str:
        content = data if isinstance(data, bytes) else json.dumps(data).encode()
        return jws.serialize_compact({"alg": self.algorithm, "kid": self.kid}, content, self.key)

    def envelope(self, time_s: float, content: object, /, **changed: Any) -> dict[str, Any]:
        """Return an envelope around signed content; fields changed to None are omitted."""
        envelope = {
            "specversion": "1.0.2",
            "id": str(uuid.uuid4()),
            "source": f"//grid/v1/{self.role}/{self.identifier}",
            "type": "grid.loadtarget.set.v1",
            "time": moment(time_s),
            "datacontenttype": "application/json",
            "subject": "loadtarget",
            "traceparent": TRACEPARENT,
            "correlationid": str(uuid.uuid4()),
            "data": self.signed(content),
        } | changed
        return {name: value for name, value in envelope.items() if value is not None}


def agent_key(folder: Path) -> tuple[Path, ECKey]:
    """Return a file with a gateway's private key, and the public key."""
    path = folder / "gateway.jwk"
    private, public = new_key("gateway-1")
    write_private(path, private)
    return path, ECKey.import_key(json.loads(public)["keys"][0])


def opened(payload: bytes, key: Key) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the envelope of a gateway's event, and its verified content."""
    envelope = json.loads(payload)
    return envelope, json.loads(jws.deserialize_compact(envelope["data"], key).payload)
