"""The scenario to simulate: a TOML or JSON file, checked as a whole before anything runs.

Times are hours from the scenario's start. Paths are relative to the file.
"""

import json
import tomllib
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from perseus.job_id import JOB_ID_RULE, is_job_id
from perseus.regular_file import read_bounded
from perseus.service.domain.power import DEFAULT_FEED
from perseus.service.domain.signals import SignalKind
from perseus.service.signal_settings import Unit, check_unit
from perseus.simulation.replay import Forecast


def _job_id(text: str) -> str:
    if not is_job_id(text):
        raise ValueError(f"expected {JOB_ID_RULE}, found {text!r}")
    return text


Name = Annotated[str, Field(min_length=1, max_length=63, pattern=r"[a-z0-9][a-z0-9._-]*")]
JobId = Annotated[str, AfterValidator(_job_id)]
Hours = Annotated[float, Field(ge=0, le=366 * 24)]
Percent = Annotated[float, Field(ge=0, le=100)]
Watts = Annotated[float, Field(gt=0, le=1e12)]
BlockingWatts = Annotated[float, Field(ge=0, le=1e4)]


Model = TypeVar("Model", bound=BaseModel)


class ScenarioError(Exception):
    """A scenario can't be read or simulated; the text names the place, and what was expected and found."""


class ScenarioPart(BaseModel):
    """A part of a scenario's or sweep's file."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class FeedPart(ScenarioPart):
    """A feed, and how fast its power cap falls and rises."""

    name: Name = DEFAULT_FEED
    ramp_down_w_per_s: Watts | None = None
    ramp_up_w_per_s: Watts | None = None


class StragglerPart(ScenarioPart):
    """A pipeline that takes `factor` times longer for a while."""

    pipeline: Annotated[int, Field(ge=0)]
    factor: Annotated[float, Field(ge=1, le=100)]
    begin_h: Hours = 0.0
    end_h: Hours | None = None


class PolicyPart(ScenarioPart):
    """Least carbon or cost within some extra time, over consecutive horizons."""

    signal: SignalKind
    extra_time_percent: Annotated[float, Field(ge=0, le=100)]
    horizon_h: Annotated[float, Field(ge=1, le=366 * 24)]


class JobPart(ScenarioPart):
    """A job with a profile as `perseus solve` reads it; its schedule is 1F1B."""

    job_id: JobId
    profile: Path
    microbatches: Annotated[int, Field(ge=1, le=4096)]
    gpus_per_stage: Annotated[int, Field(ge=1, le=256)] = 1
    blocking_power_w: BlockingWatts | Annotated[dict[int, BlockingWatts], Field(min_length=1)] = 0.0
    """Per GPU; by the clock held meanwhile, MHz, if it is a table."""
    pipelines: Annotated[int, Field(ge=1, le=4096)] = 1
    feed: Name = DEFAULT_FEED
    tolerance_percent: Percent = 100.0
    weight: Annotated[float, Field(ge=1e-6, le=1e6)] = 1.0
    begin_h: Hours = 0.0
    end_h: Hours | None = None
    policy: PolicyPart | None = None
    stragglers: tuple[StragglerPart, ...] = ()
    power_error_percent: Annotated[float, Field(ge=-50, le=50)] = 0.0
    """By how much its power exceeds its plans' prediction."""


class BudgetPart(ScenarioPart):
    """A limit on a feed, in watts or in percent of the power of all its jobs at stock."""

    budget_id: Name
    feed: Name = DEFAULT_FEED
    limit_w: Annotated[float, Field(ge=0, le=1e12)] | None = None
    percent: Annotated[float, Field(ge=0, le=1000)] | None = None
    begin_h: Hours
    end_h: Hours | None = None
    known_h: Hours = 0.0
    """When it is set."""
    cancelled_h: Hours | None = None

    @model_validator(mode="after")
    def _one_limit(self) -> "BudgetPart":
        if (self.limit_w is None) == (self.percent is None):
            raise ValueError("expected one of limit_w and percent")
        if self.end_h is not None and self.end_h <= self.begin_h:
            raise ValueError(f"expected an end_h after begin_h, {self.begin_h:g}")
        return self


