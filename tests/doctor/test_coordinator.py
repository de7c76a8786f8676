"""Checks on the way to a running coordinator, and to one that does not run."""

import asyncio
from collections.abc import AsyncIterator, Collection
from pathlib import Path

import pytest

from perseus.demo.security import Security
from perseus.doctor.checks import Check, Verdict
from perseus.doctor.coordinator import coordinator_checks
from perseus.service.api.statuses import to_status
from perseus.service.domain.errors import ServedElsewhereError
from perseus.service.domain.members import Fleet, Member, Slot
from perseus.service.server import running
from perseus.tls.channels import Channels
from perseus.tls.tokens import TokenSource
from tests.cli.prepared import PreparedCoordinator
from tests.service.grpc_fakes import make_secured_settings, make_settings

GOOD, WARNING, BAD = Verdict.GOOD, Verdict.WARNING, Verdict.BAD


@pytest.fixture
def security(tmp_path: Path) -> Security:
    return Security(tmp_path / "authority")


@pytest.fixture
async def address(tmp_path: Path, security: Security) -> AsyncIterator[str]:
    async with running(make_secured_settings(tmp_path, security)) as (address, _):
        yield address


async def checked(channels: Channels, scopes: Collection[str] = ()) -> dict[str, Check]:
    checks = await asyncio.to_thread(lambda: list(coordinator_checks(channels, scopes)))
    assert all(bool(check.advice) == (check.verdict is not GOOD) for check in checks), checks
    return {check.subject.partition(" ")[0]: check for check in checks}


async def test_a_token_of_another_scope_and_an_unknown_one_are_reported(
    address: str, security: Security
) -> None:
    await asyncio.to_thread(security.admit_agents, address)
    agent = TokenSource(path=security.agent_token_file)
    checks = await checked(Channels(address, security.client_files, agent), ("agent", "operator"))
    assert checks["credential"].verdict is GOOD
    checks = await checked(Channels(address, security.client_files, agent), ("grid",))
    assert checks["credential"].verdict is BAD
    assert "scope grid" in checks["credential"].advice

    unknown = TokenSource(token="perseus_unknown", variable="PERSEUS_TOKEN")
    checks = await checked(Channels(address, security.client_files, unknown))
    assert (checks["coordinator"].verdict, checks["credential"].verdict) == (GOOD, BAD)
    assert checks["coordinator"].found == "it answers, over TLS"
    assert checks["credential"].found.endswith("; the token is from PERSEUS_TOKEN")
    assert "token_file" in checks["credential"].advice
    assert "clocks" not in checks


async def test_a_wrong_clock_is_reported(address: str, security: Security) -> None:
    channels = security.channels(address)
    checks = await asyncio.to_thread(lambda: list(coordinator_checks(channels, clock=lambda: 0.0)))
    (clocks,) = [check for check in checks if check.subject == "clocks"]
    assert (clocks.verdict, "ahead" in clocks.found) == (BAD, True)


async def test_why_a_coordinator_does_not_answer_is_reported(address: str) -> None:
    plaintext = "the coordinator speaks TLS, but the connection was plaintext: expected tls_ca"
    for asked, reason, is_there in (("127.0.0.1:1", "Connection refused", False), (address, plaintext, True)):
        check = (await checked(Channels(asked)))["coordinator"]
        assert (check.verdict, reason in check.found) == (BAD, True)
        assert ("does it run there" in check.advice) is not is_there


async def test_local_plaintext_is_good_and_a_client_without_a_token_is_anybody(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path)) as (address, _):
        checks = await checked(Channels(address))
    assert checks["coordinator"].found == "it answers, on this machine"
    assert checks["credential"].found == "anybody, scope operator"


async def test_of_several_each_is_checked_until_one_serves(tmp_path: Path) -> None:
    async with running(make_settings(tmp_path)) as (address, _):
        with PreparedCoordinator() as other:
            standby = other.address
            refusal = ServedElsewhereError(address=address, slot=0, standbys=[])
            other.answers = {"GetInfo": to_status(refusal)}
            channels = Channels(f"127.0.0.1:1,{standby}")
            checks = await asyncio.to_thread(lambda: list(coordinator_checks(channels)))
    assert [(check.subject, check.verdict) for check in checks[:4]] == [
        ("coordinator 127.0.0.1:1", BAD),
        (f"coordinator {standby}", GOOD),
        (f"coordinator {address}", GOOD),
        ("credential", GOOD),
    ]
    assert checks[1].found == f"it stands by; jobs are served at {address}"


async def test_who_serves_the_slots_of_a_fleet_is_reported(tmp_path: Path) -> None:
    members = [Member("me", "me:1"), Member("other", "other:1"), Member("standby", "standby:1")]
    fleet = Fleet("me", 0, members, [Slot(0, "me", 1), Slot(1, "other", 1)])
    async with running(make_settings(tmp_path), fleet=fleet) as (address, _):
        check = (await checked(Channels(address)))["fleet"]
        assert (check.verdict, check.found) == (GOOD, "slot 0 at me:1, slot 1 at other:1; 1 stands by")
        fleet.members = members[:2]
        check = (await checked(Channels(address)))["fleet"]
        assert (check.verdict, check.found) == (
            WARNING,
            "slot 0 at me:1, slot 1 at other:1; 0 stand by",
        )
        assert "start one more coordinator" in check.advice
        fleet.members = [Member("me", "")]
        check = (await checked(Channels(address)))["fleet"]
        assert check.verdict is BAD
        assert check.found == "nobody serves slot 1; slot 0 at an unknown address; 0 stand by"
        fleet.members, fleet.slots = members[:1], fleet.slots[:1]
        assert (await checked(Channels(address)))["fleet"].verdict is WARNING, "its standby may have ended"
        fleet.slots = [Slot(0, "me", 0)]
        assert "fleet" not in await checked(Channels(address)), "on SQLite"
