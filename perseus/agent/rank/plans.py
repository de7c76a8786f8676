"""A rank's plans: which offers it takes, which plan is in force, and which one is to come. Pure.

At most one is in force and at most one pending. An offer that is accepted becomes pending, in place of any
other, and is due whole at the begin of its start iteration.
"""

from dataclasses import dataclass

from perseus.agent.clocks.keeper import Clocks
from perseus.agent.link.computation import Kind, Rank
from perseus.agent.rank.messages import (
    NO_PLAN,
    GpuDescription,
    Hold,
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
    """An accepted offer. `clocks_mhz` has one clock for each computation of the order, None for stock."""

    plan: PlanId
    start_iteration: int
    lease_s: float
    clocks_mhz: Clocks
    is_hold: bool


class Plans:
    """Those of one rank, on one GPU.

    Attributes:
        order: what plans are made for; None until the rank was accepted.
        in_force: the plan that is, if any.
        pending: the one that comes into force next, if any.
        forbidden: why no clocks may be set, None if they may.
    """

    def __init__(self, rank: Rank, gpu: GpuDescription, forbidden: str | None) -> None:
        self._rank = rank
        self._gpu_uuid = gpu.uuid
        self._supported_clocks_mhz = gpu.supported_clocks_mhz
        self.order: Order | None = None
        self.in_force: Plan | None = None
        self.pending: Plan | None = None
        self.forbidden = forbidden

    @property
    def has_any(self) -> bool:
        """Whether one is in force or pending."""
        return self.in_force is not None or self.pending is not None

    @property
    def id_in_force(self) -> PlanId:
        """What the coordinator knows the plan in force by."""
        return self.in_force.plan if self.in_force is not None else NO_PLAN

    @property
    def lease_s(self) -> float | None:
        """For how long the plans hold without a word from the coordinator; None without any."""
        return min((plan.lease_s for plan in (self.in_force, self.pending) if plan), default=None)

    @property
    def clocks_mhz(self) -> Clocks:
        """The clocks in force for each computation."""
        return self._clocks_of(self.in_force)

    def following_mhz(self, iteration: int) -> Clocks:
        """The clocks of the iteration after this one."""
        return self._clocks_of(self.due(iteration + 1) or self.in_force)

    def due(self, iteration: int) -> Plan | None:
        """The pending plan, if it comes into force when this iteration begins."""
        if self.pending is not None and iteration >= self.pending.start_iteration:
            return self.pending
        return None

    def follow(self, plan: Plan | None) -> None:
        """This plan, which was pending, is in force from now on; or none."""
        self.pending = None
        self.in_force = plan

    def consider(self, offer: PlanOffer, begun_iteration: int, *, is_accepted: bool) -> PlanRefusal | None:
        """Make the offer pending, or say why not.

        `begun_iteration`: the latest that has begun. `is_accepted`: the coordinator has accepted the rank.
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
            self.pending = Plan(
                offer.plan,
                offer.start_iteration,
                offer.lease_s,
                _clocks_mhz(offer.clocks, len(self.order)),
                is_hold=isinstance(offer.clocks, Hold),
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
        if offer.start_iteration <= begun_iteration and not self._is_in_force(offer):
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
        return (None,) * (len(self.order) if self.order is not None else 0)

    def validate(self, begun_iteration: int) -> None:
        """Check what must always hold; AssertionError otherwise. Called by tests after every event."""
        assert self.pending is None or self.pending.start_iteration > begun_iteration
        assert self.in_force is None or self.in_force.start_iteration <= begun_iteration
        for plan in (self.in_force, self.pending):
            assert plan is None or (self.order is not None and len(plan.clocks_mhz) == len(self.order))


def _clocks_mhz(clocks: Stock | Hold | StageClocks, computation_count: int) -> Clocks:
    """The clock to want for each computation; a FIXED one gets that of the next that has one (cyclic)."""
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
