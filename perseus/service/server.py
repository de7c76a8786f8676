"""The coordinator as a process: opens the store, serves gRPC, and stops gracefully on SIGTERM and SIGINT."""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from perseus.background import background_task
from perseus.logs import log_end
from perseus.service.api.agent_service import AgentService
from perseus.service.api.authentication import Authentication, NoAuthentication
from perseus.service.api.calls import unary_calls
from perseus.service.api.elsewhere import Elsewhere
from perseus.service.api.frontier_service import FrontierService
from perseus.service.api.info_service import InfoService
from perseus.service.api.interceptors import Decoding, Releasing
from perseus.service.api.job_service import JobService
from perseus.service.api.ledger_service import LedgerService
from perseus.service.api.power_service import PowerService
from perseus.service.api.reflection import enable_reflection
from perseus.service.api.statuses import refusal_counts
from perseus.service.api.token_service import TokenService
from perseus.service.domain.errors import (
    AddressUnavailableError,
    DaskMissingError,
    DatabaseUnreadableError,
    StoreFailedError,
    TokenFileUnusableError,
)
from perseus.service.domain.ledger import Rates
from perseus.service.domain.members import ALONE, Fleet, Member, Slot
from perseus.service.domain.principals import Grant
from perseus.service.domain.signals import SignalKind
from perseus.service.fleet.power.feeds import Feeds
from perseus.service.listening import Port, check_free
from perseus.service.settings import CoordinatorSettings
from perseus.service.shell.coordinator import Coordinator
from perseus.service.shell.membership import FleetMember
from perseus.service.shell.signals import NamedSignal
from perseus.service.shell.tokens import new_secret
from perseus.service.signals.factory import open_source
from perseus.service.solving.dask_cluster import DaskCluster
from perseus.service.solving.worker import Worker
from perseus.service.solving.worker_pool import JOBS, REQUESTS, WorkerPool
from perseus.service.storage.engines import Opened, is_url
from perseus.service.storage.membership import MemberRows
from perseus.service.storage.sql_store import SqlStore, open_connections
from perseus.service.watchdog import Watchdog
from perseus.service.web.access import HttpAuthenticator
from perseus.service.web.app import make_app, make_standby_app
from perseus.service.web.collector import CoordinatorCollector, collect_standing_by
from perseus.service.web.listening import bind, listening
from perseus.service.web.origin import Hosts
from perseus.service.web.page_api import PageApi
from perseus.service.web.page_files import packaged_page
from perseus.service.web.scrape import Scrape
from perseus.tls.address import host_and_port, is_local
from perseus.tls.tokens import TokenFileError, own_token
from perseus.v1 import (
    agent_service_pb2,
    frontier_service_pb2,
    frontier_service_pb2_grpc,
    info_service_pb2,
    info_service_pb2_grpc,
    job_service_pb2,
    job_service_pb2_grpc,
    ledger_service_pb2,
    ledger_service_pb2_grpc,
    power_service_pb2,
    power_service_pb2_grpc,
    token_service_pb2,
    token_service_pb2_grpc,
)

log = structlog.get_logger(__name__)

_HEALTH_PERIOD_S = 1.0

_STANDBY_AFTER_S = 1.0
"""One that finds the jobs free has taken them within this time, and never stands by."""

_MAX_CALLS = 65_536
"""Concurrent calls and streams; any more are refused at once."""

_OPTIONS = [
    ("grpc.so_reuseport", 0),  # A second coordinator on the port must fail, not share it silently.
    # The core rejects new calls at random above the first and always above the second; the defaults (1,000
    # and 3,000) do not outlast a restart with thousands of agents reconnecting at once.
    ("grpc.server.max_pending_requests", 50_000),
    ("grpc.server.max_pending_requests_hard_limit", 100_000),
    # Agents ping idle connections more often than the default of five minutes allows.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Half-open connections are detected after these times.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
]

_YOUNG_OBJECTS = 200_000
"""Number of new objects that starts a garbage collection. At Python's 700, a fifth of the time under load
went into visiting long-lived timelines and ranks; hardly anything here becomes cyclic garbage."""

_COLLECTION_PERIOD_S = 600
"""Time between two collections of everything."""

