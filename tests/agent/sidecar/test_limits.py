"""Limits on a user's cost to the agent: connections, silence, bytes, files, time on the event loop."""

import asyncio
import contextlib
import errno
import grp
import os
import resource
import socket
import stat
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from perseus.agent.link.packets import (
    MAX_OBJECTS,
    MAX_PACKET_BYTES,
    Finish,
    MalformedPacket,
    Reply,
    decode,
    encode,
)
from perseus.agent.sidecar import local
from perseus.agent.sidecar.local import (
    ALL_BYTES_PER_S,
    BURST_BYTES,
    HELLO_BYTES,
    MAX_CONNECTIONS_PER_USER,
    USER_BYTES_PER_S,
    LocalServer,
    NoSuchGroupError,
    ProbeConnection,
    SocketAccess,
    TokenBucket,
)
from perseus.agent.sidecar.peer import Peer, UnknownPeerError, identify
from tests.agent.coordinator_stub import until
from tests.tiers import reference_loop_s

OPEN = SocketAccess(0o666)


async def drain(line: ProbeConnection) -> None:
    while await line.receive():
        pass


@pytest.fixture
def knocks() -> Iterator["list[socket.socket]"]:
    made: list[socket.socket] = []
    yield made
    for each in made:
        each.close()


async def knock(path: Path, made: list[socket.socket]) -> socket.socket:
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.append(probe)
    await asyncio.to_thread(probe.connect, str(path))
    probe.setblocking(False)
    return probe


async def reply_to(probe: socket.socket) -> Reply:
    reply = decode(await asyncio.get_running_loop().sock_recv(probe, MAX_PACKET_BYTES))
    assert isinstance(reply, Reply)
    return reply


async def test_a_user_has_a_limited_number_of_connections_and_may_reuse_them(
    tmp_path: Path, knocks: list[socket.socket]
) -> None:
    path = tmp_path / "agent.sock"
    server = LocalServer(path, OPEN, drain)
    for _ in range(MAX_CONNECTIONS_PER_USER):
        await knock(path, knocks)
    refused = await reply_to(await knock(path, knocks))
    assert (refused.ok, refused.reason) == (False, "TOO_MANY_CONNECTIONS")
    knocks[0].close()
    await asyncio.sleep(0.1)
    heard = await knock(path, knocks)
    await asyncio.sleep(0.05)
    with pytest.raises(BlockingIOError):
        heard.recv(1)  # neither refused nor closed
    await server.close()


