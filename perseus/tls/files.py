"""Certificates, keys and CAs in PEM files: checked before use, reloaded when renewed.

OpenSSL, which will use the files, also checks them, through Python's `ssl`. A certificate and its key perform
a handshake with themselves in memory, which trusts only that certificate and leaves its dates to this module;
so no separate parser is needed.

Other programs renew the files (cert-manager, a cron job, `perseus certificates`), and may write two files one
after the other. So a change counts once all files agree; until then the previous contents stay in use.
"""

import contextlib
import enum
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import structlog

from perseus.regular_file import MAX_SMALL_FILE_BYTES, read_bounded

_log = structlog.get_logger(__name__)

EXPIRY_WARNING_S = 7 * 86400.0
_WARN_AGAIN_S = 86400.0
_READ_ATTEMPTS = 3

# OpenSSL's X509_V_FLAG_NO_CHECK_TIME, which Python has no name for: dates are compared here.
NO_CHECK_TIME = 0x200000
_UNSUPPORTED_PURPOSE = 26  # X509_V_ERR_INVALID_PURPOSE


class TlsError(Exception):
    """A file can't be used; the text names it, what was expected, and what was found."""


class Role(enum.Enum):
    """The side for which a certificate is used."""

    SERVER = "server"
    CLIENT = "client"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: the own certificate (with the chain to its CA) and its key, and the CAs to trust."""

    certificate: Path | None = None
    key: Path | None = None
    ca: Path | None = None

    def read(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """Return the contents of the three files. Raises `TlsError`, naming an unreadable file."""
        return _read(self.certificate), _read(self.key), _read(self.ca)


@dataclass(frozen=True, slots=True)
class Material:
    """The checked contents of the files. `expiries_s` is the Unix time, by file, when it expires."""

    certificate: bytes | None
    key: bytes | None
    ca: bytes | None
    expiries_s: dict[str, float]


class TlsSource:
    """The newest valid material, for any thread; `now_s` returns the Unix time.

    Raises:
        TlsError: the initial material is not valid.
    """

    def __init__(self, files: TlsFiles, role: Role, now_s: Callable[[], float] = time.time) -> None:
        self.files = files
        self._role = role
        self._now_s = now_s
        self._lock = threading.Lock()
        self._refused: tuple[bytes | None, ...] | str | None = None
        self._warned_at_s = -_WARN_AGAIN_S
        self.material = check(files, role, now_s())
        self.generation = 1
        """Rises with every new material."""
        self._warn_of_expiry()

    def poll(self) -> bool:
        """Check the files; return whether there is new material."""
        with self._lock:
            self._warn_of_expiry()
            try:
                contents = self.files.read()
            except TlsError as error:
                self._keep(str(error), error)
                return False
            material = self.material
            if contents == (material.certificate, material.key, material.ca):
                self._refused = None
                return False
            if contents == self._refused:
                return False
            try:
                self.material = check(self.files, self._role, self._now_s())
            except TlsError as error:
                self._keep(contents, error)
                return False
            self.generation += 1
            self._refused = None
            self._warned_at_s = -_WARN_AGAIN_S
            _log.info("certificates reloaded", **_moments(self.material))
            self._warn_of_expiry()
            return True

    def _keep(self, found: tuple[bytes | None, ...] | str, error: TlsError) -> None:
        """Log an error once for the same contents."""
        if found != self._refused:
            self._refused = found
            _log.error("certificates not reloaded: the previous ones stay in use", reason=str(error))

    def _warn_of_expiry(self) -> None:
        now_s = self._now_s()
        if now_s - self._warned_at_s < _WARN_AGAIN_S:
            return
        for file, expiry_s in self.material.expiries_s.items():
            if expiry_s - now_s < EXPIRY_WARNING_S:
                self._warned_at_s = now_s
                event = "certificate expires soon" if expiry_s > now_s else "certificate has expired"
                _log.warning(event, file=file, expires=moment(expiry_s))


def check(files: TlsFiles, role: Role, now_s: float) -> Material:
    """Return the contents of files that fit together.

    Raises:
        TlsError: a file can't be read, has the wrong content, is out of date, or does not fit another.
    """
    for _ in range(_READ_ATTEMPTS):
        contents = files.read()
        certificate, key, ca = contents
        expiries_s = {}
        if files.certificate is not None and files.key is not None:
            expiries_s[str(files.certificate)] = _check_pair(
                files.certificate, files.key, contents, role, now_s
            )
        if files.ca is not None and ca is not None and (expiry_s := _check_ca(files.ca, ca, now_s)):
            expiries_s[str(files.ca)] = expiry_s
        if files.read() == contents:
            return Material(certificate, key, ca, expiries_s)
    raise TlsError(f"{files.certificate or files.ca}: expected unchanging files, found them being written")


def moment(unix_s: float) -> str:
    """Format a Unix time for people."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M UTC")


def trust_only(context: ssl.SSLContext, certificate: str | bytes) -> None:
    """Let a context trust only this certificate (PEM text or DER), regardless of its issuer and dates."""
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | NO_CHECK_TIME
    context.load_verify_locations(cadata=certificate)


