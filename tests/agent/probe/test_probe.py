"""The probe's marks and registrations, as an agent receives them."""

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format

from perseus.agent.link.address import SOCKET_VARIABLE
from perseus.agent.link.computation import Computation, Kind, Rank
from perseus.agent.link.packets import (
    MAX_UNMARKED_LENGTH,
    ComputationMark,
    Edge,
    Finish,
    Hello,
    IterationMark,
    Membership,
    Message,
    Registration,
    Reply,
    Unmarked,
    WaitMark,
    encode,
)
from perseus.agent.probe.client import Probe
from perseus.agent.probe.job_spec import NamedSchedule
from perseus.v1 import job_pb2
from tests.agent.probe.agent_stub import AgentStub, connect


def test_marks_carry_identity_and_order(agent: AgentStub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SOCKET_VARIABLE, str(agent.path))
    with Probe.connect(job_id="job", pipeline=1, stage=2, tensor=3, gpu_uuid="GPU-1") as probe:
        agent.answered()
        (hello,) = agent.asked
        assert isinstance(hello, Hello)
        assert (hello.rank, hello.gpu_uuid) == (Rank("job", 1, 2, 3), "GPU-1")
        assert 0 < hello.time_ns <= time.monotonic_ns()
        before_ns = time.monotonic_ns()
        for _ in range(2):
            with probe.iteration():
                with probe.computation(Kind.FORWARD, 5):
                    pass
                probe.begin_computation(Kind.BACKWARD, 5, 1)
                probe.begin_wait()
                probe.end_wait()
                probe.end_computation(Kind.BACKWARD, 5, 1)
    after_ns = time.monotonic_ns()
    marks: list[Any] = agent.marks()
    times_ns = [mark.time_ns for mark in marks]
    assert [before_ns, *times_ns, after_ns] == sorted([before_ns, *times_ns, after_ns])
    forward, backward = Computation(Kind.FORWARD, 5), Computation(Kind.BACKWARD, 5, 1)
    expected: list[Message] = []
    for iteration in range(2):
        expected += [
            IterationMark(Edge.BEGIN, iteration, 0),
            ComputationMark(Edge.BEGIN, iteration, 0, forward, 0),
            ComputationMark(Edge.END, iteration, 0, forward, 0),
            ComputationMark(Edge.BEGIN, iteration, 1, backward, 0),
            WaitMark(Edge.BEGIN, iteration, 0),
            WaitMark(Edge.END, iteration, 0),
            ComputationMark(Edge.END, iteration, 1, backward, 0),
            IterationMark(Edge.END, iteration, 0),
        ]
    assert [replace(mark, time_ns=0) for mark in marks] == [*expected, Finish(0)]


def test_an_iteration_may_have_relative_work(
    agent: AgentStub, probe: Probe, caplog: pytest.LogCaptureFixture
) -> None:
    for work in (None, 1.2504, 0.001, 1000, 0.0, -1.0, math.nan, math.inf, 1e9, "much"):
        with probe.iteration(relative_work=work):  # type: ignore[arg-type]
            pass
    probe.close()
    begun = [mark for mark in agent.marks() if isinstance(mark, IterationMark) and mark.edge is Edge.BEGIN]
    assert [mark.relative_work_permille for mark in begun] == [0, 1250, 1, 1_000_000, 0, 0, 0, 0, 0, 0]
    warned = [record for record in caplog.records if "relative_work" in record.message]
    assert len(warned) == 1
    assert "expected 0.001 to 1000, found 0.0" in warned[0].message


def test_the_work_that_is_counted_is_that_of_one_iteration(agent: AgentStub, probe: Probe) -> None:
    for counted in ((1000, 24), (), (3 * 2**31 + 5,), (2**60,)):
        with probe.iteration():
            for elements in counted:
                probe.count_work(elements)
        probe.count_work(7)  # as an evaluation's
    probe.close()
    ended = [mark for mark in agent.marks() if isinstance(mark, IterationMark) and mark.edge is Edge.END]
    assert [mark.work for mark in ended] == [1024, 0, 3 * 2**31 + 5, 2**53]


def test_a_block_that_raises_has_no_end(agent: AgentStub, probe: Probe) -> None:
    with pytest.raises(KeyError), probe.iteration(), probe.computation(Kind.FORWARD, 0):
        raise KeyError
    probe.close()
    assert [mark.edge for mark in agent.marks() if isinstance(mark, IterationMark | ComputationMark)] == [
        Edge.BEGIN,
        Edge.BEGIN,
    ]


def test_a_full_socket_drops_marks_without_waiting(agent: AgentStub, probe: Probe) -> None:
    for _ in range(1000):
        with probe.iteration():
            pass
    assert probe.is_connected
    assert 0 < probe.dropped_mark_count < 2000
    assert len(agent.marks()) == 2000 - probe.dropped_mark_count
    dropped = probe.dropped_mark_count
    with probe.iteration():
        pass
    assert probe.dropped_mark_count == dropped, "there is room again"
    reported = [mark.dropped_mark_count for mark in agent.marks() if isinstance(mark, IterationMark)]
    assert reported == [0, dropped], "and the agent learns the count at the end"