@pytest.mark.parametrize("free_count", [0, 1])
async def test_without_free_file_descriptors_clients_wait(
    free_count: int, tmp_path: Path, knocks: list[socket.socket]
) -> None:
    """Running out of file descriptors only pauses: waiting clients are served once some are free.

    A single one suffices to accept a client, but not to look up who it is.
    """
    path = tmp_path / "agent.sock"
    heard: asyncio.Queue[object] = asyncio.Queue()

    async def serve(line: ProbeConnection) -> None:
        await heard.put(*await line.receive())

    server = LocalServer(path, OPEN, serve)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    first = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    knocks.append(first)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    hogs: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 8, before[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                hogs.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(free_count):
            os.close(hogs.pop())
        first.connect(str(path))
        first.send(encode(Finish(7)))
        await asyncio.sleep(0.3)
        assert heard.empty(), "there is no descriptor for it"
    finally:
        for hog in hogs:
            os.close(hog)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert await asyncio.wait_for(heard.get(), 5) == Finish(7)
    await server.close()


async def test_a_client_waits_if_no_descriptor_is_left_for_its_process(
    tmp_path: Path, knocks: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older kernels have no pidfd of the peer, and the agent opens several files for it."""
    path = tmp_path / "agent.sock"
    heard: asyncio.Queue[object] = asyncio.Queue()
    failures = [OSError(errno.EMFILE, "Too many open files")] * 2

    def identify_later(connection: socket.socket) -> Peer:
        if failures:
            raise UnknownPeerError("process 7, which connected, has ended") from failures.pop()
        return identify(connection)

    async def serve(line: ProbeConnection) -> None:
        await heard.put(*await line.receive())

    monkeypatch.setattr(local, "identify", identify_later)
    monkeypatch.setattr(local, "_NO_ROOM_PAUSE_S", 0.01)
    server = LocalServer(path, OPEN, serve)
    for iteration in (7, 8):
        (await knock(path, knocks)).send(encode(Finish(iteration)))
    assert [await heard.get() for _ in range(2)] == [Finish(7), Finish(8)]
    failures += [OSError(errno.EMFILE, "Too many open files")] * 1000
    await knock(path, knocks)
    await until(lambda: len(failures) < 1000, "a client that still waits when the server closes")
    await server.close()


async def test_more_files_may_be_open_than_a_login_shell_allows(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    try:
        server = LocalServer(tmp_path / "agent.sock", OPEN, drain)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(before[1], 65_536)
        await server.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_bucket_fills_at_a_rate_up_to_a_burst() -> None:
    bucket = TokenBucket(0.0)
    bucket.spend(BURST_BYTES, 0.0)
    assert bucket.wait_s() == 0.0
    bucket.spend(ALL_BYTES_PER_S // 2, 0.0)
    assert bucket.wait_s() == pytest.approx(1.0)
    assert not bucket.is_full(2.0)
    bucket.spend(0, 2.0)
    assert bucket.wait_s() == 0.0
    assert bucket.is_full(60.0)
    bucket.spend(BURST_BYTES, 1000.0)
    assert bucket.wait_s() == 0.0, "unused rate does not accumulate"


def test_all_users_share_a_rate_and_quiet_ones_do_not_wait() -> None:
    of_all = TokenBucket(0.0, ALL_BYTES_PER_S)
    loud = [TokenBucket(0.0, of_all=of_all) for _ in range(10)]
    modest = TokenBucket(0.0, of_all=of_all)
    packet, message = 2048, dict.fromkeys(loud, 0)
    may_go_on_s = dict.fromkeys(loud, 0.0)
    for step in range(10_000):
        now_s = step / 1000
        for each in loud:
            if now_s >= may_go_on_s[each]:
                each.spend(packet, now_s)
                message[each] += packet
                may_go_on_s[each] = now_s + each.wait_s()
        if step % 100 == 0:  # 10 packets a second
            modest.spend(packet, now_s)
            assert modest.wait_s() == 0.0
    # Each has spent half of its burst before it waits for others.
    maximum = ALL_BYTES_PER_S * 10 + BURST_BYTES * (1 + len(loud) / 2)
    assert sum(message.values()) <= 1.1 * maximum
    assert max(message.values()) <= 1.2 * min(message.values())


async def test_hellos_are_inspected_no_faster_than_marks_are_read() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    now_s = time.monotonic()
    bucket = TokenBucket(now_s)
    line = ProbeConnection(ours, identify(ours), bucket)
    for _ in range(BURST_BYTES // HELLO_BYTES):
        await line.pay_hello()
    assert bucket.wait_s() == 0.0
    paying = asyncio.create_task(line.pay_hello())
    await asyncio.sleep(0)
    assert not paying.done()
    assert bucket.wait_s() == pytest.approx(HELLO_BYTES / USER_BYTES_PER_S, rel=0.5)
    paying.cancel()
    await asyncio.gather(paying, return_exceptions=True)
    line.close()
    theirs.close()


def worst_packets() -> list[bytes]:
    computations = b'{"version":2,"type":"registration","spec":{"x":[' + b'{"kind":1},' * (MAX_OBJECTS - 2)
    texts = b'{"version":2,"type":"registration","spec":{"x":[' + b'"",' * (4 * MAX_OBJECTS - 40)
    tail = b'0]},"request_id":"","spec_fingerprint":""}'
    return [
        zlib.compress(computations + tail, 9),
        zlib.compress(texts + tail, 9),
        zlib.compress(b'{"x":[' + b"{}," * 1_200_000),
        zlib.compress(b" " * 2**27)[:MAX_PACKET_BYTES],
        b"[" * MAX_PACKET_BYTES,
    ]


@pytest.mark.parametrize("index", range(5))
async def test_the_worst_packets_do_not_block_the_loop(index: int) -> None:
    """By a reference loop; the best of a few attempts, since a shared machine may take the core away."""
    packet = worst_packets()[index]
    assert len(packet) <= MAX_PACKET_BYTES
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(0.0005)  # as the agent does
    try:
        without_a_turn_s = [await longest_without_a_turn_s(packet)]
        references_s = [reference_loop_s()]
        while without_a_turn_s[-1] >= 4 * references_s[-1] and len(without_a_turn_s) < 8:
            without_a_turn_s.append(await longest_without_a_turn_s(packet))
            references_s.append(reference_loop_s())
    finally:
        sys.setswitchinterval(before_s)
    assert without_a_turn_s[-1] < 4 * references_s[-1], (without_a_turn_s, references_s)


async def longest_without_a_turn_s(packet: bytes) -> float:
    """Return the process's longest CPU time between two turns of the loop while a packet is read."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    line = ProbeConnection(ours, identify(ours))
    theirs.send(packet)
    reading = asyncio.create_task(line.receive())
    at_s = time.process_time()
    longest_s = 0.0
    while not reading.done():
        await asyncio.sleep(0)
        now_s = time.process_time()
        longest_s, at_s = max(longest_s, now_s - at_s), now_s
    with contextlib.suppress(MalformedPacket):
        await reading
    line.close()
    theirs.close()
    return longest_s


# --- The socket's file --------------------------------------------------------------------------------------


async def test_an_unknown_group_is_an_error_and_leaves_no_files(tmp_path: Path) -> None:
    with pytest.raises(NoSuchGroupError, match=r"socket_group: expected a group.*'no-such-group': this"):
        LocalServer(tmp_path / "agent.sock", SocketAccess(0o660, "no-such-group"), drain)
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file to any group")
async def test_the_socket_belongs_to_the_configured_group(tmp_path: Path) -> None:
    server = LocalServer(tmp_path / "agent.sock", SocketAccess(0o660, "daemon"), drain)
    found = (tmp_path / "agent.sock").stat()
    assert (found.st_gid, stat.S_IMODE(found.st_mode)) == (grp.getgrnam("daemon").gr_gid, 0o660)
    await server.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for whom this is logged")
@pytest.mark.parametrize(("mode", "is_sent"), [(0o600, True), (0o660, True), (0o666, False), (0o602, False)])
async def test_a_socket_for_root_only_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, is_sent: bool
) -> None:
    monkeypatch.setattr(local, "DEFAULT_GROUP", "no-such-group")
    with capture_logs() as logs:
        server = LocalServer(tmp_path / "agent.sock", SocketAccess(mode), drain)
    assert [line["event"] for line in logs] == (["only root may connect"] if is_sent else [])
    await server.close()


async def test_the_umask_neither_opens_nor_closes_the_socket(tmp_path: Path) -> None:
    for umask in (0, 0o777):
        before = os.umask(umask)
        try:
            server = LocalServer(tmp_path / "agent.sock", SocketAccess(0o660), drain)
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / "agent.sock").stat().st_mode) == 0o660
        await server.close()
        assert os.listdir(tmp_path) == []


async def test_another_agents_socket_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    first = LocalServer(path, OPEN, drain)
    path.unlink()
    second = LocalServer(path, OPEN, drain)
    await first.close()
    assert path.exists()
    await second.close()
    await until(lambda: not path.exists(), "the socket gone")
