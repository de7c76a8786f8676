"""Asking an agent of this node for its health, or its inference engines, over its socket."""

import socket
from pathlib import Path
from typing import Any

from perseus.agent.link.packets import (
    MAX_PACKET_BYTES,
    HealthQuestion,
    Instances,
    InstancesQuestion,
    MalformedPacket,
    Message,
    Reply,
    decode,
    encode,
)

UNMARKED = "UNMARKED"
"""Reason of a healthy agent's answer if trainers report training without marked iterations."""

FOREIGN_CLOCK = "FOREIGN_CLOCK"
"""Reason of a healthy agent's answer if another client of the driver holds a served GPU's clock."""


def ask_health(path: Path, timeout_s: float) -> Reply:
    """Return an agent's answer to a health question.

    Raises:
        OSError: nobody listens there, access is denied, or no answer comes in time.
        MalformedPacket: the server there is not an agent, or one of another release.
    """
    answer = _ask(path, HealthQuestion(), timeout_s)
    if not isinstance(answer, Reply):
        raise MalformedPacket(f"expected a reply, found {type(answer).__name__}")
    return answer


def ask_instances(path: Path, timeout_s: float) -> list[dict[str, Any]]:
    """Return an agent's instances. Raises as `ask_health`."""
    answer = _ask(path, InstancesQuestion(), timeout_s)
    if isinstance(answer, Reply):
        raise MalformedPacket(answer.message)
    if not isinstance(answer, Instances):
        raise MalformedPacket(f"expected instances, found {type(answer).__name__}")
    return answer.instances


def _ask(path: Path, question: Message, timeout_s: float) -> Message:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(timeout_s)
        connection.connect(str(path))
        connection.sendall(encode(question))
        return decode(connection.recv(MAX_PACKET_BYTES))
