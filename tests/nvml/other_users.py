"""Attacks by another user of the node on a running job.

`attack` runs as that user in a separate process and prints the outcomes as JSON. Numbers of connections and
packets are arguments: few in `make test`, many in `make torture`.
"""

import contextlib
import fcntl
import json
import os
import random
import select
import socket
import time
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path

from perseus.agent.link.computation import Computation, Kind, Rank
from perseus.agent.link.packets import (
    MAX_OBJECTS,
    MAX_PACKET_BYTES,
    ComputationMark,
    Edge,
    Hello,
    IterationMark,
    MalformedPacket,
    Membership,
    Message,
    Registration,
    Reply,
    decode,
    encode,
)
from perseus.agent.sidecar.local import HELLO_TIMEOUT_S, MAX_CONNECTIONS_PER_USER
from perseus.demo import trainer
from perseus.demo.trainer import RankTask

_REPLY_S = 20.0
_PACKETS_PER_CONNECTION = 20


@dataclass(slots=True)
class Attempts:
    """The outcomes: reasons of refusals by attempt."""

    claims: dict[str, str] = field(default_factory=dict)
    records: str = ""
    connection_count: int = 0
    held_connection_count: int = 0
    packet_count: int = 0
    accepted_count: int = 0
    hello_count: int = 0
    """The answered ones of the hellos that were sent as fast as possible."""
    mark_count: int = 0
    """Marks sent as fast as possible, on the attacker's own GPU."""


def train(task: str) -> None:
    """A rank of the demo's job."""
    trainer.train(RankTask(**json.loads(task)))


def attack(
    path: str,
    gpu_uuid: str,
    closed_uuid: str,
    own_uuid: str,
    job_id: str,
    records: str,
    connections: str,
    packets: str,
    flood_s: str,
) -> None:
    """Make all attempts in turn."""
    done = Attempts()
    mine = Rank("mine", 0, 0, 0)
    done.claims["the GPU that is trained on"] = claim(path, Hello(mine, gpu_uuid))
    done.claims["a GPU whose device is closed"] = claim(path, Hello(mine, closed_uuid))
    done.claims["the owner's rank"] = claim(path, Hello(Rank(job_id, 0, 0, 0), "GPU-none"))
    done.claims["another rank of the owner's job"] = claim(path, Hello(Rank(job_id, 0, 7, 0), "GPU-none"))
    done.claims["a rank without Hello"] = claim(path, Membership("x"))
    done.records = lock(records)
    hold_connections(path, int(connections), done)
    chance = random.Random(7)
    while done.packet_count < int(packets):
        send_malformed(path, chance, min(_PACKETS_PER_CONNECTION, int(packets) - done.packet_count), done)
    flood_with_hellos(path, closed_uuid, float(flood_s), done)
    flood_with_marks(path, own_uuid, float(flood_s), done)
    print(json.dumps(asdict(done)), flush=True)


def squat(path: str, gpu_uuid: str) -> None:
    """Claim an idle GPU before its owner, send marks as if training on it, and report the end."""
    with connected(path) as line:
        line.send(encode(Hello(Rank("squatted", 0, 0, 0), gpu_uuid)))
        reply = receive(line)
        print("squatting" if reply.ok else reply.reason, flush=True)
        line.send(encode(Membership("x")))
        line.settimeout(0.01)
        iteration = 0
        while True:
            try:
                for mark in marks(iteration):
                    line.send(encode(mark))
                iteration += 1
                print(receive(line).reason, flush=True)
                return
            except TimeoutError:
                pass
            except OSError:
                print(receive(line).reason, flush=True)
                return


def try_to_connect(path: str) -> None:
    """Say whether the socket is open to this user."""
    try:
        connected(path).close()
    except PermissionError:
        print("refused", flush=True)
    else:
        print("connected", flush=True)


def marks(iteration: int) -> list[Message]:
    """Return the marks of an iteration with one computation."""
    now_ns = time.monotonic_ns()
    computation = Computation(Kind.FORWARD, 0)
    return [
        IterationMark(Edge.BEGIN, iteration, now_ns),
        ComputationMark(Edge.BEGIN, iteration, 0, computation, now_ns),
        ComputationMark(Edge.END, iteration, 0, computation, now_ns + 1000),
        IterationMark(Edge.END, iteration, now_ns + 2000),
    ]


def connected(path: str) -> socket.socket:
    """Open a connection to the agent."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.connect(path)  # blocks until accepted; with a timeout set it would not
    line.settimeout(_REPLY_S)
    return line


def receive(line: socket.socket) -> Reply:
    """Return the agent's next reply, or a substitute if there is none."""
    for _ in range(3):  # Linux reports a reset once, before the queued packets
        try:
            packet = line.recv(MAX_PACKET_BYTES)
        except ConnectionResetError:
            continue
        reply = decode(packet) if packet else Reply(False, "CLOSED")
        assert isinstance(reply, Reply)
        return reply
    return Reply(False, "RESET")


