"""The plug-in for vLLM: steps of every version in, packets out; no error of the agent reaches the engine."""

import socket
import threading
import tomllib
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import pytest

from perseus.agent import vllm
from perseus.agent.link.packets import (
    LATENCY_RATIO,
    MAX_PACKET_BYTES,
    EngineHello,
    EngineReport,
    Message,
    Reply,
    decode,
    encode,
)

NEW = SimpleNamespace(
    num_prompt_tokens=120,
    prompt_token_stats=SimpleNamespace(cached_tokens=20),
    num_generation_tokens=4,
    time_to_first_tokens_iter=[0.2],
    inter_token_latencies_iter=[0.02, 0.02, 0.05],
)
OLD = SimpleNamespace(
    num_prompt_tokens=100,
    num_generation_tokens=4,
    time_to_first_tokens_iter=[0.2],
    time_per_output_tokens_iter=[0.02, 0.02, 0.05],
)
SCHEDULER = SimpleNamespace(num_running_reqs=4, num_waiting_reqs=1, kv_cache_usage=0.5)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PERSEUS_AGENT_SOCKET", str(tmp_path / "agent.sock"))
    monkeypatch.setenv("PERSEUS_INSTANCE", "chat")
    return tmp_path / "agent.sock"


class Agent:
    """Listens, and takes what is there."""

    def __init__(self, path: Path) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(str(path))
        self.listener.listen()
        self.listener.setblocking(False)
        self.connection: socket.socket | None = None

    def packets(self) -> list[Message]:
        """Return what has come since the last call. Raises BlockingIOError while nobody has connected."""
        if self.connection is None:
            self.connection, _ = self.listener.accept()
            self.connection.setblocking(False)
        received = []
        with suppress(BlockingIOError):
            while packet := self.connection.recv(MAX_PACKET_BYTES):
                received.append(decode(packet))
        return received

    def reports(self) -> list[EngineReport]:
        return [each for each in self.packets() if isinstance(each, EngineReport)]

    def close(self) -> None:
        self.listener.close()
        if self.connection is not None:
            self.connection.close()


@pytest.fixture
def agent(path: Path) -> Iterator[Agent]:
    with closing(Agent(path)) as agent:
        yield agent


@pytest.fixture
def logger(path: Path) -> Iterator[vllm.StatLogger]:
    logger = vllm.StatLogger(None, engine_index=1)
    yield logger
    logger.sender.stop()
    logger.sender.run()  # ends the connection


@pytest.mark.parametrize(("iteration", "position"), [(NEW, 3), (OLD, 0)])
def test_an_interval_sums_up_steps_of_every_version(
    agent: Agent, logger: vllm.StatLogger, iteration: Any, position: int
) -> None:
    logger.sender.beat(0.0)
    logger.record(SCHEDULER, iteration, *[0] * position)
    logger.record(scheduler_stats=None, iteration_stats=iteration, engine_idx=1, mm_cache_stats=None, new=1)
    logger.record(scheduler_stats=SCHEDULER, iteration_stats=None)
    logger.sender.beat(0.25)
    logger.sender.beat(0.5)
    hello, report, idle = agent.packets()
    assert hello == EngineHello("chat", 1)
    assert isinstance(report, EngineReport)
    assert (report.length_s, report.running_count, report.waiting_count) == (0.25, 4, 1)
    assert (report.prompt_tokens, report.generation_tokens, report.step_count) == (200, 8, 2)
    assert report.itl_sum_s == pytest.approx(0.18)
    assert sum(report.ttft.values()) == 2
    ((slow, _),) = ((bucket, count) for bucket, count in report.itl.items() if count == 2)
    assert LATENCY_RATIO**slow <= 0.05 < LATENCY_RATIO ** (slow + 1)
    assert isinstance(idle, EngineReport)
    assert (idle.step_count, idle.running_count) == (0, 4), "an idle engine is no silent one"


def test_steps_are_bounded_while_nothing_takes_them(agent: Agent, logger: vllm.StatLogger) -> None:
    logger.sender.beat(0.0)
    for _ in range(10_000):
        logger.record(SCHEDULER, NEW)
    logger.sender.beat(0.25)
    assert [report.step_count for report in agent.reports()] == [vllm.MAX_STEPS]


def test_an_interval_without_room_is_sent_with_the_next(agent: Agent, logger: vllm.StatLogger) -> None:
    for number in range(2_000):
        logger.sender.beat(0.25 * number)
        logger.record(SCHEDULER, NEW)
    reports = agent.reports()
    assert len(reports) < 1_000, "the agent's end was full"
    logger.sender.beat(500.0)
    reports += agent.reports()
    assert sum(report.step_count for report in reports) == 2_000
    assert sum(report.length_s for report in reports) == pytest.approx(500.0)


def test_an_agent_that_leaves_and_comes_back(
    agent: Agent, path: Path, logger: vllm.StatLogger, caplog: pytest.LogCaptureFixture
) -> None:
    logger.sender.beat(0.0)
    agent.packets()
    assert agent.connection is not None
    agent.connection.send(encode(Reply(False, "NO_INSTANCE", "expected a configured instance")))
    logger.sender.beat(0.25)
    assert "refuses this engine: expected a configured instance" in caplog.text
    agent.close()
    path.unlink()
    logger.sender.beat(0.5)
    logger.record(SCHEDULER, NEW)
    logger.sender.beat(1.0)
    with closing(Agent(path)) as again:
        logger.sender.beat(1.25)
        with pytest.raises(BlockingIOError):
            again.packets()  # not at once
        logger.sender.beat(60.0)
        assert again.packets() == [EngineHello("chat", 1)]
        logger.sender.beat(60.25)
        (report,) = again.reports()
    assert (report.step_count, report.length_s) == (0, 0.25), "nothing is kept without an agent"


def test_unknown_statistics_count_as_none(agent: Agent, logger: vllm.StatLogger) -> None:
    logger.sender.beat(0.0)
    logger.record(object(), object())
    logger.record(SCHEDULER, SimpleNamespace(num_generation_tokens=1))
    logger.sender.beat(0.25)
    (report,) = agent.reports()
    assert (report.step_count, report.generation_tokens) == (2, 1)


def test_the_thread_begins_once_the_engine_is_there_and_outlives_impossible_statistics(
    agent: Agent, logger: vllm.StatLogger, caplog: pytest.LogCaptureFixture
) -> None:
    logger.log_engine_initialized()
    (thread,) = (each for each in threading.enumerate() if each.name == "perseus")
    agent.listener.settimeout(30.0)
    agent.connection, _ = agent.listener.accept()
    agent.connection.settimeout(30.0)
    assert decode(agent.connection.recv(MAX_PACKET_BYTES)) == EngineHello("chat", 1)
    assert isinstance(decode(agent.connection.recv(MAX_PACKET_BYTES)), EngineReport)
    logger.record(SimpleNamespace(num_running_reqs="many"), None)
    while packet := agent.connection.recv(MAX_PACKET_BYTES):
        assert isinstance(decode(packet), EngineReport)
    assert "statistics not sent: ValueError" in caplog.text
    assert thread.is_alive()
    logger.sender.stop()
    thread.join()


def test_the_package_declares_the_plug_in() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    declared = project["entry-points"]["vllm.stat_logger_plugins"]
    assert {name: resolve_name(place) for name, place in declared.items()} == {"perseus": vllm.StatLogger}
