"""Asking an agent of this node for its health, over its socket."""

import socket
from pathlib import Path

from perseus.agent.link.packets import (
    MAX_PACKET_BYTES,
    HealthQuestion,
    MalformedPacket,
    Reply,
    decode,
    encode,
)

UNMARKED = "UNMARKED"
"""Reason of a healthy agent's answer if trainers report training without marked iterations."""


def ask_health(path: Path, timeout_s: float) -> Reply:
    """Return an agent's answer to a health question.

    Raises:
        OSError: nobody listens there, access is denied, or no answer comes in time.
        MalformedPacket: the server there is not an agent, or one of another release.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(timeout_s)
        connection.connect(str(path))
        connection.sendall(encode(HealthQuestion()))
        answer = decode(connection.recv(MAX_PACKET_BYTES))
    if not isinstance(answer, Reply):
        raise MalformedPacket(f"expected a reply, found {type(answer).__name__}")
    return answer