def claim(path: str, message: Message) -> str:
    """Return the agent's answer to a first message."""
    with connected(path) as line:
        line.send(encode(message))
        reply = receive(line)
        return "accepted" if reply.ok and not reply.reason else reply.reason


def lock(records: str) -> str:
    """Try to lock a record so that nobody can restore from it."""
    try:
        for name in os.listdir(records):
            fcntl.flock(os.open(Path(records) / name, os.O_RDONLY), fcntl.LOCK_EX)
    except PermissionError:
        return "refused"
    return "held"


def hold_connections(path: str, count: int, done: Attempts) -> None:
    """Open as many silent connections as possible at once."""
    held: list[socket.socket] = []
    for _ in range(count):
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        line.connect(path)  # blocks until accepted
        done.connection_count += 1
        held.append(line)
        if len(held) >= 500:  # this process's limit on open files
            held = still_open(held)
    until_s = time.monotonic() + HELLO_TIMEOUT_S - 1
    while len(held) > MAX_CONNECTIONS_PER_USER and time.monotonic() < until_s:
        held = still_open(held)
    done.held_connection_count = len(held)
    for line in held:
        line.close()


def still_open(lines: list[socket.socket]) -> list[socket.socket]:
    """Return the connections that the agent has neither refused nor closed; close the others."""
    time.sleep(0.05)
    kept = []
    for line in lines:
        line.setblocking(False)
        try:
            line.recv(MAX_PACKET_BYTES)
        except BlockingIOError:
            kept.append(line)
            continue
        except OSError:
            pass
        line.close()
    return kept


def send_malformed(path: str, chance: random.Random, count: int, done: Attempts) -> None:
    """Send malformed packets, several on one connection: the agent ends it at the first."""
    try:
        with connected(path) as line:
            for _ in range(count):
                done.packet_count += 1
                with contextlib.suppress(OSError):
                    line.send(malformed(chance))
            with contextlib.suppress(OSError, MalformedPacket):
                done.accepted_count += receive(line).ok
    except OSError:
        done.packet_count += 1


def flood_with_hellos(path: str, closed_uuid: str, flood_s: float, done: Attempts) -> None:
    """Repeatedly claim a GPU that must be inspected, on as many connections as the agent accepts."""
    lines: list[socket.socket] = []
    ends_s = time.monotonic() + flood_s
    while time.monotonic() < ends_s:
        while len(lines) < MAX_CONNECTIONS_PER_USER - 1:
            lines.append(connected(path))
            lines[-1].send(encode(Hello(Rank("mine", 0, len(lines), 0), closed_uuid)))
        for line in select.select(lines, [], [], 0.1)[0]:
            done.hello_count += receive(line).reason == "GPU_NOT_OPENABLE"
            lines.remove(line)
            line.close()
    for line in lines:
        line.close()


def flood_with_marks(path: str, own_uuid: str, flood_s: float, done: Attempts) -> None:
    """Mark computations on the attacker's own GPU, as fast as the socket accepts them."""
    answer = Reply(False)
    while not answer.ok:  # Earlier traffic counts for a while.
        line = connected(path)
        line.send(encode(Hello(Rank("own", 0, 0, 0), own_uuid)))
        answer = receive(line)
        if not answer.ok:
            assert answer.reason == "TOO_MANY_CONNECTIONS", answer
            line.close()
            time.sleep(0.5)
    with line:
        ends_s = time.monotonic() + flood_s
        packets = [encode(mark) for mark in marks(0)]
        while time.monotonic() < ends_s:
            with contextlib.suppress(TimeoutError):
                line.settimeout(0.1)
                for packet in packets:
                    line.send(packet)
                    done.mark_count += 1


_HELLO = encode(Hello(Rank("job", 0, 0, 0), "GPU-0"))
_BOMB = zlib.compress(b'{"x":[' + b"{}," * (12 * MAX_OBJECTS))
_REGISTRATION = encode(Registration({"jobId": "job", "x": ["\u202e"]}, "r", "f"))


def malformed(chance: random.Random) -> bytes:
    """Return an invalid packet: random bytes, half a message, a mutated one, a bomb, too deep."""
    mutated = bytearray(_HELLO)
    mutated[chance.randrange(len(mutated))] = chance.randrange(1, 32)
    return chance.choice(
        [
            chance.randbytes(chance.randrange(1, 200)),
            b"P" + chance.randbytes(31),
            _HELLO[: chance.randrange(1, len(_HELLO))],
            bytes(mutated),
            _BOMB,
            b"[" * chance.randrange(1, MAX_PACKET_BYTES),
            _REGISTRATION,
            b'{"version":2,"type":"hello","job_id":"\\u001b[31m","gpu_uuid":"\\ud800"}',
        ]
    )
