"""The local socket: its file, its conversations, and the limits on a user's cost to the agent.

The limits are on connections, silence, bytes, files and time on the event loop.
"""

import asyncio
import contextlib
import errno
import grp
import os
import resource
import socket
import stat
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from structlog.testing import capture_logs

from perseus.agent.link.computation import Rank
from perseus.agent.link.packets import (
    MAX_OBJECTS,
    MAX_PACKET_BYTES,
    Edge,
    Finish,
    Hello,
    MalformedPacket,
    Packing,
    Reply,
    WaitMark,
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
    SocketInUseError,
    TokenBucket,
)
from perseus.agent.sidecar.peer import Peer, UnknownPeerError, identify
from tests.agent.coordinator_stub import until

Serve = Callable[[ProbeConnection], Awaitable[None]]
Pair = tuple[ProbeConnection, socket.socket]


async def answer(line: ProbeConnection) -> None:
    while await line.receive():
        line.reply(Reply(True))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "agent.sock"


@pytest.fixture
async def listen(path: Path) -> AsyncIterator[Callable[..., LocalServer]]:
    """Starts servers, which end with the test."""
    servers: list[LocalServer] = []

    def listen(serve: Serve = answer, access: SocketAccess | None = None) -> LocalServer:
        servers.append(LocalServer(path, access or SocketAccess(), serve))
        return servers[-1]

    yield listen
    for server in servers:
        await server.close()


Listen = Callable[..., LocalServer]


@pytest.fixture
def heard() -> asyncio.Queue[object]:
    return asyncio.Queue()


@pytest.fixture
def hear(heard: asyncio.Queue[object]) -> Serve:
    """Keeps the messages of a conversation, and None at its end."""

    async def hear(line: ProbeConnection) -> None:
        while messages := await line.receive():
            await heard.put(*messages)
        await heard.put(None)

    return hear


@pytest.fixture
def knock(path: Path) -> Iterator[Callable[[], Awaitable[socket.socket]]]:
    """Connects clients."""
    made: list[socket.socket] = []

    async def knock() -> socket.socket:
        made.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        await asyncio.to_thread(made[-1].connect, str(path))
        made[-1].setblocking(False)
        return made[-1]

    yield knock
    for each in made:
        each.close()


Knock = Callable[[], Awaitable[socket.socket]]


