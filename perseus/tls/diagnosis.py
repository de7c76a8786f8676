"""Why a coordinator can't be reached, in a sentence: gRPC often reports only UNAVAILABLE.

`diagnose` repeats a failed connection once with Python's own `ssl`, within a time limit, with the same CAs,
certificate and name. It turns the error of OpenSSL, or the other side's alert, into a sentence (`trouble`,
`refusal`). It fetches a rejected certificate again, trusting only that one, so that the sentence can have its
names, its issuer and its dates.

It blocks: on an event loop, call it in a thread.
"""

import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from perseus.tls.address import host_and_port
from perseus.tls.files import TlsFiles, moment, own_facts, trust_only

TIMEOUT_S = 3.0
_MAX_LIST = 5

# HTTP/2's connection preface and an empty SETTINGS frame: a server answers with its own, or an error.
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")

# OpenSSL's X509_V_ERR_….
_NOT_YET_VALID, _EXPIRED, _HOSTNAME, _IP_ADDRESS, _PURPOSE = 9, 10, 62, 64, 26
_UNKNOWN_ISSUER = frozenset({2, 18, 19, 20, 21})


@dataclass(frozen=True, slots=True)
class Shown:
    """The contents of a certificate; times are Unix times."""

    names: tuple[str, ...] = ()
    issuer: str = ""
    begins_s: float = 0.0
    ends_s: float = 0.0

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "Shown":
        """Build from the result of `ssl.SSLSocket.getpeercert`."""
        if not facts:
            return cls()
        issuer = ", ".join(value for part in facts.get("issuer", ()) for _, value in part)
        names = tuple(value for _, value in facts.get("subjectAltName", ()))
        begins_s, ends_s = (ssl.cert_time_to_seconds(facts[name]) for name in ("notBefore", "notAfter"))
        return cls(names, issuer, begins_s, ends_s)


class _DismissedError(Exception):
    """A coordinator closed the connection after a handshake."""


def diagnose(address: str, files: TlsFiles | None, timeout_s: float = TIMEOUT_S) -> str | None:
    """Return why a coordinator can't be reached, or None if that can't be determined.

    `files` are those of the failed connection; None if it was in plaintext.
    """
    place = host_and_port(address)
    if place is None:
        return None
    deadline_s = time.monotonic() + timeout_s
    try:
        if files is None:
            return _if_tls_is_spoken(place, deadline_s)
        _shake(_context(files), place, deadline_s)
    except ssl.SSLCertVerificationError as error:
        return trouble(
            error.verify_code, error.verify_message, place[0], _shown(place, deadline_s), time.time()
        )
    except ssl.SSLError as error:
        return refusal(
            error.reason or "", has_certificate=files is not None and files.certificate is not None
        )
    except _DismissedError:
        return dismissal(Shown.of(own_facts(files)) if files is not None else Shown(), time.time())
    except (OSError, ValueError):
        return None  # no server, silence, or an unknown name: gRPC reports these, too
    return None


def trouble(code: int, message: str, host: str, shown: Shown, now_s: float) -> str:
    """Return why a coordinator's certificate is not accepted; `code` is OpenSSL's X509_V_ERR."""
    if code == _EXPIRED:
        if shown.ends_s and now_s < shown.ends_s:
            return "the CA that signed the coordinator's certificate has expired"
        return f"the coordinator's certificate has expired{_on(shown.ends_s)}"
    if code == _NOT_YET_VALID:
        return f"the coordinator's certificate is not valid yet{_on(shown.begins_s, 'it begins')}"
    if code in (_HOSTNAME, _IP_ADDRESS):
        names = ", ".join(shown.names[:_MAX_LIST]) or "no name"
        return f"the coordinator's certificate is not for {host}: it is for {names}"
    if code in _UNKNOWN_ISSUER:
        issuer = f" by {shown.issuer}" if shown.issuer else ""
        return f"the coordinator's certificate is signed{issuer}, which is not a CA in tls_ca"
    if code == _PURPOSE:
        return "the coordinator's certificate is not for servers, according to its extended key usage"
    return f"the coordinator's certificate is not accepted: {message}"