def own_facts(files: TlsFiles) -> dict[str, Any]:
    """Return the contents of a client's own certificate; empty if there is none or it can't be read."""
    if files.certificate is None or files.key is None:
        return {}
    with contextlib.suppress(OSError, TlsError):
        return _facts(files.certificate, files.key, _read(files.certificate) or b"", Role.CLIENT)
    return {}


def _facts(certificate: Path, key: Path, pem: bytes, role: Role) -> dict[str, Any]:
    """Return a certificate's contents as `ssl.SSLSocket.getpeercert` does, by a handshake in memory.

    Raises:
        ssl.SSLError: certificate and key do not match, or the certificate is not for the role.
    """
    own = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if role is Role.SERVER else ssl.PROTOCOL_TLS_CLIENT)
    peer = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if role is Role.SERVER else ssl.PROTOCOL_TLS_SERVER)
    for context in (own, peer):
        context.check_hostname = False
        context.load_cert_chain(certificate, key, password=_no_password)
    own.verify_mode = ssl.CERT_NONE
    trust_only(peer, pem.decode("ascii", "replace"))
    ends = []
    for context, is_server in ((own, role is Role.SERVER), (peer, role is Role.CLIENT)):
        received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends.append((context.wrap_bio(received, sent, server_side=is_server), received, sent))
    (mine, my_in, my_out), (theirs, their_in, their_out) = ends
    for _ in range(4):
        for end, sent, other_received in ((mine, my_out, their_in), (theirs, their_out, my_in)):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
            other_received.write(sent.read())
    return dict(theirs.getpeercert() or {})


def _check_pair(
    certificate: Path, key: Path, contents: tuple[bytes | None, ...], role: Role, now_s: float
) -> float:
    """Check a certificate and its key; return the Unix time when the certificate expires."""
    pem, key_pem = (content or b"" for content in contents[:2])
    _check_certificates(certificate, pem)
    if b"PRIVATE KEY-----" not in key_pem:
        raise TlsError(f"{key}: expected a private key in PEM, found none")
    if b"ENCRYPTED" in key_pem:
        raise TlsError(f"{key}: expected a private key without a passphrase, found an encrypted one")
    try:
        found = _facts(certificate, key, pem, role)
    except ssl.SSLCertVerificationError as error:
        if error.verify_code == _UNSUPPORTED_PURPOSE:
            raise TlsError(
                f"{certificate}: expected a certificate that may be a {role.value}'s, found one whose "
                "extended key usage says otherwise"
            ) from None
        raise TlsError(
            f"{certificate}: expected a usable certificate, found {error.verify_message}"
        ) from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise TlsError(f"{key}: expected the key of {certificate}, found another's") from None
        reason = (error.reason or str(error)).lower().replace("_", " ")
        raise TlsError(
            f"{certificate} and {key}: expected a certificate and its key, found: {reason}"
        ) from None
    begins_s, ends_s = (ssl.cert_time_to_seconds(str(found[name])) for name in ("notBefore", "notAfter"))
    _check_dates(certificate, begins_s, ends_s, now_s)
    return ends_s


def _check_ca(path: Path, pem: bytes, now_s: float) -> float | None:
    """Check CAs; return the Unix time when the last of them expires, None if none is marked as a CA."""
    context = _check_certificates(path, pem)
    authorities = context.get_ca_certs()
    if not authorities:
        return None  # a server's own certificate, trusted directly
    periods_s = [
        tuple(ssl.cert_time_to_seconds(str(each[name])) for name in ("notBefore", "notAfter"))
        for each in authorities
    ]
    begins_s, ends_s = max(periods_s, key=lambda period_s: period_s[1])
    _check_dates(path, begins_s, ends_s, now_s)
    return ends_s


def _check_certificates(path: Path, pem: bytes) -> ssl.SSLContext:
    """Return a context that trusts the certificates of a file."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if b"-----BEGIN CERTIFICATE-----" not in pem:
        raise TlsError(f"{path}: expected a certificate in PEM, found none")
    try:
        context.load_verify_locations(cadata=pem.decode("ascii", "replace"))
    except (ssl.SSLError, ValueError):
        raise TlsError(f"{path}: expected a certificate in PEM, found a damaged one") from None
    return context


def _check_dates(path: Path, begins_s: float, ends_s: float, now_s: float) -> None:
    if now_s < begins_s:
        raise TlsError(f"{path}: expected a valid certificate, found one that begins on {moment(begins_s)}")
    if now_s >= ends_s:
        raise TlsError(f"{path}: expected a valid certificate, found one that expired on {moment(ends_s)}")


def _read(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return read_bounded(path, MAX_SMALL_FILE_BYTES)
    except OSError as error:
        raise TlsError(f"{path}: can't be read: {error.strerror}") from None


def _moments(material: Material) -> dict[str, Any]:
    return {"expires": {file: moment(expiry_s) for file, expiry_s in material.expiries_s.items()}}


def _no_password() -> str:
    raise TlsError("expected private keys without a passphrase, found an encrypted one")
