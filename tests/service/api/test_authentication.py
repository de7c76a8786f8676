"""Who may call which method, the errors for others, and what one tenant can't take from another."""

import asyncio
import importlib
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from structlog.testing import capture_logs

import perseus.v1
from perseus.agent.stream.call import Call
from perseus.demo.security import Security
from perseus.release import release
from perseus.service.api.agent_service import PROTOCOL_VERSION
from perseus.service.api.authentication import caller, calling
from perseus.service.api.rpc_scopes import RPC_SCOPES, check_scope
from perseus.service.domain.errors import ScopeTooNarrowError, TokenFileUnusableError
from perseus.service.domain.principals import ANYBODY, Grant, Principal, Scope
from perseus.service.storage.sql_store import SqlStore
from perseus.service.storage.store import TokenEntry
from perseus.tls.tokens import TokenSource
from perseus.v1 import agent_service_pb2, job_service_pb2, token_service_pb2
from perseus.v1 import power_service_pb2 as power_pb
from tests.service.api.test_power_service import Budgets
from tests.service.grpc_fakes import (
    ALL_PLACES,
    TIMEOUT_S,
    Client,
    FakeAgent,
    connected,
    connected_to,
    error_of,
    make_request,
    make_secured_settings,
    make_settings,
    refusal,
    running_here,
    sent,
    spec_message,
    until,
)
from tests.service.sites import Site, open_site

PAGE = Path(__file__).parents[3] / "docs" / "security.md"
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
PERMISSION_DENIED = grpc.StatusCode.PERMISSION_DENIED
_LASTING_S = 600.0
FIRST = ALL_PLACES[:1]
REQUESTS = {
    "/perseus.v1.JobService/RegisterJob": make_request(
        "RegisterJob", spec=spec_message("llama-1"), request_id="request"
    )
}


