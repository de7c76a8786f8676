"""Another client of the driver sets a GPU's clock, as nvidia-smi does: a running agent says so."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from perseus.agent.clocks import foreign
from perseus.agent.sidecar.health_client import FOREIGN_CLOCK, ask_health
from perseus.agent.sidecar.shell import serving
from perseus.doctor.checks import Verdict
from perseus.doctor.node import node_checks
from perseus.emulation.gpu import EmulatedGpu
from tests.agent.coordinator_stub import Inbox, until
from tests.agent.sidecar.training import HELD_MHZ, STOCK_MHZ, UUID, Start, Trainer, hold, settings

OTHER_MHZ = 705


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge clocks within moments."""
    monkeypatch.setattr(foreign, "WINDOW_S", 0.3)
    monkeypatch.setattr(foreign, "_INTERVAL_S", 0.001)


async def test_another_clients_reset_is_undone_and_its_lock_is_named(
    tmp_path: Path, gpu: EmulatedGpu, start: Start
) -> None:
    inbox = Inbox()
    coordinator = await start(inbox)
    given = settings(tmp_path, coordinator.port)
    with contextlib.closing(EmulatedGpu(tmp_path / "gpus" / "0")) as client:
        async with serving(given):
            trainer = Trainer(given.socket, gpu)
            await coordinator.until(lambda inbox: len(inbox.all("telemetry")) > 0, "telemetry at stock")
            coordinator.send(hold(1, trainer.iteration_count + 5))
            await until(lambda: client.sm_clock_mhz() == HELD_MHZ, "the plan's clock")
            client.reset_clock()

            def reported() -> list[tuple[int, int]]:
                clocks = [each.telemetry.foreign_clock for each in inbox.all("telemetry")]
                return [(each.clock_mhz, each.wanted_clock_mhz) for each in clocks]

            await until(lambda: (STOCK_MHZ, HELD_MHZ) in reported(), "the reset is noticed")
            await until(
                lambda: client.sm_clock_mhz() == HELD_MHZ and reported()[-1] == (0, 0), "it is undone"
            )

            async def hold_it() -> None:
                while True:
                    await asyncio.to_thread(client.set_clock_mhz, OTHER_MHZ)

            holding = asyncio.create_task(hold_it())
            await until(lambda: reported()[-1] == (OTHER_MHZ, HELD_MHZ), "the lock is noticed")
            answer = await asyncio.to_thread(ask_health, given.socket, 10.0)
            (check,) = [
                check
                for check in await asyncio.to_thread(lambda: list(node_checks(given)))
                if check.subject == "agent"
            ]
            holding.cancel()
            await asyncio.wait([holding])
            await trainer.stop()
    assert (answer.ok, answer.reason) == (True, FOREIGN_CLOCK)
    assert f"{UUID} of job" in answer.message
    assert (
        f"runs at {OTHER_MHZ} MHz, wanted {HELD_MHZ} MHz: another client of the driver holds it"
        in check.found
    )
    assert check.verdict is Verdict.WARNING
    assert "nvidia-smi -rgc" in check.advice
