"""The baselines that `perseus solve --compare` shows beside the frontier: savings without Perseus.

One clock (or setting, if a setting is more than a clock) for all computations, one for each stage, both as
Zeus chooses them, and EnvPipe's plan.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perseus.solver import Frontier, Pipeline, Plan

ENVPIPE = "EnvPipe"


def baselines(pipeline: "Pipeline") -> "Mapping[str, tuple[Plan, ...]]":
    """Return each baseline's plans by rising time; no plans if the computations share no setting."""
    from perseus.solver import MeasuredSetting, ProfileError, study

    def if_common(zeus: "Callable[[Pipeline], tuple[Plan, ...]]") -> "tuple[Plan, ...]":
        try:
            return zeus(pipeline)
        except ProfileError:
            return ()

    has_further = any(isinstance(m, MeasuredSetting) for some in pipeline.profiles.values() for m in some)
    what = "setting" if has_further else "clock"
    return {
        f"one {what}": if_common(study.zeus_global),
        f"a {what} per stage": if_common(study.zeus_per_stage),
        ENVPIPE: (study.envpipe(pipeline),),
    }


def comparison_rows(
    frontier: "Frontier", marked: Mapping[str, int], others: "Mapping[str, tuple[Plan, ...]]"
) -> Iterator[dict[str, Any]]:
    """Yield a row for each baseline's best plan that is as fast as a marked point, and for EnvPipe's plan.

    ``marked``: the points' indices by name. Energies run until that point's time. Savings are against all
    computations at the highest clock, waiting until then.
    """
    for name, index in marked.items():
        time_s = frontier.points[index].iteration_time_s
        for other in (other for other in others if other != ENVPIPE):
            within = [plan for plan in others[other] if plan.iteration_time_s <= time_s]
            if within:  # the slowest one: along a frontier effective energy falls
                yield _row(f"{other} within {name}", frontier, within[-1], time_s)
    for plan in others[ENVPIPE]:
        yield _row(ENVPIPE, frontier, plan, plan.iteration_time_s)


def _row(name: str, frontier: "Frontier", plan: "Plan", until_s: float) -> dict[str, Any]:
    energy_j = plan.energy_until_j(until_s)
    return {
        "point": name,
        "iteration_time_s": plan.iteration_time_s,
        "energy_j": energy_j,
        "bound_energy_j": None,
        "saving_percent": 100 * (1 - energy_j / frontier.baseline.energy_until_j(until_s)),
    }
