"""A rank's plans: accepts or refuses offers, and tracks the plan in force and the pending one. Pure.

At most one plan is in force and at most one pending. An accepted offer becomes pending and replaces any
other. It is due as a whole at the begin of its start iteration; an urgent one at once.

A maximum clock limits unplanned clocks: without a plan, and where a plan has stock, clocks are at the maximum
clock, and clocks that are held for measuring are no higher. A stage plan does not change.
"""

from dataclasses import dataclass, replace

from perseus.agent.clocks.keeper import Clocks
from perseus.agent.link.computation import Kind, Rank
from perseus.agent.rank.messages import (
    NO_PLAN,
    GpuDescription,
    Hold,
    MaxClock,
    PlanId,
    PlanOffer,
    PlanRefusal,
    PlanRefusalReason,
    StageClocks,
    Stock,
)
from perseus.agent.rank.order import Order


@dataclass(frozen=True, slots=True)
class Plan:
    """An accepted offer: one clock for each computation of the order, None for stock.

    `offered_mhz` are its own clocks, `clocks_mhz` those under the maximum clock.
    """

    plan: PlanId
    start_iteration: int
    lease_s: float
    offered_mhz: Clocks
    clocks_mhz: Clocks
    is_hold: bool


class Plans:
    """The plans of one rank, on one GPU.

    Attributes:
        order: the order for which plans are made; None until the rank is accepted.
        in_force: the plan in force, if any.
        pending: the plan that comes into force next, if any.
        forbidden: why no clocks may be set, None if they may.
        max_clock: the highest clock without a stage plan, if any.
    """

    def __init__(self, rank: Rank, gpu: GpuDescription, forbidden: str | None) -> None:
        self._rank = rank
        self._gpu_uuid = gpu.uuid
        self._supported_clocks_mhz = gpu.supported_clocks_mhz
        self.order: Order | None = None
        self.in_force: Plan | None = None
        self.pending: Plan | None = None
        self.forbidden = forbidden
        self.max_clock: MaxClock | None = None
        self._max_clock_lease_s = 0.0

    @property
    def has_any(self) -> bool:
        """Whether a plan is in force or pending."""
        return self.in_force is not None or self.pending is not None

    @property
    def sets_clocks(self) -> bool:
        """Whether a plan in force or pending sets a clock, or a maximum clock is."""
        plans = (self.in_force, self.pending)
        is_planned = any(mhz is not None for plan in plans if plan for mhz in plan.clocks_mhz)
        return is_planned or self.fallback_mhz is not None

    @property
    def id_in_force(self) -> PlanId:
        """The identity of the plan in force."""
        return self.in_force.plan if self.in_force is not None else NO_PLAN

    @property
    def lease_s(self) -> float | None:
        """How long plans and maximum clock hold without a message from the coordinator; None without any."""
        leases_s = [plan.lease_s for plan in (self.in_force, self.pending) if plan]
        if self.max_clock is not None:
            leases_s.append(self._max_clock_lease_s)
        return min(leases_s, default=None)

    @property
    def fallback_mhz(self) -> int | None:
        """The clock outside of plans: the highest supported one within the maximum clock, or stock."""
        if self.max_clock is None or self.forbidden is not None:
            return None
        supported_mhz, max_mhz = self._supported_clocks_mhz, self.max_clock.clock_mhz
        return next((mhz for mhz in supported_mhz if mhz <= max_mhz), supported_mhz[-1])

    @property
    def clocks_mhz(self) -> Clocks:
        """The clocks in force for each computation."""
        return self._clocks_of(self.in_force)

    def following_mhz(self, iteration: int) -> Clocks:
        """Return the clocks of the iteration after this one."""
        return self._clocks_of(self.due(iteration + 1) or self.in_force)

    def due(self, iteration: int) -> Plan | None:
        """Return the pending plan, if it comes into force when this iteration begins."""
        if self.pending is not None and iteration >= self.pending.start_iteration:
            return self.pending
        return None

    def follow(self, plan: Plan | None) -> None:
        """Bring this plan, which was pending, into force, or none."""
        self.pending = None
        self.in_force = plan

    def limit(self, max_clock: MaxClock | None, lease_s: float) -> bool:
        """Set another maximum clock, or none; return whether this changes the clocks in force.

        `lease_s`: how long it holds without a message from the coordinator.
        """
        before = self.clocks_mhz
        self.max_clock, self._max_clock_lease_s = max_clock, lease_s
        self.in_force = self._limited(self.in_force)
        self.pending = self._limited(self.pending)
        return self.clocks_mhz != before

    def consider(self, offer: PlanOffer, begun_iteration: int, *, is_accepted: bool) -> PlanRefusal | None:
        """Make the offer pending, or return a refusal.

        `begun_iteration`: the latest iteration that has begun. `is_accepted`: the coordinator has accepted
        the rank.
        """
        if not is_accepted or self.order is None:
            message = f"{self._rank}: not announced, or not accepted yet"
            return PlanRefusal(PlanRefusalReason.UNKNOWN_RANK, message)
        refusal = self._refusal(offer, self.order, begun_iteration)
        if refusal is not None:
            return refusal
        if self._is_in_force(offer):
            self.pending = None
        else:
            clocks_mhz = _clocks_mhz(offer.clocks, len(self.order))
            self.pending = self._limited(
                Plan(
                    offer.plan,
                    begun_iteration if offer.is_urgent else offer.start_iteration,
                    offer.lease_s,
                    clocks_mhz,
                    clocks_mhz,
                    is_hold=isinstance(offer.clocks, Hold),
                )
            )
        return None

    def _refusal(self, offer: PlanOffer, order: Order, begun_iteration: int) -> PlanRefusal | None:
        reasons, rank = PlanRefusalReason, self._rank
        if self.forbidden is not None and not isinstance(offer.clocks, Stock):
            return PlanRefusal(reasons.NOT_PERMITTED, f"{rank}: {self.forbidden}")
        match offer.clocks:
            case StageClocks(computations, _) if computations != order.computations:
                return PlanRefusal(reasons.ORDER_MISMATCH, f"{rank}: {order.difference(computations)}")
            case StageClocks(computations, clocks):
                wanted = {c for each, c in zip(computations, clocks, strict=True) if each.kind != Kind.FIXED}
            case Hold(clock_mhz):
                wanted = {clock_mhz}
            case Stock():
                wanted = set()
        foreign = sorted(wanted.difference(self._supported_clocks_mhz))
        if foreign:
            return PlanRefusal(
                reasons.CLOCK_NOT_SUPPORTED,
                f"{rank}: expected clocks that GPU {self._gpu_uuid} supports, found {foreign} MHz",
                tuple(foreign),
            )
        is_late = offer.start_iteration <= begun_iteration and not offer.is_urgent
        if is_late and not self._is_in_force(offer):
            return PlanRefusal(
                reasons.PAST_START,
                f"{rank}: expected a start after iteration {begun_iteration}, which has begun, "
                f"found {offer.start_iteration}",
            )
        return None

    def _is_in_force(self, offer: PlanOffer) -> bool:
        return self.in_force is not None and self.in_force.plan == offer.plan

    def _clocks_of(self, plan: Plan | None) -> Clocks:
        if plan is not None:
            return plan.clocks_mhz
        return (self.fallback_mhz,) * (len(self.order) if self.order is not None else 0)

    def _limited(self, plan: Plan | None) -> Plan | None:
        """Return a plan with its clocks under the maximum clock."""
        if plan is None:
            return None
        max_mhz, clocks_mhz = self.fallback_mhz, plan.offered_mhz
        if max_mhz is not None:
            clocks_mhz = tuple(
                max_mhz if mhz is None or (plan.is_hold and mhz > max_mhz) else mhz for mhz in clocks_mhz
            )
        return plan if clocks_mhz == plan.clocks_mhz else replace(plan, clocks_mhz=clocks_mhz)

    def validate(self, begun_iteration: int) -> None:
        """Check the invariants; AssertionError otherwise. Called by tests after every event."""
        assert self.pending is None or self.pending.start_iteration > begun_iteration
        assert self.in_force is None or self.in_force.start_iteration <= begun_iteration
        for plan in (self.in_force, self.pending):
            assert plan is None or (self.order is not None and len(plan.clocks_mhz) == len(self.order))
            assert plan is None or plan == self._limited(plan)


def _clocks_mhz(clocks: Stock | Hold | StageClocks, computation_count: int) -> Clocks:
    """Return each computation's clock; a FIXED one gets that of the next one with a clock (cyclic)."""
    match clocks:
        case Stock():
            return (None,) * computation_count
        case Hold(clock_mhz):
            return (clock_mhz,) * computation_count
        case StageClocks(computations, planned_mhz):
            following_mhz = next(
                (c for each, c in zip(computations, planned_mhz, strict=True) if each.kind != Kind.FIXED),
                None,
            )
            wanted: list[int | None] = []
            for computation, clock_mhz in zip(reversed(computations), reversed(planned_mhz), strict=True):
                if computation.kind != Kind.FIXED:
                    following_mhz = clock_mhz
                wanted.append(following_mhz)
            return tuple(reversed(wanted))
