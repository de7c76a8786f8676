"""Another coordinator takes over, whatever ends one that serves. `make torture-fleet` ends more."""

import random
import signal
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest

from benchmarks.coordinator_load import report_problems
from benchmarks.load.agents import Agent, Bodies, Findings, Rank
from benchmarks.load.control import Agents
from benchmarks.load.job import outdated_offers
from benchmarks.load.wire import Place
from perseus.demo.processes import Coordinator
from perseus.solver import one_forward_one_backward
from perseus.v1 import agent_service_pb2 as pb
from tests.ports import free_port
from tests.processes import MEMBER_LEASE_S
from tests.service.storage import next_release, postgresql
from tests.torture import unfenced
from tests.torture.coordinator import FLAGS, STAGES
from tests.torture.fleet import COUNT, KINDS, PERIOD_S, ForeignClocks, shuffled, torture

SAMPLE = ("kill", "freeze in a transaction", "leave", "cut off", "kill and restart")


@pytest.mark.slow("coordinators are ended and others take over while dozens of agents train")
@pytest.mark.nightly(
    "it takes minutes; CI kills a fleet's coordinators once, in tests/test_fleet_end_to_end.py"
)
@pytest.mark.timeout(1800)
@pytest.mark.skipif(bool(postgresql.MISSING), reason=str(postgresql.MISSING))
def test_nothing_is_lost_doubled_or_reversed_when_another_takes_over(tmp_path: Path) -> None:
    outcome = torture(tmp_path, len(SAMPLE), seed=1, kinds=SAMPLE)
    assert outcome.problems == []
    assert outcome.counts.total() == len(SAMPLE)
    assert outcome.end_statuses == {3: 2}, "those that were frozen or cut off end by themselves"
    assert outcome.batch_count > 0
    assert outcome.version_count > 0


@pytest.mark.slow("coordinators of two releases serve dozens of agents, one after the other")
@pytest.mark.skipif(bool(postgresql.MISSING), reason=str(postgresql.MISSING))
def test_a_fleet_is_upgraded_one_by_one(tmp_path: Path) -> None:
    """The next release migrates the database while this one serves, and goes on; nothing is lost."""
    with postgresql.running() as server, ExitStack() as stack:
        database = server.new_database()
        old, new = (
            stack.enter_context(coordinator(tmp_path / module, database, module))
            for module in ("perseus.cli", next_release.__name__)
        )
        old.start()
        agents = stack.enter_context(Agents(f"{old.address},{new.address}"))
        agents.ask("find", job_id="job", limit_s=60.0)
        agents.ask(
            "add", job_id="job", pipeline_count=4, stage_count=STAGES, microbatch_count=4,
            period_s=PERIOD_S, reconnect_within_s=0.3,
        )  # fmt: skip
        agents.ask("planned", job_id="job", limit_s=120.0)
        new.launch()
        new.logged("standing by")
        assert schema_in(database) == next_release.NEXT
        before = agents.ask("counts", job_id="job")
        agents.ask("measure", seconds=3.0, server_pid=old.pid)
        beside = agents.ask("counts", job_id="job")
        assert beside["acknowledged"] > before["acknowledged"], "the old one goes on beside the new one"
        since_s = time.monotonic()
        assert old.terminate() == 0, old.log.read_text()[-1000:]
        agents.ask("back", since_s=since_s, limit_s=60.0)
        agents.ask("find", job_id="job", limit_s=60.0)
        after = agents.ask("counts", job_id="job")
        assert after["versions"] == beside["versions"], "plans are kept"
        agents.ask("rest", job_id="job", limit_s=60.0)
        assert report_problems(agents, "job", 1) == []
        assert agents.ask("findings")["messages"] == []
        assert new.terminate() == 0
        old.launch()
        assert old.wait() == 1
        assert f"expected schema {next_release.THIS}, found {next_release.NEXT}" in old.log.read_text()


