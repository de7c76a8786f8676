"""The inventory of GPUs, and an agent's health without any."""

import asyncio
import json
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner, Result

from perseus.agent.gpu import Gpu, GpuError, GpuNotFoundError, GpuUse
from perseus.agent.gpu.executor import GpuExecutor
from perseus.agent.sidecar.backends import Found, Inventory
from perseus.agent.sidecar.health_client import ask_health
from perseus.agent.sidecar.shell import serving
from perseus.cli.main import app
from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.physics import A100_SXM
from tests.agent.sidecar.training import settings


class Listing:
    """A backend with a given list."""

    def __init__(self, *found: str | GpuError, error: GpuError | None = None) -> None:
        self.found = list(found)
        self.error = error
        self.look_count = 0

    def listed(self) -> list[str | GpuError]:
        self.look_count += 1
        if self.error is not None:
            raise self.error
        return self.found

    def open(self, uuid: str) -> Gpu:
        raise GpuNotFoundError(uuid)

    def inspect(self, uuid: str) -> GpuUse:
        raise GpuNotFoundError(uuid)


@pytest.mark.parametrize(
    ("backend", "expected", "reported"),
    [
        (Listing("a", "b"), Found(2), ["GPUs found"]),
        (Listing("a", GpuError("GPU 1: lost")), Found(1, ("GPU 1: lost",)), ["GPU lost", "GPUs found"]),
        (Listing(GpuError("GPU 0: lost")), Found(0, ("GPU 0: lost",)), ["no GPU can be served"]),
        (
            Listing(error=GpuError("no driver")),
            Found(0, ("no driver",)),
            ["no GPU can be served"],
        ),
    ],
)
async def test_gpus_and_problems_are_logged(backend: Listing, expected: Found, reported: list[str]) -> None:
    inventory = Inventory(backend, GpuExecutor())
    with capture_logs() as logs:
        await inventory.report()
    assert await inventory.refresh() == expected
    assert [line["event"] for line in logs] == reported
    assert [line["reason"] for line in logs if "reason" in line] == list(expected.problems)


async def test_no_gpu_at_all_is_a_problem_too() -> None:
    found = await Inventory(Listing(), GpuExecutor()).refresh()
    assert found.gpu_count == 0
    assert "no GPU" in found.problems[0]


async def test_the_inventory_is_cached_for_a_moment() -> None:
    now_s = 0.0
    backend = Listing(error=GpuError("no driver"))
    inventory = Inventory(backend, GpuExecutor(), lambda: now_s)
    assert (await inventory.refresh()).gpu_count == (await inventory.refresh()).gpu_count == 0
    assert backend.look_count == 1
    backend.error, backend.found, now_s = None, ["a"], 5.0
    assert await inventory.refresh() == Found(1)


async def test_an_agents_health_depends_on_its_gpus(tmp_path: Path) -> None:
    (tmp_path / "gpus").mkdir()
    own = settings(tmp_path, 1)

    async def asked(*flags: str) -> Result:
        """What the command says, without the log of an agent in its process."""
        with capture_logs():
            arguments = ["health", "--agent", str(own.socket), "--timeout-s", "60", *flags]
            return await asyncio.to_thread(CliRunner().invoke, app, arguments)

    async with serving(own):
        answer = await asyncio.to_thread(ask_health, own.socket, 60.0)
        assert (answer.ok, answer.reason) == (False, "NO_GPU")
        result = await asked("--format", "json")
        assert result.exit_code == 1
        assert "error: expected an agent that serves, found GPUs: 0; ranks: 0; " in result.stderr
        row = json.loads(result.stdout)
        assert (row["who"], row["is_serving"]) == ("agent", False)
        assert row["status"].startswith("GPUs: 0; ranks: 0; ")
        result = await asked("--alive")
        assert (result.exit_code, result.stdout.startswith("GPUs: 0; ranks: 0; ")) == (0, True)
    EmulatedGpu.create(tmp_path / "gpus" / "0", A100_SXM, "GPU-0").close()
    async with serving(own):
        answer = await asyncio.to_thread(ask_health, own.socket, 60.0)
        assert answer.ok
        assert answer.message == "GPUs: 1; ranks: 0; not connected to 127.0.0.1:1"