_JOB_SERVICE = job_service_pb2.DESCRIPTOR.services_by_name["JobService"]
_FRONTIER_SERVICE = frontier_service_pb2.DESCRIPTOR.services_by_name["FrontierService"]
_LEDGER_SERVICE = ledger_service_pb2.DESCRIPTOR.services_by_name["LedgerService"]
_POWER_SERVICE = power_service_pb2.DESCRIPTOR.services_by_name["PowerService"]
_NOT_ON_THE_PAGE = ("SetBudget", "CancelBudget", "ListBudgets")

_SERVICES = (
    agent_service_pb2.DESCRIPTOR.services_by_name["AgentService"].full_name,
    info_service_pb2.DESCRIPTOR.services_by_name["InfoService"].full_name,
    _JOB_SERVICE.full_name,
    _FRONTIER_SERVICE.full_name,
    _LEDGER_SERVICE.full_name,
    _POWER_SERVICE.full_name,
    token_service_pb2.DESCRIPTOR.services_by_name["TokenService"].full_name,
)


def collect_rarely() -> None:
    """Tune the process's garbage collections, which stop the loop whatever thread they are in.

    They are rare, and leave out what is imported by now: it stays, and a visit to all of it takes 50 ms.
    """
    gc.set_threshold(_YOUNG_OBJECTS)
    gc.collect()
    gc.freeze()


async def _collect_in_time() -> None:
    """Leave objects out of collections as they come, which costs nothing, but for a rare full one.

    Otherwise those of thousands of ranks are visited again and again, for up to 0.3 s; nearly all of them are
    freed without, as they are in no cycles.
    """
    while True:
        for _ in range(_COLLECTION_PERIOD_S):
            gc.freeze()
            await asyncio.sleep(1.0)
        gc.unfreeze()
        gc.collect()