@pytest.mark.slow("coordinators without the fence serve agents at the same time")
@pytest.mark.nightly("it tests the checks of the torture, which is nightly itself")
@pytest.mark.skipif(bool(postgresql.MISSING), reason=str(postgresql.MISSING))
def test_a_fence_that_is_not_checked_is_found(tmp_path: Path) -> None:
    """One goes on after its lease, and acknowledges what the one that has taken over never reads."""
    with postgresql.running() as server, ExitStack() as stack:
        database = server.new_database()
        # A job that stays in its baseline has no events: two that write the same ones would soon fail.
        first, second = (
            stack.enter_context(
                coordinator(tmp_path / name, database, unfenced.__name__, "--baseline-iterations=1000")
            )
            for name in ("first", "second")
        )
        first.start()
        second.launch()
        second.logged("standing by")
        agents = stack.enter_context(Agents(f"{first.address},{second.address}"))
        agents.ask("find", job_id="job", limit_s=60.0)
        agents.ask(
            "add", job_id="job", pipeline_count=1, stage_count=STAGES, microbatch_count=4,
            period_s=PERIOD_S, reconnect_within_s=0.3,
        )  # fmt: skip

        def until_acknowledged(count: int, *, by_another: bool) -> None:
            wanted = agents.ask("counts", job_id="job")["acknowledged"] + count
            ends_s = time.monotonic() + 60.0
            while agents.ask("counts", job_id="job")["acknowledged"] < wanted:
                assert time.monotonic() < ends_s, "expected acknowledgements"
                if by_another:
                    agents.ask("leave_silent")
                time.sleep(0.1)

        first.signal(signal.SIGSTOP)
        second.logged("jobs loaded")  # or it would read what the first one goes on to write
        first.signal(signal.SIGCONT)
        until_acknowledged(40, by_another=False)
        first.signal(signal.SIGSTOP)
        until_acknowledged(40, by_another=True)
        agents.ask("find", job_id="job", limit_s=60.0)
        agents.ask("rest", job_id="job", limit_s=60.0)
        [problem] = report_problems(agents, "job", 1)
        assert "the report of job does not agree" in problem


def coordinator(folder: Path, database: str, module: str, *flags: str) -> Coordinator:
    folder.mkdir()
    flags = (*FLAGS, f"--member-lease-s={MEMBER_LEASE_S}", *flags)
    return Coordinator(folder, database, *flags, module=module, address=f"127.0.0.1:{free_port()}")


def schema_in(database: str) -> str:
    with psycopg.connect(database) as connection:
        found = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    assert found is not None
    return str(found[0])


def test_an_older_lease_epoch_after_a_newer_is_found() -> None:
    findings = Findings()
    agent = Agent("agent", [], Bodies(one_forward_one_backward(1, 1)), findings, 0.0, is_echo=False)
    for lease_epoch in (2, 2, 3, 2):
        agent._take_one(pb.ConnectResponse(rank_accepted=pb.RankAccepted(lease_epoch=lease_epoch)))
    assert findings.counts == {"lease epoch reversed": 1}


def taken(*offers: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    """Return a rank's history after offers of (start iteration, version, lease epoch)."""
    rank = Rank("job", Place(0, 0))
    for start, version, lease_epoch in offers:
        rank.pending = pb.PlanOffer(start_iteration=start, version=version, lease_epoch=lease_epoch)
        rank.begin(start)
    return rank.history


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        ([(3, 1, 1), (9, 2, 2)], [(3, 1, 1), (9, 2, 2)], ""),
        ([(3, 1, 1), (9, 2, 2)], [(3, 1, 1)], ""),  # the newer plan leaves it as it is
        ([(3, 1, 2)], [(3, 1, 1)], ""),  # the same offer, sent again to one of them
        ([(9, 2, 2)], [(9, 3, 1)], "version 3 of lease epoch 1 in iteration 9"),
        ([(3, 1, 1), (9, 2, 2)], [(3, 1, 1), (9, 2, 2), (12, 3, 1)], "version 3 of lease epoch 1"),
        ([(3, 1, 1), (9, 3, 2)], [(3, 1, 1), (10, 2, 1)], "version 2 of lease epoch 1 in iteration 10"),
    ],
)
def test_a_pipeline_under_offers_of_two_holders_is_found(
    first: list[tuple[int, int, int]], second: list[tuple[int, int, int]], found: str
) -> None:
    problems = outdated_offers({0: taken(*first), 1: taken(*second)})
    assert bool(problems) == bool(found)
    assert found in "".join(problems)


def test_a_gpu_that_keeps_its_clock_without_a_coordinator_is_found() -> None:
    clocks = ForeignClocks()
    clocks.take(0, False, 10.0)
    clocks.lost(0, 11.0)
    clocks.take(0, False, 14.0)
    clocks.take(0, True, 15.0)
    clocks.take(1, False, 30.0)
    assert clocks.longest_s == 3.0
    clocks.served(0)
    clocks.take(0, False, 40.0)
    assert clocks.longest_s == 3.0
    clocks.lost(0, 50.0)
    clocks.take(0, False, 80.0)
    assert clocks.longest_s == 30.0


def test_all_kinds_happen_as_often_as_planned() -> None:
    assert Counter(shuffled(COUNT, random.Random(1))) == KINDS
    assert set(shuffled(COUNT // 2, random.Random(1))) == set(KINDS)
