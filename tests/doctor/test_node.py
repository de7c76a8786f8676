"""Checks of a node: with a running agent, without one, and after one has died."""

import asyncio
import os
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from perseus import configuration
from perseus.agent.gpu.executor import GpuExecutor
from perseus.agent.probe.client import Probe
from perseus.agent.restore.records import Record, RecordFolder
from perseus.agent.sidecar.settings import AgentSettings
from perseus.agent.sidecar.shell import serving
from perseus.doctor import node
from perseus.doctor.checks import Check, Verdict
from perseus.doctor.node import node_checks
from perseus.emulation.gpu import EmulatedGpu
from perseus.emulation.physics import A100_SXM

GOOD, BAD, UNKNOWN = Verdict.GOOD, Verdict.BAD, Verdict.UNKNOWN


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[AgentSettings]:
    (tmp_path / "gpus").mkdir()
    gpu = EmulatedGpu.create(tmp_path / "gpus" / "0", A100_SXM, "GPU-0")
    given = {
        "coordinator": "127.0.0.1:1",
        "socket": tmp_path / "agent.sock",
        "gpu_backend": "emulated",
        "emulated_gpus": tmp_path / "gpus",
        "restore_folder": tmp_path / "restore",
    }
    yield configuration.load(AgentSettings, None, given)
    gpu.close()


def checked(settings: AgentSettings) -> dict[str, Check]:
    return {check.subject.partition(" /")[0]: check for check in node_checks(settings)}


def verdicts(checks: dict[str, Check]) -> dict[str, Verdict]:
    assert all(bool(check.advice) == (check.verdict is not GOOD) for check in checks.values()), checks
    return {subject: check.verdict for subject, check in checks.items()}


async def test_a_node_with_a_running_agent_is_good(settings: AgentSettings) -> None:
    async with serving(settings):
        checks = await asyncio.to_thread(checked, settings)
    names = ["GPUs", "privileges", "clocks left changed", "socket", "agent"]
    assert verdicts(checks) == dict.fromkeys(names, GOOD)
    assert checks["GPUs"].found.startswith("1 can be read")
    assert checks["agent"].found == "GPUs: 1; ranks: 0; not connected to 127.0.0.1:1"


async def test_a_trainer_without_marks_is_named_until_it_marks(settings: AgentSettings) -> None:
    def train() -> list[Check]:
        checks = []
        arguments = {"job_id": "GPT3", "pipeline": 0, "stage": 0, "gpu_uuid": "GPU-0"}
        with Probe.connect(settings.socket, **arguments) as probe:  # type: ignore[arg-type]
            checks.append(checked(settings)["agent"])
            probe.report_unmarked("the model is in eval()")
            checks.append(checked(settings)["agent"])
            with probe.iteration():
                pass
            checks.append(checked(settings)["agent"])
        return checks

    async with serving(settings):
        before, unmarked, after = await asyncio.to_thread(train)
    ranks = "GPUs: 1; ranks: 1, 1 before the first marked iteration"
    end = "not connected to 127.0.0.1:1"
    assert (before.verdict, before.found) == (GOOD, f"{ranks}; {end}")
    assert (unmarked.verdict, unmarked.found) == (
        Verdict.WARNING,
        f"{ranks}; 1 not marked, such as GPT3[pipeline 0, stage 0, tensor 0]: the model is in eval(); {end}",
    )
    assert after == before


def test_without_an_agent_the_socket_is_missing_and_nothing_is_queried(settings: AgentSettings) -> None:
    checks = checked(settings)
    assert verdicts(checks)["socket"] is BAD
    assert "agent" not in checks
    settings.socket.write_text("")
    assert checked(settings)["socket"].found == "the path is not a socket"


async def test_a_socket_without_a_listener_is_reported(settings: AgentSettings, tmp_path: Path) -> None:
    async with serving(settings):
        os.link(settings.socket, tmp_path / "left.sock")
    os.rename(tmp_path / "left.sock", settings.socket)
    check = (await asyncio.to_thread(checked, settings))["agent"]
    assert (check.verdict, check.found) == (
        BAD,
        "nobody listens: the agent that made the socket is gone",
    )


def test_gpus_left_by_a_dead_agent_are_named_and_not_touched(settings: AgentSettings) -> None:
    folder = RecordFolder(settings.restore_folder)
    held = folder.write(Record("GPU-0", None))
    check = checked(settings)["clocks left changed"]
    assert (check.verdict, check.found) == (GOOD, "none; a running agent holds 1 GPUs")
    held.release()  # as the kernel does when the holder dies
    for _ in range(2):
        check = checked(settings)["clocks left changed"]
        assert (check.verdict, check.found) == (BAD, "a dead agent left GPU-0")
        assert "--restore" in check.advice
    assert folder.gpu_uuids() == ["GPU-0"]


def test_an_invalid_emulated_gpu_and_a_node_without_gpus_are_reported(
    settings: AgentSettings, tmp_path: Path
) -> None:
    (tmp_path / "gpus" / "folder").mkdir()
    assert verdicts(checked(settings))["GPUs"] is BAD
    (tmp_path / "none").mkdir()
    none = settings.model_copy(update={"emulated_gpus": tmp_path / "none"})
    assert checked(none)["GPUs"].found == "there is none, or none visible here"


def test_a_hanging_driver_is_reported_without_waiting(
    settings: AgentSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang = threading.Event()
    monkeypatch.setattr(node, "backend", lambda settings: SimpleNamespace(listed=hang.wait))
    monkeypatch.setattr(node, "GpuExecutor", partial(GpuExecutor, timeout_s=0.1))
    try:
        check = checked(settings)["GPUs"]
    finally:
        hang.set()
    assert check.verdict is BAD
    assert "expected the driver to answer" in check.found


@pytest.mark.parametrize(
    ("changes", "may_set", "verdict"),
    [({"observe": True}, False, GOOD), ({}, True, GOOD), ({}, False, UNKNOWN)],
)
def test_privileges_are_the_caller_s(
    settings: AgentSettings,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, bool],
    may_set: bool,
    verdict: Verdict,
) -> None:
    monkeypatch.setattr(node, "may_set_clocks", lambda: may_set)
    other = settings.model_copy(update={"gpu_backend": "nvml", **changes})
    assert verdicts(checked(other))["privileges"] is verdict
