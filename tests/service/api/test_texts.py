"""No text is accepted that is too long or not printable: every text field of every request, by the
descriptors."""

from itertools import product
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from perseus.v1.agent_service_pb2 import ConnectRequest
from tests.service.api.test_bounds_of_requests import output
from tests.service.grpc_fakes import METHODS, Client, FakeAgent, make_request, refusal, sent
from tests.torture.malformed_messages import Path, paths

HOSTILE = ("\x1b[31mred", "two\nlines", "\u202eright to left", "x" * 1025)


def texts(descriptor: Descriptor) -> list[Path]:
    """Return the path of every text field in a message; a bundle's messages also come alone."""
    strings = [path for path in paths(descriptor) if path[-1].type == FieldDescriptor.TYPE_STRING]
    return [path for path in strings if path[0].name != "bundle"]


def put(message: Message, path: Path, text: str) -> str:
    """Put a text there, and return the field's name as errors contain it."""
    part: Any = text
    for field in reversed(path):
        part = {field.name: [part] if field.is_repeated else part}
    message.MergeFrom(type(message)(**part))
    return ".".join(field.name + "[0]" * field.is_repeated for field in path)


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
    valid = {str(message.WhichOneof("message")): message for message in output(agent)}
    for path, text in product(SENT, HOSTILE):
        kind = path[0].name
        if kind == "hello":
            message = sent(hello={"instance_id": "other"})
            field = put(message, path, text)
            other = FakeAgent(client)
            await other.send(message)
            code, _, metadata = await refusal(other.reader)
            assert (code, metadata["field"]) == (grpc.StatusCode.INVALID_ARGUMENT, field)
            continue
        message = ConnectRequest()
        message.CopyFrom(valid[kind])
        if path[-1].is_repeated:
            getattr(message, kind).ClearField(path[-1].name)
        field = put(message, path, text)
        agent.clear_refusals()
        await agent.send(message)
        await agent.beat()
        (refused,) = agent.refusals
        assert path[-1].name in str(refused), field
