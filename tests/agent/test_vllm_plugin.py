"""The plug-in for vLLM: steps of every version in, packets out; no error of the agent reaches the engine."""

import socket
import threading
import tomllib
from collections.abc import Iterator
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
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.setblocking(False)
        self.connection: socket.socket | None = None

    def packets(self) -> list[Message]:
        if self.connection is None:
            self.connection, _ = self._listener.accept()
            self.connection.setblocking(False)
        found = []
        try:
            while packet := self.connection.recv(MAX_PACKET_BYTES):
                found.append(decode(packet))
        except BlockingIOError:
            pass
        return found

    def close(self) -> None:
        self._listener.close()
        if self.connection is not None:
            self.connection.close()


@pytest.fixture
def agent(path: Path) -> Iterator[Agent]:
    agent = Agent(path)
    yield agent
    agent.close()


@pytest.fixture
def logger(path: Path) -> Iterator[vllm.StatLogger]:
    logger = vllm.StatLogger(None, engine_index=1)
    yield logger
    logger._sender._disconnect(0.0)


@pytest.mark.parametrize(("iteration", "position"), [(NEW, 3), (OLD, 0)])
def test_an_interval_sums_up_steps_of_every_version(
    agent: Agent, logger: vllm.StatLogger, iteration: Any, position: int
) -> None:
    sender = logger._sender
    sender.beat(0.0)
    logger.record(SCHEDULER, iteration, *[0] * position)
    logger.record(scheduler_stats=None, iteration_stats=iteration, engine_idx=1, mm_cache_stats=None, new=1)
    logger.record(scheduler_stats=SCHEDULER, iteration_stats=None)
    sender.beat(0.25)
    hello, report = agent.packets()
    assert hello == EngineHello("chat", 1)
    assert isinstance(report, EngineReport)
    assert (report.length_s, report.running_count, report.waiting_count) == (0.25, 4, 1)
    assert (report.prompt_tokens, report.generation_tokens, report.step_count) == (200, 8, 2)
    assert report.itl_sum_s == pytest.approx(0.18)
    assert sum(report.ttft.values()) == 2
    ((slow, _),) = ((bucket, count) for bucket, count in report.itl.items() if count == 2)
    assert LATENCY_RATIO**slow <= 0.05 < LATENCY_RATIO ** (slow + 1)
    sender.beat(0.5)
    (again,) = agent.packets()
    assert isinstance(again, EngineReport)
    assert (again.step_count, again.running_count) == (0, 4)  # an idle engine is no silent one


def test_nothing_is_kept_without_an_agent(path: Path, logger: vllm.StatLogger) -> None:
    sender = logger._sender
    logger.record(SCHEDULER, NEW)
    sender.beat(0.0)
    assert not logger._steps
    agent = Agent(path)
    logger.record(SCHEDULER, NEW)
    sender.beat(10.0)
    sender.beat(10.25)
    _, report = agent.packets()
    assert isinstance(report, EngineReport)
    assert (report.step_count, report.length_s) == (0, 0.25)
    agent.close()


def test_steps_are_bounded_while_nothing_takes_them(logger: vllm.StatLogger) -> None:
    for _ in range(10_000):
        logger.record(SCHEDULER, NEW)
    assert len(logger._steps) == vllm._MAX_STEPS


def test_an_interval_without_room_is_sent_with_the_next(agent: Agent, logger: vllm.StatLogger) -> None:
    sender = logger._sender
    now_s = 0.0
    sender.beat(now_s)
    while sender._begun_s == now_s:  # until the agent's end is full
        now_s += 0.25
        sender.beat(now_s)
    logger.record(SCHEDULER, NEW)
    for _ in range(3):
        now_s += 0.25
        sender.beat(now_s)
    agent.packets()
    sender.beat(now_s + 0.25)
    (report,) = agent.packets()
    assert isinstance(report, EngineReport)
    assert report.step_count == 1
    assert report.length_s == pytest.approx(1.25)


def test_an_agent_that_leaves_and_comes_back(
    agent: Agent, path: Path, logger: vllm.StatLogger, caplog: Any
) -> None:
    sender = logger._sender
    sender.beat(0.0)
    agent.packets()
    assert agent.connection is not None
    agent.connection.send(encode(Reply(False, "NO_INSTANCE", "expected a configured instance")))
    sender.beat(0.25)
    assert "refuses this engine: expected a configured instance" in caplog.text
    agent.close()
    path.unlink()
    sender.beat(0.5)
    sender.beat(1.0)
    assert sender._connection is None
    again = Agent(path)
    sender.beat(1.25)
    assert sender._connection is None  # not at once
    sender.beat(60.0)
    assert again.packets()[0] == EngineHello("chat", 1)
    again.close()


def test_unknown_statistics_never_reach_the_engine(agent: Agent, logger: vllm.StatLogger) -> None:
    sender = logger._sender
    sender.beat(0.0)
    logger.record(object(), object())
    logger.record(SCHEDULER, SimpleNamespace(num_generation_tokens=1))
    sender.beat(0.25)
    assert isinstance(agent.packets()[-1], EngineReport)
    logger.record(SimpleNamespace(num_running_reqs="many"), None)
    with pytest.raises(ValueError, match="many"):
        sender.beat(0.5)  # the thread logs it, and goes on


def test_the_thread_begins_once_the_engine_is_there(
    agent: Agent, logger: vllm.StatLogger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "_INTERVAL_S", 0.001)
    logger.log_engine_initialized()
    (thread,) = (each for each in threading.enumerate() if each.name == "perseus")
    agent._listener.settimeout(5.0)
    try:
        agent.connection, _ = agent._listener.accept()
        agent.connection.settimeout(5.0)
        assert decode(agent.connection.recv(MAX_PACKET_BYTES)) == EngineHello("chat", 1)
    finally:
        logger._sender.stop()
        thread.join()


def test_the_package_declares_the_plug_in() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    declared = project["entry-points"]["vllm.stat_logger_plugins"]
    assert {name: resolve_name(place) for name, place in declared.items()} == {"perseus": vllm.StatLogger}