async def reply_to(probe: socket.socket, message: Finish) -> Reply:
    with contextlib.suppress(OSError):  # it may be refused already
        probe.send(encode(message))
    reply = decode(await asyncio.get_running_loop().sock_recv(probe, MAX_PACKET_BYTES))
    assert isinstance(reply, Reply)
    return reply


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    """The agent's end of a conversation, and its probe's."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    line = ProbeConnection(ours, identify(ours))
    yield line, theirs
    line.close()
    theirs.close()


# --- The socket's file --------------------------------------------------------------------------------------


async def test_a_dead_agents_socket_is_replaced(path: Path, listen: Listen, knock: Knock) -> None:
    left = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    left.bind(str(path))
    left.close()
    listen()
    await knock()


async def test_a_path_that_is_taken_is_left_alone(tmp_path: Path, listen: Listen) -> None:
    path = tmp_path / "agent.sock"
    server = LocalServer(path, SocketAccess(), answer)
    with pytest.raises(SocketInUseError, match="expected no agent there, found one that listens"):
        listen()
    await server.close()
    path.write_text("precious")
    with pytest.raises(SocketInUseError, match="found something else"):
        listen()
    assert path.read_text() == "precious"


async def test_another_agents_socket_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    first = LocalServer(path, SocketAccess(), answer)
    path.unlink()
    second = LocalServer(path, SocketAccess(), answer)
    await first.close()
    assert path.exists()
    await second.close()
    await until(lambda: not path.exists(), "the socket gone")


async def test_a_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="expected a socket path of at most 107 bytes, found"):
        LocalServer(tmp_path / ("x" * 120), SocketAccess(), answer)


async def test_an_unknown_group_is_an_error_and_leaves_no_files(tmp_path: Path, listen: Listen) -> None:
    with pytest.raises(NoSuchGroupError, match=r"socket_group: expected a group.*'no-such-group': this"):
        listen(access=SocketAccess(0o660, "no-such-group"))
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file to any group")
async def test_the_socket_belongs_to_the_configured_group(tmp_path: Path, listen: Listen) -> None:
    path = tmp_path / "agent.sock"
    listen(access=SocketAccess(0o660, "daemon"))
    found = path.stat()
    assert (found.st_gid, stat.S_IMODE(found.st_mode)) == (grp.getgrnam("daemon").gr_gid, 0o660)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for whom this is logged")
@pytest.mark.parametrize(("mode", "is_sent"), [(0o600, True), (0o660, True), (0o666, False), (0o602, False)])
async def test_a_socket_for_root_only_is_logged(
    listen: Listen, monkeypatch: pytest.MonkeyPatch, mode: int, is_sent: bool
) -> None:
    monkeypatch.setattr(local, "DEFAULT_GROUP", "no-such-group")
    with capture_logs() as logs:
        listen(access=SocketAccess(mode))
    assert [line["event"] for line in logs] == (["only root may connect"] if is_sent else [])


async def test_the_umask_neither_opens_nor_closes_the_socket(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    for umask in (0, 0o777):
        before = os.umask(umask)
        try:
            server = LocalServer(path, SocketAccess(), answer)
        finally:
            os.umask(before)
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        await server.close()
        assert os.listdir(path.parent) == []


# --- Conversations ------------------------------------------------------------------------------------------


async def test_messages_before_an_abrupt_end_are_received(pair: Pair) -> None:
    line, probe = pair
    line.reply(Reply(True))  # never read: the kernel reports a reset first
    probe.send(encode(Finish(1)))
    probe.close()
    assert await line.receive() == [Finish(1)]
    assert not await line.receive()


async def test_packed_marks_are_received_together_and_in_order(pair: Pair) -> None:
    line, probe = pair
    marks = [WaitMark(edge, 3, time_ns) for time_ns in range(32) for edge in Edge]
    probe.send(b"".join(map(encode, marks)))
    assert await line.receive() == marks


@pytest.mark.parametrize(
    ("packet", "expected"),
    [
        (encode(WaitMark(Edge.BEGIN, 3, 0)) * 65, "marks: expected at most 2048 bytes, found 2080"),
        (encode(WaitMark(Edge.BEGIN, 3, 0)) + b"P", "mark: expected 32 bytes, found 1"),
        (b"{" * (MAX_PACKET_BYTES + 10), "expected 1 to 131072 bytes, found 131073"),
    ],
    ids=["too many marks", "part of a mark", "too large"],
)
async def test_a_malformed_packet_is_refused(pair: Pair, packet: bytes, expected: str) -> None:
    line, probe = pair
    probe.send(packet)
    with pytest.raises(MalformedPacket, match=expected):
        await line.receive()


async def test_others_have_a_turn_between_two_full_packets_of_marks(pair: Pair) -> None:
    line, probe = pair
    turns: list[str] = []
    for _ in range(3):
        probe.send(encode(WaitMark(Edge.BEGIN, 0, 1)) * 64)
    asyncio.get_running_loop().call_soon(turns.append, "another")
    await line.receive()
    assert not turns
    await line.receive()
    assert turns == ["another"]


async def test_a_probe_hears_of_packing_after_its_hello_is_answered_and_of_changes_only(pair: Pair) -> None:
    line, probe = pair
    probe.setblocking(False)
    line.allow_packing(True)
    with pytest.raises(BlockingIOError):
        probe.recv(1024)
    line.reply(Reply(True))
    assert [decode(probe.recv(1024)) for _ in range(2)] == [Reply(True), Packing(True)]
    line.allow_packing(True)
    line.reply(Reply(True))
    line.allow_packing(False)
    assert [decode(probe.recv(1024)) for _ in range(2)] == [Reply(True), Packing(False)]


async def test_a_conversation_that_does_not_read_now_does_not_keep_the_loop_busy(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, probe = pair
    probe.send(encode(Finish(1)))
    assert await line.receive() == [Finish(1)]
    reading = asyncio.create_task(line.receive())
    await asyncio.sleep(0)
    probe.send(encode(Finish(2)))
    assert await reading == [Finish(2)]
    probe.send(encode(Finish(3)))  # nobody reads it yet
    selector = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]
    select = Mock(wraps=selector.select)
    monkeypatch.setattr(selector, "select", select)
    await asyncio.sleep(0.3)
    assert select.call_count < 20, "expected no turns of the loop but a few"
    assert await line.receive() == [Finish(3)]


TRAINER_WITH_CHILD = """
import socket, subprocess, sys, time
line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
line.connect(sys.argv[1])
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], pass_fds=[line.fileno()])
line.send(sys.argv[2].encode())
time.sleep(60)
"""


async def test_the_end_of_a_process_is_seen_although_a_child_holds_its_connection(
    path: Path, hear: Serve, heard: asyncio.Queue[object]
) -> None:
    server = LocalServer(path, SocketAccess(), hear)
    hello = Hello(Rank("job", 0, 0, 0), "GPU-0")
    command = [sys.executable, "-c", TRAINER_WITH_CHILD, str(path), encode(hello).decode()]
    with await asyncio.to_thread(subprocess.Popen, command, stdin=subprocess.PIPE) as trainer:
        assert await asyncio.wait_for(heard.get(), 60) == hello
        trainer.kill()
        assert await asyncio.wait_for(heard.get(), 60) is None
        await server.close()
        # The end of its standard input ends the child.


async def test_a_probe_that_reads_nothing_does_not_block_a_reply(pair: Pair) -> None:
    line, probe = pair
    for _ in range(1000):
        line.reply(Reply(True))
    assert decode(probe.recv(MAX_PACKET_BYTES)) == Reply(True)
    probe.close()
    line.reply(Reply(True))


# --- Limits -------------------------------------------------------------------------------------------------


async def test_a_user_has_a_limited_number_of_connections_and_may_reuse_them(
    listen: Listen, knock: Knock
) -> None:
    listen()
    first, *_ = [await knock() for _ in range(MAX_CONNECTIONS_PER_USER)]
    refused = await reply_to(await knock(), Finish(1))
    assert (refused.ok, refused.reason) == (False, "TOO_MANY_CONNECTIONS")
    first.close()
    while True:
        if (await reply_to(await knock(), Finish(2))).ok:
            break
        await asyncio.sleep(0.01)


async def test_without_free_file_descriptors_clients_wait(
    path: Path, listen: Listen, hear: Serve, heard: asyncio.Queue[object]
) -> None:
    """Running out of file descriptors only pauses: waiting clients are served once some are free."""
    listen(hear)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as first:
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        hogs: list[int] = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 8, before[1]))
        try:
            with contextlib.suppress(OSError):
                while True:
                    hogs.append(os.open("/dev/null", os.O_RDONLY))
            first.connect(str(path))
            first.send(encode(Finish(7)))
            await asyncio.sleep(0.3)
            assert heard.empty(), "there is no descriptor for it"
        finally:
            for hog in hogs:
                os.close(hog)
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert await asyncio.wait_for(heard.get(), 60) == Finish(7)


async def test_a_client_waits_if_no_descriptor_is_left_for_its_process(
    listen: Listen, knock: Knock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older kernels have no pidfd of the peer, and the agent opens several files for it."""
    failures = [OSError(errno.EMFILE, "Too many open files")] * 2

    def identify_later(connection: socket.socket) -> Peer:
        if failures:
            raise UnknownPeerError("process 7, which connected, has ended") from failures.pop()
        return identify(connection)

    monkeypatch.setattr(local, "identify", identify_later)
    monkeypatch.setattr(local, "_NO_ROOM_PAUSE_S", 0.01)
    listen()
    for iteration in (7, 8):
        assert (await reply_to(await knock(), Finish(iteration))).ok
    failures += [OSError(errno.EMFILE, "Too many open files")] * 1000
    await knock()
    await until(lambda: len(failures) < 1000, "a client that still waits when the server closes")


