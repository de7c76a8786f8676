"""No text is accepted that is too long or not printable: every text field of every request, by the
descriptors."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from perseus.service.api.texts import check_texts, holds_text
from perseus.v1 import job_service_pb2
from perseus.v1.agent_service_pb2 import ConnectRequest
from tests.service.grpc_fakes import METHODS, Client, FakeAgent, make_request, refusal

HOSTILE = ("\x1b[31mred", "two\nlines", "\u202eright to left", "x" * 1025)

Path_ = tuple[FieldDescriptor, ...]


def texts(descriptor: Descriptor, above: Path_ = ()) -> Iterator[Path_]:
    """Return the path of every text field in a message."""
    for field in descriptor.fields:
        path = (*above, field)
        if field.type == FieldDescriptor.TYPE_STRING:
            yield path
        elif field.message_type is not None and field.name != "bundle":  # its messages also come alone
            yield from texts(field.message_type, path)


def put(message: Message, path: Path_, text: str) -> str:
    """Put a text there, and return the field's name as errors contain it."""
    names = []
    part: Any = message
    for field in path[:-1]:
        value = getattr(part, field.name)
        names.append(field.name + ("[0]" if field.is_repeated else ""))
        if field.is_repeated:
            part = value[0] if value else value.add()
        else:
            value.SetInParent()
            part = value
    last = path[-1]
    if last.is_repeated:
        getattr(part, last.name).append(text)
    else:
        setattr(part, last.name, text)
    return ".".join([*names, last.name + ("[0]" if last.is_repeated else "")])


REQUESTS = [
    (name, path)
    for name, method in METHODS.items()
    if not method.client_streaming
    for path in texts(method.input_type)
]
SENT = [
    path
    for path in texts(ConnectRequest.DESCRIPTOR)
    # Texts for people, which are only logged (and made printable there): refusing them helps nobody. Those of
    # a heartbeat are the coordinator's own, which it does not read.
    if path[0].name not in {"message_refused", "goodbye", "heartbeat"}
]


async def test_a_request_with_such_a_text_is_refused(client: Client) -> None:
    tried = {f"{name}-{'.'.join(field.name for field in path)}" for name, path in REQUESTS}
    assert {"RegisterJob-spec.stage_work.fingerprint", "GetJob-job_id", "WatchJob-job_id"} <= tried
    for (name, path), text in product(REQUESTS, HOSTILE):
        request = make_request(name)
        field = put(request, path, text)
        code, reason, metadata = await refusal(client.ask(name, request))
        expected = (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", field)
        assert (code, reason, metadata["field"]) == expected, name
        assert all(value.isprintable() for value in metadata.values())


async def test_an_agents_message_with_such_a_text_is_refused_by_itself(client: Client) -> None:
    tried = {".".join(field.name for field in path) for path in SENT}
    assert {"hello.instance_id", "rank_joined.gpu.uuid", "telemetry.job_id"} <= tried
    agent = FakeAgent(client)
    await agent.hello()
    for path, text in product(SENT, HOSTILE):
        output = ConnectRequest()
        field = put(output, path, text)
        if path[0].name == "hello":
            output.hello.instance_id = output.hello.instance_id or "other"
            other = FakeAgent(client)
            await other.send(output)
            code, _, metadata = await refusal(other.reader)
            assert (code, metadata["field"]) == (grpc.StatusCode.INVALID_ARGUMENT, field)
            continue
        fill(output)
        agent.clear_refusals()
        await agent.send(output)
        await agent.beat()
        (refused,) = agent.refusals
        assert path[-1].name in str(refused), field


def fill(output: ConnectRequest) -> None:
    """Fill in everything besides the text that makes a message about a rank or GPU valid."""
    kind = str(output.WhichOneof("message"))
    part = getattr(output, kind)
    if kind == "power_reading":
        part.duration_s = 1.0
        part.power_w[:] = [1.0]
        return
    part.job_id = part.job_id or "job"
    part.rank.SetInParent()
    match kind:
        case "rank_joined":
            part.gpu.uuid = part.gpu.uuid or "GPU-0"
            part.gpu.supported_clocks_mhz[:] = [1410]
        case "gpu_error":
            part.reason = 1
        case "plan_answer":
            part.version, part.accepted = 1, True


def test_messages_without_texts_are_not_walked() -> None:
    assert not holds_text(job_service_pb2.CaughtUp.DESCRIPTOR)
    check_texts(job_service_pb2.GetJobRequest(job_id="fine"))
