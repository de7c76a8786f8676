"""CPU time of the coordinator and its agents until an urgent offer is in force on 4,096 ranks.

A job's state machine gets a target iteration time from a power budget. Each of its offers goes through both
sides' translation and the wire's bytes; ranks answer, accept it and bring it into force, and the machine
handles their messages. There are no processes, sockets or store.
"""

import time
from collections import deque
from collections.abc import Sequence
from statistics import median

from benchmarks.harness import Cell, Column, Table, main
from perseus.agent.rank.messages import PlanOffer
from perseus.agent.stream import translate as agent_side
from perseus.service.api.translate_agents import offer_to_proto
from perseus.service.domain.commands import Command, SendMaxClock, SendOffer
from perseus.service.domain.inputs import BudgetTargetSet, Input, MaxClockSet
from perseus.service.domain.model import JobState
from perseus.service.job import views
from perseus.service.job.rules import Rules
from perseus.v1.agent_service_pb2 import ConnectResponse
from tests.service.service_fakes import Cluster, make_spec

STAGES, MICROBATCHES = 4, 10
RANKS = (32, 512, 4096)
_TIMES = 5
_LEASE_S = 30.0
_CLOCK_MHZ = 1200


class QuietCluster(Cluster):
    """A cluster without checks, which would take most of the time."""

    def handle(self, event: Input) -> list[Command]:
        return list(self.machine.handle(event, self.now_s, self.now_s))


def run() -> Sequence[Table]:
    """Cut a job's power and release it, several times for each size."""
    rows: list[tuple[Cell, ...]] = []
    for rank_count in RANKS:
        made = _measure(rank_count)
        rows.append((rank_count, *(1000 * median(column) for column in zip(*made, strict=True))))
    return [
        Table(
            "An urgent offer to all ranks of a job: CPU time, no processes",
            (
                Column("ranks", "d"),
                Column("decided [ms]", ".1f"),
                Column("translated and serialised [ms]", ".1f"),
                Column("read by all agents [ms]", ".1f"),
                Column("answers handled by the machine [ms]", ".1f"),
                Column("total [ms]", ".1f"),
            ),
            tuple(rows),
            f"{STAGES} stages, {MICROBATCHES} microbatches; medians of {_TIMES} cuts, each with its "
            "maximum clock. Agents share that work among their nodes; here it runs sequentially.",
        )
    ]


def _measure(rank_count: int) -> list[tuple[float, ...]]:
    spec = make_spec("job", rank_count // STAGES, STAGES, microbatches=MICROBATCHES)
    cluster = QuietCluster(spec, Rules(baseline_iterations=3, profile_iterations=3, profile_clocks=2))
    cluster.join_all()
    cluster.iterate_until(JobState.PLANNED)
    cluster.iterate(4)
    basis = views.power(cluster.machine.run).basis
    assert basis is not None
    slowest_s = basis.frontier.t_slow_s
    found = []
    for number in range(_TIMES):
        found.append(_cut(cluster, slowest_s, _CLOCK_MHZ - number))
        cluster.send(MaxClockSet(None))
        cluster.send(BudgetTargetSet(None, False))
        cluster.iterate(4)
    return found


def _cut(cluster: Cluster, target_time_s: float, clock_mhz: int) -> tuple[float, ...]:
    begun_s = time.process_time()
    commands = cluster.handle(MaxClockSet(clock_mhz))
    commands += cluster.handle(BudgetTargetSet(target_time_s, True))
    decided_s = time.process_time()
    offers = [command for command in commands if isinstance(command, SendOffer)]
    assert len(offers) == len(cluster.ranks)
    assert all(each.offer.is_urgent for each in offers)
    assert sum(isinstance(each, SendMaxClock) for each in commands) == len(cluster.ranks)
    sent = [
        offer_to_proto("job", each.rank, each.offer, "epoch", _LEASE_S).SerializeToString() for each in offers
    ]
    serialised_s = time.process_time()
    read = [agent_side.response(ConnectResponse.FromString(message)) for message in sent]
    assert all(isinstance(each, PlanOffer) and each.is_urgent for each in read)
    read_s = time.process_time()
    waiting = deque(command for command in commands if isinstance(command, SendOffer))
    for command in waiting:
        rank = cluster.ranks[command.rank]
        cluster.handle(rank.answer(command.offer))
        if (in_force := rank.apply()) is not None:
            cluster.handle(in_force)
    assert views.power(cluster.machine.run).is_in_force
    end_s = time.process_time()
    return (
        decided_s - begun_s,
        serialised_s - decided_s,
        read_s - serialised_s,
        end_s - read_s,
        end_s - begun_s,
    )


if __name__ == "__main__":
    main("urgent", run)
