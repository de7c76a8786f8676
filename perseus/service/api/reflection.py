"""The standard reflection service under both of its names: `grpc.reflection.v1` and `v1alpha`.

`grpcio-reflection` serves v1alpha only, while newer clients ask for v1 first, some for nothing else. The two
have the same messages in different packages. So the v1 service is the v1alpha one under the other name, and
its descriptor is v1alpha's with the package renamed.
"""

from collections.abc import Iterable

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection as v1alpha
from grpc_reflection.v1alpha import reflection_pb2

_ALPHA = "grpc.reflection.v1alpha"
_STABLE = "grpc.reflection.v1"
_METHOD = "ServerReflectionInfo"

SERVICE_NAMES = (v1alpha.SERVICE_NAME, f"{_STABLE}.ServerReflection")


def enable_reflection(service_names: Iterable[str], server: grpc.aio.Server) -> None:
    """Let a server publish its services' descriptors, reflection's included, under both names."""
    names = (*service_names, *SERVICE_NAMES)
    v1alpha.enable_server_reflection(names, server)
    _add_descriptor()
    servicer = v1alpha.aio.ReflectionServicer(names)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    service = grpc.method_handlers_generic_handler(f"{_STABLE}.ServerReflection", {_METHOD: handler})
    server.add_generic_rpc_handlers((service,))


def _add_descriptor() -> None:
    """Add the v1 service's descriptor to this process, unless it is there already."""
    pool = descriptor_pool.Default()
    try:
        pool.FindServiceByName(f"{_STABLE}.ServerReflection")
    except KeyError:
        file = descriptor_pb2.FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(file)
        file.name = "grpc/reflection/v1/reflection.proto"
        file.package = _STABLE
        for message in file.message_type:
            for field in message.field:
                if field.HasField("type_name"):
                    field.type_name = field.type_name.replace(f".{_ALPHA}.", f".{_STABLE}.")
        for service in file.service:
            for method in service.method:
                method.input_type = method.input_type.replace(f".{_ALPHA}.", f".{_STABLE}.")
                method.output_type = method.output_type.replace(f".{_ALPHA}.", f".{_STABLE}.")
        pool.AddSerializedFile(file.SerializeToString())
