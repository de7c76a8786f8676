"""The command `perseus`. Each command imports what it runs on only when it is called: the base install has no
solver, and `perseus --help` should not wait for numpy.
"""

import os
from importlib.metadata import version
from typing import Annotated

import typer

from perseus.agent.restore.supervisor import LIFELINE
from perseus.cli import (
    agent,
    certificates,
    coordinator,
    demo,
    doctor,
    grid,
    health,
    jobs,
    ledger,
    power,
    simulate,
    slurm,
    solve,
    store,
    tokens,
    top,
)
from perseus.cli.environment import unknown
from perseus.cli.terminal import FAILURE, console, fail, warn

# Module that a command may miss → the extra that brings it.
_EXTRAS = {
    "igraph": "coordinator",
    "highspy": "coordinator",
    "grpc_health": "coordinator",
    "grpc_reflection": "coordinator",
    "sqlalchemy": "coordinator",
    "alembic": "coordinator",
    "psycopg": "postgresql",
    "matplotlib": "plot",
    "cryptography": "certificates",
    "aiomqtt": "grid",
    "joserfc": "grid",
}

app = typer.Typer(
    name="perseus",
    help="Cut the energy of pipeline-parallel training without slowing it down.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("solve")(solve.solve)
app.command("plan")(solve.plan)
app.command("simulate")(simulate.simulate)
app.command("coordinator")(coordinator.coordinator)
app.command("agent")(agent.agent)
app.command("demo")(demo.demo)
app.command("top")(top.top)
app.command("doctor")(doctor.doctor)
app.command("health")(health.health)
app.command("ledger")(ledger.ledger)
app.add_typer(jobs.app, name="jobs")
app.add_typer(power.app, name="power")
app.add_typer(grid.app, name="grid")
app.add_typer(slurm.app, name="slurm")
app.add_typer(tokens.app, name="tokens")
app.add_typer(certificates.app, name="certificates")
app.add_typer(store.app, name="store")


def _show_version(wanted: bool) -> None:
    if wanted:
        console.print(f"perseus {version('perseus-energy')}", highlight=False)
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    if LIFELINE not in os.environ:  # who has it was started by a command that has said it
        for complaint in unknown(os.environ, context.command):
            warn(complaint)


def main() -> None:
    """Run the command line (`entry` is what is around it); no traceback for a missing extra."""
    # gRPC's core writes a line of its own to standard error for every handshake that fails.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    try:
        app()
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        try:
            fail(f"this command needs {error.name}: pip install 'perseus-energy[{extra}]'", FAILURE)
        except typer.Exit as end:
            raise SystemExit(end.exit_code) from None