def test_a_registration_is_a_job_spec_and_its_refusal_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    agent = AgentStub(tmp_path / "agent.sock", [Reply(True), Reply(False, "JOB_EXISTS", "another job")])
    probe = connect(agent.path)
    schedule = [[Computation(Kind.FORWARD, 0)], [Computation(Kind.BACKWARD, 0, 1)]]
    assert not probe.register(
        pipeline_count=2,
        stage_count=2,
        tensor_count=4,
        schedule=schedule,
        paths=[[(0, 0), (1, 1)]],
        max_slowdown_percent=2.5,
    )
    assert "job not registered: another job" in caplog.text
    registration = agent.asked[1]
    assert isinstance(registration, Registration)
    spec = json_format.ParseDict(registration.spec, job_pb2.JobSpec())
    assert spec.job_id == "job"
    assert (spec.parallelism.pipeline_count, spec.parallelism.tensor_count) == (2, 4)
    assert spec.policy.max_slowdown_percent == 2.5
    second = spec.schedule.explicit.stages[1].computations[0]
    assert (int(second.kind), second.microbatch, second.chunk) == (2, 0, 1)
    (path,) = spec.schedule.explicit.paths
    assert [(step.stage, step.chunk) for step in path.steps] == [(0, 0), (1, 1)]
    with probe.iteration():
        pass
    assert len(agent.marks()) == 2, "training is marked all the same"
    probe.close()
    agent.close()


def test_the_other_ranks_declare_membership_of_the_registered_job(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    agents = [
        AgentStub(tmp_path / "first" / "agent.sock", [Reply(True), Reply(True)]),
        AgentStub(tmp_path / "second" / "agent.sock", [Reply(True)]),
    ]
    probes = [connect(agent.path, stage) for stage, agent in enumerate(agents)]
    for probe in probes:
        assert probe.register(pipeline_count=1, stage_count=2, schedule=NamedSchedule("1f1b", 4))
    registration = agents[0].asked[1]
    assert isinstance(registration, Registration)
    assert agents[1].marks() == [Membership(registration.spec_fingerprint)]
    for probe, agent in zip(probes, agents, strict=True):
        probe.close()
        agent.close()


def test_another_order_is_registered_without_keeping_the_trainer_waiting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    agent = AgentStub(tmp_path / "agent.sock", [Reply(True), Reply(True)])
    probe = connect(agent.path)
    counts = {"pipeline_count": 1, "stage_count": 2}
    probe.register(**counts, schedule=NamedSchedule("1f1b", 4))  # type: ignore[arg-type]
    agent.answered()
    probe.register(**counts, schedule=NamedSchedule("1f1b", 6), waits=False)  # type: ignore[arg-type]
    with probe.iteration():
        pass  # the agent has not answered yet
    first = agent.asked[1]
    (second, *marks) = agent.marks()
    assert isinstance(first, Registration)
    assert isinstance(second, Registration)
    assert [type(mark) for mark in marks] == [IterationMark, IterationMark]
    assert second.spec["schedule"]["named"]["microbatchCount"] == 6
    assert second.spec_fingerprint != first.spec_fingerprint
    assert second.request_id != first.request_id
    agent.connection.send(encode(Reply(False, "JOB_ALREADY_EXISTS", "its schedule differs")))
    with probe.iteration():
        pass
    assert caplog.messages == [], "it changes once all of its ranks have registered the change"
    assert probe.is_connected
    probe.close()
    agent.close()


def test_with_a_full_socket_another_order_is_registered_when_there_is_room(tmp_path: Path) -> None:
    agent = AgentStub(tmp_path / "agent.sock", [Reply(True)])
    probe = connect(agent.path, stage=1)
    agent.answered()
    probe.register(pipeline_count=1, stage_count=2, schedule=NamedSchedule("1f1b", 4))
    while not probe.dropped_mark_count:
        probe.begin_computation(Kind.FORWARD, 0)
    probe.register(pipeline_count=1, stage_count=2, schedule=NamedSchedule("1f1b", 6), waits=False)
    assert [type(some) for some in agent.marks()].count(Membership) == 1, "the first one"
    probe.begin_iteration()
    assert [type(some) for some in agent.marks()] == [Membership, IterationMark]
    probe.close()
    agent.close()


def test_training_without_marks_is_reported_to_the_agent(agent: AgentStub, probe: Probe) -> None:
    probe.report_unmarked(2 * MAX_UNMARKED_LENGTH * "x")
    assert agent.marks() == [Unmarked(MAX_UNMARKED_LENGTH * "x")]
    probe.close()
    probe.report_unmarked("after the end")


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ({"stage": -1}, "stage: expected an integer of at least 0, found -1"),
        ({"job_id": "GPT 3"}, r"job_id: expected 1 to 63 of .*, found 'GPT 3'"),
        ({"gpu_uuid": ""}, "gpu_uuid: expected"),
    ],
)
def test_mistakes_about_the_rank_are_refused(tmp_path: Path, mistake: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        connect(tmp_path / "nothing.sock", **mistake)


def test_mistakes_about_the_job_are_refused_also_without_an_agent(tmp_path: Path) -> None:
    probe = connect(tmp_path / "nothing.sock")
    with pytest.raises(ValueError, match="expected the orders of 4 stages, found 1"):
        probe.register(pipeline_count=1, stage_count=4, schedule=[[Computation(Kind.FORWARD, 0)]])


def test_a_mistake_while_training_does_not_raise(
    agent: AgentStub, probe: Probe, caplog: pytest.LogCaptureFixture
) -> None:
    with probe.iteration(), probe.computation("forward", 0):  # type: ignore[arg-type]
        pass
    with probe.iteration(), probe.computation(Kind.FORWARD, 2**40):
        pass
    assert probe.is_connected
    assert caplog.text.count("invalid marks are dropped") == 1
    probe.close()
    assert len(agent.marks()) == 4, "the iterations' own"
