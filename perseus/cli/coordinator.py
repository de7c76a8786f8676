"""`perseus coordinator`: run the service."""

import asyncio
from typing import Annotated

import typer

from perseus import logs
from perseus.cli import store
from perseus.cli.flags import configured
from perseus.cli.terminal import FAILURE, STORE_FAILED
from perseus.service.settings import CoordinatorSettings


@configured(CoordinatorSettings)
def coordinator(
    settings: CoordinatorSettings,
    check_store: Annotated[
        bool, typer.Option("--check-store", help="Check the database, as `perseus store check`, and exit.")
    ] = False,
) -> None:
    """Run the coordinator of many jobs. Every flag is also PERSEUS_COORDINATOR_… in the environment."""
    from perseus.service.domain.errors import StartupError, StoreFailedError
    from perseus.service.server import serve
    from perseus.service.shell.measured_loop import MeasuredLoop

    if check_store:
        store.check_store(settings.database)
        return
    logs.configure(settings.log_level, settings.log_format)
    codes: dict[type[Exception], int] = {StartupError: FAILURE, StoreFailedError: STORE_FAILED}
    with logs.exiting(codes), asyncio.Runner(loop_factory=MeasuredLoop) as runner:
        runner.run(serve(settings))