class SignalPart(ScenarioPart):
    """A signal from a CSV file; `column` has its values, `timestamp` their times."""

    kind: SignalKind
    file: Path
    column: str
    unit: Unit | None = None
    stale_h: Hours = 3.0

    @model_validator(mode="after")
    def _unit_of_kind(self) -> "SignalPart":
        check_unit(self.kind.value, self.unit)
        return self


class Scenario(ScenarioPart):
    """A complete scenario, from `start` for `duration_h` hours."""

    start: datetime
    duration_h: Annotated[float, Field(gt=0, le=366 * 24)]
    seed: int = 0
    noise_percent: Annotated[float, Field(ge=0, le=50)] = 1.0
    """Standard deviation of the error of a job's mean power over a second."""
    forecast: Forecast = "regression"
    """How signals are forecast; `perfect` knows what comes."""
    feeds: tuple[FeedPart, ...] = ()
    jobs: Annotated[tuple[JobPart, ...], Field(max_length=1000)]
    budgets: tuple[BudgetPart, ...] = ()
    signals: tuple[SignalPart, ...] = ()

    @model_validator(mode="after")
    def _fits_together(self) -> "Scenario":
        if not self.jobs:
            raise ValueError("expected at least one job")
        for what, names in (
            ("job_id", [job.job_id for job in self.jobs]),
            ("budget_id", [budget.budget_id for budget in self.budgets]),
            ("feed", [feed.name for feed in self.feeds]),
            ("signal", [signal.kind.value for signal in self.signals]),
        ):
            twice = next((name for name in names if names.count(name) > 1), None)
            if twice is not None:
                raise ValueError(f"expected each {what} once, found {twice!r} twice")
        supplied = {job.feed for job in self.jobs}
        for budget in self.budgets:
            if budget.feed not in supplied:
                raise ValueError(
                    f"budget {budget.budget_id!r}: expected a feed with a job on it, found {budget.feed!r}"
                )
        known = {signal.kind for signal in self.signals}
        for job in self.jobs:
            if job.policy is not None and job.policy.signal not in known:
                raise ValueError(
                    f"job {job.job_id!r}: expected a signal {job.policy.signal.value!r}, found none"
                )
            for straggler in job.stragglers:
                if straggler.pipeline >= job.pipelines:
                    raise ValueError(
                        f"job {job.job_id!r}: expected a straggler among pipelines 0 to {job.pipelines - 1}, "
                        f"found {straggler.pipeline}"
                    )
        return self


def read_scenario(path: Path) -> Scenario:
    """Read a scenario: JSON if the file's suffix is .json, otherwise TOML. Resolve its relative paths.

    Raises:
        ScenarioError: it can't be read or is invalid; names every invalid place.
    """
    scenario = read_checked(path, Scenario)
    jobs = tuple(job.model_copy(update={"profile": path.parent / job.profile}) for job in scenario.jobs)
    signals = tuple(s.model_copy(update={"file": path.parent / s.file}) for s in scenario.signals)
    return scenario.model_copy(update={"jobs": jobs, "signals": signals})


def read_checked(path: Path, model: type[Model]) -> Model:
    """Read a file of a model: JSON if its suffix is .json, otherwise TOML.

    Raises:
        ScenarioError: it can't be read or is invalid; names every invalid place.
    """
    try:
        text = read_bounded(path).decode("utf-8-sig")
        content: Any = json.loads(text) if path.suffix.lower() == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ScenarioError(f"{path}: can't be read: {error.strerror}") from None
    except (UnicodeDecodeError, json.JSONDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        expected = "JSON" if path.suffix.lower() == ".json" else "TOML"
        raise ScenarioError(f"{path}: expected {expected} in UTF-8, found: {error}") from None
    try:
        return model.model_validate(content)
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            place = ".".join(str(part) for part in problem["loc"])
            message = problem["msg"].removeprefix("Value error, ")
            found = "" if problem["type"] in ("missing", "value_error") else f", found {problem['input']!r}"
            lines.append(f"{path}{f', {place}' if place else ''}: {message}{found}")
        raise ScenarioError("\n".join(lines)) from None
