"""Another client of the driver sets a GPU's clock, as nvidia-smi does: a running agent says so."""

import asyncio
import contextlib

import pytest

from perseus.agent.clocks import foreign
from perseus.agent.sidecar.health_client import FOREIGN_CLOCK, ask_health
from perseus.doctor.checks import Verdict
from perseus.doctor.node import node_checks
from perseus.emulation.gpu import EmulatedGpu
from tests.agent.coordinator_stub import until
from tests.agent.sidecar.training import HELD_MHZ, STOCK_MHZ, UUID, Node

OTHER_MHZ = 705


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judge clocks within moments."""
    monkeypatch.setattr(foreign, "WINDOW_S", 0.3)
    monkeypatch.setattr(foreign, "_INTERVAL_S", 0.001)


async def test_another_clients_reset_is_undone_and_its_lock_is_named(node: Node) -> None:
    def reported() -> list[tuple[int, int]]:
        clocks = [each.telemetry.foreign_clock for each in node.inbox.all("telemetry")]
        return [(each.clock_mhz, each.wanted_clock_mhz) for each in clocks]

    with contextlib.closing(EmulatedGpu(node.folder / "gpus" / "0")) as client:
        async with node.serving():
            trainer = await node.train()
            await node.hold(trainer)
            client.reset_clock()
            await until(lambda: (STOCK_MHZ, HELD_MHZ) in reported(), "the reset is noticed")
            await until(
                lambda: client.sm_clock_mhz() == HELD_MHZ and reported()[-1] == (0, 0), "it is undone"
            )

            async def hold_it() -> None:
                while True:
                    await asyncio.to_thread(client.set_clock_mhz, OTHER_MHZ)

            holding = asyncio.create_task(hold_it())
            await until(lambda: reported()[-1] == (OTHER_MHZ, HELD_MHZ), "the lock is noticed")
            answer = await asyncio.to_thread(ask_health, node.socket, 60.0)
            checks = await asyncio.to_thread(lambda: list(node_checks(node.settings())))
            holding.cancel()
            await asyncio.wait([holding])
            await trainer.stop()
    assert (answer.ok, answer.reason) == (True, FOREIGN_CLOCK)
    assert f"{UUID} of job" in answer.message
    (check,) = [check for check in checks if check.subject == "agent"]
    assert (
        f"runs at {OTHER_MHZ} MHz, wanted {HELD_MHZ} MHz: another client of the driver holds it"
        in check.found
    )
    assert check.verdict is Verdict.WARNING
    assert "nvidia-smi -rgc" in check.advice
