"""The probe's connection to agents that start, vanish, refuse, hang and send nonsense."""

import contextlib
import logging
import os
import socket
import threading
import time
from pathlib import Path

import pytest

from perseus.agent.link.computation import Kind
from perseus.agent.link.packets import (
    MAX_PACKET_BYTES,
    SAVING,
    ComputationMark,
    Edge,
    Finish,
    Hello,
    IterationMark,
    Registration,
    Reply,
    Saving,
    Unmarked,
    WaitMark,
    encode,
)
from perseus.agent.probe import agent_connection
from perseus.agent.probe.client import Probe
from perseus.agent.probe.job_spec import NamedSchedule
from perseus.agent.probe.rejoin import PERIOD_NS
from tests.agent.probe.agent_stub import AgentStub, connect, iterate


def test_marks_are_packed_only_while_the_agent_allows_it(
    agent: AgentStub, probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_connection, "_NOTICE_PERIOD_NS", 0)
    hello = agent.asked[0]
    assert isinstance(hello, Hello)
    assert hello.packs_marks

    def packets(count: int) -> int:
        """Return the number of packets of an iteration of some computations."""
        probe.begin_iteration()
        for microbatch in range(count):
            with probe.computation(Kind.FORWARD, microbatch):
                probe.begin_wait()
                probe.end_wait()
        probe.end_iteration()
        before = agent.packet_count
        marks = agent.marks()
        assert [type(mark) for mark in marks] == [
            IterationMark,
            *[ComputationMark, WaitMark, WaitMark, ComputationMark] * count,
            IterationMark,
        ]
        times_ns = [getattr(mark, "time_ns") for mark in marks]  # noqa: B009 - of whatever type
        assert times_ns == sorted(times_ns)
        return agent.packet_count - before

    assert packets(3) == 14
    agent.allow_packing(True)
    assert packets(3) == 2, "the begin, and everything else with the end"
    assert packets(20) == 3, "at most 64 marks a packet"
    agent.allow_packing(False)
    assert packets(3) == 14
    assert probe.dropped_mark_count == 0
    agent.allow_packing(True)
    with probe.iteration(), probe.computation(Kind.FORWARD, 0):
        probe.report_unmarked("in eval()")
        probe.begin_wait()
        probe.finish()
    sent = [IterationMark, ComputationMark, Unmarked, WaitMark, Finish]
    assert [type(mark) for mark in agent.marks()][:5] == sent


def test_packed_marks_that_find_no_room_are_counted_one_by_one(
    agent: AgentStub, probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_connection, "_NOTICE_PERIOD_NS", 0)
    agent.allow_packing(True)
    sent_count = 0
    while not probe.dropped_mark_count:
        iterate(probe)
        sent_count += 4
    received_count = len(agent.marks())
    assert sent_count == received_count + probe.dropped_mark_count


def test_a_forked_child_closes_the_connection_and_sends_nothing(agent: AgentStub, probe: Probe) -> None:
    """The agent must see the trainer's end while a data loader lives on, and no other end."""
    let_end, end = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):
            with probe, probe.iteration():
                status = 2 if probe.is_connected else 0
            os.close(end)
            os.read(let_end, 1)
        os._exit(status)
    os.close(let_end)
    try:
        probe.begin_iteration()
        time.sleep(0.2)
        (mark,) = agent.marks()
        assert isinstance(mark, IterationMark), "the parent's only"
        probe.close()
        agent.connection.settimeout(10)
        assert agent.connection.recv(MAX_PACKET_BYTES) == b"", "the end, though the child lives"
    finally:
        os.close(end)
        _, status = os.waitpid(child, 0)
    assert status == 0


class Now:
    """The probe's clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ns = 0
        monkeypatch.setattr("perseus.agent.probe.agent_connection.monotonic_ns", lambda: self.ns)


def test_an_agent_that_starts_later_is_joined_and_receives_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    now = Now(monkeypatch)
    probe = connect(tmp_path / "agent.sock")
    assert not probe.register(pipeline_count=2, stage_count=4, schedule=NamedSchedule("1f1b", 8))
    iterate(probe)
    probe.finish()
    (warning,) = caplog.messages
    assert "training continues at stock clocks, and joins an agent that starts there later" in warning
    assert "systemctl start perseus-agent" in warning
    agent = AgentStub(tmp_path / "agent.sock", [Reply(True), Reply(False, "JOB_EXISTS", "job 'job' differs")])
    now.ns = PERIOD_NS - 1
    iterate(probe)
    assert not agent.asked, "not before it is time"
    now.ns = PERIOD_NS
    iterate(probe)
    while len(agent.asked) < 2:  # the stub answers on its thread, and its socket must not get full meanwhile
        iterate(probe)
        time.sleep(0.001)
    agent.answered()
    assert probe.is_connected
    iterate(probe)
    assert "job not registered: job 'job' differs" in caplog.text
    hello, registration = agent.asked
    assert isinstance(hello, Hello)
    assert isinstance(registration, Registration)
    marks = agent.marks()
    assert isinstance(marks[0], IterationMark), "whole iterations only"
    assert marks[0].edge is Edge.BEGIN
    iterations = sorted({mark.iteration for mark in marks if isinstance(mark, IterationMark)})
    assert iterations == list(range(iterations[0], iterations[-1] + 1))
    assert iterations[0] > 2, "the count continues"
    probe.close()
    agent.close()


def test_a_restarted_agent_is_joined_again(
    agent: AgentStub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = Now(monkeypatch)
    probe = connect(agent.path)
    agent.close()
    iterate(probe)
    assert not probe.is_connected
    agent.path.unlink()
    foreign = AgentStub(agent.path, [encode(Finish(0))])
    now.ns = PERIOD_NS
    iterate(probe)
    foreign.close()
    iterate(probe)
    assert not probe.is_connected, "a server that is no agent is left alone"
    agent.path.unlink()
    again = AgentStub(agent.path, [Reply(True)])
    now.ns += PERIOD_NS
    iterate(probe)
    again.answered()
    iterate(probe)
    assert probe.is_connected
    assert len(again.marks()) == 4
    probe.close()
    again.close()
    assert caplog.text.count("lost the agent") == 1


def silent(path: Path) -> socket.socket:
    """Return a socket that listens, and never answers."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen()
    return listener


