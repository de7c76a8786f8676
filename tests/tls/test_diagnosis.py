"""Diagnoses of failed connections: each usual mistake, with a real handshake on a real port."""

import asyncio
import contextlib
import re
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import grpc
import pytest

from perseus.certificates import Authority
from perseus.tls.address import host_and_port
from perseus.tls.channels import Channels
from perseus.tls.diagnosis import Shown, diagnose, refusal, trouble
from perseus.tls.files import Role, TlsFiles
from tests.tls.pairs import authority, issue, listening
from tests.tls.test_tls_files import MISTAKES, UNDOCUMENTED

SECURITY = Path(__file__).parents[2] / "docs" / "security.md"
NOTHING = "/nothing/Here"


class Case(NamedTuple):
    """Both ends, and the expected diagnosis. `server`: its files, and the clients' CA, if any."""

    server: Callable[[Authority, Authority], tuple[TlsFiles | None, Path | None]]
    client: Callable[[Authority, Authority], TlsFiles | None]
    expected: str


def sound(ours: Authority, _: Authority) -> tuple[TlsFiles | None, Path | None]:
    return issue(ours), None


def mutual(ours: Authority, _: Authority) -> tuple[TlsFiles | None, Path | None]:
    return issue(ours), ours.folder / "ca.pem"


def trusting(ours: Authority, _: Authority) -> TlsFiles | None:
    return TlsFiles(ca=ours.folder / "ca.pem")


CASES = {
    "wrong CA": Case(
        sound,
        lambda _, theirs: TlsFiles(ca=theirs.folder / "ca.pem"),
        "the coordinator's certificate is signed by ours, which is not a CA in tls_ca",
    ),
    "expired": Case(
        lambda ours, _: (issue(ours, ends_days=-0.5), None),
        trusting,
        r"the coordinator's certificate has expired on \d{4}-\d\d-\d\d \d\d:\d\d UTC",
    ),
    "not yet valid": Case(
        lambda ours, _: (issue(ours, begins_days=2), None),
        trusting,
        r"the coordinator's certificate is not valid yet: it begins on \d{4}-\d\d-\d\d \d\d:\d\d UTC",
    ),
    "another name": Case(
        lambda ours, _: (issue(ours, names=["coordinator.example", "10.1.2.3"]), None),
        trusting,
        r"the coordinator's certificate is not for 127\.0\.0\.1: it is for coordinator\.example, 10\.1\.2\.3",
    ),
    "a client's certificate": Case(
        lambda ours, _: (issue(ours, is_server=False), None),
        trusting,
        "the coordinator's certificate is not for servers, according to its extended key usage",
    ),
    "no client certificate": Case(
        mutual,
        trusting,
        "the coordinator requires a client certificate: expected tls_certificate and tls_key",
    ),
    "client of another CA": Case(
        mutual,
        lambda ours, theirs: replace(issue(theirs, "client", is_server=False), ca=ours.folder / "ca.pem"),
        "the coordinator refuses the certificate in tls_certificate, which is signed by theirs: "
        "expected that CA in its tls_client_ca, and clocks that agree",
    ),
    "expired client": Case(
        mutual,
        lambda ours, _: issue(ours, "client", is_server=False, ends_days=-0.5),
        r"the certificate in tls_certificate has expired on \d{4}-\d\d-\d\d \d\d:\d\d UTC",
    ),
    "TLS to plaintext": Case(
        lambda ours, _: (None, None), trusting, "the server there speaks no TLS, or not gRPC's"
    ),
    "plaintext to TLS": Case(
        sound,
        lambda ours, _: None,
        "the coordinator speaks TLS, but the connection was plaintext: expected tls_ca",
    ),
    "plaintext to mutual TLS": Case(
        mutual,
        lambda ours, _: None,
        "the coordinator speaks TLS, but the connection was plaintext: expected tls_ca",
    ),
}


