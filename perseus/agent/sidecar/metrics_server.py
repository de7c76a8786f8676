"""The agent's metrics over HTTP, on separate threads, so that no scraper delays marks and clocks.

Values are read on the event loop, which takes a moment, and rendered on the scraper's thread. Where other
machines can reach it, the server requires TLS and the token of a file.
"""

import asyncio
import hmac
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import structlog

from perseus.agent.link.computation import Rank
from perseus.agent.rank.messages import GpuErrorReason
from perseus.agent.restore.restorer import Restorer
from perseus.agent.sidecar.gpus import NOT_SERVED, AgentCounters
from perseus.agent.sidecar.instance import Instance
from perseus.agent.sidecar.optional import OptionalParts, part_retry
from perseus.agent.sidecar.served import ServedRank
from perseus.agent.sidecar.settings import AgentSettings
from perseus.agent.sidecar.uplink import Uplink
from perseus.metrics import names
from perseus.metrics.exposition import check_installed, render
from perseus.metrics.readings import Readings
from perseus.release import release
from perseus.tls.address import host_and_port
from perseus.tls.files import Role, TlsSource
from perseus.tls.server import server_context
from perseus.tls.tokens import TokenFileError, read_token

_HZ_PER_MHZ = 1e6


class AgentCollector:
    """Reads an agent's metrics, on its event loop. `ranks` are those served now."""

    def __init__(
        self,
        ranks: Mapping[Rank, ServedRank],
        uplink: Uplink,
        restorer: Restorer,
        counters: AgentCounters,
        optional: OptionalParts,
        instances: Mapping[str, Instance],
    ) -> None:
        self._instances = instances
        self._ranks = ranks
        self._uplink = uplink
        self._restorer = restorer
        self._counters = counters
        self.optional = optional

    def collect(self) -> Readings:
        """Read all metrics."""
        readings = Readings()
        readings.put(names.BUILD_INFO, 1, release())
        for file, expiry_s in self._uplink.first.coordinator.certificate_expiries_s.items():
            readings.put(names.CERTIFICATE_EXPIRY, expiry_s, file)
        self._read_stream(readings)
        for reason, count in sorted(self._counters.refusal_counts.items()):
            readings.put(names.AGENT_TRAINERS_REFUSED, count, reason)
        for part, count in sorted(self.optional.failure_counts.items()):
            readings.put(names.AGENT_PART_FAILURES, count, part)
        for rank, served in self._ranks.items():
            _read_rank(readings, rank, served)
        for gpu_uuid, counters in self._counters.gpus.items():
            for error in GpuErrorReason:
                readings.put(names.GPU_ERRORS, counters.error_counts[error], gpu_uuid, error.name.lower())
            if gpu_uuid != NOT_SERVED:
                readings.put(names.GPU_SETS, counters.sets, gpu_uuid)
                readings.put(names.GPU_MARKS_DROPPED, counters.dropped_mark_count, gpu_uuid)
        self._read_restores(readings)
        for name, instance in self._instances.items():
            _read_instance(readings, name, instance)
        return readings

    def _read_stream(self, readings: Readings) -> None:
        coordinators = self._uplink.coordinators
        readings.put(names.AGENT_CONNECTED, all(each.is_connected for each in coordinators))
        leases = [(each.lease_s, each.heard_at_s) for each in coordinators if each.lease_s is not None]
        if leases:
            readings.put(names.AGENT_LEASE, min(lease_s for lease_s, _ in leases))
            end_s = min(heard_at_s + lease_s for lease_s, heard_at_s in leases)
            readings.put(names.AGENT_LEASE_LEFT, max(0.0, end_s - time.monotonic()))
        readings.put(names.AGENT_BATCHES_KEPT, sum(each.telemetry.kept_count for each in coordinators))
        readings.put(names.AGENT_BATCHES, self._uplink.batch_count)
        readings.put(names.AGENT_BATCHES_DROPPED, self._uplink.dropped_batch_count)

    def _read_restores(self, readings: Readings) -> None:
        restored, failing = self._restorer.restore_counts, self._restorer.not_restored
        for gpu_uuid in sorted({*self._counters.gpus, *restored, *failing} - {NOT_SERVED}):
            readings.put(names.GPU_RESTORES, restored[gpu_uuid], gpu_uuid)
            readings.put(names.GPU_NOT_RESTORED, gpu_uuid in failing, gpu_uuid)