async def outcome(client: Client, rpc: str) -> str:
    """Return the outcome of a call: `yes`, or the reason of its refusal."""
    request = REQUESTS[rpc].SerializeToString() if rpc in REQUESTS else b""
    channel: Any = client.channel  # raw bytes
    try:
        if rpc.endswith("/Connect"):
            return await joining(client)
        if rpc.endswith(("/ServerReflectionInfo", "/WatchFeeds", "/WatchJob", "/Watch")):
            call = channel.unary_stream(rpc)(request, timeout=TIMEOUT_S)
            async for _ in call:
                call.cancel()
                break
        else:
            await channel.unary_unary(rpc)(request, timeout=TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        if error.code() in (UNAUTHENTICATED, PERMISSION_DENIED):
            return str(error.code().name)
    return "yes"


async def joining(client: Client) -> str:
    """An agent may connect, and then have its messages about a rank refused."""
    call = Call(client.agents.Connect(timeout=TIMEOUT_S))
    # An instance of its own: the end of an earlier caller's stream may not have been noticed yet.
    hello = {"instance_id": uuid.uuid4().hex, "agent_version": "0", "hostname": "host"}
    for output in (sent(hello=hello), sent(rank_joined={"job_id": "llama-1"})):
        with suppress(asyncio.InvalidStateError):  # the stream has ended; reading returns the reason
            await call.write(output)
        answer = await call.read()
    call.cancel()
    assert answer is not None
    reason = answer.message_refused.reason or answer.rank_refused.reason
    return "no message of the job" if reason == "JOB_OUT_OF_SCOPE" else "yes"


INVALID = ("none", "wrong", "expired", "revoked")
COLUMNS = ("reader", "grid", "agent of another job", "agent", "operator")


def page_row(outcomes: dict[str, str]) -> tuple[str, ...]:
    """Return the cells of the page's table for one call: a dash is a refusal with the expected status."""
    (invalid,) = {outcomes[name] for name in INVALID}
    cells = ["–" if invalid == UNAUTHENTICATED.name else invalid]
    cells += ["–" if outcomes[name] == PERMISSION_DENIED.name else outcomes[name] for name in COLUMNS]
    assert set(cells) <= {"yes", "–", "no message of the job"}
    return tuple(cells)


def page_table(rows: dict[str, tuple[str, ...]]) -> str:
    """Return the page's table: one row for all calls of a service that the same callers may make."""
    methods: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for rpc, cells in rows.items():
        service, method = rpc[1:].split("/")
        methods.setdefault((service.removeprefix("perseus.v1."), cells), []).append(f"`{method}`")
    return "\n".join(
        [
            f"| service | calls | no valid token | {' | '.join(COLUMNS)} |",
            f"|---{'|---' * (len(COLUMNS) + 2)}|",
            *(
                f"| `{service}` | {', '.join(names)} | {' | '.join(cells)} |"
                for (service, cells), names in methods.items()
            ),
        ]
    )


async def test_the_page_lists_who_may_call_what(site: Site) -> None:
    secrets = {
        "none": None,
        "wrong": "perseus_wrong",
        "expired": await site.new("expired", "operator", _LASTING_S),
        "revoked": await site.new("revoked", "operator"),
        "reader": await site.new("reader", "reader"),
        "grid": await site.new("grid", "grid"),
        "agent of another job": await site.new("another", "agent:opt-*"),
        "agent": await site.new("agent", "agent:llama-*"),
        "operator": site.operator,
    }
    await site.tokens.revoke("revoked")
    site.clock.ahead_s = 2 * _LASTING_S
    outcomes: dict[str, dict[str, str]] = {rpc: {} for rpc in RPC_SCOPES}
    for name, secret in secrets.items():
        async with site.as_(secret) as client:
            for rpc, found in outcomes.items():
                found[name] = await outcome(client, rpc)
    table = page_table({rpc: page_row(found) for rpc, found in outcomes.items()})
    assert table in PAGE.read_text(), f"expected in {PAGE.name}:\n{table}"


def test_every_call_of_every_service_has_its_scope_and_an_unlisted_one_is_refused() -> None:
    stubs = sorted(Path(perseus.v1.__path__[0]).glob("*_service_pb2.py"))
    files = [importlib.import_module(f"perseus.v1.{path.stem}").DESCRIPTOR for path in stubs]
    files += [health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR]
    services = [service for file in files for service in file.services_by_name.values()]
    calls = {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}
    assert set(RPC_SCOPES) == calls | {call.replace("v1alpha", "v1") for call in calls}
    operator = Principal("token admin", Grant(Scope.OPERATOR))
    with pytest.raises(ScopeTooNarrowError, match="found operator of token admin"):
        check_scope("/perseus.v1.JobService/Unheard", operator)


async def test_callers_can_ask_for_their_own_identity(site: Site) -> None:
    async with site.as_(await site.new("node-7", "agent:llama-*")) as client:
        found = await client.ask("GetInfo")
    assert (found.principal, found.scope) == ("token node-7", token_service_pb2.SCOPE_AGENT)


async def test_without_authentication_every_caller_is_anybody(client: Client) -> None:
    before_s = time.time()
    answer = await client.ask("GetInfo")
    assert (answer.version, answer.protocol_version) == (release(), PROTOCOL_VERSION)
    assert before_s - 1e-6 <= answer.current_time.ToNanoseconds() / 1e9 <= time.time()
    assert (answer.principal, answer.scope) == ("anybody", token_service_pb2.SCOPE_OPERATOR)


@pytest.mark.parametrize(
    ("secret", "reason"),
    [(None, "CREDENTIAL_MISSING"), ("perseus_wrong", "TOKEN_UNKNOWN"), ("", "TOKEN_UNKNOWN")],
)
async def test_a_refusal_has_its_reason_and_is_logged_without_the_secret(
    site: Site, secret: str | None, reason: str
) -> None:
    async with site.as_(secret) as client:
        with capture_logs() as logs:
            for _ in range(2):
                assert (await refusal(client.ask("ListJobs")))[:2] == (UNAUTHENTICATED, reason)
    (line,) = [each for each in logs if each["event"] == "caller refused"]  # once, not twice
    assert (line["reason"], line["rpc"]) == (reason, "/perseus.v1.JobService/ListJobs")
    assert line["peer"].startswith("ipv4:127.0.0.1:")
    assert "perseus_wrong" not in str(line)


async def test_other_authorization_headers_are_not_bearer_tokens(site: Site) -> None:
    async with site.as_(None) as client:
        headers = (("authorization", f"Basic {site.operator}"),)
        call = client.jobs.ListJobs(job_service_pb2.ListJobsRequest(), metadata=headers)
        assert (await refusal(call))[1] == "CREDENTIAL_MISSING"


@pytest.mark.parametrize("is_revoked", [True, False])
async def test_streams_end_with_their_token(site: Site, is_revoked: bool) -> None:
    secret = await site.new("agents", "agent:*", None if is_revoked else _LASTING_S)
    watcher = await site.new("watchers", "reader", None if is_revoked else _LASTING_S)
    async with site.as_(site.operator) as operator, site.as_(secret) as client, site.as_(watcher) as reader:
        await operator.register()
        other = FakeAgent(operator, "other", ALL_PLACES[2:3])
        agent = FakeAgent(client, "agent", FIRST)
        await agent.join()
        await other.join()
        watching = reader.ask("WatchJob", job_id="job")
        await watching.read()
        if is_revoked:
            await site.tokens.revoke("agents")
            await site.tokens.revoke("watchers")
        else:
            site.clock.ahead_s = 2 * _LASTING_S
        async with asyncio.timeout(TIMEOUT_S):
            ends = [await refusal(agent.reader), await refusal(to_the_end(watching))]
        assert {reason for _, reason, _ in ends} == {"TOKEN_REVOKED" if is_revoked else "TOKEN_EXPIRED"}
        await other.beat()  # nobody else's ends


async def to_the_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_an_agent_is_limited_to_its_scopes_jobs_and_its_stream_continues(site: Site) -> None:
    secret = await site.new("agents", "agent:llama-*")
    async with site.as_(site.operator) as operator, site.as_(secret) as client:
        for job_id in ("llama-1", "opt"):
            await operator.register(job_id=job_id)
        assert (await refusal(client.register(job_id="opt")))[:2] == (PERMISSION_DENIED, "JOB_OUT_OF_SCOPE")
        assert (await client.register(job_id="llama-2")).job_id == "llama-2"
        agent = FakeAgent(client, "agent", FIRST, job_id="opt")
        await agent.join()
        (rank,) = agent.ranks.values()
        rank.begin()
        await agent.send(telemetry=agent.telemetry(rank))
        await agent.until(lambda: bool(agent.telemetry_refused))
        assert [refused.reason for refused in agent.refusals] == ["JOB_OUT_OF_SCOPE"] * 2
        agent.job_id = "llama-1"
        await agent.join_ranks()
        assert len(agent.accepted) == 1


async def test_a_budget_is_changed_by_its_owner_or_an_operator_alone(site: Site) -> None:
    owner, other = await site.new("grid-a", "grid"), await site.new("grid-b", "grid")
    async with site.as_(owner) as mine, site.as_(other) as theirs, site.as_(site.operator) as operator:
        first = await Budgets(mine).set("peak", "r1", limit_w=900.0)
        for call in (
            Budgets(theirs).set("peak", "r1", limit_w=5e5),  # it repeats the owner's request
            Budgets(theirs).set("peak", "r2", limit_w=5e5),
            Budgets(theirs).cancel("peak"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() is PERMISSION_DENIED
            assert refused.value.details() == (
                "power budget 'peak' exists and belongs to token grid-a, so token grid-b may not replace or "
                "cancel it: use another identifier, or ask an operator"
            )
        assert list((await Budgets(theirs).listed()).budgets) == [first]
        assert first.principal == "token grid-a"
        by_operator = await Budgets(operator).set("peak", "r3", limit_w=800.0)
        assert (by_operator.limit_w, by_operator.principal) == (800.0, "token grid-a"), "it keeps its owner"
        assert (await Budgets(mine).set("peak", "r4", limit_w=700.0)).limit_w == 700.0
        assert (await Budgets(operator).cancel("peak")).state == power_pb.BUDGET_STATE_CANCELLED
        assert (await refusal(Budgets(theirs).set("peak", "r5")))[1] == "BUDGET_OWNER_MISMATCH"


def register(client: Client, owner: str, request_id: str) -> Any:
    return client.ask("RegisterJob", spec=spec_message(), request_id=request_id, owner=owner)


async def test_a_jobs_owner_keeps_it_while_it_runs(site: Site) -> None:
    async def join(client: Client, owner: str) -> list[str]:
        agent = FakeAgent(client, f"of-{owner}", FIRST)
        await agent.hello()
        message = agent.joined(*agent.ranks.values())
        message.owner = owner
        await agent.send(rank_joined=message)
        await agent.until(lambda: bool(agent.accepted or agent.refused))
        await agent.end()
        return [refused.reason for refused in agent.refused]

    async with site.as_(await site.new("agents", "agent:*")) as client, site.as_(site.operator) as operator:
        await register(client, "alice", "1")
        code, reason, values = await refusal(register(client, "bob", "2"))
        assert (code, reason, values["owner"]) == (PERMISSION_DENIED, "OWNER_MISMATCH", "bob")
        await register(client, "alice", "3")
        await register(operator, "", "4")  # an operator changes nothing about that
        assert await join(client, "bob") == ["OWNER_MISMATCH"]
        assert await join(client, "alice") == []
        await operator.finish()
        assert (await register(client, "bob", "5")).job.run_number == 2


async def test_the_owner_outlives_the_coordinator(tmp_path: Path) -> None:
    for owner, is_taken in (("alice", True), ("bob", False), ("alice", True)):
        async with connected(make_settings(tmp_path)) as client:
            if is_taken:
                await register(client, owner, owner)
            else:
                assert (await refusal(register(client, owner, owner)))[1] == "OWNER_MISMATCH"


async def test_the_operators_file_is_for_its_user_alone_and_its_token_lasts_until_it_is_replaced(
    tmp_path: Path,
) -> None:
    path = tmp_path / "own" / "operator.token"
    settings = make_settings(tmp_path, insecure=False, operator_token_file=path)
    secrets = []
    for is_valid in (True, True, False, True):
        async with running_here(settings) as (address, _):
            assert path.stat().st_mode & 0o777 == 0o600
            assert path.parent.stat().st_mode & 0o777 == 0o700
            secrets.append(path.read_text())
            async with connected_to(address, token=TokenSource(path=path)) as client:
                if is_valid:
                    await client.register()
                else:
                    assert (await refusal(client.ask("ListJobs")))[1] == "TOKEN_REVOKED"
        assert secrets[-1].strip().encode() not in (tmp_path / "perseus.db").read_bytes()
        if len(secrets) == 2:
            await revoke_in(settings.database)
        elif not is_valid:
            path.unlink()
    assert secrets[0] == secrets[1] == secrets[2] != secrets[3]
    path.chmod(0o644)
    with pytest.raises(TokenFileUnusableError, match="expected a file of this user's with mode 0600"):
        async with running_here(settings):
            pass


async def revoke_in(database: Path | str) -> None:
    store = await SqlStore.open(database)
    (token,) = await store.load_tokens()
    await store.write([TokenEntry(replace(token, revoke_time_s=time.time()))])
    await store.close()


@pytest.mark.parametrize(
    ("scopes", "reason"),
    [({"client": "operator"}, None), ({"client": "reader"}, "SCOPE_TOO_NARROW"), ({}, "CREDENTIAL_MISSING")],
)
async def test_a_certificates_identity_replaces_a_token(
    tmp_path: Path, scopes: dict[str, str], reason: str | None
) -> None:
    security = Security(tmp_path / "security")
    settings = make_secured_settings(tmp_path, security, certificate_scopes=scopes)
    files = security.client_files
    async with running_here(settings) as (address, _):
        async with connected_to(address, files) as client:
            if reason is None:
                await client.register()
            else:
                assert (await refusal(client.register()))[1] == reason
        async with connected_to(address, files, TokenSource(token="perseus_wrong")) as client:
            assert (await refusal(client.register()))[1] == "TOKEN_UNKNOWN"
        async with security.channels(address).open() as channel:
            await Client(channel).register()


def test_scopes_of_certificates_are_checked_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected tls_client_ca beside it"):
        make_settings(tmp_path, certificate_scopes={"a": "reader"})
    with pytest.raises(ValueError, match="a: scope: expected operator, reader, grid or agent"):
        make_settings(
            tmp_path,
            insecure=False,
            tls_certificate="a",
            tls_key="b",
            tls_client_ca="c",
            certificate_scopes={"a": "root"},
        )


def test_no_call_is_served_without_authentication() -> None:
    with pytest.raises(LookupError):
        caller()
    with calling(ANYBODY):
        assert caller() == Principal("anybody", Grant(Scope.OPERATOR))


INSTANCE_SERVED = (PERMISSION_DENIED, "INSTANCE_SERVED")


async def greeting(client: Client, instance_id: str, key: str = "") -> Any:
    """Return the answer to an agent's Hello: a Welcome, or code and reason of its refusal."""
    call = client.agents.Connect(timeout=TIMEOUT_S)
    hello = {"instance_id": instance_id, "agent_version": "0", "instance_key": key}
    await call.write(sent(hello=hello))
    try:
        answer = await call.read()
    except grpc.aio.AioRpcError as error:
        return error_of(error)[:2]
    call.cancel()
    assert isinstance(answer, agent_service_pb2.ConnectResponse)
    return answer.welcome


async def test_an_instance_belongs_to_its_principal_even_after_its_stream_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Knowing another agent's identifier is not enough to take its place; the agent itself may come back."""
    async with open_site(tmp_path, monkeypatch) as site:
        first, second = [await site.new(name, "agent:llama-*") for name in ("first", "second")]
        async with site.as_(first) as client, site.as_(second) as other:
            await client.register(job_id="llama-1")
            agent = FakeAgent(client, "mine", FIRST, job_id="llama-1")
            await agent.join()
            key = agent.welcome.instance_key
            assert await greeting(other, "mine") == INSTANCE_SERVED
            await agent.iterate()
            await agent.end()
            theirs = await greeting(other, "theirs")
            for wrong in ("", "x", "é", theirs.instance_key):
                assert await greeting(other, "mine", wrong) == INSTANCE_SERVED
    async with (
        open_site(tmp_path, monkeypatch) as site,  # after a restart it still knows the owner
        site.as_(first) as client,
        site.as_(second) as other,
    ):
        assert await greeting(other, "mine") == INSTANCE_SERVED
        welcome = await greeting(client, "mine")  # even its principal, without the key
        assert (welcome.acknowledged_sequence, welcome.instance_key) == (1, key)
        # The agent itself, with a renewed token.
        assert (await greeting(other, "mine", key)).acknowledged_sequence == 1


# ---------------------------------------------------------------------- one tenant and another


MADE_UP_W = 1e7


@asynccontextmanager
async def agent_of(site: Site, grant: str, job_id: str) -> AsyncIterator[FakeAgent]:
    """An agent that has said hello, and whose job is registered."""
    async with site.as_(site.operator) as operator, site.as_(await site.new(job_id, grant)) as client:
        await operator.register(job_id=job_id)
        agent = FakeAgent(client, job_id, job_id=job_id)
        await agent.hello()
        yield agent


async def report_powers(agent: FakeAgent, **powers_w: float) -> None:
    """Report the draw of GPUs, and wait until the coordinator has handled that."""
    reading = {"duration_s": 1.0, "gpu_uuid": list(powers_w), "power_w": list(powers_w.values())}
    await agent.send(power_reading=reading)
    await agent.beat()


async def test_gpus_without_a_rank_count_only_from_the_credential_s_host(site: Site) -> None:
    made_up = {f"GPU-made-up-{number}": MADE_UP_W for number in range(256)}
    async with (
        agent_of(site, "agent:a-*@host", "a-1") as agent,
        agent_of(site, "agent:b-*", "b-1") as liar,
        site.as_(site.operator) as operator,
    ):
        power = Budgets(operator)
        await power.set(limit_w=1e6)  # agents report no readings before there is a budget

        async def is_known() -> bool:
            await report_powers(liar, **made_up)
            await report_powers(agent, idle=60.0)
            return (await power.feed()).unmanaged_w > 50.0

        await until(is_known)
        state = await power.feed()
        assert max(state.unmanaged_w, state.measured_w) <= 60.001
        assert state.conflicting_gpu_count == 0


async def test_an_agent_is_refused_on_a_host_outside_its_credential(site: Site) -> None:
    async with site.as_(await site.new("nodes", "agent:*@node-1,node-2*")) as client:
        agent = FakeAgent(client)
        await agent.send(hello={"instance_id": "agent", "hostname": "host"})
        code, reason, metadata = await refusal(agent.reader)
        assert (code, reason) == (grpc.StatusCode.PERMISSION_DENIED, "HOST_OUT_OF_SCOPE")
        assert metadata == {"principal": "token nodes", "hostname": "host"}


async def test_a_restart_gives_no_tenants_gpus_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_site(tmp_path, monkeypatch) as site:
        theirs, ours = await site.new("a", "agent:a-*"), await site.new("nodes", "agent:*")
        async with site.as_(site.operator) as operator, site.as_(theirs) as client:
            for job_id in ("a-1", "b-1"):
                await operator.register(job_id=job_id)
            thief = FakeAgent(client, "thief", job_id="a-1")
            await thief.join()
    async with open_site(tmp_path, monkeypatch) as site, site.as_(theirs) as client, site.as_(ours) as nodes:
        # It is back, and is silent about most of its ranks: its stream keeps their leases alive.
        thief = FakeAgent(client, "thief", ALL_PLACES[:1], job_id="a-1")
        await thief.hello()
        victim = FakeAgent(nodes, "victim", job_id="b-1")
        await victim.join()
        assert victim.refused == []
        await thief.join_ranks()
        assert thief.refused == [], "nor does a claim of this run block another tenant's rank"
