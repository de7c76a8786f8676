"""Checks on the way to a coordinator: certificates, reachability, credential, release, clock."""

import time
from collections.abc import Callable, Collection, Iterator

import grpc

from perseus.doctor.checks import Check, Verdict, clock_check, expiry_checks, version_check
from perseus.job_id import MAX_SLOT_COUNT
from perseus.release import release
from perseus.tls.channels import Channels, served_at
from perseus.tls.files import TlsError
from perseus.tls.tokens import TokenFileError
from perseus.v1 import info_service_pb2, info_service_pb2_grpc, token_service_pb2

_TIMEOUT_S = 5.0
_CREDENTIAL = "credential"
_TOKEN = (
    "give a token of this coordinator (token_file): an operator's token makes more of them with "
    "perseus tokens create, and the coordinator's log names the file of the first"
)
_REACH = "does it run there (perseus coordinator, setting listen), and can this machine reach its port?"
_TLS = "compare certificates and CA files on both sides: docs/security.md, TLS error messages"
_DENIED = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}


def coordinator_checks(
    channels: Channels, scopes: Collection[str] = (), clock: Callable[[], float] = time.time
) -> Iterator[Check]:
    """Check a coordinator from this machine; of several, each until one serves.

    Args:
        channels: the way to it.
        scopes: what the caller has to be, such as `agent`; anything, if empty.
        clock: the wall clock.
    """
    yield from expiry_checks(channels.expiries_s, clock())
    info = None
    while info is None:
        subject = f"coordinator {channels.address}"
        sent_s = clock()
        try:
            with channels.open_blocking() as channel:
                stub = info_service_pb2_grpc.InfoServiceStub(channel)
                info = stub.GetInfo(info_service_pb2.GetInfoRequest(), timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            if address := served_at(error):
                yield Check(subject, Verdict.GOOD, f"it stands by; jobs are served at {address}")
            else:
                yield from _failures(error, subject, channels)
            if channels.move_on(error):
                return
    received_s = clock()
    yield _reached(subject, channels)
    yield _credential(info, scopes)
    yield version_check(release(), info.version)
    yield clock_check(sent_s, info.current_time.ToNanoseconds() / 1e9, received_s)
    yield from _fleet(channels)


def unusable_credential(error: TokenFileError) -> Check:
    """Report a given token that can't be used."""
    return Check(_CREDENTIAL, Verdict.BAD, str(error), _TOKEN)


def unusable_certificate(error: TlsError) -> Check:
    """Report a given certificate, key or CA that can't be used."""
    return Check("certificate", Verdict.BAD, str(error), _TLS)


def _reached(subject: str, channels: Channels) -> Check:
    if channels.is_exposed:
        found = "it answers, in plaintext over the network"
        return Check(subject, Verdict.WARNING, found, "give it a certificate: perseus certificates server")
    return Check(
        subject,
        Verdict.GOOD,
        "it answers, over TLS" if channels.expiries_s else "it answers, on this machine",
    )


def _credential(info: info_service_pb2.GetInfoResponse, scopes: Collection[str]) -> Check:
    scope = token_service_pb2.Scope.Name(info.scope).removeprefix("SCOPE_").lower()
    found = f"{info.principal}, scope {scope}"
    if scopes and scope not in scopes:
        advice = f"make one of scope {' or '.join(scopes)}: perseus tokens create"
        return Check(_CREDENTIAL, Verdict.BAD, found, advice)
    return Check(_CREDENTIAL, Verdict.GOOD, found)


def _fleet(channels: Channels) -> Iterator[Check]:
    """Check that every slot of jobs is served, and another coordinator stands by, where they can share a
    database."""
    try:
        with channels.open_blocking() as channel:
            stub = info_service_pb2_grpc.InfoServiceStub(channel)
            fleet = stub.ListCoordinators(info_service_pb2.ListCoordinatorsRequest(), timeout=_TIMEOUT_S)
    except grpc.RpcError:
        return  # an older release, or it has just ended
    if not any(each.lease_epoch for each in fleet.coordinators):
        return  # one on SQLite: another could not take over
    served = {each.slot: each.address for each in fleet.coordinators if each.HasField("slot")}
    waiting_count = len(fleet.coordinators) - len(served)
    found = ", ".join(
        f"slot {slot} at {address or 'an unknown address'}" for slot, address in sorted(served.items())
    )
    found = f"{found}; {waiting_count} stand{'s' * (waiting_count == 1)} by"
    if unserved := [str(slot) for slot in range(min(fleet.slot_count, MAX_SLOT_COUNT)) if slot not in served]:
        advice = "start more coordinators on the same database, or see the logs of those that should run"
        yield Check("fleet", Verdict.BAD, f"nobody serves slot {', '.join(unserved)}; {found}", advice)
    elif not all(served.values()):
        yield Check("fleet", Verdict.WARNING, found, "give it an address for clients: setting advertise")
    elif not waiting_count:
        advice = "start one more coordinator on the same database: nobody takes over from one that ends"
        yield Check("fleet", Verdict.WARNING, found, advice)
    else:
        yield Check("fleet", Verdict.GOOD, found)


def _failures(error: grpc.RpcError, subject: str, channels: Channels) -> Iterator[Check]:
    details = error.details() or error.code().name
    if error.code() in _DENIED:
        yield _reached(subject, channels)
        origin = f"; the token is from {channels.token_origin}" if channels.token_origin else ""
        yield Check(_CREDENTIAL, Verdict.BAD, f"{details}{origin}", _TOKEN)
    elif error.code() is grpc.StatusCode.UNIMPLEMENTED:
        yield Check(subject, Verdict.WARNING, "it runs an earlier release", "upgrade it to this release")
    else:
        reason = channels.diagnosis_blocking()  # a TLS error: something has answered
        yield Check(subject, Verdict.BAD, reason or details, _TLS if reason else _REACH)