def _read_rank(readings: Readings, rank: Rank, served: ServedRank) -> None:
    gpu_uuid, reading = served.gpu_uuid, served.reading
    labels = (gpu_uuid, rank.job_id, str(rank.pipeline), str(rank.stage), str(rank.tensor))
    readings.put(names.GPU_RANK, 1, *labels)
    readings.put(names.GPU_CLOCK_WANTED, (served.wanted_clock_mhz or 0) * _HZ_PER_MHZ, gpu_uuid)
    readings.put(names.GPU_PLANNED, served.has_plan, gpu_uuid)
    if served.is_set_known:
        readings.put(names.GPU_CLOCK_SET, (served.set_clock_mhz or 0) * _HZ_PER_MHZ, gpu_uuid)
    foreign = served.foreign_clock
    readings.put(names.GPU_CLOCK_FOREIGN, (foreign.clock_mhz if foreign else 0) * _HZ_PER_MHZ, gpu_uuid)
    if reading is None:
        return
    if reading.sm_clock_mhz is not None:
        readings.put(names.GPU_CLOCK_IN_FORCE, reading.sm_clock_mhz * _HZ_PER_MHZ, gpu_uuid)
    readings.put(names.GPU_POWER, reading.power_w, gpu_uuid)
    readings.put(names.GPU_ENERGY, reading.energy_j, gpu_uuid)


def _read_instance(readings: Readings, name: str, instance: Instance) -> None:
    wanted_mhz, stats, savings = instance.wanted_clock_mhz, instance.latest, instance.meter.savings()
    readings.put(names.INSTANCE_CONTROLLED, wanted_mhz is not None, name)
    readings.put(names.INSTANCE_CLOCK_WANTED, (wanted_mhz or 0) * _HZ_PER_MHZ, name)
    if stats is not None:
        readings.put(names.INSTANCE_REQUESTS, stats.running_count, name, "running")
        readings.put(names.INSTANCE_REQUESTS, stats.waiting_count, name, "waiting")
        readings.put(names.INSTANCE_POWER, stats.power_w, name)
    readings.put(names.INSTANCE_ENERGY, savings.energy_j, name)
    readings.put(names.INSTANCE_TOKENS, savings.generation_tokens, name)
    readings.put(names.INSTANCE_ATTAINMENT, savings.attainment_ttft, name, "ttft")
    readings.put(names.INSTANCE_ATTAINMENT, savings.attainment_itl, name, "itl")
    readings.put(names.INSTANCE_SAVING, savings.saving, name)
    readings.put(names.INSTANCE_SAVING_UNCERTAINTY, savings.uncertainty, name)


if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

_log = structlog.get_logger(__name__)

_TIMEOUT_S = 5.0
"""For a scraper that neither sends nor reads."""

_MAX_CONCURRENT = 8


@contextmanager
def serving_metrics_of(collector: AgentCollector, settings: AgentSettings) -> Iterator[None]:
    """Serve an agent's metrics for the length of the block, if configured; call it on its event loop.

    Raises:
        MetricsUnavailableError, TlsError, TokenFileError, OSError: as `serving_metrics`.
    """
    if settings.metrics_listen is None:
        yield
        return
    loop, files = asyncio.get_running_loop(), settings.metrics_tls_files
    tls = TlsSource(files, Role.SERVER) if files is not None else None

    async def read() -> Readings:
        return collector.collect()

    def collect() -> Readings:
        readings = asyncio.run_coroutine_threadsafe(read(), loop).result(_TIMEOUT_S)
        for file, expiry_s in tls.material.expiries_s.items() if tls is not None else ():
            readings.put(names.CERTIFICATE_EXPIRY, expiry_s, file)
        return readings

    found = host_and_port(settings.metrics_listen)
    assert found is not None  # checked by the settings
    with serving_metrics(
        *found, collect, collector.optional, tls=tls, token_file=settings.metrics_token_file
    ) as (host, port):
        _log.info("metrics served", host=host, port=port)
        yield