def test_training_does_not_wait_for_an_agent_that_does_not_reply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = Now(monkeypatch)
    probe = connect(tmp_path / "agent.sock")
    listener = silent(tmp_path / "agent.sock")
    for _ in range(3):
        now.ns += PERIOD_NS
        iterate(probe)
    assert not probe.is_connected
    connection, _ = listener.accept()
    listener.setblocking(False)
    with pytest.raises(BlockingIOError):
        listener.accept()  # the agent was contacted once
    probe.close()
    assert connection.recv(MAX_PACKET_BYTES), "the hello"
    assert not connection.recv(MAX_PACKET_BYTES), "nothing is left open"
    connection.close()
    listener.close()


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (Reply(False, "GPU_NOT_USABLE", "GPU GPU-1: expected one of GPU-0"), "expected one of GPU-0"),
        (b"\x00\x01", "expected a mark or JSON"),
        (encode(Finish(0)), "expected a reply, found Finish"),
    ],
)
def test_a_refused_or_foreign_hello_leaves_training_at_stock(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, reply: Reply | bytes, text: str
) -> None:
    agent = AgentStub(tmp_path / "agent.sock", [reply])
    probe = connect(agent.path)
    assert not probe.is_connected
    assert text in caplog.text
    agent.close()


def test_the_wait_for_an_agent_that_does_not_answer_is_bounded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    listener = silent(tmp_path / "agent.sock")
    probe = connect(tmp_path / "agent.sock", timeout_s=0.05)
    assert not probe.is_connected
    assert "timed out" in caplog.text
    listener.close()


def test_refusals_are_logged_at_any_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "perseus.probe")
    refused = Reply(False, "JOB_FINISHED", "run 1 has ended", is_notice=True)
    served = Reply(True, "", "the rank is taken now", is_notice=True)
    # The first comes before the answer to the registration, and is no answer.
    agent = AgentStub(tmp_path / "agent.sock", [Reply(True), refused])
    probe = connect(agent.path)
    thread = threading.Thread(
        target=lambda: probe.register(pipeline_count=1, stage_count=1, schedule=NamedSchedule("1f1b", 4))
    )
    thread.start()
    agent.answered()
    agent.connection.send(encode(Reply(False, "INVALID_FIELD", "no")))
    thread.join(5)
    agent.connection.send(encode(served))
    probe.begin_iteration()
    assert caplog.messages[1:] == [
        "job[pipeline 0, stage 0, tensor 0]: run 1 has ended",
        "job[pipeline 0, stage 0, tensor 0]: job not registered: no",
    ]
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING", "ERROR"]
    probe.close()
    agent.close()


def test_the_job_s_saving_is_known_until_the_agent_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_connection, "_NOTICE_PERIOD_NS", 0)
    caplog.set_level(logging.INFO, "perseus.probe")
    monkeypatch.setattr(agent_connection, "untested", ["torch 9.9.9"])
    agent = AgentStub(tmp_path / "agent.sock", [Reply(True)])
    probe = connect(agent.path)
    agent.answered()
    assert probe.saving is None
    found: list[Saving | None] = []
    for saving in (Saving(13.2, 0.1, 0.4, 0.2), None, Saving(13.3, 0.0)):
        agent.connection.send(encode(Reply(True, SAVING, "13.2 %", is_notice=True, saving=saving)))
        probe.begin_iteration()
        found.append(probe.saving)
    assert found == [Saving(13.2, 0.1, 0.4, 0.2), None, Saving(13.3, 0.0)]
    assert [message.partition("]: ")[2] for message in caplog.messages] == [
        f"attached to the agent at {agent.path}, to be measured and planned; not tested with torch 9.9.9",
        "planned: saves 13.2 ± 0.4 % of energy, at +0.1 ± 0.2 % of time: perseus jobs show job",
    ], "once; a trainer logs figures by its own logger"
    agent.connection.close()
    for _ in range(2):
        probe.begin_iteration()
    assert probe.saving is None
    probe.close()
    agent.close()
