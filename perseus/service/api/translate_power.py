"""Translation between the contract's power budgets and feeds, and the coordinator's values."""

from perseus.service.domain.messages import NUMBERS, time_from_proto, time_to_proto
from perseus.service.domain.power import (
    DEFAULT_FEED,
    BudgetRecord,
    BudgetRequest,
    Feed,
    FeedStatus,
)
from perseus.v1 import power_service_pb2 as pb


def wanted_from_proto(message: pb.SetBudgetRequest) -> BudgetRequest:
    """Return the requested budget, not yet checked.

    Raises:
        InvalidFieldError: a time is invalid.
    """
    amount = message.WhichOneof("amount")
    return BudgetRequest(
        budget_id=message.budget_id,
        request_id=message.request_id,
        feed=message.feed or DEFAULT_FEED,
        limit_w=message.limit_w if amount == "limit_w" else None,
        percent=message.percent if amount == "percent" else None,
        start_s=time_from_proto("start_time", message.start_time) if message.HasField("start_time") else None,
        end_s=time_from_proto("end_time", message.end_time) if message.HasField("end_time") else None,
        ramp_w_per_s=message.ramp_w_per_s if message.HasField("ramp_w_per_s") else None,
        correlation_id=message.correlation_id,
    )


def budget_to_proto(record: BudgetRecord, now_s: float) -> pb.Budget:
    """Return a budget as it is at a time of the wall clock."""
    budget = record.budget
    message = pb.Budget(
        budget_id=budget.budget_id,
        feed=budget.feed,
        limit_w=budget.limit_w,
        percent=record.percent,
        start_time=time_to_proto(budget.start_s),
        ramp_w_per_s=budget.ramp_w_per_s,
        correlation_id=budget.correlation_id,
        set_time=time_to_proto(record.set_time_s),
        state=NUMBERS[record.stage(now_s)],
        principal=record.principal,
    )
    if budget.end_s is not None:
        message.end_time.CopyFrom(time_to_proto(budget.end_s))
    if record.cancel_time_s is not None:
        message.cancel_time.CopyFrom(time_to_proto(record.cancel_time_s))
    return message


def feed_to_proto(feed: Feed, status: FeedStatus) -> pb.FeedState:
    """Return a feed's state."""
    return pb.FeedState(
        feed=status.feed,
        reference_w=feed.reference_w,
        limit_w=status.limit_w,
        power_cap_w=status.power_cap_w,
        measured_w=status.measured_w,
        managed_w=status.managed_w,
        unmanaged_w=status.unmanaged_w,
        is_compliant=status.is_compliant,
        is_in_transition=status.in_transition,
        job_ids_to_pause=status.to_pause,
        job_ids_beyond_tolerance=status.beyond_tolerance,
        slowed_job_ids=status.held,
        own_limit_w=feed.limit_w,
        default_w=feed.default_w,
        judged_w=status.judged_w,
        judged_mean_w=status.judged_mean_w,
        judged_s=status.judged_s,
        is_above_power_cap=status.is_above_power_cap,
        conflicting_gpu_count=status.conflicting_gpu_count,
    )
