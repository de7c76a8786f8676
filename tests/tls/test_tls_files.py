"""Certificate and token files: refusals before use, and renewal."""

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from perseus.tls.files import Role, TlsError, TlsFiles, TlsSource, check
from perseus.tls.tokens import TokenFileError, read_token
from tests.tls.pairs import authority, issue

DAY_S = 86400.0


def broken(files: TlsFiles, text: bytes, which: str) -> TlsFiles:
    path: Path = getattr(files, which)
    path.write_bytes(text)
    return files


def damaged(path: Path) -> bytes:
    """Remove the middle of a PEM file."""
    lines = path.read_bytes().splitlines(keepends=True)
    return b"".join(lines[:2] + lines[-1:])


def mismatch(folder: Path) -> TlsFiles:
    ca = authority(folder)
    return TlsFiles(issue(ca, "one").certificate, issue(ca, "two").key)


def encrypted(folder: Path) -> TlsFiles:
    files = issue(authority(folder))
    assert files.key is not None
    subprocess.run(
        ["openssl", "ec", "-in", files.key, "-out", files.key, "-aes256", "-passout", "pass:x"],
        check=True,
        capture_output=True,
    )
    return files


UNDOCUMENTED = {"absent", "no CA", "key in the certificate's place", "damaged key"}
"""The same errors as others."""

# Each mistake, and its error.
MISTAKES: dict[str, tuple[Callable[[Path], TlsFiles], str]] = {
    "key of another": (mismatch, r"two\.key: expected the key of .*one\.pem, found another's"),
    "expired": (
        lambda folder: issue(authority(folder), ends_days=-0.5),
        r"own\.pem: expected a valid certificate, found one that expired on \d{4}-",
    ),
    "not yet valid": (
        lambda folder: issue(authority(folder), begins_days=2),
        r"own\.pem: expected a valid certificate, found one that begins on \d{4}-",
    ),
    "no certificate": (
        lambda folder: broken(issue(authority(folder)), b"hello", "certificate"),
        r"own\.pem: expected a certificate in PEM, found none",
    ),
    "damaged certificate": (
        lambda folder: (
            (files := issue(authority(folder)))
            and broken(files, damaged(folder / "Test CA" / "own.pem"), "certificate")
        ),
        r"own\.pem: expected a certificate in PEM, found a damaged one",
    ),
    "key in the certificate's place": (
        lambda folder: (files := issue(authority(folder))) and TlsFiles(files.key, files.key),
        r"own\.key: expected a certificate in PEM, found none",
    ),
    "no key": (
        lambda folder: (files := issue(authority(folder))) and TlsFiles(files.certificate, files.certificate),
        r"own\.pem: expected a private key in PEM, found none",
    ),
    "damaged key": (
        lambda folder: (
            (files := issue(authority(folder)))
            and broken(files, damaged(folder / "Test CA" / "own.key"), "key")
        ),
        r"own\.key: expected a certificate and its key, found: ",
    ),
    "encrypted key": (encrypted, r"own\.key: expected a private key without a passphrase"),
    "for clients only": (
        lambda folder: issue(authority(folder), is_server=False),
        r"own\.pem: expected a certificate that may be a server's, found one whose extended key usage",
    ),
    "absent": (
        lambda folder: TlsFiles(folder / "none.pem", folder / "none.key"),
        r"none\.pem: can't be read: No such file",
    ),
    "no CA": (
        lambda folder: broken(issue(authority(folder)), b"", "ca"),
        r"ca\.pem: expected a certificate in PEM, found none",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_with_its_file(name: str, tmp_path: Path) -> None:
    make, expected = MISTAKES[name]
    with pytest.raises(TlsError, match=expected):
        check(make(tmp_path), Role.SERVER, time.time())


def test_a_servers_certificate_is_not_for_clients(tmp_path: Path) -> None:
    with pytest.raises(TlsError, match=r"may be a client's"):
        check(issue(authority(tmp_path)), Role.CLIENT, time.time())


def test_valid_files_have_expiry_times(tmp_path: Path) -> None:
    files = issue(authority(tmp_path), is_server=False, ends_days=30)
    material = check(files, Role.CLIENT, time.time())
    assert material.certificate == files.certificate.read_bytes()  # type: ignore[union-attr]
    days = sorted((expiry_s - time.time()) / DAY_S for expiry_s in material.expiries_s.values())
    assert days == pytest.approx([30, 100], abs=0.1)


def test_clients_need_only_a_ca_or_the_servers_own_certificate(tmp_path: Path) -> None:
    files = issue(authority(tmp_path))
    assert check(TlsFiles(ca=files.ca), Role.CLIENT, time.time()).certificate is None
    assert check(TlsFiles(ca=files.certificate), Role.CLIENT, time.time()).expiries_s == {}


def test_renewed_files_are_loaded_once_complete(tmp_path: Path) -> None:
    ca = authority(tmp_path)
    files = issue(ca)
    source = TlsSource(files, Role.SERVER)
    before = source.material
    assert not source.poll()
    assert files.certificate is not None and files.key is not None  # noqa: PT018

    other = issue(ca, "other")
    assert other.certificate is not None and other.key is not None  # noqa: PT018
    with capture_logs() as logs:
        files.key.write_bytes(other.key.read_bytes())
        assert not source.poll()
        assert not source.poll()
        files.certificate.write_bytes(other.certificate.read_bytes()[:100])
        assert not source.poll()
        files.certificate.unlink()
        assert not source.poll()
        assert not source.poll()
    assert source.material is before
    assert [line["event"] for line in logs] == 3 * [
        "certificates not reloaded: the previous ones stay in use"
    ], "one line for each new state of the files"
    assert "expected the key of" in logs[0]["reason"]
    assert "can't be read" in logs[2]["reason"]

    with capture_logs() as logs:
        files.certificate.write_bytes(other.certificate.read_bytes())
        assert source.poll()
        assert not source.poll()
    assert source.generation == 2
    assert source.material.certificate == other.certificate.read_bytes()
    assert [line["event"] for line in logs] == ["certificates reloaded"]


def test_expiry_is_logged_daily_from_a_week_before(tmp_path: Path) -> None:
    begun_s = now_s = time.time()
    source = TlsSource(issue(authority(tmp_path), ends_days=8.1), Role.SERVER, lambda: now_s)
    message = []
    for half_day in range(20):
        now_s = begun_s + half_day / 2 * DAY_S
        with capture_logs() as logs:
            source.poll()
        message += [(half_day / 2, line["event"]) for line in logs]
    soon, over = "certificate expires soon", "certificate has expired"
    assert message == [
        *((day + 1.5, soon) for day in range(7)),
        (8.5, over),
        (9.5, over),
    ]


@pytest.mark.parametrize(("mode", "warnings"), [(0o600, 0), (0o640, 0), (0o644, 1)])
def test_a_token_readable_by_all_is_used_with_a_warning(tmp_path: Path, mode: int, warnings: int) -> None:
    path = tmp_path / "token"
    path.write_text("secret\n")
    path.chmod(mode)
    with capture_logs() as logs:
        assert read_token(path) == "secret"
    assert [line["event"] for line in logs] == warnings * ["every user of this machine can read a token"]


def test_a_fifo_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "token")
    with pytest.raises(TokenFileError, match="token: can't be read: expected a regular file, found prw"):
        read_token(tmp_path / "token")
