"""A real SOCK_SEQPACKET server that behaves as badly as an agent can."""

import socket
import threading
from pathlib import Path
from typing import Any

from perseus.agent.link.computation import Kind
from perseus.agent.link.packets import MAX_PACKET_BYTES, Message, Packing, Reply, decode, decode_all, encode
from perseus.agent.probe.client import Probe


class AgentStub:
    """Answers a hello and a registration on a thread, then leaves the connection to the test."""

    def __init__(self, path: Path, replies: list[Reply | bytes]) -> None:
        self.path = path
        self._replies = replies
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen()
        self.asked: list[Message] = []
        self.packet_count = 0
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def _answer(self) -> None:
        self.connection, _ = self._listener.accept()
        for reply in self._replies:
            self.asked.append(decode(self.connection.recv(MAX_PACKET_BYTES)))
            self.connection.send(reply if isinstance(reply, bytes) else encode(reply))

    def answered(self) -> None:
        self._thread.join(5)

    def marks(self) -> list[Message]:
        """All packets that are queued now."""
        self.connection.setblocking(False)
        received: list[Message] = []
        try:
            while packet := self.connection.recv(MAX_PACKET_BYTES):
                received += decode_all(packet)
                self.packet_count += 1
        except BlockingIOError:
            pass
        return received

    def allow_packing(self, is_allowed: bool) -> None:
        """Allow packing from the next iteration on, or forbid it."""
        self.connection.send(encode(Packing(is_allowed)))

    def close(self) -> None:
        self.answered()
        self.connection.close()
        self._listener.close()


def connect(path: Path, stage: int = 0, **more: Any) -> Probe:
    """Return the probe of a rank; `more`: arguments that differ from a usual rank's."""
    rank = {"job_id": "job", "pipeline": 0, "stage": stage, "gpu_uuid": "GPU-1", "timeout_s": 5, **more}
    return Probe.connect(path, **rank)


def iterate(probe: Probe, count: int = 1) -> None:
    """Mark iterations of one computation."""
    for _ in range(count):
        with probe.iteration(), probe.computation(Kind.FORWARD, 0):
            pass
