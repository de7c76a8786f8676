"""Admission: the cost of hellos, and claims that are judged again during training."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from perseus.agent.claims.decision import Allowed, Refused
from perseus.agent.claims.grants import User
from perseus.agent.claims.registry import GPU_TAKEN, JOB_TAKEN, RANK_TAKEN, Claim
from perseus.agent.link.computation import Rank
from perseus.agent.link.packets import Hello
from perseus.agent.rank.events import TrainerGone
from perseus.agent.sidecar import admission
from perseus.agent.sidecar.admission import Admission
from perseus.agent.sidecar.gpus import AgentCounters
from perseus.agent.sidecar.roster import Roster, Trainer


class FakeAccess:
    """An access checker that gives these verdicts, or else allows every claim once released."""

    def __init__(self, *verdicts: Allowed | Refused | Exception) -> None:
        self.looked_at: list[int] = []
        self.may_go_on = asyncio.Event()
        self._verdicts = iter(verdicts)

    async def user(self, peer: Any) -> User:
        return User(peer.uid, f"user-{peer.uid}")

    async def judge(self, peer: Any, *_: object) -> Allowed | Refused:
        self.looked_at.append(peer.uid)
        for verdict in self._verdicts:
            if isinstance(verdict, Exception):
                raise verdict
            return verdict
        await self.may_go_on.wait()
        return Allowed()


class FakeConnection:
    """A trainer's connection without a known process."""

    def __init__(self, uid: int) -> None:
        self.peer = SimpleNamespace(uid=uid, pid=0, pidfd=None, has_ended=False, time_namespace=None)
        self.ends: list[object] = []
        self.paid_count = 0

    async def pay_hello(self) -> None:
        self.paid_count += 1

    def end(self, reply: object) -> None:
        self.ends.append(reply)


Admitting = tuple[Admission, FakeAccess, Roster]


@pytest.fixture
def admitting(monkeypatch: pytest.MonkeyPatch) -> Admitting:
    monkeypatch.setattr(admission, "check_clock", lambda *_: None)
    access, roster = FakeAccess(), Roster()
    found = Admission(roster, cast(Any, access), AgentCounters())
    return found, access, roster


async def test_a_hello_that_must_be_refused_is_not_inspected(admitting: Admitting) -> None:
    admits, access, roster = admitting
    held = Claim(Rank("job", 0, 0, 0), "GPU-0", User(1000, "owner"), Allowed(is_granted=True))
    roster.enter(
        Trainer(held, cast(Any, FakeConnection(1000)), Hello(held.rank, held.gpu_uuid), problem=None)
    )
    for uid, rank, gpu, reason in (
        (1000, Rank("job", 0, 0, 0), "GPU-1", RANK_TAKEN),
        (1000, Rank("job", 0, 1, 0), "GPU-0", GPU_TAKEN),
        (2000, Rank("job", 0, 1, 0), "GPU-1", JOB_TAKEN),
    ):
        refused = await admits.admit(Hello(rank, gpu), cast(Any, FakeConnection(uid)))
        assert isinstance(refused, Refused)
        assert refused.reason == reason
    assert access.looked_at == []


async def test_a_users_hellos_are_inspected_one_at_a_time(admitting: Admitting) -> None:
    admits, access, roster = admitting
    connections = [FakeConnection(uid) for uid in (1000, 2000) for _ in range(3)]
    hellos = [
        asyncio.create_task(
            admits.admit(Hello(Rank(f"job-{number}", 0, 0, 0), f"GPU-{number}"), cast(Any, connection))
        )
        for number, connection in enumerate(connections)
    ]
    for _ in range(20):
        await asyncio.sleep(0)
    assert sorted(access.looked_at) == [1000, 2000]
    access.may_go_on.set()
    await asyncio.gather(*hellos)
    assert sorted(access.looked_at) == [1000] * 3 + [2000] * 3
    assert len(roster.trainers) == 6
    assert [connection.paid_count for connection in connections] == [1] * 6, "and count as data"


async def test_a_claim_is_judged_again_after_any_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_WATCH_UNPROVEN_S", 0.0)
    refused = Refused("GPU_OF_ANOTHER_USER", "found user 7's")
    access = FakeAccess(OSError(24, "Too many open files"), refused)
    dispatched: list[object] = []
    roster = SimpleNamespace(dispatch=lambda *event: dispatched.append(event))
    line = FakeConnection(1000)
    claim = Claim(Rank("job", 0, 0, 0), "GPU-0", User(1000, "somebody"), Allowed())
    watching = Admission(cast(Any, roster), cast(Any, access), AgentCounters())
    with capture_logs() as logs:
        await watching.watch(Trainer(claim, cast(Any, line), Hello(claim.rank, claim.gpu_uuid), problem=None))
    assert [line["event"] for line in logs] == ["claim not judged again", "rank refused"]
    assert "Too many open files" in logs[0]["message"]
    assert dispatched == [(claim.rank, TrainerGone())]
    assert len(line.ends) == 1
