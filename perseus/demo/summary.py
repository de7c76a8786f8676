"""The demo's measurements, phase by phase, and whether they are good enough. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

SLOWDOWN_LIMIT_PERCENT = 2.0


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration of one pipeline, from its ranks' clocks and energy counters."""

    pipeline: int
    number: int
    plan_version: int
    """0 for stock without a plan."""
    time_s: float
    energy_j: float


@dataclass(frozen=True, slots=True)
class Phase:
    """Mean figures of one phase; percentages are relative to the phase named in `compared_with`."""

    name: str
    iteration_count: int
    iteration_time_s: float
    energy_j_per_iteration: float
    compared_with: str
    slowdown_percent: float
    saving_percent: float


@dataclass(frozen=True, slots=True)
class Evaluations:
    """Mean durations of evaluations, before and after the first clock other than stock; 0 for none."""

    stock_count: int
    stock_time_s: float
    later_count: int
    later_time_s: float
    longest_later_time_s: float

    @classmethod
    def of(cls, found: Iterable[tuple[int, float]], stock_iterations: int) -> "Evaluations":
        """Make them from (iteration before it, duration) pairs; the first `stock_iterations` ran at stock."""
        stock_s: list[float] = []
        later_s: list[float] = []
        for iteration, time_s in found:
            (stock_s if iteration < stock_iterations else later_s).append(time_s)
        return cls(
            len(stock_s),
            fmean(stock_s) if stock_s else 0.0,
            len(later_s),
            fmean(later_s) if later_s else 0.0,
            max(later_s, default=0.0),
        )


class Measurements:
    """The job's iterations as they arrive, and the phases made of them."""

    def __init__(self, pipeline_count: int) -> None:
        self._pipeline_count = pipeline_count
        self._iterations: dict[int, dict[int, Iteration]] = {}
        self.phases: list[Phase] = []
        self.stock_iterations = 0
        """Number of iterations before any clock other than stock was in force."""
        self.evaluations: Evaluations | None = None

    def add(self, iteration: Iteration) -> None:
        """Record one pipeline's iteration."""
        self._iterations.setdefault(iteration.number, {})[iteration.pipeline] = iteration

    @property
    def latest(self) -> int:
        """The latest iteration that any pipeline has finished; -1 before the first."""
        return max(self._iterations, default=-1)

    def latest_of(self, pipeline: int) -> Iteration | None:
        """Return the latest iteration of a pipeline."""
        numbers = [number for number, row in self._iterations.items() if pipeline in row]
        return self._iterations[max(numbers)][pipeline] if numbers else None

    def at_stock(self) -> list[int]:
        """Return the iterations before any plan, without the first: its ranks were still starting."""
        return [
            number
            for number, row in sorted(self._iterations.items())
            if number > 0 and all(iteration.plan_version == 0 for iteration in row.values())
        ]

    def under(self, plan_version: int) -> list[int]:
        """Return the iterations that every pipeline ran under the clocks of a version, without the first."""
        numbers = [
            number
            for number, row in sorted(self._iterations.items())
            if all(iteration.plan_version == plan_version for iteration in row.values())
        ]
        return numbers[1:]

    def are_complete(self, numbers: Iterable[int]) -> bool:
        """Whether all pipelines have finished these iterations."""
        return all(len(self._iterations.get(number, {})) == self._pipeline_count for number in numbers)

    def whole(self, numbers: Iterable[int]) -> list[Mapping[int, Iteration]]:
        """Return those of the iterations that all pipelines reported, each by pipeline."""
        return [self._iterations[number] for number in numbers if self.are_complete([number])]

    def close_phase(self, name: str, numbers: Iterable[int], compared_with: str | None = None) -> Phase:
        """Make a phase of the iterations that all pipelines reported.

        Time is that of the slowest pipeline, energy the sum over all. `compared_with` names an earlier phase;
        without it, the phase is compared with itself.

        Raises:
            ValueError: none of the iterations was reported by all pipelines.
        """
        rows = self.whole(numbers)
        if not rows:
            raise ValueError(f"phase {name}: expected at least one iteration of all pipelines, found none")
        time_s = fmean(max(iteration.time_s for iteration in row.values()) for row in rows)
        energy_j = fmean(sum(iteration.energy_j for iteration in row.values()) for row in rows)
        base_time_s, base_energy_j = time_s, energy_j
        if compared_with is not None:
            base = self.phase(compared_with)
            base_time_s, base_energy_j = base.iteration_time_s, base.energy_j_per_iteration
        phase = Phase(
            name=name,
            iteration_count=len(rows),
            iteration_time_s=time_s,
            energy_j_per_iteration=energy_j,
            compared_with=compared_with or name,
            slowdown_percent=100 * (time_s / base_time_s - 1),
            saving_percent=100 * (1 - energy_j / base_energy_j),
        )
        self.phases.append(phase)
        return phase

    def phase(self, name: str) -> Phase:
        """Return a closed phase by its name."""
        return next(phase for phase in self.phases if phase.name == name)


def as_json(phases: Sequence[Phase], evaluations: Evaluations | None = None) -> Mapping[str, object]:
    """Return the contents of summary.json."""
    document = {"evaluations": asdict(evaluations)} if evaluations is not None else {}
    return {"phases": [asdict(phase) for phase in phases], **document}


def evaluation_problems(evaluations: Evaluations, expected_time_s: float) -> list[str]:
    """Return the problems of evaluations that take this long at stock; empty if plans cost them no time."""
    limit_s = expected_time_s * (1 + SLOWDOWN_LIMIT_PERCENT / 100)
    if evaluations.later_time_s <= limit_s:
        return []
    return [
        f"evaluations: expected at most {limit_s:.3f} s on average "
        f"({expected_time_s:g} s + {SLOWDOWN_LIMIT_PERCENT} %), found {evaluations.later_time_s:.3f} s"
    ]


def problems(phases: Sequence[Phase], expected: Mapping[str, tuple[str, float]]) -> list[str]:
    """Return the problems of the phases in `expected`; empty if all were fast enough and saved energy.

    An expectation is an earlier phase and the factor by which its mean iteration time may be exceeded.
    """
    found = []
    times_s = {phase.name: phase.iteration_time_s for phase in phases}
    for phase in (phase for phase in phases if phase.name in expected):
        base, factor = expected[phase.name]
        limit_s = times_s[base] * factor * (1 + SLOWDOWN_LIMIT_PERCENT / 100)
        if phase.iteration_time_s > limit_s:
            found.append(
                f"{phase.name}: expected an iteration time of at most {limit_s:.3f} s "
                f"({factor:g} × {base} + {SLOWDOWN_LIMIT_PERCENT} %), found {phase.iteration_time_s:.3f} s"
            )
        if phase.saving_percent <= 0:
            found.append(
                f"{phase.name}: expected a saving against {phase.compared_with}, "
                f"found {phase.saving_percent:.2f} %"
            )
    return found
