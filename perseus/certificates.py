"""A small certificate authority: an EC key and its certificate in a folder, which signs other certificates.

For clusters without one, and for the demo and the tests. The library cryptography does the mathematics; this
module chooses a certificate's fields, and writes files atomically and readable by the right users only.
"""

import ipaddress
import os
import secrets
import stat
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from perseus.regular_file import MAX_SMALL_FILE_BYTES, read_bounded

CA_FILE = "ca.pem"
CA_KEY_FILE = "ca.key"

# Hosts' clocks differ slightly.
_BACKDATED = timedelta(minutes=5)


class CertificateError(Exception):
    """The authority's folder has missing or wrong files, or would be overwritten."""


class Authority:
    """An authority, loaded from its folder. Raises `CertificateError` if there is none."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self._certificate = x509.load_pem_x509_certificate(
                read_bounded(folder / CA_FILE, MAX_SMALL_FILE_BYTES)
            )
            key = serialization.load_pem_private_key(
                read_bounded(folder / CA_KEY_FILE, MAX_SMALL_FILE_BYTES), None
            )
        except (OSError, ValueError, TypeError) as error:
            raise CertificateError(
                f"{folder}: expected {CA_FILE} and {CA_KEY_FILE} of an authority, found: {error}"
            ) from None
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise CertificateError(f"{folder / CA_KEY_FILE}: expected an EC key, found another")
        self._key = key

    @classmethod
    def create(cls, folder: Path, name: str, valid_for: timedelta) -> "Authority":
        """Create a folder with a new authority. Raises `CertificateError` if it already has one."""
        if any((folder / file).exists() for file in (CA_FILE, CA_KEY_FILE)):
            raise CertificateError(
                f"{folder}: expected no authority there yet, found {CA_FILE} or {CA_KEY_FILE}"
            )
        folder.mkdir(parents=True, exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _name(name)
        now = datetime.now(UTC)
        certificate = (
            _builder(subject, subject, key, now - _BACKDATED, now + valid_for)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs=True), critical=True)
            .sign(key, hashes.SHA256())
        )
        _write(folder / CA_KEY_FILE, _key_pem(key), 0o600)
        _write(folder / CA_FILE, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
        return cls(folder)

    def issue(
        self,
        stem: Path,
        names: Sequence[str],
        *,
        is_server: bool,
        begins: datetime | None = None,
        ends: datetime,
    ) -> tuple[Path, Path]:
        """Write `stem`.pem and `stem`.key, a new certificate for host names or addresses and its key.

        The first name is the certificate's subject. Existing files are replaced atomically, the key first: a
        reader in between finds a pair that does not match, and waits. They keep mode, user and group, so the
        same users can read them.
        """
        certificate_file, key_file = (stem.with_name(stem.name + suffix) for suffix in (".pem", ".key"))
        own = {(self.folder / name).resolve() for name in (CA_FILE, CA_KEY_FILE)}
        if own & {certificate_file.resolve(), key_file.resolve()}:
            raise CertificateError(f"{stem}: expected another path than the authority's own files")
        key = ec.generate_private_key(ec.SECP256R1())
        begins = begins or datetime.now(UTC) - _BACKDATED
        usage = ExtendedKeyUsageOID.SERVER_AUTH if is_server else ExtendedKeyUsageOID.CLIENT_AUTH
        certificate = (
            _builder(_name(names[0]), self._certificate.subject, key, begins, ends)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .add_extension(
                x509.SubjectAlternativeName([_alternative(name) for name in names]), critical=False
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
            .sign(self._key, hashes.SHA256())
        )
        _write(key_file, _key_pem(key), 0o600)
        _write(certificate_file, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
        return certificate_file, key_file


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    begins: datetime,
    ends: datetime,
) -> x509.CertificateBuilder:
    public_key = key.public_key()
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(ends)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


def _name(name: str) -> x509.Name:
    try:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    except ValueError as error:
        raise CertificateError(f"{name!r}: expected a name of 1 to 64 characters, found: {error}") from None


def _alternative(name: str) -> x509.GeneralName:
    with suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(name))
    try:
        return x509.DNSName(name)
    except ValueError as error:
        raise CertificateError(f"{name!r}: expected a host name or an address, found: {error}") from None


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _write(path: Path, content: bytes, mode: int) -> None:
    """Write a file atomically, following links; nobody can read a partial one.

    An existing file keeps its mode, user and group; a new one follows the umask.
    """
    place = Path(os.path.realpath(path))
    draft = place.with_name(f".perseus-{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if place.exists():
                before = place.stat()
                with suppress(PermissionError):  # then the writer owns it, and nobody else gains access
                    os.fchown(descriptor, before.st_uid, before.st_gid)
                    os.fchmod(descriptor, stat.S_IMODE(before.st_mode))
            file.write(content)
        draft.replace(place)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        draft.unlink(missing_ok=True)
