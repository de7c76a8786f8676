"""A server that ignores the content of agents' streams: `python -m benchmarks.load.echo`.

Its cost per message is that of gRPC; the rest of a coordinator's cost is that of Perseus.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from perseus.v1 import agent_service_pb2 as pb

_ANSWER = pb.ConnectResponse(telemetry_ack=pb.TelemetryAck(sequence=1)).SerializeToString()


async def _connect(
    requests: AsyncIterator[bytes], _context: grpc.aio.ServicerContext[bytes, bytes]
) -> AsyncIterator[bytes]:
    async for _ in requests:
        yield _ANSWER


async def _serve() -> None:
    server = grpc.aio.server(
        options=[
            ("grpc.so_reuseport", 0),
            ("grpc.server.max_pending_requests", 100_000),
            ("grpc.server.max_pending_requests_hard_limit", 100_000),
        ]
    )
    handlers: dict[str, Any] = {"Connect": grpc.stream_stream_rpc_method_handler(_connect)}
    generic = grpc.method_handlers_generic_handler("perseus.v1.AgentService", handlers)
    server.add_generic_rpc_handlers((generic,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_serve())
