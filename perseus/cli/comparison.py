"""The baselines that `perseus solve --compare` shows beside the frontier: savings without Perseus.

One clock (or setting, if a setting is more than a clock) for all computations, one for each stage, both as
Zeus chooses them, and EnvPipe's plan. All are compared by the same rule: the plan of least energy within a
point's time, waiting until then.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perseus.solver import Frontier, Pipeline, Plan

RULES = {
    " within ": "within: the plan of least energy that takes no longer, waiting until then",
    " per stage": "per stage: balancing the stages' forwards (Zeus), or one for all if better",
    "EnvPipe": "EnvPipe: the only plan that it makes",
}
"""What parts of a row's name mean."""


def baselines(pipeline: "Pipeline") -> "Mapping[str, tuple[Plan, ...]]":
    """Return each baseline's plans by rising time; no plans if the computations share no setting."""
    from perseus.solver import MeasuredSetting, ProfileError, study

    def if_common(zeus: "Callable[[Pipeline], tuple[Plan, ...]]") -> "tuple[Plan, ...]":
        try:
            return zeus(pipeline)
        except ProfileError:
            return ()

    of_all, of_stages = if_common(study.zeus_global), if_common(study.zeus_per_stage)
    has_further = any(isinstance(m, MeasuredSetting) for some in pipeline.profiles.values() for m in some)
    what = "setting" if has_further else "clock"
    return {
        f"one {what}": of_all,
        # One for all is also one per stage; balancing the forwards alone can leave it out.
        f"a {what} per stage": tuple(_unbeaten([*of_stages, *of_all])),
        "EnvPipe": (study.envpipe(pipeline),),
    }


def _unbeaten(plans: "Iterable[Plan]") -> "Iterator[Plan]":
    """Yield the plans that no other beats in both time and effective energy, fastest first."""
    least_j = math.inf
    for plan in sorted(plans, key=lambda plan: (plan.iteration_time_s, plan.effective_energy_j)):
        if plan.effective_energy_j < least_j:
            least_j = plan.effective_energy_j
            yield plan


def comparison_rows(
    frontier: "Frontier", marked: Mapping[str, int], others: "Mapping[str, tuple[Plan, ...]]"
) -> Iterator[dict[str, Any]]:
    """Yield a row for each baseline's plan of least energy that is as fast as a marked point.

    ``marked``: the points' indices by name. Energies run until that point's time. Savings are against all
    computations at the highest clock, waiting until then.
    """
    for name, index in marked.items():
        time_s = frontier.points[index].iteration_time_s
        waiting_j = frontier.baseline.energy_until_j(time_s)
        for other, plans in others.items():
            within = [plan for plan in plans if plan.iteration_time_s <= time_s]
            if within:  # the slowest one: along a frontier effective energy falls
                energy_j = within[-1].energy_until_j(time_s)
                yield {
                    "point": f"{other} within {name}",
                    "iteration_time_s": within[-1].iteration_time_s,
                    "energy_j": energy_j,
                    "bound_energy_j": None,
                    "saving_percent": 100 * (1 - energy_j / waiting_j),
                    "confidence_percent": None,
                }
