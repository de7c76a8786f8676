"""The baselines of Perseus: all-max, EnvPipe and Zeus, each as plans of the same pipeline.

All-max is :func:`~perseus.solver.plan.fastest_clock_plan`: every computation at its highest clock. EnvPipe
makes one plan. Zeus makes a frontier of its own, with one clock for all computations or one for each stage.
"""

from collections.abc import Iterable, Iterator, Sequence

from perseus.solver.computation import Computation, Kind
from perseus.solver.errors import ProfileError
from perseus.solver.graph import Dependency, order_computations
from perseus.solver.pipeline import Pipeline, ProfileKey
from perseus.solver.plan import Plan, earliest_finishes_ps, replay
from perseus.solver.profile import Option, highest, pareto_options
from perseus.solver.setting import Setting, clock_of, in_order

_BACKWARD_KINDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def envpipe(pipeline: Pipeline) -> Plan:
    """Return EnvPipe's plan, as compared in the Perseus paper (§6.1): one plan, close to all-max's time.

    The last stage, each stage's first forward and each stage's last backward run at their highest clocks: the
    envelope. Every other computation starts at its slowest Pareto clock. Then, along one critical path after
    the other, the computations at the path's lowest clock are raised by one step, until a critical path lies
    inside the envelope, or no computation on it can be raised. Every round raises a clock, so the number of
    rounds is bounded by the number of clock steps. Where settings are more than a clock, a step leads to the
    next faster Pareto setting.

    EnvPipe assumes stages of equal weight: where the last stage is not the heaviest, its plan is slower.
    """
    computations, dependencies = order_computations(pipeline)
    envelope, scale = _envelope(pipeline), pipeline.scale
    options: list[tuple[Option, ...]] = []
    for c in computations:
        if c.kind is Kind.FIXED:
            options.append((Option(0, scale.to_ps(pipeline.fixed_times_s[c]), 0.0, 0.0),))
            continue
        measurements = pipeline.profiles[c.stage, c.chunk, c.kind]
        if c in envelope:
            measurements = (highest(measurements),)
        options.append(pareto_options(measurements, pipeline.blocking_power_w[c.stage], scale))
    chosen = [len(some) - 1 for some in options]
    while True:
        durations_ps = [some[k].time_ps for some, k in zip(options, chosen, strict=True)]
        path = _critical_path(dependencies, durations_ps)
        raisable = [i for i in path if chosen[i] > 0]
        if not raisable:
            break
        lowest_mhz = min(options[i][chosen[i]].clock_mhz for i in raisable)
        for i in raisable:
            if options[i][chosen[i]].clock_mhz == lowest_mhz:
                chosen[i] -= 1
    return replay(
        pipeline,
        {
            c: some[k].setting
            for c, some, k in zip(computations, options, chosen, strict=True)
            if c.kind is not Kind.FIXED
        },
    )


def zeus_global(pipeline: Pipeline) -> tuple[Plan, ...]:
    """Return the frontier of one clock, or setting, for all computations, fastest first.

    Raises:
        ProfileError: no setting was measured for all computations.
    """
    stage_count = pipeline.schedule.stage_count
    common = _common_settings(pipeline, range(stage_count))
    return _frontier(pipeline, ((setting,) * stage_count for setting in common))


def zeus_per_stage(pipeline: Pipeline) -> tuple[Plan, ...]:
    """Return the frontier of one clock, or setting, for each stage, fastest first.

    Given a limit on the forward's time, each stage takes its slowest setting whose forward, all chunks
    together, is within the limit. Every possible time of a stage's forward is tried as the limit. The limit
    balances the forwards; the backwards run at the same settings.

    Raises:
        ProfileError: a stage has no setting that was measured for all its computations.
    """
    forward_times_s: list[dict[int | Setting, float]] = []
    for stage in range(pipeline.schedule.stage_count):
        totals_s = dict.fromkeys(_common_settings(pipeline, [stage]), 0.0)
        for key in _used_profiles(pipeline, [stage]):
            for m in pipeline.profiles[key]:
                if key[2] is Kind.FORWARD and m.setting in totals_s:
                    totals_s[m.setting] += m.time_s
        forward_times_s.append(totals_s)

    def settings_under(limit_s: float) -> Iterator[int | Setting]:
        for times_s in forward_times_s:
            within = [setting for setting, time_s in times_s.items() if time_s <= limit_s]
            yield max(within, key=lambda setting: (times_s[setting], -clock_of(setting)))

    shortest_s = max(min(times_s.values()) for times_s in forward_times_s)
    limits_s = {time_s for times_s in forward_times_s for time_s in times_s.values() if time_s >= shortest_s}
    return _frontier(pipeline, {tuple(settings_under(limit_s)) for limit_s in limits_s})


def _critical_path(dependencies: Sequence[Dependency], durations_ps: Sequence[int]) -> list[int]:
    """Return the indices of one longest path, last to first; deterministic among equal ones."""
    finishes_ps = earliest_finishes_ps(dependencies, durations_ps)
    waits_for: dict[int, int] = {}
    for earlier, later, lag_ps in dependencies:
        if finishes_ps[earlier] + lag_ps == finishes_ps[later] - durations_ps[later]:
            waits_for.setdefault(later, earlier)
    path = [finishes_ps.index(max(finishes_ps))]
    while path[-1] in waits_for:
        path.append(waits_for[path[-1]])
    return path


def _envelope(pipeline: Pipeline) -> set[Computation]:
    """Return the last stage's computations, and each stage's first forward and last backward."""
    envelope = set(pipeline.schedule.orders[-1])
    for order in pipeline.schedule.orders:
        envelope |= {next(c for c in order if c.kind is Kind.FORWARD)}
        envelope |= {next(c for c in reversed(order) if c.kind in _BACKWARD_KINDS)}
    return envelope


def _used_profiles(pipeline: Pipeline, stages: Iterable[int]) -> set[ProfileKey]:
    return {
        (c.stage, c.chunk, c.kind)
        for stage in stages
        for c in pipeline.schedule.orders[stage]
        if c.kind is not Kind.FIXED
    }


def _common_settings(pipeline: Pipeline, stages: Sequence[int]) -> list[int | Setting]:
    """Return the settings at which all computations of these stages were measured."""
    measured = [{m.setting for m in pipeline.profiles[key]} for key in _used_profiles(pipeline, stages)]
    common = set.intersection(*measured)
    if not common:
        listed = ", ".join(str(stage) for stage in stages)
        raise ProfileError(
            f"stage {listed}: expected a setting at which all computations were measured, found none",
            stage=listed,
        )
    return sorted(common, key=in_order)


def _frontier(pipeline: Pipeline, stage_settings: Iterable[tuple[int | Setting, ...]]) -> tuple[Plan, ...]:
    """Return the plans of one setting a stage that are not beaten in both time and effective energy.

    On effective energy, because frontiers are also used for the cost of waiting for a straggler.
    """
    plans = [
        replay(pipeline, {c: settings[c.stage] for c in pipeline.schedule.computations})
        for settings in stage_settings
    ]
    kept: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: (plan.iteration_time_s, plan.effective_energy_j)):
        if not kept or plan.effective_energy_j < kept[-1].effective_energy_j:
            kept.append(plan)
    return tuple(kept)
