"""A sweep: one scenario under every combination of budgets, forecasts, policies and seeds."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from perseus.simulation.build import Frontiers, build_fleet
from perseus.simulation.replay import Fleet, Forecast, replay
from perseus.simulation.scenario import (
    BudgetPart,
    PolicyPart,
    Scenario,
    ScenarioError,
    ScenarioPart,
    read_checked,
)

MAX_RUN_COUNT = 100_000

SweepName = Annotated[str, Field(min_length=1, max_length=63)]


class NamedBudgets(ScenarioPart):
    """Budgets in place of the scenario's."""

    name: SweepName
    budgets: tuple[BudgetPart, ...] = ()


class NamedPolicy(ScenarioPart):
    """A policy of all jobs in place of their own; none is full speed."""

    name: SweepName
    policy: PolicyPart | None = None


class Sweep(ScenarioPart):
    """What to combine; what is left out stays as in the scenario."""

    budgets: tuple[NamedBudgets, ...] = ()
    forecasts: tuple[Forecast, ...] = ()
    policies: tuple[NamedPolicy, ...] = ()
    seeds: tuple[int, ...] = ()

    @model_validator(mode="after")
    def _fits_together(self) -> "Sweep":
        names: dict[str, list[Any]] = {
            "budgets": [each.name for each in self.budgets],
            "forecasts": list(self.forecasts),
            "policies": [each.name for each in self.policies],
            "seeds": list(self.seeds),
        }
        count = 1
        for what, found in names.items():
            twice = next((each for each in found if found.count(each) > 1), None)
            if twice is not None:
                raise ValueError(f"{what}: expected each once, found {str(twice)!r} twice")
            count *= len(found) or 1
        if not any(names.values()):
            raise ValueError(f"expected at least one of {', '.join(names)}")
        if count > MAX_RUN_COUNT:
            raise ValueError(f"expected at most {MAX_RUN_COUNT:,} combinations, found {count:,}")
        return self


@dataclass(frozen=True, slots=True)
class Setting:
    """One combination of a sweep, by name."""

    budgets: str
    forecast: str
    policy: str
    seed: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """The totals of all jobs of one run; carbon and cost are None without that signal.

    `stock_*`: of the same iterations at the highest clocks. `kept_budget_count`: budgets that were kept at
    their end, of all that had come into force.
    """

    time_s: float
    stock_time_s: float
    energy_j: float
    stock_energy_j: float
    carbon_g: float | None
    stock_carbon_g: float | None
    cost: float | None
    stock_cost: float | None
    budget_count: int
    kept_budget_count: int


def read_sweep(path: Path) -> Sweep:
    """Read a sweep: JSON if the file's suffix is .json, otherwise TOML.

    Raises:
        ScenarioError: it can't be read or is invalid; names every invalid place.
    """
    return read_checked(path, Sweep)


def fleets(
    scenario: Scenario, sweep: Sweep, on_progress: Callable[[float], None] = lambda _: None
) -> Iterator[tuple[Setting, Fleet]]:
    """Return the fleet of each combination; the jobs are solved once, with the first.

    Raises:
        ScenarioError: as from `build_fleet`, or a combination does not fit together.
    """
    frontiers: Frontiers = {}
    as_is = "as in the scenario"
    for budgets, forecast, policy, seed in product(
        sweep.budgets or (NamedBudgets(name=as_is, budgets=scenario.budgets),),
        sweep.forecasts or (scenario.forecast,),
        sweep.policies or (None,),
        sweep.seeds or (scenario.seed,),
    ):
        jobs = scenario.jobs
        if policy is not None:
            jobs = tuple(job.model_copy(update={"policy": policy.policy}) for job in jobs)
        setting = Setting(budgets.name, forecast, as_is if policy is None else policy.name, seed)
        parts = {"budgets": budgets.budgets, "forecast": forecast, "jobs": jobs, "seed": seed}
        try:
            changed = Scenario.model_validate({**dict(scenario), **parts})
        except ValidationError as error:
            message = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise ScenarioError(
                f"budgets {setting.budgets!r}, policy {setting.policy!r}: {message}"
            ) from None
        yield setting, build_fleet(changed, on_progress, frontiers)


def outcome(fleet: Fleet) -> Outcome:
    """Replay a fleet, and return what a sweep compares."""
    done = replay(fleet)
    totals = list(done.totals.values())

    def total(name: str) -> Any:
        values = [getattr(each, name) for each in totals]
        return None if None in values else sum(values)

    return Outcome(
        **{name: total(name) for name in Outcome.__slots__ if not name.endswith("_count")},
        budget_count=len(done.outcomes),
        kept_budget_count=sum(
            status.is_compliant and not status.is_above_power_cap for _, status in done.outcomes
        ),
    )
