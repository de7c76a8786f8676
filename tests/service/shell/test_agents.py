"""Agents and the jobs that they serve."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import structlog

from perseus.service.domain.inputs import AgentDisconnected, AgentHeard, Input, RankJoined, RankLeft
from perseus.service.domain.model import RankLeftReason
from perseus.service.domain.specification import Coordinates
from perseus.service.fleet.power.feeds import Feeds
from perseus.service.shell.agents import Agents
from tests.service import service_fakes

RANK = Coordinates(0, 0, 0)


@dataclass
class Jobs:
    """The runs of jobs of one rank, which is live until its agent reports that it has left."""

    handled: list[tuple[str, Input]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.runs: dict[str, Any] = {}
        self.ports: dict[str, object] = {}
        self.epoch = "epoch"
        self.clock = SimpleNamespace(now_s=lambda: 0.0)

    def get(self, job_id: str) -> Any:
        return self.runs.get(job_id)

    def find(self, job_id: str) -> Any:
        registrations = SimpleNamespace(is_owner=lambda owner: True)
        machine = SimpleNamespace(registrations=registrations, has_live_rank=False)
        return self.runs.setdefault(job_id, SimpleNamespace(job_id=job_id, machine=machine))

    def tick_run(self, run: Any) -> None:
        pass

    def read(self, run: Any, ask: object, otherwise: object, part: object) -> None:
        return None  # it has left its GPU

    def handle(self, run: Any, event: Input) -> None:
        self.handled.append((run.job_id, event))
        if isinstance(event, RankJoined | RankLeft):
            run.machine.has_live_rank = isinstance(event, RankJoined)


async def greeted(jobs: Jobs) -> tuple[Agents, Any]:
    store = AsyncMock(instance_key=Mock(return_value="key"))
    store.telemetry_principal.return_value, store.telemetry_sequence.return_value = "", 0
    port: Any = SimpleNamespace()
    agents = Agents(store, store, cast(Any, jobs), Feeds())
    await agents.greet("agent", port)
    return agents, port


def join(agents: Agents, job_id: str) -> None:
    gpu = service_fakes.make_gpu(RANK)
    agents.join(job_id, RankJoined(RANK, "agent", "host", gpu, 0, "", 0, 0))


async def test_a_heartbeat_reaches_none_of_a_thousand_finished_jobs() -> None:
    jobs = Jobs()
    agents, _ = await greeted(jobs)
    for number in range(1000):
        join(agents, f"job-{number}")
        agents.dispatch(f"job-{number}", RankLeft(RANK, "agent", RankLeftReason.FINISHED))
    for job_id in ("lives", "lives, too"):
        join(agents, job_id)
    jobs.handled.clear()
    agents.hear("agent")
    fed = sorted(job_id for job_id, event in jobs.handled if event == AgentHeard("agent"))
    assert fed == ["lives", "lives, too"]


async def test_a_clock_that_differs_is_logged_once_and_when_it_agrees_again() -> None:
    agents, port = await greeted(Jobs())
    assert agents.clock_skew_s() is None
    with structlog.testing.capture_logs() as entries:
        for ahead_s in (0.2, -90.0, -91.0, 0.1):
            agents.note_clock("agent", "host-a", ahead_s)
            assert agents.clock_skew_s() == abs(ahead_s)
    assert [entry["hostname"] for entry in entries] == ["host-a", "host-a"]
    assert [entry["ahead_s"] for entry in entries] == [-90.0, 0.1]
    assert [entry["event"].partition(":")[0] for entry in entries] == [
        "an agent's clock differs from the coordinator's",
        "an agent's clock agrees with the coordinator's again",
    ]
    agents.part("agent", port, is_goodbye=True)
    assert agents.clock_skew_s() is None


async def test_a_job_is_dropped_once_it_has_no_live_rank() -> None:
    jobs = Jobs()
    agents, port = await greeted(jobs)
    for job_id in ("deleted", "lost", "lives"):
        join(agents, job_id)
    del jobs.runs["deleted"]
    jobs.runs["lost"].machine.has_live_rank = False
    jobs.handled.clear()
    agents.hear("agent")
    jobs.runs["lost"].machine.has_live_rank = True  # served by another agent now
    agents.part("agent", port, is_goodbye=False)
    assert jobs.handled == [("lives", AgentHeard("agent")), ("lives", AgentDisconnected("agent"))]
