"""Published messages in the contract's terms: power states and breach alerts.

Powers are in watts, except that a target's own limit keeps its unit.
"""

from collections.abc import Mapping, Sequence

from perseus.grid.contract.messages import moment
from perseus.grid.dsx_flex.breaches import BreachStatus
from perseus.grid.dsx_flex.commands import FeedSnapshot, PublishAlert, PublishStatus
from perseus.grid.dsx_flex.values import Constraint, Piece

_MAX_HINTS = 1000

Content = dict[str, object]


def status(publication: PublishStatus) -> Content:
    """Return a snapshot of all feeds: PowerStateStatusData."""
    feeds = {feed: _feed(snapshot) for feed, snapshot in publication.feeds.items()}
    return {"snapshot_time": moment(publication.time_s), "feeds": feeds}


def alert(publication: PublishAlert, nodes: Mapping[str, Sequence[str]]) -> Content:
    """Return the state of a breach: PowerBreachAlertData. `nodes`: the nodes of jobs, as far as known.

    Shed hints name only nodes: Perseus does not know racks, data feeds and breakers. A best-effort target
    stops no job.
    """
    breach = publication.breach
    is_over = breach.status is BreachStatus.RESOLVED
    is_urgent = breach.status is BreachStatus.ESCALATED and not breach.best_effort
    content: Content = {
        "feed_tag": breach.feed,
        "status": breach.status.value,
        "severity": "critical" if breach.is_critical else "warning",
        "breach": {"breach_id": breach.breach_id, "detected_at": moment(breach.detected_s)},
        "target": {
            "correlation_id": breach.correlation_id,
            "load_constraint": _constraint(breach.constraint),
        },
        "measured_load": _watts(breach.measured_w),
        "infrastructure_actions": ["SHUTDOWN_NODES"] if is_urgent else [],
    }
    if is_over and breach.resolved_s is not None:
        content["breach"] = {
            "breach_id": breach.breach_id,
            "detected_at": moment(breach.detected_s),
            "resolved_at": moment(breach.resolved_s),
        }
    else:
        content["shed_hints"] = _hints(publication, nodes)
    return content


def _hints(publication: PublishAlert, nodes: Mapping[str, Sequence[str]]) -> list[Content]:
    """Return hints: first the nodes of jobs that would have to be paused, then those of slowed jobs."""
    pausing = "throttle" if publication.breach.best_effort else "suspend"
    actions: dict[str, str] = {}
    for jobs, action in ((publication.to_pause, pausing), (publication.held, "throttle")):
        for job_id in jobs:
            for node in nodes.get(job_id, ()):
                actions.setdefault(node, action)
    return [
        {"resource_id": node, "resource_type": "node", "action": action, "priority": priority}
        for priority, (node, action) in enumerate(list(actions.items())[:_MAX_HINTS], 1)
    ]


def _feed(snapshot: FeedSnapshot) -> Content:
    reading = snapshot.reading
    maximum_w = reading.maximum_w or 0.0
    content: Content = {
        "metadata": {
            "power_minimum": _watts(0.0),
            "power_maximum": _watts(maximum_w),
            "default_constraint": _watts(maximum_w if reading.default_w is None else reading.default_w),
        },
        "targets": [_target(piece, is_active=is_active) for piece, is_active in snapshot.targets],
        "calculated_load": _watts(reading.calculated_w),
        "in_flight": snapshot.in_flight,
        "event": snapshot.event.value,
        "compliant": snapshot.is_compliant,
    }
    if snapshot.since_s is not None:
        content["power_event_start_time"] = moment(snapshot.since_s)
    return content


def _target(piece: Piece, *, is_active: bool) -> Content:
    interval = {"start_time": moment(piece.start_s)}
    if piece.has_end:
        interval["end_time"] = moment(piece.end_s)
    return {
        "active": is_active,
        "load_constraint": _constraint(piece.constraint),
        "interval": interval,
        "strategy": {"best_effort": piece.best_effort},
        "correlation_id": piece.correlation_id,
    }


def _constraint(constraint: Constraint) -> Content:
    return {"value": constraint.value, "unit": constraint.unit}


def _watts(power_w: float) -> Content:
    return {"value": max(0.0, power_w), "unit": "watt"}