def dismissal(own: Shown, now_s: float) -> str:
    """Return why a coordinator closes the connection after a handshake, as gRPC does for unknown clients.

    gRPC gives no reason; `own` has the contents of the client's certificate, if there is one.
    """
    if not own.ends_s:
        return "the coordinator requires a client certificate: expected tls_certificate and tls_key"
    if now_s >= own.ends_s:
        return f"the certificate in tls_certificate has expired on {moment(own.ends_s)}"
    return (
        f"the coordinator refuses the certificate in tls_certificate, which is signed by {own.issuer}: "
        "expected that CA in its tls_client_ca, and clocks that agree"
    )


def refusal(reason: str, *, has_certificate: bool) -> str:
    """Return why a handshake failed for another reason than the coordinator's certificate.

    `reason` is OpenSSL's; an alert in it comes from the coordinator.
    """
    if "CERTIFICATE_REQUIRED" in reason or ("HANDSHAKE_FAILURE" in reason and not has_certificate):
        return "the coordinator requires a client certificate: expected tls_certificate and tls_key"
    if "ALERT_UNKNOWN_CA" in reason:
        return "the coordinator refuses the certificate in tls_certificate: it does not trust its CA"
    if "ALERT_CERTIFICATE_EXPIRED" in reason:
        return "the coordinator refuses the certificate in tls_certificate: it has expired by its clock"
    if "ALERT" in reason and "CERTIFICATE" in reason:
        return f"the coordinator refuses the certificate in tls_certificate: {_words(reason)}"
    if "PROTOCOL_VERSION" in reason or "UNSUPPORTED_PROTOCOL" in reason:
        return "no common version of TLS: the coordinator's are 1.2 and 1.3"
    if "ALERT" in reason:
        return f"the coordinator ends the handshake: {_words(reason)}"
    return "the server there speaks no TLS, or not gRPC's"


def _if_tls_is_spoken(place: tuple[str, int], deadline_s: float) -> str | None:
    """Return the diagnosis of a plaintext connection, if the coordinator speaks TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        _shake(context, place, deadline_s)
    except ssl.SSLError as error:
        if "ALERT" not in (error.reason or ""):
            return None
    except _DismissedError:
        pass
    return "the coordinator speaks TLS, but the connection was plaintext: expected tls_ca"


def _context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    if files.ca is not None:
        context.load_verify_locations(cafile=files.ca)
    if files.certificate is not None:
        context.load_cert_chain(files.certificate, files.key, password="")
    return context


def _shake(context: ssl.SSLContext, place: tuple[str, int], deadline_s: float) -> None:
    """Connect, shake hands, send HTTP/2's preface and wait for any answer. Raises any error."""
    with _connected(place, deadline_s) as plain, context.wrap_socket(plain, server_hostname=place[0]) as sock:
        sock.settimeout(_left_s(deadline_s))
        # With TLS 1.3 a client's certificate is judged after its handshake is over.
        try:
            sock.sendall(_HELLO)
            is_welcome = bool(sock.recv(1))
        except (ConnectionError, ssl.SSLEOFError):
            is_welcome = False
        if not is_welcome:
            raise _DismissedError


def _shown(place: tuple[str, int], deadline_s: float) -> Shown:
    """Return the contents of the coordinator's certificate; empty if it is no longer reachable."""
    anyone = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE
    only_it = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    only_it.check_hostname = False
    for context in (anyone, only_it):
        context.set_alpn_protocols(["h2"])
    try:
        with _connected(place, deadline_s) as plain, anyone.wrap_socket(plain) as sock:
            trust_only(only_it, sock.getpeercert(binary_form=True) or b"")
        with _connected(place, deadline_s) as plain, only_it.wrap_socket(plain) as sock:
            return Shown.of(sock.getpeercert() or {})
    except (OSError, ValueError):
        return Shown()


def _connected(place: tuple[str, int], deadline_s: float) -> socket.socket:
    return socket.create_connection(place, timeout=_left_s(deadline_s))


def _left_s(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


def _on(unix_s: float, verb: str = "") -> str:
    if not unix_s:
        return ""
    return f": {verb} on {moment(unix_s)}" if verb else f" on {moment(unix_s)}"


def _words(reason: str) -> str:
    """Return OpenSSL's name of an alert as words."""
    return reason.rpartition("ALERT_")[2].lower().replace("_", " ")
