"""The reader of an engine's metrics ends each scrape in time, whatever the port sends."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
import structlog

from perseus.agent.sidecar import engine_metrics
from perseus.agent.sidecar.engine_metrics import MetricsReader
from perseus.serving.scrape import EngineTotals

PAGE = b"vllm:num_requests_running 1\nvllm:num_requests_waiting 0\n"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"


@contextmanager
def trickling(begin: bytes) -> Iterator[tuple[int, threading.Event]]:
    """Yield the port of a server that sends this, and then a byte now and then, for as long as it can.

    The event is set when a client has given up on a scrape.
    """
    ended, given_up = threading.Event(), threading.Event()

    def serve() -> None:
        while not ended.is_set():
            with suppress(OSError):
                connection, _ = server.accept()
                with connection:
                    connection.sendall(begin)
                    try:
                        while not ended.wait(0.01):
                            connection.sendall(b"x")
                    except OSError:
                        given_up.set()

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1], given_up
        finally:
            ended.set()
            thread.join()


@pytest.mark.parametrize("begin", [b"", HEAD], ids=["headers", "body"])
def test_a_scrape_that_trickles_is_given_up(begin: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_metrics, "_TIMEOUT_S", 0.1)
    with structlog.testing.capture_logs() as logged, trickling(begin) as (port, given_up):
        reader = MetricsReader("127.0.0.1", port, lambda *_: None)
        assert given_up.wait(60)
        reader.close()
    (warning,) = logged
    assert warning["reason"] in ("expected a whole answer within 0.1 s", "timed out")


def test_answers_are_read_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_metrics, "INTERVAL_S", 0.01)
    totals, enough = [], threading.Event()

    def serve() -> None:
        connection, _ = server.accept()
        with connection, suppress(OSError):
            while connection.recv(4096):
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(PAGE) + PAGE)

    def take(at_s: float, scraped: EngineTotals) -> None:
        totals.append((at_s, scraped.running_count))
        if len(totals) == 3:
            enough.set()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        reader = MetricsReader("127.0.0.1", server.getsockname()[1], take)
        assert enough.wait(60)
        reader.close()
        thread.join()
    assert [count for _, count in totals[:3]] == [1, 1, 1]
    assert totals[0][0] < totals[1][0] < time.monotonic()
