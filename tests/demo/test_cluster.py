"""The demo's processes, which know nothing of this machine's own Perseus, and its live page."""

import json
import os
import ssl
import threading
import urllib.request
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic_settings import BaseSettings

from perseus import configuration
from perseus.agent.sidecar.settings import AgentSettings
from perseus.demo import serving_scenario
from perseus.demo.cluster import Cluster
from perseus.demo.processes import TIMEOUT_S, Agent, ClusterError, Process, logged, until
from perseus.demo.security import Security
from perseus.demo.tasks import rank_tasks
from perseus.demo.trainer import Evaluations
from perseus.emulation.gpu import EmulatedGpu
from perseus.service.settings import CoordinatorSettings
from tests.workloads import SMALL

OF_THE_MACHINE = {
    "PERSEUS_COORDINATOR_SLOTS": "no number",
    "PERSEUS_AGENT_COORDINATOR": "foreign.example:50051",
    "PERSEUS_AGENT_TOKEN": "foreign",
    "PERSEUS_AGENT_SOCKET": "/run/perseus/agent.sock",
    "CUDA_VISIBLE_DEVICES": "7",
}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OF_THE_MACHINE.items():
        monkeypatch.setenv(name, value)


def test_no_setting_of_this_machine_reaches_a_process(machine: None, tmp_path: Path) -> None:
    show = "import json, os; print(json.dumps(dict(os.environ)))"
    process = Process(tmp_path / "log", "-c", show, environment={"PERSEUS_AGENT_SOCKET": "own"})
    process.launch()
    assert process.wait() == 0
    seen = json.loads(process.log.read_text())
    assert {name: seen[name] for name in OF_THE_MACHINE if name in seen} == {"PERSEUS_AGENT_SOCKET": "own"}
    assert seen["PATH"] == os.environ["PATH"]


def test_a_later_entry_is_awaited(tmp_path: Path) -> None:
    log = tmp_path / "agent.log"
    log.write_text('not JSON\n{"event": "started"}\n{"event": "serv')
    found = []
    waiting = threading.Thread(target=lambda: found.append(logged(log, "served")))
    waiting.start()
    with log.open("a") as more:
        more.write('ed", "port": 7}\n')
    waiting.join(timeout=TIMEOUT_S)
    assert found == [{"event": "served", "port": 7}]


def test_what_does_not_come_is_an_error_with_the_state() -> None:
    with pytest.raises(ClusterError, match=r"expected a plan within 0 s\nno rank"):
        until(lambda: False, "a plan", 0.0, state=lambda: "no rank")


def test_a_rank_evaluates_between_iterations_and_records_how_long_that_takes(tmp_path: Path) -> None:
    workload = replace(SMALL, evaluation_s=0.01, evaluation_interval=2)
    with Cluster(workload, tmp_path, tmp_path / "logs") as cluster:
        task, *_ = rank_tasks(workload, tmp_path, cluster.socket, cluster.gpu_file)
        gpu = EmulatedGpu(Path(task.gpu_file))
        evaluations = Evaluations(task, workload.forward)
        assert [evaluations.iteration_ended(gpu) for _ in range(4)] == [False, True, False, True]
        gpu.close()
        (first, time_s), (second, _) = cluster.evaluations(but=1)
    assert (first, second) == (1, 3)
    assert time_s > 0.005


class Started:
    """Records processes instead of starting them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.commands: list[tuple[list[str], Mapping[str, str]]] = []
        entry = {"address": "127.0.0.1:1"}
        monkeypatch.setattr(
            Process, "launch", lambda each: self.commands.append((each.command(), each.environment))
        )
        monkeypatch.setattr(Process, "logged", lambda *_: entry)
        monkeypatch.setattr(Process, "until", lambda *_: None)
        monkeypatch.setattr(Agent, "launch", Process.launch)
        monkeypatch.setattr(Security, "admit_agents", lambda *_: None)
        self._monkeypatch = monkeypatch

    def settings(self, command: str, model: type[BaseSettings]) -> BaseSettings:
        """Return the settings of the last process of a command."""
        arguments, environment = next(each for each in self.commands[::-1] if command in each[0])
        flags = dict(flag[2:].partition("=")[::2] for flag in arguments if flag.startswith("--"))
        file = next((Path(each) for each in arguments if each.endswith(".toml")), None)
        with self._monkeypatch.context() as patch:
            for name in os.environ:
                if name.startswith("PERSEUS_"):
                    patch.delenv(name)
            for name, value in environment.items():
                patch.setenv(name, value)
            given = {name.replace("-", "_"): value for name, value in flags.items()}
            return configuration.load(model, file, given)


def elsewhere(settings: BaseSettings, folder: Path) -> list[str]:
    """Return the settings that name a place of this machine outside a folder."""
    return [
        name
        for name, value in settings
        if isinstance(value, Path) and not value.is_relative_to(folder) and name != "device_folder"
    ]


def test_all_places_of_agents_and_coordinator_are_in_the_demo_s_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started = Started(monkeypatch)
    with Cluster(SMALL, tmp_path, tmp_path / "logs") as cluster:
        cluster.start_agents(cluster.start_coordinator())
        cluster.start_trainers()
    agent = started.settings("agent", AgentSettings)
    assert isinstance(agent, AgentSettings)
    assert elsewhere(agent, tmp_path) == []
    assert (agent.coordinator, agent.token_file is None) == ("127.0.0.1:1", False)
    assert elsewhere(started.settings("coordinator", CoordinatorSettings), tmp_path) == []
    trainer, environment = started.commands[-1]
    assert "perseus.demo.trainer" in trainer
    assert environment["PERSEUS_AGENT_SOCKET"].startswith(str(tmp_path))


def test_all_places_of_an_engine_s_agent_are_in_the_demo_s_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started = Started(monkeypatch)
    with serving_scenario.running(tmp_path, tmp_path) as (_, gpus, _):
        for gpu in gpus.values():
            gpu.close()
    agent = started.settings("perseus.demo.serving_agent", AgentSettings)
    assert isinstance(agent, AgentSettings)
    assert elsewhere(agent, tmp_path) == []
    assert agent.coordinator == f"unix:{tmp_path}/coordinator.sock"
    assert agent.token is not None, "else it reads the operator's"


@pytest.mark.slow("starts a coordinator")
@pytest.mark.smoke
@pytest.mark.timeout(60)
def test_the_page_is_where_its_lines_say_for_who_has_the_token(machine: None, tmp_path: Path) -> None:
    with Cluster(SMALL, tmp_path, tmp_path / "logs", serves_page=True) as cluster:
        where, log_in = cluster.page_lines(cluster.start_coordinator())
        assert cluster.page_url in where
        request = urllib.request.Request(
            f"{cluster.page_url}/session",
            json.dumps({"token": log_in.rpartition(" ")[2]}).encode(),
            {"Content-Type": "application/json", "Origin": cluster.page_url},
        )
        trusted = ssl.create_default_context(cafile=cluster.security.ca)
        with urllib.request.urlopen(request, context=trusted) as answer:
            assert json.load(answer)["scope"] == "reader"
        cluster.stop_services()
