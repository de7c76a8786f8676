import asyncio
import socket
import stat
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from perseus.agent.link.computation import Rank
from perseus.agent.link.packets import (
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
from perseus.agent.sidecar.local import LocalServer, ProbeConnection, SocketAccess, SocketInUseError
from perseus.agent.sidecar.peer import identify


async def drain(line: ProbeConnection) -> None:
    while await line.receive():
        pass


ACCESS = SocketAccess()


async def test_the_socket_is_for_its_group_and_removed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "run" / "perseus" / "agent.sock"
    server = LocalServer(path, ACCESS, drain)
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    assert [entry.name for entry in path.parent.iterdir()] == ["agent.sock"]
    await server.close()
    assert not path.exists()


async def test_a_dead_agents_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    left = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    left.bind(str(path))
    left.close()
    server = LocalServer(path, ACCESS, drain)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.connect(str(path))
    await server.close()


async def test_a_path_that_is_taken_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    server = LocalServer(path, ACCESS, drain)
    with pytest.raises(SocketInUseError, match="expected no agent there, found one that listens"):
        LocalServer(path, ACCESS, drain)
    await server.close()
    path.write_text("precious")
    with pytest.raises(SocketInUseError, match="found something else"):
        LocalServer(path, ACCESS, drain)
    assert path.read_text() == "precious"


async def test_a_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 120)
    with pytest.raises(OSError, match="expected a socket path of at most 107 bytes, found"):
        LocalServer(path, ACCESS, drain)


def pair() -> tuple[ProbeConnection, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return ProbeConnection(ours, identify(ours)), theirs


async def test_a_packet_is_a_message_and_the_end_is_empty() -> None:
    line, probe = pair()
    for time_ns in range(200):
        probe.send(encode(Finish(time_ns)))
    probe.close()
    assert [[*await line.receive()] for _ in range(201)] == [*([Finish(n)] for n in range(200)), []]
    line.close()


async def test_messages_before_an_abrupt_end_are_received() -> None:
    line, probe = pair()
    line.reply(Reply(True))  # never read: the kernel reports a reset first
    probe.send(encode(Finish(1)))
    probe.close()
    assert await line.receive() == [Finish(1)]
    assert not await line.receive()
    line.close()


async def test_packed_marks_are_received_together_and_in_order() -> None:
    line, probe = pair()
    marks = [WaitMark(edge, 3, time_ns) for time_ns in range(32) for edge in Edge]
    probe.send(b"".join(map(encode, marks)))
    assert await line.receive() == marks
    probe.send(b"".join(map(encode, [*marks, *marks[:1]])))
    with pytest.raises(MalformedPacket, match="marks: expected at most 2048 bytes, found 2080"):
        await line.receive()
    probe.send(encode(marks[0]) + b"P")
    with pytest.raises(MalformedPacket, match="mark: expected 32 bytes, found 1"):
        await line.receive()
    line.close()
    probe.close()


async def test_others_have_a_turn_between_two_full_packets_of_marks() -> None:
    line, probe = pair()
    packet = encode(WaitMark(Edge.BEGIN, 0, 1)) * 64
    turns: list[str] = []
    for _ in range(3):
        probe.send(packet)
    asyncio.get_running_loop().call_soon(turns.append, "another")
    await line.receive()
    assert not turns
    await line.receive()
    assert turns == ["another"]
    line.close()
    probe.close()


async def test_a_probe_hears_of_packing_after_its_hello_is_answered_and_of_changes_only() -> None:
    line, probe = pair()
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
    line.close()
    probe.close()


async def test_a_conversation_that_does_not_read_now_does_not_keep_the_loop_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line, probe = pair()
    probe.send(encode(Finish(1)))
    reading = asyncio.create_task(line.receive())
    assert await reading == [Finish(1)]
    reading = asyncio.create_task(line.receive())
    await asyncio.sleep(0)
    probe.send(encode(Finish(2)))
    assert await reading == [Finish(2)]
    probe.send(encode(Finish(3)))  # nobody reads it yet
    loop = asyncio.get_running_loop()
    selector = loop._selector  # type: ignore[attr-defined]
    select = Mock(wraps=selector.select)
    monkeypatch.setattr(selector, "select", select)
    await asyncio.sleep(0.3)
    assert select.call_count < 20, "expected no turns of the loop but a few"
    assert await line.receive() == [Finish(3)]
    line.close()
    probe.close()


TRAINER_WITH_CHILD = """
import socket, subprocess, sys, time
line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
line.connect(sys.argv[1])
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], pass_fds=[line.fileno()])
line.send(sys.argv[2].encode())
time.sleep(60)
"""


def started(command: list[str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(command, stdin=subprocess.PIPE)


async def test_the_end_of_a_process_is_seen_although_a_child_holds_its_connection(tmp_path: Path) -> None:
    heard: asyncio.Queue[object] = asyncio.Queue()

    async def serve(line: ProbeConnection) -> None:
        while messages := await line.receive():
            await heard.put(*messages)
        await heard.put(None)

    server = LocalServer(tmp_path / "sock", ACCESS, serve)
    hello = Hello(Rank("job", 0, 0, 0), "GPU-0")
    command = [sys.executable, "-c", TRAINER_WITH_CHILD, str(tmp_path / "sock"), encode(hello).decode()]
    with started(command) as trainer:
        assert await asyncio.wait_for(heard.get(), 10) == hello
        trainer.kill()
        assert await asyncio.wait_for(heard.get(), 10) is None
        await server.close()
        # The end of its standard input ends the child.


async def test_a_packet_that_is_too_large_is_refused() -> None:
    line, probe = pair()
    probe.send(b"{" * (MAX_PACKET_BYTES + 10))
    with pytest.raises(MalformedPacket, match="expected 1 to 131072 bytes, found 131073"):
        await line.receive()
    line.close()
    probe.close()


async def test_a_probe_that_reads_nothing_does_not_block_a_reply() -> None:
    line, probe = pair()
    for _ in range(1000):
        line.reply(Reply(True))
    assert decode(probe.recv(MAX_PACKET_BYTES)) == Reply(True)
    probe.close()
    line.reply(Reply(True))
    line.close()


async def test_a_conversation_that_fails_does_not_end_the_others(tmp_path: Path) -> None:
    heard: asyncio.Queue[object] = asyncio.Queue()

    async def serve(line: ProbeConnection) -> None:
        messages = await line.receive()
        if messages == [Finish(1)]:
            raise KeyError
        await heard.put(*messages)

    server = LocalServer(tmp_path / "agent.sock", ACCESS, serve)
    for time_ns in (1, 2):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            probe.connect(str(tmp_path / "agent.sock"))
            probe.send(encode(Finish(time_ns)))
    assert await heard.get() == Finish(2)
    await server.close()