@contextmanager
def serving_metrics(
    host: str,
    port: int,
    collect: Callable[[], Readings],
    optional: OptionalParts,
    *,
    tls: TlsSource | None = None,
    token_file: Path | None = None,
) -> Iterator[tuple[str, int]]:
    """Serve /metrics for the length of the block; yields the bound host and port.

    Scrapers' threads call `collect`.

    Raises:
        MetricsUnavailableError: prometheus-client is not installed.
        TokenFileError: the file has no token.
        OSError: the address can't be bound.
    """
    check_installed()
    if token_file is not None:
        read_token(token_file)
    server = _Server((host, port), _Quiet, tls)
    server.set_app(_app(collect, token_file))
    closing = threading.Event()

    def serve() -> None:
        retry = part_retry()
        while True:
            try:
                server.serve_forever()
                return
            except Exception as error:
                optional.failed("metrics server", error)
            if closing.wait(retry.failed(time.monotonic())):
                return

    thread = threading.Thread(target=serve, name="metrics", daemon=True)
    thread.start()
    try:
        yield host, int(server.server_address[1])
    finally:
        closing.set()
        server.shutdown()
        server.server_close()


def _app(
    collect: Callable[[], Readings], token_file: Path | None
) -> "Callable[[WSGIEnvironment, StartResponse], Iterable[bytes]]":
    def answer(environ: "WSGIEnvironment", start: "StartResponse") -> Iterable[bytes]:
        def end(
            status: str, body: bytes, content_type: str = "text/plain", *more: tuple[str, str]
        ) -> list[bytes]:
            start(status, [("Content-Type", content_type), ("Content-Length", str(len(body))), *more])
            return [body]

        if environ["PATH_INFO"] != "/metrics":
            return end("404 Not Found", b"there is /metrics only\n")
        if environ["REQUEST_METHOD"] != "GET":
            return end("405 Method Not Allowed", b"expected GET\n")
        if token_file is not None and not _shows(environ.get("HTTP_AUTHORIZATION", ""), token_file):
            return end(
                "401 Unauthorized", b"expected the token\n", "text/plain", ("WWW-Authenticate", "Bearer")
            )
        try:
            body, content_type = render(collect(), environ.get("HTTP_ACCEPT", ""))
        except Exception:  # a bug, or the agent is ending: only this scrape fails
            _log.exception("metrics not rendered")
            return end("500 Internal Server Error", b"see the agent's log\n")
        return end("200 OK", body, content_type)

    return answer


def _shows(authorization: str, token_file: Path) -> bool:
    """Whether the request has the token that the file holds now."""
    scheme, _, shown = authorization.partition(" ")
    try:
        token = read_token(token_file)
    except TokenFileError as error:
        _log.error("scraper refused", reason=str(error))
        return False
    return scheme.lower() == "bearer" and hmac.compare_digest(shown.strip().encode(), token.encode())


class _Server(ThreadingMixIn, WSGIServer):
    """A server with a thread per connection, but few at once; each thread waits for its own handshake."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64
    """Beyond this, connections take a second or more: the kernel drops their packets."""

    def __init__(
        self, address: tuple[str, int], handler: type[WSGIRequestHandler], tls: TlsSource | None
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._tls = tls
        self._generation = 0
        self._context: ssl.SSLContext | None = None
        self._lock = threading.Lock()
        # Connections in progress, oldest first.
        self._open: dict[Any, None] = {}
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Bind as the parent does, but without resolving this machine's name."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = "", int(self.server_address[1])
        self.setup_environ()

    def get_request(self) -> tuple[Any, Any]:
        connection, address = super().get_request()
        connection.settimeout(_TIMEOUT_S)
        if self._tls is None:
            return connection, address
        self._tls.poll()
        if self._generation != self._tls.generation or self._context is None:
            self._generation, self._context = self._tls.generation, server_context(self._tls.material)
        return self._context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False), address

    def process_request(self, request: Any, client_address: Any) -> None:
        """Process as the parent does, but close the oldest of too many connections: scrapes are short."""
        with self._lock:
            if len(self._open) >= _MAX_CONCURRENT:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._open[request] = None
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._open.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing when a scraper disconnects."""


class _Quiet(WSGIRequestHandler):
    """Logs no requests."""

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the parent's name
        """Log nothing."""
