"""JWS: verifies senders' messages and signs our own. The cryptography is joserfc's.

Senders' public keys are in a folder with a JWK set for each: `isv/acme-energy.json` for messages from
`//grid/v1/isv/acme-energy`. A key is valid for its sender only. Files are read for each message, so a renewed
key needs no restart.
"""

import json
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from joserfc import jws
from joserfc.errors import JoseError
from joserfc.jwk import ECKey, RSAKey

from perseus.regular_file import MAX_SMALL_FILE_BYTES, read_bounded

_MAX_BYTES = 256 * 1024
_MIN_RSA_BITS = 2048
_IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def _registry(algorithm: str) -> jws.JWSRegistry:
    registry = jws.JWSRegistry(algorithms=[algorithm])
    registry.max_payload_length = _MAX_BYTES
    return registry


_REGISTRIES = {algorithm: _registry(algorithm) for algorithm in ("ES256", "RS256")}


class KeyFileError(Exception):
    """A file with keys can't be used; the text names it, and what was expected and found."""


class SignatureRefusedError(Exception):
    """A signature is not its sender's; the text says why."""


class SenderKeys:
    """The public keys of all accepted senders."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def verified(self, role: str, identifier: str, signed: str) -> bytes:
        """Verify a sender's JWS and return its content.

        Raises:
            SignatureRefusedError: the sender is unknown or did not sign it.
            KeyFileError: the sender's key file can't be used.
        """
        if not _IDENTIFIER.fullmatch(identifier):
            raise SignatureRefusedError(f"expected a sender with keys, found {role} {identifier!r}")
        path = self._folder / role / f"{identifier}.json"
        if not path.is_file():
            raise SignatureRefusedError(f"expected a sender with keys in {path}, found none")
        keys = _public_keys(path)
        try:
            kid = jws.extract_compact(signed.encode("ascii")).headers().get("kid")
        except (JoseError, ValueError) as error:
            raise SignatureRefusedError(f"expected a JWS, found: {error}") from None
        key = keys.get(kid) if isinstance(kid, str) else None
        if key is None:
            raise SignatureRefusedError(f"expected a kid in {path}, found {kid!r}")
        try:
            found = jws.deserialize_compact(signed, key, registry=_REGISTRIES[_algorithm(key, path)])
        except (JoseError, ValueError) as error:
            raise SignatureRefusedError(f"expected a signature by {kid!r}, found: {error}") from None
        return found.payload


class Signer:
    """Signs the gateway's messages with the private key in a file: a JWK with a `kid`.

    Raises:
        KeyFileError: the file can't be used.
    """

    def __init__(self, path: Path) -> None:
        content = _content(path)
        try:
            if stat.S_IMODE(path.stat().st_mode) & 0o077:
                raise KeyFileError(
                    f"{path}: expected a file that only its user can read, found wider permissions"
                )
            key = _key(content)
        except (JoseError, ValueError, TypeError, OSError) as error:
            raise KeyFileError(f"{path}: expected a private JWK, found: {error}") from None
        if not key.is_private or not isinstance(content.get("kid"), str):
            raise KeyFileError(f"{path}: expected a private JWK with a kid, found none")
        self._key = key
        self._algorithm = _algorithm(key, path)
        self._header = {"alg": self._algorithm, "kid": content["kid"]}

    def sign(self, content: bytes) -> str:
        """Return a JWS in compact form."""
        return jws.serialize_compact(self._header, content, self._key, registry=_REGISTRIES[self._algorithm])


def new_key(kid: str) -> tuple[str, str]:
    """Make a key for ES256; return the private JWK, and the JWK set with the public key."""
    key = ECKey.generate_key("P-256", {"kid": kid, "use": "sig", "alg": "ES256"}, private=True)
    private = json.dumps(key.as_dict(private=True), indent=2)
    return private, json.dumps({"keys": [key.as_dict(private=False)]}, indent=2)


def write_private(path: Path, text: str) -> None:
    """Write a file that only its user can read.

    Raises:
        OSError: it can't be written, or exists.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(f"{text}\n")


def _public_keys(path: Path) -> Mapping[str, ECKey | RSAKey]:
    content = _content(path)
    try:
        keys = [_key(each) for each in content["keys"]]
    except (JoseError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise KeyFileError(f"{path}: expected a JWK set, found: {error!r}") from None
    return {key.kid: key for key in keys if key.kid is not None}


def _content(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_bounded(path, MAX_SMALL_FILE_BYTES))
    except OSError as error:
        raise KeyFileError(f"{path}: can't be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise KeyFileError(f"{path}: expected JSON, found: {error}") from None
    if not isinstance(content, dict):
        raise KeyFileError(f"{path}: expected a JSON object, found another value")
    return content


def _key(content: dict[str, Any]) -> ECKey | RSAKey:
    match content.get("kty"):
        case "EC":
            return ECKey.import_key(content)
        case "RSA":
            return RSAKey.import_key(content)
        case other:
            raise ValueError(f"key of type {other!r}, expected EC or RSA")


def _algorithm(key: ECKey | RSAKey, path: Path) -> str:
    """Return the only algorithm of a key, so that messages can't choose one."""
    if isinstance(key, RSAKey):
        if (bits := key.raw_value.key_size) < _MIN_RSA_BITS:
            raise KeyFileError(f"{path}: expected RSA keys of {_MIN_RSA_BITS} bits or more, found {bits}")
        return "RS256"
    if key.curve_name != "P-256":
        raise KeyFileError(f"{path}: expected EC keys on P-256, found {key.curve_name}")
    return "ES256"
