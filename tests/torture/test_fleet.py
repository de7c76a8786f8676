"""Another coordinator takes over, whatever ends one that serves. `make torture-fleet` ends more."""

import random
from pathlib import Path

import pytest

from benchmarks.load.agents import Agent, Bodies, Findings
from perseus.solver import one_forward_one_backward
from perseus.v1 import agent_service_pb2 as pb
from tests.service.storage import postgresql
from tests.torture.fleet import torture

KINDS = ("kill", "freeze", "leave", "cut off", "kill and restart")


@pytest.mark.slow("coordinators are ended and others take over while dozens of agents train")
@pytest.mark.timeout(300)
@pytest.mark.skipif(bool(postgresql.MISSING), reason=str(postgresql.MISSING))
def test_nothing_is_lost_doubled_or_reversed_when_another_takes_over(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")  # shown if it fails
    outcome = torture(tmp_path, len(KINDS), seed, kinds=KINDS)
    assert outcome.problems == []
    assert set(outcome.failover_s) == set(KINDS)
    assert outcome.end_statuses == {3: 2}, "those that were frozen or cut off end by themselves"
    assert outcome.batch_count > 0
    assert outcome.version_count > 0


def test_an_older_lease_epoch_after_a_newer_is_found() -> None:
    findings = Findings()
    agent = Agent("agent", [], Bodies(one_forward_one_backward(1, 1)), findings, 0.0, is_echo=False)
    for lease_epoch in (2, 2, 3, 2):
        agent._take_one(pb.ConnectResponse(rank_accepted=pb.RankAccepted(lease_epoch=lease_epoch)))
    assert findings.counts == {"lease epoch reversed": 1}
