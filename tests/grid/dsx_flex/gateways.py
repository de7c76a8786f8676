"""A gateway for tests of the state machine, with readable identifiers and short targets."""

import math
from collections.abc import Sequence
from dataclasses import replace

from perseus.grid.dsx_flex.budgets import Budget, KnownBudget, Stage
from perseus.grid.dsx_flex.commands import (
    Answer,
    BudgetAnswered,
    BudgetRefused,
    BudgetsListed,
    Command,
    FeedsListed,
    PublishAlert,
    PublishStatus,
    TargetsReceived,
    Verdict,
)
from perseus.grid.dsx_flex.gateway import Gateway
from perseus.grid.dsx_flex.values import Constraint, FeedReading, Target, TargetSet, Trace

NOW_S = 1_700_000_000.0
TRACE = Trace("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "vendor=1")


def uuid4(number: int) -> str:
    """Return the n-th identifier."""
    return f"00000000-0000-4000-8000-{number:012d}"


def target(
    limit_kw: float | None,
    start_s: float = NOW_S,
    end_s: float = math.inf,
    feeds: Sequence[str] = (),
    *,
    best_effort: bool = False,
) -> Target:
    constraint = None if limit_kw is None else Constraint(limit_kw, "kilowatt")
    return Target(tuple(feeds), start_s, end_s, constraint, best_effort)


def message(number: int, *targets: Target, sent_s: float = NOW_S, sender: str = "acme") -> TargetSet:
    return TargetSet(uuid4(number), sender, uuid4(1000 + number), sent_s, targets, TRACE)


def reading(feed: str = "hall-a", **fields: object) -> FeedReading:
    """Return an unlimited feed of one megawatt that draws 900 kW."""
    found = FeedReading(
        feed=feed,
        maximum_w=1e6,
        default_w=None,
        limit_w=1e6,
        power_cap_w=1e6,
        measured_w=9e5,
        judged_w=9e5,
        calculated_w=9e5,
        in_transition=False,
        is_compliant=True,
    )
    return replace(found, **fields)  # type: ignore[arg-type]


class Coordinator:
    """A coordinator in memory, with a maximum of budgets like the real one."""

    def __init__(self, maximum: int = 256) -> None:
        self.maximum = maximum
        self.known: dict[str, KnownBudget] = {}
        self.calls: list[str] = []

    def set(self, budget: Budget) -> KnownBudget | None:
        """Return the budget; None if it is refused."""
        others = (each for budget_id, each in self.known.items() if budget_id != budget.budget_id)
        if sum(each.stage is Stage.CURRENT for each in others) >= self.maximum:
            return None
        self.calls.append(f"set {budget.budget_id}")
        self.known[budget.budget_id] = KnownBudget(budget, Stage.CURRENT)
        return self.known[budget.budget_id]

    def cancel(self, budget_id: str) -> KnownBudget:
        self.calls.append(f"cancel {budget_id}")
        self.known[budget_id] = replace(self.known[budget_id], stage=Stage.CANCELLED)
        return self.known[budget_id]

    def limit_w(self, feed: str, at_s: float) -> float:
        """Return the lowest limit of the budgets in force."""
        limits = (
            each.budget.limit_w
            for each in self.known.values()
            if each.stage is Stage.CURRENT
            and each.budget.feed == feed
            and each.budget.start_s <= at_s < each.budget.end_s
        )
        return min(limits, default=math.inf)


class Driven:
    """A gateway with a coordinator, driven as the process does."""

    def __init__(
        self, gateway: Gateway, coordinator: Coordinator, *feeds: FeedReading, now_s: float = NOW_S
    ) -> None:
        self.gateway = gateway
        self.coordinator = coordinator
        self.commands: list[Command] = gateway.handle(FeedsListed(feeds or (reading(),)), now_s)
        self.commands += gateway.handle(BudgetsListed(coordinator.known), now_s)

    def receive(self, some: TargetSet, now_s: float = NOW_S) -> list[Command]:
        """Receive a message, and make the resulting requests to the coordinator."""
        return self.gateway.handle(TargetsReceived(some), now_s) + self.reconcile(now_s)

    def reconcile(self, now_s: float = NOW_S) -> list[Command]:
        commands: list[Command] = []
        refused: set[str] = set()
        while True:
            changes = self.gateway.changes(now_s)
            to_set = [budget for budget in changes.to_set if budget.budget_id not in refused]
            if not to_set and not changes.to_cancel:
                return commands
            for budget in changes.to_defer:
                self.coordinator.set(budget)
                known = self.coordinator.cancel(budget.budget_id)
                commands += self.gateway.handle(BudgetAnswered(known), now_s)
            for budget in to_set:
                found = self.coordinator.set(budget)
                if found is None:
                    refused.add(budget.budget_id)
                    commands += self.gateway.handle(BudgetRefused(budget.budget_id), now_s)
                else:
                    commands += self.gateway.handle(BudgetAnswered(found), now_s)
            for budget_id in changes.to_cancel:
                refused.clear()
                commands += self.gateway.handle(BudgetAnswered(self.coordinator.cancel(budget_id)), now_s)


def verdicts(commands: list[Command]) -> list[Verdict]:
    return [each.verdict for each in commands if isinstance(each, Answer)]


def statuses(commands: list[Command]) -> list[PublishStatus]:
    return [each for each in commands if isinstance(each, PublishStatus)]


def active(reported: PublishStatus, feed: str = "hall-a") -> list[bool]:
    """Return for each target of a feed whether it is reported as active."""
    return [is_active for _, is_active in reported.feeds[feed].targets]


def alerts(commands: list[Command]) -> list[PublishAlert]:
    return [each for each in commands if isinstance(each, PublishAlert)]


def new_gateway(accepted: Sequence[TargetSet] = (), **options: object) -> Gateway:
    ids = iter(range(5000, 6000))
    return Gateway("maxlps", 30.0, lambda: uuid4(next(ids)), accepted, **options)  # type: ignore[arg-type]