@pytest.mark.parametrize("name", CASES)
async def test_each_mistake_has_its_diagnosis(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    ours, theirs = authority(tmp_path, "ours"), authority(tmp_path, "theirs")
    # A coordinator refuses to start with an expired certificate, but keeps one that expires later.
    monkeypatch.setattr("perseus.tls.files._check_dates", lambda *_: None)
    monkeypatch.setattr("perseus.service.listening.Role", _AnyRole(ours, case))
    files, client_ca = case.server(ours, theirs)
    async with listening(files, client_ca) as address:
        found = await asyncio.to_thread(diagnose, address, case.client(ours, theirs))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(address, case.client(ours, theirs))
    assert found is not None
    assert re.fullmatch(case.expected, found)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


class _AnyRole:
    """A port with a client's certificate, which it would refuse at its start."""

    def __init__(self, ours: Authority, case: Case) -> None:
        self.SERVER = Role.CLIENT if case is CASES["a client's certificate"] else Role.SERVER


@pytest.mark.parametrize("server", [sound, mutual])
async def test_a_working_connection_has_no_diagnosis(
    server: Callable[[Authority, Authority], tuple[TlsFiles | None, Path | None]], tmp_path: Path
) -> None:
    ours = authority(tmp_path)
    files, client_ca = server(ours, ours)
    client = issue(ours, "client", is_server=False)
    async with listening(files, client_ca) as address:
        assert await asyncio.to_thread(diagnose, address, client) is None
        with pytest.raises(grpc.aio.AioRpcError) as answered:
            await call(address, client)
        assert answered.value.code() is grpc.StatusCode.UNIMPLEMENTED
        with pytest.raises(grpc.RpcError) as answered_too:
            await asyncio.to_thread(call_blocking, address, client)
        assert answered_too.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_plaintext_to_plaintext_has_no_diagnosis(tmp_path: Path) -> None:
    async with listening(None) as address:
        assert await asyncio.to_thread(diagnose, address, None) is None


def test_the_documentation_has_the_lines() -> None:
    rows = [line for line in SECURITY.read_text().splitlines() if line.startswith("| ")]
    lines = re.findall(r"`([^`]+)`", "\n".join(rows))
    of_files = [MISTAKES[name][1].replace(".*", "") + ".*" for name in MISTAKES.keys() - UNDOCUMENTED]
    for expected in (*of_files, *(case.expected for case in CASES.values())):
        assert any(re.fullmatch(expected, line) for line in lines), expected


async def call(address: str, files: TlsFiles | None) -> None:
    async with Channels(address, files).open() as channel:
        await channel.unary_unary(NOTHING, bytes, bytes)(b"", timeout=5)


def call_blocking(address: str, files: TlsFiles | None) -> None:
    with Channels(address, files).open_blocking() as channel:
        channel.unary_unary(NOTHING, bytes, bytes)(b"", timeout=5)


def test_absent_servers_and_sockets_have_no_diagnosis(tmp_path: Path) -> None:
    files = TlsFiles(ca=authority(tmp_path).folder / "ca.pem")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        assert diagnose(f"127.0.0.1:{unused.getsockname()[1]}", files) is None
    assert diagnose("unix:/nowhere", None) is None


@pytest.mark.parametrize("responses", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_a_diagnosis_has_a_time_limit(responses: bytes, tmp_path: Path) -> None:
    """Against a server that accepts and then sends nothing, or an occasional byte."""
    files = TlsFiles(ca=authority(tmp_path).folder / "ca.pem")
    with socket.create_server(("127.0.0.1", 0)) as server:
        held = contextlib.ExitStack()

        def accept() -> None:
            with held:
                while True:
                    try:
                        line, _ = server.accept()
                    except OSError:
                        return
                    held.enter_context(line).sendall(responses)

        accepting = threading.Thread(target=accept)
        accepting.start()
        found = diagnose(f"127.0.0.1:{server.getsockname()[1]}", files, timeout_s=0.3)
        assert found == ("the server there speaks no TLS, or not gRPC's" if responses else None)
        server.shutdown(socket.SHUT_RDWR)  # which ends the thread's wait
        accepting.join()


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
async def test_versions_before_tls_1_2_are_refused(tmp_path: Path) -> None:
    ours = authority(tmp_path)
    context = ssl.create_default_context(cafile=ours.folder / "ca.pem")
    context.set_alpn_protocols(["h2"])
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version = ssl.TLSVersion.TLSv1

    async def version(newest: ssl.TLSVersion) -> str:
        context.maximum_version = newest
        place = host_and_port(address)
        assert place is not None
        _, writer = await asyncio.open_connection(*place, ssl=context)
        writer.close()
        return str(writer.get_extra_info("ssl_object").version())

    async with listening(issue(ours)) as address:
        assert await version(ssl.TLSVersion.TLSv1_3) == "TLSv1.3"
        assert await version(ssl.TLSVersion.TLSv1_2) == "TLSv1.2"
        with pytest.raises((ConnectionResetError, ssl.SSLError)) as refused:
            await version(ssl.TLSVersion.TLSv1_1)
    assert "NO_PROTOCOLS" not in str(refused.value), "the client would speak it"


# --- The sentences ------------------------------------------------------------------------------------------


def test_an_expired_ca_is_not_mistaken_for_the_certificate() -> None:
    shown = Shown(ends_s=2000.0)
    assert trouble(10, "", "host", shown, 1000.0) == (
        "the CA that signed the coordinator's certificate has expired"
    )
    assert trouble(10, "", "host", Shown(), 1000.0) == "the coordinator's certificate has expired"


def test_unknown_errors_have_openssls_text() -> None:
    assert trouble(23, "certificate revoked", "host", Shown(), 0) == (
        "the coordinator's certificate is not accepted: certificate revoked"
    )
    assert refusal("TLSV1_ALERT_INTERNAL_ERROR", has_certificate=True) == (
        "the coordinator ends the handshake: internal error"
    )
    assert refusal("SSLV3_ALERT_BAD_CERTIFICATE", has_certificate=True) == (
        "the coordinator refuses the certificate in tls_certificate: bad certificate"
    )
    assert "1.2 and 1.3" in refusal("TLSV1_ALERT_PROTOCOL_VERSION", has_certificate=True)
    assert "tls_key" in refusal("SSLV3_ALERT_HANDSHAKE_FAILURE", has_certificate=False)
