"""`perseus health`: whether a coordinator serves, for probes that speak no gRPC or no TLS of their own."""

from typing import Annotated

import typer

from perseus.cli.connection import Connection, connected, connecting
from perseus.cli.terminal import FAILURE, console, fail


@connecting
def health(
    connection: Connection,
    service: Annotated[
        str, typer.Option(help="One service, such as perseus.v1.AgentService; all if not given.")
    ] = "",
    timeout_s: Annotated[float, typer.Option(min=0.1, max=600, help="Seconds to wait for an answer.")] = 5.0,
) -> None:
    """Ask a coordinator whether it serves: exit code 0 if so, else 1 or 2, and a line that says why."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with connected(connection) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service=service), timeout=timeout_s
        )
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        fail(f"expected a coordinator that serves, found {status}", FAILURE)
    console.print(status, highlight=False)
