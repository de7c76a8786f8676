"""The command `perseus`. A subcommand, and everything that it runs on, is imported only when it is called.

The base install has no solver, and `perseus --help` must not wait for imports.
"""

import os
from pkgutil import resolve_name
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from perseus.cli.environment import unknown
from perseus.cli.terminal import FAILURE, console, fail, warn
from perseus.printable import printable

# Each command's location and the summary that `perseus --help` shows: the first paragraph of its own help.
_COMMANDS = {
    "solve": (
        "perseus.cli.solve:solve",
        "Compute the iteration time-energy frontier of one pipeline from its profile, or of a graph.",
    ),
    "plan": (
        "perseus.cli.solve:plan",
        "Make the plan of least energy that meets an iteration time, or that is not slower than stock.",
    ),
    "simulate": (
        "perseus.cli.simulate:simulate",
        "Simulate the coordinator's decisions for jobs, power budgets and signals, and show the result.",
    ),
    "coordinator": (
        "perseus.cli.coordinator:coordinator",
        "Run the coordinator of many jobs. Every flag is also PERSEUS_COORDINATOR_… in the environment.",
    ),
    "agent": (
        "perseus.cli.agent:agent",
        "Run the agent of one node. Every flag is also PERSEUS_AGENT_… in the environment.",
    ),
    "demo": (
        "perseus.cli.demo:demo",
        "Train emulated jobs under Perseus, through a straggler or a power budget; or serve a model.",
    ),
    "top": (
        "perseus.cli.top:top",
        "Show jobs by power draw, and feeds that have a limit, until you press Ctrl-C.",
    ),
    "doctor": (
        "perseus.cli.doctor:doctor",
        "Find what is wrong on the way to a coordinator, or with a node, and say how to fix it.",
    ),
    "health": (
        "perseus.cli.health:health",
        "Ask whether a coordinator serves, or whether an agent has GPUs to serve: exit code 0 if so.",
    ),
    "ledger": (
        "perseus.cli.ledger:ledger",
        "Show energy, cost and carbon of all runs against their stock baselines, and the total.",
    ),
    "jobs": ("perseus.cli.jobs:app", "Inspect and control jobs."),
    "serving": (
        "perseus.cli.serving:app",
        "Show inference engines whose clocks this node's agent sets, and what that saves.",
    ),
    "power": ("perseus.cli.power:app", "Limit the power that jobs draw, and show the state of feeds."),
    "grid": ("perseus.cli.grid:app", "Let the grid set power budgets."),
    "slurm": (
        "perseus.cli.slurm:app",
        "Prolog and epilog that slurmd runs on a node around a job: see docs/slurm.md.",
    ),
    "tokens": ("perseus.cli.tokens:app", "Make, list and revoke tokens."),
    "certificates": ("perseus.cli.certificates:app", "Keep a small certificate authority, for TLS."),
    "store": (
        "perseus.cli.store:app",
        "Check, export and import the coordinator's database; replay a quarantined job.",
    ),
}

# Module that may not be installed → the extra that provides it.
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


class _Commands(TyperGroup):
    """All commands. Getting one imports it; the overview has only their summaries."""

    _shows_overview = False

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if self._shows_overview or cmd_name not in _COMMANDS:
            return super().get_command(ctx, cmd_name)
        place, summary = _COMMANDS[cmd_name]
        found, alone = resolve_name(place), typer.Typer()
        if isinstance(found, typer.Typer):
            alone.add_typer(found, name=cmd_name, help=summary)
        else:
            alone.command(cmd_name)(found)
        return typer.main.get_group(alone).commands[cmd_name]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for each in self.get_params(ctx):
            if each.default is None and getattr(each, "is_flag", False):
                each.default = False  # typer imports pydantic for the None of its own flags
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            # Typer shows only the message of pydantic's error, which lacks the value.
            problems: Any = getattr(error.__cause__, "errors", list)()
            if problems and "input" in problems[0]:
                error.message = f"{error.message}, found {printable(repr(problems[0]['input']))}"
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self._shows_overview = True
        super().format_help(ctx, formatter)
        self._shows_overview = False


app = typer.Typer(
    name="perseus",
    help="Cut the energy of pipeline-parallel training without slowing it down.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    cls=_Commands,
)
for _name, (_, _summary) in _COMMANDS.items():
    app.command(_name, help=_summary)(lambda: None)


def _show_version(wanted: bool) -> None:
    if wanted:
        from perseus.release import release

        console.print(f"perseus {release()}", highlight=False)
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    for problem in unknown(os.environ):
        warn(problem)


def main() -> None:
    """Run the command line, inside `entry`; report a missing extra without a traceback."""
    # gRPC's core writes its own lines to standard error, for example for a port in use or a failed handshake.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
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
