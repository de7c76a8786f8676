"""`perseus health`: whether a coordinator or an agent serves, for probes that don't speak gRPC."""

from pathlib import Path
from typing import Annotated

import typer

from perseus.cli.connection import Connection, connected, connecting
from perseus.cli.progress import working
from perseus.cli.rows import Format, FormatOption, show_row
from perseus.cli.terminal import FAILURE, fail
from perseus.printable import printable


@connecting
def health(
    connection: Connection,
    service: Annotated[
        str, typer.Option(help="One service, such as perseus.v1.AgentService; default all.")
    ] = "",
    agent: Annotated[
        Path | None,
        typer.Option(
            metavar="SOCKET",
            help="Ask this node's agent on that socket instead, such as /run/perseus/agent.sock.",
            show_default=False,
        ),
    ] = None,
    alive: Annotated[
        bool,
        typer.Option("--alive", help="Any answer of the agent will do: for liveness probes."),
    ] = False,
    timeout_s: Annotated[float, typer.Option(min=0.1, max=600, help="Seconds to wait for an answer.")] = 5.0,
    form: FormatOption = Format.TABLE,
) -> None:
    """Ask whether a coordinator serves, or whether an agent has GPUs to serve: exit code 0 if so.

    Otherwise the exit code is 1 or 2, and a line on standard error gives the reason.
    """
    if agent is not None:
        _ask_agent(agent, timeout_s, form, alive)
        return
    if alive:
        fail("--alive: expected --agent, found none: a coordinator is alive if it accepts connections")
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with connected(connection) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service=service), timeout=timeout_s
        )
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    _show(form, "coordinator", status, is_serving=answer.status == health_pb2.HealthCheckResponse.SERVING)


def _ask_agent(path: Path, timeout_s: float, form: Format, alive: bool) -> None:
    from perseus.agent.link.packets import MalformedPacket
    from perseus.agent.sidecar.health_client import ask_health

    try:
        with working("Asking the agent"):
            answer = ask_health(path, timeout_s)
    except TimeoutError:
        fail(f"no answer within {timeout_s:g} s from the agent at {path}", FAILURE)
    except (OSError, MalformedPacket) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        fail(f"no agent at {path}: {reason}", FAILURE)
    _show(form, "agent", answer.message, is_serving=answer.ok, alive=alive)


def _show(form: Format, who: str, status: str, *, is_serving: bool, alive: bool = False) -> None:
    """Print the status, and exit with an error unless it is good; as a table, a bad one is only an error."""
    from rich.text import Text

    row = {"who": who, "is_serving": is_serving, "status": printable(status)}
    if is_serving or alive or form is not Format.TABLE:
        show_row(form, row, lambda: [Text(printable(status))])
    if not is_serving and not alive:
        fail(f"expected {'an' if who == 'agent' else 'a'} {who} that serves, found {status}", FAILURE)