async def test_more_files_may_be_open_than_a_login_shell_allows(listen: Listen) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    try:
        listen()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(before[1], 65_536)
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


class FrozenBucket(TokenBucket):
    """A bucket for which no time passes."""

    def spend(self, size: int, now_s: float) -> None:
        super().spend(size, 0.0)


async def test_hellos_are_inspected_no_faster_than_marks_are_read(pair: Pair) -> None:
    _, probe = pair
    bucket = FrozenBucket(0.0)
    line = ProbeConnection(probe, identify(probe), bucket)
    for _ in range(BURST_BYTES // HELLO_BYTES):
        await line.pay_hello()
    assert bucket.wait_s() == 0.0
    paying = asyncio.create_task(line.pay_hello())
    await asyncio.sleep(0)
    assert not paying.done()
    assert bucket.wait_s() == HELLO_BYTES / USER_BYTES_PER_S
    paying.cancel()
    await asyncio.gather(paying, return_exceptions=True)
    line.close()


async def test_a_users_connections_share_the_rate_at_which_marks_are_read(
    listen: Listen, knock: Knock, monkeypatch: pytest.MonkeyPatch
) -> None:
    packet = encode(WaitMark(Edge.BEGIN, 0, 1)) * 64
    monkeypatch.setattr(local, "BURST_BYTES", len(packet))
    monkeypatch.setattr(local, "USER_BYTES_PER_S", 1.0)  # minutes until the next packet is read
    packet_counts: list[int] = []

    async def count(line: ProbeConnection) -> None:
        number = len(packet_counts)
        packet_counts.append(0)
        while await line.receive():
            packet_counts[number] += 1

    async def read_of_four() -> int:
        probe = await knock()
        for _ in range(4):
            probe.send(packet)
        await until(lambda: packet_counts[-1:] > [0], "a packet is read")
        await asyncio.sleep(0.1)
        return packet_counts[-1]

    listen(count)
    assert await read_of_four() == 2, "one packet may overdraw what is left"
    assert await read_of_four() == 1, "nothing is left for another connection"
    assert packet_counts == [2, 1]


class Readers(ThreadPoolExecutor):
    """The thread that reads large packets; notes what it reads."""

    def __init__(self) -> None:
        super().__init__(1)
        self.packets: list[bytes] = []

    def submit(self, function: Any, /, *arguments: Any, **options: Any) -> Future[Any]:
        self.packets += arguments
        return super().submit(function, *arguments, **options)


_BEGIN, _END = (
    b'{"version":2,"type":"registration","spec":{"x":[',
    b'0]},"request_id":"","spec_fingerprint":""}',
)


@pytest.mark.parametrize(
    ("packet", "is_quick"),
    [
        pytest.param(encode(Finish(1)), True, id="a mark"),
        pytest.param(
            zlib.compress(_BEGIN + b'{"kind":1},' * (MAX_OBJECTS - 2) + _END, 9), False, id="computations"
        ),
        pytest.param(zlib.compress(_BEGIN + b'"",' * (4 * MAX_OBJECTS - 40) + _END, 9), False, id="texts"),
        pytest.param(zlib.compress(b'{"x":[' + b"{}," * 1_200_000), False, id="objects"),
        pytest.param(zlib.compress(b" " * 2**27)[:MAX_PACKET_BYTES], False, id="spaces"),
        pytest.param(b"[" * MAX_PACKET_BYTES, False, id="deep"),
    ],
)
async def test_the_worst_packets_are_not_read_on_the_event_loop(packet: bytes, is_quick: bool) -> None:
    """What may be in them is limited before they are decoded, as the tests of packets show."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with Readers() as readers, contextlib.closing(theirs):
        ours.setblocking(False)
        line = ProbeConnection(ours, identify(ours), FrozenBucket(0.0), readers)
        theirs.send(packet)
        with contextlib.suppress(MalformedPacket):
            await line.receive()
        line.close()
    assert readers.packets == ([] if is_quick else [packet])
