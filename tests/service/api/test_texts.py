"""No text is accepted that is too long or not printable: every text field of every request, by the
descriptors."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import ErrorInfo
from grpc_status import rpc_status

from perseus.service.api.texts import check_texts, holds_text
from perseus.v1 import agent_service_pb2, frontier_service_pb2, job_service_pb2
from perseus.v1.agent_service_pb2 import ConnectRequest, Hello
from tests.service.grpc_fakes import Client, connected, make_settings

HOSTILE = ("\x1b[31mred", "two\nlines", "\u202eright to left", "x" * 1025)

Path_ = tuple[FieldDescriptor, ...]

SERVICES = [
    service
    for module in (agent_service_pb2, job_service_pb2, frontier_service_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
]
UNARY = [each for service in SERVICES for each in service.methods if not each.client_streaming]


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
    pytest.param(method, path, id=f"{method.name}-{'.'.join(field.name for field in path)}")
    for method in UNARY
    for path in texts(method.input_type)
]


def test_there_are_such_fields() -> None:
    assert len(REQUESTS) > 20
    assert {"RegisterJob-spec.stage_work.fingerprint", "GetJob-job_id", "WatchJob-job_id"} <= {
        str(each.id) for each in REQUESTS
    }


@pytest.mark.parametrize(("method", "path"), REQUESTS)
async def test_a_request_with_such_a_text_is_refused(
    method: MethodDescriptor, path: Path_, tmp_path: Path
) -> None:
    make = message_factory.GetMessageClass(method.input_type)
    async with connected(make_settings(tmp_path)) as client:
        for text in HOSTILE:
            request = make()
            name = put(request, path, text)
            code, info = await answer(client, method, request)
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert (info.reason, info.metadata["field"]) == ("INVALID_FIELD", name)
            assert all(value.isprintable() for value in info.metadata.values())


async def answer(
    client: Client, method: MethodDescriptor, request: Message
) -> tuple[grpc.StatusCode, ErrorInfo]:
    path = f"/{method.containing_service.full_name}/{method.name}"
    read = message_factory.GetMessageClass(method.output_type).FromString
    open_call = client.channel.unary_stream if method.server_streaming else client.channel.unary_unary
    call: Any = open_call(path, type(request).SerializeToString, read)(request, timeout=10)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (call.read() if method.server_streaming else call)
    status = rpc_status.from_call(caught.value)
    info = ErrorInfo()
    assert status is not None
    assert status.details[0].Unpack(info)
    return caught.value.code(), info


SENT = [
    pytest.param(path, id=".".join(field.name for field in path))
    for path in texts(ConnectRequest.DESCRIPTOR)
    # Texts for people, which are only logged (and made printable there): refusing them helps nobody. Those of
    # a heartbeat are the coordinator's own, which it does not read.
    if path[0].name not in {"message_refused", "goodbye", "heartbeat"}
]


@pytest.mark.parametrize("path", SENT)
async def test_an_agents_message_with_such_a_text_is_refused_by_itself(path: Path_, tmp_path: Path) -> None:
    async with connected(make_settings(tmp_path)) as client:
        for text in HOSTILE:
            call = client.agents.Connect()
            output = ConnectRequest()
            name = put(output, path, text)
            if path[0].name == "hello":
                if output.hello.instance_id == "":
                    output.hello.instance_id = "agent"
                await call.write(output)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call.read()
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert name in str(caught.value.details())
                continue
            await call.write(ConnectRequest(hello=Hello(instance_id="agent")))
            welcome: Any = await call.read()
            assert welcome.HasField("welcome")
            part = fill(output)
            await call.write(output)
            refused: Any = await call.read()
            kind = refused.WhichOneof("message")
            assert kind in {"message_refused", "rank_refused", "telemetry_refused"}, refused
            shown = str(getattr(refused, kind))
            assert path[-1].name in shown, (shown, part)
            call.cancel()


def fill(output: ConnectRequest) -> str:
    """Fill in everything besides the text that makes a message about a rank or GPU valid."""
    kind = str(output.WhichOneof("message"))
    part = getattr(output, kind)
    if kind == "power_reading":
        part.duration_s = 1.0
        part.power_w[:] = [1.0]
        return kind
    if not part.job_id:
        part.job_id = "job"
    part.rank.SetInParent()
    match kind:
        case "rank_joined":
            part.gpu.uuid = part.gpu.uuid or "GPU-0"
            part.gpu.supported_clocks_mhz[:] = [1410]
        case "gpu_error":
            part.reason = 1
        case "plan_answer":
            part.version, part.accepted = 1, True
    return kind


def test_messages_without_texts_are_not_walked() -> None:
    assert not holds_text(job_service_pb2.CaughtUp.DESCRIPTOR)
    check_texts(job_service_pb2.GetJobRequest(job_id="fine"))
