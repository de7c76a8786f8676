"""`perseus slurm`: the prolog and epilog that slurmd runs around a job, by the scripts in deploy/slurm."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perseus import configuration
from perseus.cli.terminal import FAILURE, fail, os_error_text

if TYPE_CHECKING:
    from perseus.agent.sidecar.settings import AgentSettings
    from perseus.agent.slurm.job import SlurmJob

app = typer.Typer(no_args_is_help=True)

_Config = Annotated[Path | None, typer.Option(help="The agent's TOML file.", show_default=False)]


@app.command()
def prolog(
    config: _Config = None,
    start_agent: Annotated[
        Path | None,
        typer.Option(
            metavar="LOG",
            help="Start an agent with these settings if none answers; it logs to this file and keeps running "
            "for other jobs. Not for nodes where a service manager runs one.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Before a job: give its user, and nobody else, access to the clocks of its GPUs."""
    from perseus.agent.slurm import hooks

    start = hooks.AgentStart(config, start_agent) if start_agent is not None else None
    _run(config, lambda job, settings: hooks.prolog(job, settings, start))


@app.command()
def epilog(config: _Config = None) -> None:
    """After a job: end that access and make sure that its GPUs are at stock. Exit code 1 if they are not."""
    from perseus.agent.slurm import hooks

    _run(config, hooks.epilog)


def _run(config: Path | None, hook: "Callable[[SlurmJob, AgentSettings], None]") -> None:
    from perseus.agent.gpu import GpuError
    from perseus.agent.sidecar.settings import AgentSettings
    from perseus.agent.slurm.job import SlurmEnvironmentError, SlurmError, SlurmJob

    try:
        hook(SlurmJob.of(os.environ), configuration.load(AgentSettings, config, {}))
    except (configuration.ConfigurationError, SlurmEnvironmentError) as error:
        fail(str(error))
    except (SlurmError, GpuError) as error:
        fail(str(error), FAILURE)
    except OSError as error:
        fail(os_error_text(error), FAILURE)