async def serve(settings: CoordinatorSettings, *, on_listening: Callable[[str], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT.

    `on_listening` is called with the bound address, which is also logged as event "listening".

    Raises:
        StartupError: the coordinator can't start.
        StoreFailedError: the database has failed.
    """
    collect_rarely()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    stopped: asyncio.Future[Any] = asyncio.ensure_future(stop.wait())
    collecting = background_task("garbage collection", _collect_in_time())
    try:
        async with joined(settings) as member:
            ends = [stopped]
            fence, fleet = None, Fleet(members=[Member("", _address(settings), _page_url(settings))])
            if member is not None:
                ends.append(member.ended)  # its loss of the lease is also why the store fails then
                waiting = {*ends, member.taken}
                done, _ = await asyncio.wait(
                    waiting, timeout=_STANDBY_AFTER_S, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    async with standing_by(settings, member):
                        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if not member.taken.done() or member.ended.done():
                    return
                fence, fleet = member.taken.result(), member.fleet
            connections = member.connections if member is not None else ()
            async with running(settings, fence, fleet, connections) as (address, background):
                if on_listening is not None:
                    on_listening(address)
                await asyncio.wait({*ends, background}, return_when=asyncio.FIRST_COMPLETED)
                try:
                    for end in (*ends, background):
                        if end.done():
                            end.result()
                except Exception as error:  # said before the others are waited for
                    log_end(error, StoreFailedError)
                    raise
                log.info("stopping", grace_s=settings.shutdown_grace_s)
    finally:
        stopped.cancel()
        collecting.cancel()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


@contextlib.asynccontextmanager
async def joined(settings: CoordinatorSettings) -> AsyncIterator[FleetMember | None]:
    """Be a member of the fleet on the settings' database for the length of the block; None on SQLite.

    Raises:
        StartupError: the port is taken, or the database can't be opened.
        StoreFailedError: the database failed, or the lease was lost within the block.
    """
    if not is_url(settings.database):
        yield None
        return
    # Whoever listened here before is gone, unless several may listen.
    await asyncio.to_thread(check_free, settings.listen)
    rows = await asyncio.to_thread(MemberRows, settings.database, settings.member_lease_s, settings.slots)
    member = FleetMember(
        rows,
        settings.member_lease_s,
        partial(
            open_connections,
            settings.database,
            holder=rows.member_id,
            connect_limit_s=settings.member_lease_s / 8,  # the lease is not renewed meanwhile
        ),
    )
    if settings.slots > 1 and not _address(settings):
        log.warning("nobody can be sent to this coordinator: set advertise to its HOST:PORT")
    try:
        await member.join(_address(settings), _place(settings.listen), _page_url(settings))
        try:
            yield member
        finally:
            if member.ended.done():
                member.ended.result()  # also the reason why the store has failed then
    finally:
        await member.leave()


def _address(settings: CoordinatorSettings) -> str:
    """Return where others reach the coordinator, "" if that is unknown."""
    return settings.advertise or _reachable(settings.listen)


def _page_url(settings: CoordinatorSettings) -> str:
    """Return the URL of the page where others reach it, "" if there is none or that is unknown."""
    found, reached = host_and_port(settings.http or ""), host_and_port(_address(settings))
    if settings.http is None or found is None or found[1] == 0:
        return ""
    # An address of every host is that which is advertised; a page on loopback is for this machine alone.
    host = found[0] if _reachable(settings.http) else reached[0] if reached is not None else ""
    if not host or (is_local(settings.http) and not is_local(_address(settings))):
        return ""
    scheme = "http" if settings.tls_certificate is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{found[1]}"


def _reachable(listen: str) -> str:
    """Return an address to listen on if others can connect to it by that name, else ""."""
    found = host_and_port(listen)
    if found is None or found[0] in ("*", "0.0.0.0", "::") or found[1] == 0:  # noqa: S104 - compared only
        return ""
    return listen


def _place(listen: str) -> str:
    """Return what identifies a port of a machine or container since its boot, "" if several may share it."""
    found = host_and_port(listen)
    if found is None or found[1] == 0:
        return ""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/net').st_ino} {listen}"


@contextlib.asynccontextmanager
async def standing_by(settings: CoordinatorSettings, member: FleetMember) -> AsyncIterator[None]:
    """For the length of the block, tell all callers where jobs are served."""
    port = Port(settings)
    server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=_MAX_CALLS)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    server.add_generic_rpc_handlers((Elsewhere(member.fleet),))
    await asyncio.to_thread(check_free, settings.listen)
    async with contextlib.AsyncExitStack() as stack:
        if settings.http is not None:
            http = stack.enter_context(await asyncio.to_thread(bind, settings.http))
            collect = partial(collect_standing_by, member.fleet, partial(_expiries_s, port))
            app = make_standby_app(member.fleet, _hosts(settings), Scrape(collect))
            await stack.enter_async_context(listening(app, http, port.tls, 0.0))
        address = port.bind(server)
        await server.start()
        stack.push_async_callback(port.close)
        stack.push_async_callback(server.stop, None)
        await health_servicer.set("", health_pb2.HealthCheckResponse.SERVING)
        for service in _SERVICES:
            await health_servicer.set(service, health_pb2.HealthCheckResponse.NOT_SERVING)
        log.info("standing by", address=address)
        yield


@contextlib.asynccontextmanager
async def running(
    settings: CoordinatorSettings,
    fence: Slot | None = None,
    fleet: Fleet = ALONE,
    connections: Sequence[Opened] = (),
    *,
    new_worker: Callable[[], Worker] = Worker,
) -> AsyncIterator[tuple[str, asyncio.Future[Any]]]:
    """Run a coordinator for the length of the block.

    The block gets the bound address, and a future that is done early only if the coordinator fails (its
    database fails); its error is raised when the block ends. `fence` is the slot that it holds, on a database
    that it shares with the `fleet`, and `connections` are the store's, as `open_connections` opens them.
    `new_worker` makes each of the solver's workers.
    """
    # A failed first start leaves no database and no operator's token behind: what may fail comes before the
    # database, and a new token's file is removed if anything fails after it.
    port = Port(settings)
    signals = [
        NamedSignal(name, SignalKind(some.kind), some.feeds, open_source(name, some))
        for name, some in settings.signals.items()
    ]
    async with contextlib.AsyncExitStack() as stack:
        http = None
        if settings.http is not None:
            http = stack.enter_context(await asyncio.to_thread(bind, settings.http))
        await asyncio.to_thread(check_free, settings.listen)
        starting = stack.enter_context(contextlib.ExitStack())
        secret = None
        if not settings.insecure:
            secret = await asyncio.to_thread(_operator_token, settings.operator_token_file, starting)
        if settings.dask is not None and find_spec("distributed") is None:
            raise DaskMissingError
        store = await SqlStore.open(settings.database, fence=fence, connections=connections)
        stack.push_async_callback(store.close)
        percent = settings.solver_hull_tolerance_percent
        tolerance = None if percent is None else percent / 100
        # Other clients' work must not delay ours: jobs train meanwhile.
        cluster = None if settings.dask is None else DaskCluster(settings.dask, priority=1)
        job_solver = WorkerPool(
            JOBS,
            settings.solver_processes,
            settings.solver_limit_s,
            hull_tolerance=tolerance,
            cluster=cluster,
            cluster_share=lambda thread_count: max(1, thread_count - settings.request_processes),
            new_worker=new_worker,
        )
        stack.callback(job_solver.close)
        request_solver = WorkerPool(
            REQUESTS,
            settings.request_processes,
            settings.request_limit_s,
            hull_tolerance=tolerance,
            cluster=cluster,
            cluster_share=lambda thread_count: min(thread_count, settings.request_processes),
            new_worker=new_worker,
        )
        stack.callback(request_solver.close)
        if cluster is not None:
            stack.push_async_callback(_cancel, background_task("Dask cluster", cluster.run()))
        feeds = Feeds(
            {name: some.feed(name) for name, some in settings.feeds.items()},
            {name: some.hosts for name, some in settings.feeds.items()},
            [name for name, some in settings.feeds.items() if some.fail_safe == "last plan"],
        )
        coordinator = Coordinator(
            store,
            job_solver,
            request_solver,
            rules=settings,
            retention=settings,
            limits=settings,
            rates=Rates(settings.price_per_kwh, settings.intensity_g_per_kwh),
            feeds=feeds,
            signals=signals,
            fleet=fleet,
        )
        try:
            await coordinator.start()
        except DatabaseUnreadableError as error:
            raise (error.__cause__ or error) from None
        background = asyncio.ensure_future(coordinator.run())
        address = None
        try:
            if secret is not None:
                await coordinator.tokens.adopt(secret)
                log.info("the operator's token is in a file", path=str(settings.operator_token_file))
            async with _listening(coordinator, settings, port, http) as address:
                starting.pop_all()
                yield address, background
        finally:
            await coordinator.close()
            # Entries that wait for the next commit are stored too, unless the store has failed.
            storing = asyncio.ensure_future(coordinator.flush())
            await asyncio.wait(
                {background, storing},
                timeout=settings.shutdown_grace_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            storing.cancel()
            background.cancel()
            if address is not None:
                log.info("stopped")
            with contextlib.suppress(asyncio.CancelledError):
                await background


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _operator_token(path: Path, starting: contextlib.ExitStack) -> str:
    """Return the token in the operator's file; if there is none, write one, which `starting` removes again.

    Raises:
        TokenFileUnusableError: it can't be read or written, or others can read or write it.
    """
    new = new_secret()
    try:
        secret = own_token(path, new)
    except TokenFileError as error:
        raise TokenFileUnusableError(cause=error) from None
    if secret == new:
        starting.callback(path.unlink, missing_ok=True)
    return secret


def _has_a_caller(record: logging.LogRecord) -> bool:
    """Keep a record of gRPC's, unless it says that a caller was gone before its answer could be sent."""
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or kind.__name__ != "ExecuteBatchError"


@contextlib.asynccontextmanager
async def _listening(
    coordinator: Coordinator, settings: CoordinatorSettings, port: Port, http: socket.socket | None
) -> AsyncIterator[str]:
    grants = {name: Grant.parse(text) for name, text in settings.certificate_scopes.items()}
    asking = NoAuthentication() if settings.insecure else Authentication(coordinator.tokens, grants)
    # Callers are authenticated before their requests are decoded.
    options = [*_OPTIONS, ("grpc.max_receive_message_length", settings.limit_message_bytes)]
    logging.getLogger("grpc._cython.cygrpc").addFilter(_has_a_caller)
    server = grpc.aio.server(
        interceptors=[Releasing(), asking, Decoding()], options=options, maximum_concurrent_rpcs=_MAX_CALLS
    )
    AgentService(coordinator.agents, coordinator.quotas).add_to(server)
    info_service_pb2_grpc.add_InfoServiceServicer_to_server(InfoService(coordinator.fleet), server)
    job_service_pb2_grpc.add_JobServiceServicer_to_server(
        JobService(coordinator.jobs, coordinator.quotas, coordinator.agents.unmarked), server
    )
    frontier_service_pb2_grpc.add_FrontierServiceServicer_to_server(
        FrontierService(coordinator.jobs, coordinator.quotas), server
    )
    ledger_service_pb2_grpc.add_LedgerServiceServicer_to_server(
        LedgerService(coordinator.ledger, coordinator.quotas), server
    )
    power_service_pb2_grpc.add_PowerServiceServicer_to_server(
        PowerService(coordinator.power, coordinator.quotas), server
    )
    token_service_pb2_grpc.add_TokenServiceServicer_to_server(TokenService(coordinator.tokens), server)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    enable_reflection((*_SERVICES, health.SERVICE_NAME), server)
    try:
        address = port.bind(server)
    except AddressUnavailableError:
        await server.start()  # a server that never ran can't be stopped, and keeps its files open
        await server.stop(None)
        raise
    await server.start()
    await _set_health(health_servicer, is_serving=True)
    log.info("listening", address=address)
    try:
        with Watchdog(settings.late_limit_s) as watchdog:
            watching = background_task(
                "health", _watch_health(coordinator, health_servicer, watchdog, settings.late_limit_s)
            )
            try:
                async with _serving_http(coordinator, settings, port, http, grants):
                    yield address
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
    finally:
        await health_servicer.enter_graceful_shutdown()
        coordinator.drain()
        await server.stop(settings.shutdown_grace_s)
        await port.close()


@contextlib.asynccontextmanager
async def _serving_http(
    coordinator: Coordinator,
    settings: CoordinatorSettings,
    port: Port,
    http: socket.socket | None,
    grants: Mapping[str, Grant],
) -> AsyncIterator[None]:
    """Serve the page and the metrics over HTTP for the length of the block, if the settings ask for it."""
    if settings.http is None or http is None:
        yield
        return
    tls = port.tls
    collector = CoordinatorCollector(
        coordinator,
        has_ranks=settings.metrics_ranks,
        late_limit_s=settings.late_limit_s,
        expiries_s=partial(_expiries_s, port),
        refusal_counts=refusal_counts,
    )
    jobs, quotas, slot = coordinator.jobs, coordinator.quotas, coordinator.fleet.served or 0
    access = None if settings.insecure else HttpAuthenticator(coordinator.tokens, grants, slot)
    calls = [
        *unary_calls(_JOB_SERVICE, JobService(jobs, quotas, coordinator.agents.unmarked)),
        *unary_calls(_FRONTIER_SERVICE, FrontierService(jobs, quotas), but_for=("Solve",)),
        *unary_calls(_LEDGER_SERVICE, LedgerService(coordinator.ledger, coordinator.quotas)),
        *unary_calls(_POWER_SERVICE, PowerService(coordinator.power, quotas), but_for=_NOT_ON_THE_PAGE),
    ]
    app = make_app(
        Scrape(collector.collect),
        None if is_local(settings.http) else access,
        PageApi(coordinator, calls, access),
        packaged_page(),
        _hosts(settings),
    )
    async with listening(app, http, tls, settings.shutdown_grace_s):
        yield


def _expiries_s(port: Port) -> Mapping[str, float]:
    return port.tls.material.expiries_s if port.tls is not None else {}


def _hosts(settings: CoordinatorSettings) -> Hosts:
    """Return the host names accepted over HTTP: the addresses' own, and those in the settings."""
    found = (host_and_port(settings.http or ""), host_and_port(settings.advertise or ""))
    own = (each[0] for each in found if each is not None)
    names = (name.strip().lower() for name in (*own, *settings.http_hosts.split(",")))
    return Hosts(frozenset(filter(None, names)), are_metrics_free=not is_local(settings.http or ""))


async def _watch_health(
    coordinator: Coordinator, servicer: health.aio.HealthServicer, watchdog: Watchdog, limit_s: float
) -> None:
    """Report NOT_SERVING while the coordinator is late, and SERVING otherwise; log each change once."""
    is_late = False
    while True:
        watchdog.reset()
        late_s = coordinator.late_s()
        if is_late is not (late_s > limit_s):
            is_late = not is_late
            if is_late:
                log.error("the coordinator is late: health reports NOT_SERVING", late_s=round(late_s, 3))
            else:
                log.warning("the coordinator is on time again: health reports SERVING")
            await _set_health(servicer, is_serving=not is_late)
        await asyncio.sleep(min(_HEALTH_PERIOD_S, limit_s / 4))


async def _set_health(servicer: health.aio.HealthServicer, *, is_serving: bool) -> None:
    status = (
        health_pb2.HealthCheckResponse.SERVING if is_serving else health_pb2.HealthCheckResponse.NOT_SERVING
    )
    for service in ("", *_SERVICES):
        await servicer.set(service, status)
