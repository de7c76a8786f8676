"""Attacks by another user of the node on a running job: that user's processes print the outcomes."""

import contextlib
import fcntl
import json
import os
import random
import socket
import time
import zlib
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
    Reply,
    decode,
    encode,
)
from perseus.demo import trainer
from perseus.demo.trainer import RankTask

_REPLY_S = 20.0
_CONNECTIONS = 300
_PACKETS_PER_CONNECTION = 20
_FLOOD_S = 3.0


def train(task: str) -> None:
    """A rank of the demo's job."""
    trainer.train(RankTask(**json.loads(task)))


def attack(path: str, gpu_uuid: str, closed_uuid: str, own_uuid: str, job_id: str, records: str) -> None:
    """Make all attempts in turn."""
    done = {
        "the GPU that is trained on": claim(path, Hello(Rank("mine", 0, 0, 0), gpu_uuid)),
        "a GPU whose device is closed": claim(path, Hello(Rank("mine", 0, 0, 0), closed_uuid)),
        "the owner's rank": claim(path, Hello(Rank(job_id, 0, 0, 0), "GPU-none")),
        "another rank of the owner's job": claim(path, Hello(Rank(job_id, 0, 7, 0), "GPU-none")),
        "a rank without Hello": claim(path, Membership("x")),
        "the restore records": lock(records),
        "marks without a pause on its own GPU": flood(path, own_uuid),
    }
    for line in [connected(path) for _ in range(_CONNECTIONS)]:
        line.close()
    chance = random.Random(7)
    answers = [send_malformed(path, chance) for _ in range(_CONNECTIONS)]
    print(json.dumps({**done, "malformed packets": "accepted" if any(answers) else "refused"}), flush=True)


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


def flood(path: str, own_uuid: str) -> str:
    """Mark computations as fast as the agent reads them, and return its answer to the claim."""
    with connected(path) as line:
        line.send(encode(Hello(Rank("own", 0, 0, 0), own_uuid)))
        reply = receive(line)
        line.settimeout(0.1)
        ends_s = time.monotonic() + _FLOOD_S
        while reply.ok and time.monotonic() < ends_s:
            with contextlib.suppress(TimeoutError):
                for mark in marks(0):
                    line.send(encode(mark))
    return "accepted" if reply.ok else reply.reason


def send_malformed(path: str, chance: random.Random) -> bool:
    """Send malformed packets on a connection, which the agent ends at the first; return whether it agreed."""
    with contextlib.suppress(OSError, MalformedPacket), connected(path) as line:
        with contextlib.suppress(OSError):
            for _ in range(_PACKETS_PER_CONNECTION):
                line.send(malformed(chance))
        return receive(line).ok
    return False


_HELLO = encode(Hello(Rank("job", 0, 0, 0), "GPU-0"))
_BOMB = zlib.compress(b'{"x":[' + b"{}," * (12 * MAX_OBJECTS))


def malformed(chance: random.Random) -> bytes:
    """Return an invalid packet: random bytes, a mutated message, a bomb, too deep."""
    mutated = bytearray(_HELLO)
    mutated[chance.randrange(len(mutated))] = chance.randrange(1, 32)
    deep = b"[" * chance.randrange(1, MAX_PACKET_BYTES)
    return chance.choice([chance.randbytes(chance.randrange(1, 200)), bytes(mutated), _BOMB, deep])
