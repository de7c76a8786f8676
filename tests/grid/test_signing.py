"""Signatures: a key is valid for its sender only."""

import hmac
import json
import warnings
from base64 import urlsafe_b64encode
from pathlib import Path

import pytest
from joserfc import jws
from joserfc.errors import SecurityWarning
from joserfc.jwk import ECKey, RSAKey

from perseus.grid.signing import KeyFileError, SenderKeys, SignatureRefusedError, Signer
from tests.grid.isv import Sender, agent_key


@pytest.mark.parametrize("rsa", [False, True])
def test_signed_content_is_returned(tmp_path: Path, rsa: bool) -> None:
    sender = Sender(tmp_path, rsa=rsa)
    assert SenderKeys(tmp_path).verified("isv", "acme-energy", sender.signed({"a": 1})) == b'{"a": 1}'


def test_another_senders_key_is_refused(tmp_path: Path) -> None:
    Sender(tmp_path)
    other = Sender(tmp_path, "volt")
    other.kid = "acme-energy-1"
    keys = SenderKeys(tmp_path)
    with pytest.raises(SignatureRefusedError, match="expected a signature by 'acme-energy-1'"):
        keys.verified("isv", "acme-energy", other.signed({}))
    for role, identifier in (("infra", "acme-energy"), ("isv", "../isv/volt")):
        with pytest.raises(SignatureRefusedError, match="expected a sender with keys"):
            keys.verified(role, identifier, other.signed({}))


def test_a_message_does_not_choose_its_algorithm(tmp_path: Path) -> None:
    """It can choose neither none, nor a MAC with the public key as its secret."""
    sender = Sender(tmp_path, rsa=True)
    assert isinstance(sender.key, RSAKey)
    secret = sender.key.as_pem(private=False)
    for algorithm in ("HS256", "none"):
        signed = (
            urlsafe_b64encode(json.dumps({"alg": algorithm, "kid": sender.kid}).encode()).rstrip(b"=")
            + b".e30"
        )
        signature = urlsafe_b64encode(hmac.digest(secret, signed, "sha256")).rstrip(b"=")
        with pytest.raises(SignatureRefusedError, match=algorithm):
            SenderKeys(tmp_path).verified("isv", "acme-energy", f"{signed.decode()}.{signature.decode()}")


def test_unknown_keys_and_invalid_jws_are_refused(tmp_path: Path) -> None:
    sender = Sender(tmp_path)
    keys = SenderKeys(tmp_path)
    sender.kid = "acme-energy-2"
    with pytest.raises(SignatureRefusedError, match=r"expected a kid in .*, found 'acme-energy-2'"):
        keys.verified("isv", "acme-energy", sender.signed({}))
    with pytest.raises(SignatureRefusedError, match="expected a JWS, found"):
        keys.verified("isv", "acme-energy", "a.b.c")


def test_a_renewed_key_counts_at_once(tmp_path: Path) -> None:
    keys = SenderKeys(tmp_path)
    Sender(tmp_path)
    renewed = Sender(tmp_path)
    assert keys.verified("isv", "acme-energy", renewed.signed({})) == b"{}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "expected JSON"),
        ("[]", "expected a JSON object"),
        ("{}", "expected a JWK set"),
        (json.dumps({"keys": [{"kty": "oct", "k": "AA"}]}), "expected a JWK set"),
        (
            json.dumps({"keys": [ECKey.generate_key("P-384", {"kid": "k"}).as_dict()]}),
            "expected EC keys on P-256",
        ),
    ],
    ids=["nothing", "list", "no keys", "symmetric", "other curve"],
)
def test_the_error_names_an_invalid_key_file(tmp_path: Path, content: str, message: str) -> None:
    sender = Sender(tmp_path)
    sender.kid = "k"
    path = tmp_path / "isv" / "acme-energy.json"
    path.write_text(content)
    with pytest.raises(KeyFileError, match=message) as caught:
        SenderKeys(tmp_path).verified("isv", "acme-energy", sender.signed({}))
    assert str(caught.value).startswith(str(path))


def test_the_error_names_the_file_of_a_short_key(tmp_path: Path) -> None:
    sender = Sender(tmp_path)
    with pytest.warns(SecurityWarning):
        short = RSAKey.generate_key(1024, {"kid": sender.kid})
    (tmp_path / "isv" / "acme-energy.json").write_text(json.dumps({"keys": [short.as_dict(private=False)]}))
    with (
        warnings.catch_warnings(action="ignore", category=SecurityWarning),
        pytest.raises(KeyFileError, match="expected RSA keys of 2048 bits or more, found 1024"),
    ):
        SenderKeys(tmp_path).verified("isv", "acme-energy", sender.signed({}))


def test_a_gateway_signs_with_a_key_that_only_its_user_can_read(tmp_path: Path) -> None:
    path, public = agent_key(tmp_path)
    assert jws.deserialize_compact(Signer(path).sign(b"{}"), public).payload == b"{}"
    path.chmod(0o644)
    with pytest.raises(KeyFileError, match="only its user can read"):
        Signer(path)


def test_a_public_key_signs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_text(json.dumps(ECKey.generate_key("P-256", {"kid": "k"}).as_dict(private=False)))
    with pytest.raises(KeyFileError, match="expected a private JWK with a kid"):
        Signer(path)
