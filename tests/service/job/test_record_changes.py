"""A job's record is stored whole and sent to every watcher: nothing in it changes with every iteration."""

from collections import Counter
from copy import copy
from dataclasses import fields

import pytest

from perseus.service.domain.inputs import (
    BudgetTargetSet,
    Input,
    MaxClockSet,
    SignalTargetSet,
    StragglerCleared,
    StragglerReported,
)
from perseus.service.domain.model import JobState, Straggler
from perseus.service.domain.records import JobRecord
from perseus.service.domain.signals import (
    ExtraTime,
    SignalKind,
    SignalRule,
    SignalTargetState,
    WorkUntil,
    WorkWindow,
)
from perseus.service.domain.specification import BudgetTerms, Deadline, OperatingPolicy
from perseus.service.job.rules import Rules
from tests.service.service_fakes import Cluster, make_spec

STEADY = 16
"""Iterations that a state, or the clocks held in it, last at least."""

RULES = Rules(lease_s=3600.0, baseline_iterations=STEADY, profile_iterations=STEADY, profile_clocks=3)
WINDOW = WorkWindow(0.0, 86_400.0, 50_000.0)
POLICIES = {
    "no slowdown": OperatingPolicy(),
    "slowdown": OperatingPolicy(10.0, budget_terms=BudgetTerms(20.0, 2.0)),
    "deadline": OperatingPolicy(deadline=Deadline(10**6, 1e6)),
    "power": OperatingPolicy(max_average_power_w=400.0),
    "carbon": OperatingPolicy(signal=SignalRule(SignalKind.CARBON, ExtraTime(10, 86_400.0))),
    "price": OperatingPolicy(signal=SignalRule(SignalKind.PRICE, work_until=WorkUntil(10**6, 2e9))),
}


class _Observed(Cluster):
    """A cluster that counts, by state, its iterations and those in which a field of the record changed."""

    def __init__(self, policy: OperatingPolicy) -> None:
        super().__init__(make_spec(policy=policy), RULES)
        self.counts: Counter[JobState] = Counter()
        self.changes: Counter[tuple[JobState, str]] = Counter()

    def iterate(self, count: int = 1, duration_s: float = 0.8, *, is_regular: bool = True) -> None:
        for _ in range(count):
            before = copy(self.machine.record)
            super().iterate(1, duration_s, is_regular=is_regular)
            self.counts[before.state] += 1
            for field in fields(JobRecord):
                if getattr(before, field.name) != getattr(self.machine.record, field.name):
                    self.changes[before.state, field.name] += 1

    def skip(self, count: int) -> None:
        """Report every second of twice as many iterations."""
        for _ in range(count):
            for rank in self.ranks.values():
                rank.iteration += 1
            self.iterate()


@pytest.mark.parametrize("name", POLICIES)
def test_no_field_of_the_record_changes_with_every_iteration(name: str) -> None:
    policy = POLICIES[name]
    cluster = _Observed(policy)
    cluster.join_all()
    for rank in cluster.ranks.values():
        rank.reports_power = False  # the first clock is held until it is known
    cluster.iterate_until(JobState.PROFILING)
    cluster.iterate(STEADY)
    for rank in cluster.ranks.values():
        rank.reports_power = True
    cluster.iterate_until(JobState.PLANNED)
    inputs: list[Input] = [
        BudgetTargetSet(0.9, is_urgent=False),
        StragglerReported(Straggler(1, slowdown_factor=1.2)),
        MaxClockSet(1200),
    ]
    if policy.signal is not None:
        inputs[:0] = [SignalTargetSet(policy.signal, WINDOW, SignalTargetState.FOLLOWING, 0.9, 400.0)]
    for event in inputs:
        cluster.send(event)
        cluster.iterate(STEADY)
        cluster.iterate(STEADY, is_regular=False)
        cluster.skip(STEADY)
    cluster.send(MaxClockSet(None))
    cluster.send(StragglerCleared(1))
    cluster.iterate_until(JobState.STOCK, limit=400, duration_s=2.0)
    cluster.iterate(STEADY)
    seen = {JobState.BASELINE, JobState.PROFILING, JobState.PLANNED, JobState.STOCK}
    assert {state for state, count in cluster.counts.items() if count >= STEADY} >= seen
    often = {
        f"{field} in {state.name}: {count} of {cluster.counts[state]} iterations"
        for (state, field), count in cluster.changes.items()
        if 4 * count > cluster.counts[state]
    }
    assert not often
