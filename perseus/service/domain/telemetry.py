"""What agents measure, as columns of equal length, and the checks at the door.

Columns go from repeated fields straight into numpy arrays; nothing here touches one sample at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from perseus.service.domain.bounds import (
    MAX_COMPUTATION_ROWS,
    MAX_COUNT,
    MAX_DURATION_S,
    MAX_ITERATION_ROWS,
    MAX_RANK_ENERGY_J,
    MAX_RANK_POWER_W,
    MAX_SAMPLE_COUNT,
    MAX_TOTAL_TIME_S,
    MIN_DURATION_S,
    MIN_POWER_W,
    between,
    check_range,
    check_size,
)
from perseus.service.domain.errors import InvalidFieldError
from perseus.solver import MAX_CLOCK_MHZ, Computation, Kind

IntColumn = NDArray[np.int64]
FloatColumn = NDArray[np.float64]
BoolColumn = NDArray[np.bool_]

KINDS = tuple(Kind)
"""A `kind` column holds indices into this."""


@dataclass(frozen=True, slots=True, eq=False)
class IterationColumns:
    """Finished iterations of one rank. `clock_event_reasons` holds NVML's bits, 0 for none."""

    iteration: IntColumn
    plan_version: IntColumn
    duration_s: FloatColumn
    energy_j: FloatColumn
    is_regular: BoolColumn
    clock_event_reasons: IntColumn

    def check(self) -> None:
        """Refuse columns that can't be.

        Raises:
            InvalidFieldError: names the column.
        """
        _check_lengths("iterations", self, MAX_ITERATION_ROWS)
        _check_bounds("iterations.iteration", self.iteration, 0, MAX_COUNT)
        _check_bounds("iterations.plan_version", self.plan_version, 0, MAX_COUNT)
        _check_bounds("iterations.duration_s", self.duration_s, MIN_DURATION_S, MAX_DURATION_S)
        _check_bounds("iterations.energy_j", self.energy_j, 0, MAX_RANK_ENERGY_J)
        _check_bounds("iterations.clock_event_reasons", self.clock_event_reasons, 0, MAX_COUNT)


@dataclass(frozen=True, slots=True, eq=False)
class ComputationColumns:
    """Computations of one rank. `kind` holds indices into KINDS, `clock_mhz` 0 for stock."""

    iteration: IntColumn
    kind: IntColumn
    microbatch: IntColumn
    chunk: IntColumn
    begin_s: FloatColumn
    duration_s: FloatColumn
    clock_mhz: IntColumn

    def check(self) -> None:
        """Refuse columns that can't be.

        Raises:
            InvalidFieldError: names the column.
        """
        _check_lengths("computations", self, MAX_COMPUTATION_ROWS)
        for name in ("iteration", "microbatch", "chunk"):
            _check_bounds(f"computations.{name}", getattr(self, name), 0, MAX_COUNT)
        _check_bounds("computations.clock_mhz", self.clock_mhz, 0, MAX_CLOCK_MHZ)
        known = (self.kind >= 0) & (self.kind < len(KINDS))
        _check_column("computations.kind", self.kind, known, "a known kind")
        for name in ("begin_s", "duration_s"):
            _check_bounds(f"computations.{name}", getattr(self, name), 0, MAX_DURATION_S)

    def iterations(self) -> list[int]:
        """Return the iterations that there are rows of, in order."""
        if not len(self.iteration):
            return []
        first = int(self.iteration[0])
        # Nearly every batch is of a single one, and looking for others costs more than all else here.
        return [first] if (self.iteration == first).all() else np.unique(self.iteration).tolist()

    def of_iteration(self, iteration: int) -> "ComputationColumns":
        """Return the rows of one iteration."""
        rows = self.iteration == iteration
        if rows.all():
            return self
        return ComputationColumns(*(getattr(self, column.name)[rows] for column in fields(self)))


@dataclass(frozen=True, slots=True)
class EnergySample:
    """Time and energy of one kind of computation at one clock; while few windows are in, below 0 even."""

    kind: Kind
    chunk: int
    clock_mhz: int
    computation_count: int
    time_s: float
    time_se_s: float
    energy_j: float
    energy_se_j: float


@dataclass(frozen=True, slots=True)
class EnergyEstimate:
    """What one rank's energy counter says of a plan so far. Blocking power is None where undetermined."""

    plan_version: int
    iteration_count: int
    samples: tuple[EnergySample, ...]
    blocking_power_w: float | None
    blocking_power_se_w: float

    def check(self) -> None:
        """Refuse figures that can't be.

        Raises:
            InvalidFieldError: names the figure.
        """
        check_range("energy.plan_version", self.plan_version, 0, MAX_COUNT)
        check_range("energy.iteration_count", self.iteration_count, 0, MAX_COUNT)
        if self.blocking_power_w is not None:
            check_range("energy.blocking_power_w", self.blocking_power_w, MIN_POWER_W, MAX_RANK_POWER_W)
        check_range("energy.blocking_power_se_w", self.blocking_power_se_w, 0, MAX_RANK_POWER_W)
        check_size("energy.samples", len(self.samples), MAX_SAMPLE_COUNT)
        seen = set()
        for row, sample in enumerate(self.samples):
            where = f"energy.samples[{row}]"
            check_range(f"{where}.chunk", sample.chunk, 0, MAX_COUNT)
            check_range(f"{where}.clock_mhz", sample.clock_mhz, 0, MAX_CLOCK_MHZ)
            check_range(f"{where}.computation_count", sample.computation_count, 1, MAX_COUNT)
            check_range(f"{where}.time_s", sample.time_s, MIN_DURATION_S, MAX_DURATION_S)
            check_range(f"{where}.time_se_s", sample.time_se_s, 0, MAX_DURATION_S)
            check_range(f"{where}.energy_j", sample.energy_j, -MAX_RANK_ENERGY_J, MAX_RANK_ENERGY_J)
            check_range(f"{where}.energy_se_j", sample.energy_se_j, 0, MAX_RANK_ENERGY_J)
            key = (sample.kind, sample.chunk, sample.clock_mhz)
            if key in seen:
                raise InvalidFieldError(
                    field=where, expected="one sample per kind, chunk and clock", found="another"
                )
            seen.add(key)


@dataclass(frozen=True, slots=True)
class ClockStatistics:
    """How well a rank's clocks have followed a plan; the contract says what each figure means."""

    plan_version: int
    set_count: int
    computation_count: int
    late_raise_count: int
    missed_count: int
    computation_time_s: float
    on_clock_time_s: float
    set_latency_s: float
    margin_s: float
    prediction_error_s: float | None

    def check(self) -> None:
        """Refuse figures that can't be.

        Raises:
            InvalidFieldError: names the figure.
        """
        for name in ("plan_version", "set_count", "computation_count", "late_raise_count", "missed_count"):
            check_range(f"clocks.{name}", getattr(self, name), 0, MAX_COUNT)
        for name in ("computation_time_s", "on_clock_time_s"):
            check_range(f"clocks.{name}", getattr(self, name), 0, MAX_TOTAL_TIME_S)
        for name in ("set_latency_s", "margin_s"):
            check_range(f"clocks.{name}", getattr(self, name), 0, MAX_DURATION_S)
        if self.prediction_error_s is not None:
            check_range("clocks.prediction_error_s", self.prediction_error_s, 0, MAX_DURATION_S)


@dataclass(frozen=True, slots=True, eq=False)
class TelemetryBatch:
    """Measurements of one rank, each part already checked by itself."""

    sequence: int
    iterations: IterationColumns
    computations: ComputationColumns
    energy: EnergyEstimate | None
    dropped_batch_count: int
    clocks: ClockStatistics | None = None

    def check(self) -> None:
        """Refuse numbers that can't be.

        Raises:
            InvalidFieldError: names the number or column.
        """
        check_range("sequence", self.sequence, 1, MAX_COUNT)
        check_range("dropped_batch_count", self.dropped_batch_count, 0, MAX_COUNT)
        self.iterations.check()
        self.computations.check()
        ours, theirs = self.iterations.iteration, self.computations.iteration
        is_ours = theirs == ours[0] if len(ours) == 1 else np.isin(theirs, ours)  # mostly it is a single one
        _check_column("computations.iteration", theirs, is_ours, "one of iterations.iteration")
        if self.energy is not None:
            self.energy.check()
        if self.clocks is not None:
            self.clocks.check()

    def check_clocks(self, supported_clocks_mhz: Sequence[int]) -> None:
        """Refuse clocks that the rank's GPU does not have; 0 is stock.

        Raises:
            InvalidFieldError: quotes the clock.
        """
        clocks_mhz = self.computations.clock_mhz
        if not {0, *supported_clocks_mhz}.issuperset(clocks_mhz.tolist()):
            known = np.isin(clocks_mhz, [0, *supported_clocks_mhz])
            _check_column("computations.clock_mhz", clocks_mhz, known, "a clock of the rank's GPU")
        for row, sample in enumerate(self.energy.samples if self.energy else ()):
            if sample.clock_mhz != 0 and sample.clock_mhz not in supported_clocks_mhz:
                raise InvalidFieldError(
                    field=f"energy.samples[{row}].clock_mhz",
                    expected="a clock of the rank's GPU",
                    found=sample.clock_mhz,
                )

    def check_order(self, order: "Order") -> None:
        """Refuse regular iterations with other computations than the rank's, and energy of such.

        Raises:
            InvalidFieldError: quotes the iteration, or the sample.
        """
        order.check_regular(self.iterations, self.computations)
        for row, sample in enumerate(self.energy.samples if self.energy else ()):
            if (sample.kind, sample.chunk) not in order.keys:
                raise InvalidFieldError(
                    field=f"energy.samples[{row}]",
                    expected="kinds and chunks of the rank's order",
                    found=f"{sample.kind.value} of chunk {sample.chunk}",
                )


class Order:
    """What a rank computes in an iteration, made ready to compare columns with.

    Attributes:
        keys: its kinds and chunks.
    """

    def __init__(self, computations: Sequence[Computation]) -> None:
        self.keys = frozenset((each.kind, each.chunk) for each in computations)
        self._columns = np.array(
            [(KINDS.index(each.kind), each.microbatch, each.chunk) for each in computations], dtype=np.int64
        ).reshape(-1, 3)

    def check_regular(self, iterations: IterationColumns, computations: ComputationColumns) -> None:
        """Refuse regular iterations whose computations are not exactly these, in this order.

        Raises:
            InvalidFieldError: quotes the first such iteration.
        """
        if self._are_all_regular(iterations, computations):
            return
        regular = iterations.iteration[iterations.is_regular]
        rows = np.flatnonzero(np.isin(computations.iteration, regular))
        rows = rows[np.argsort(computations.iteration[rows], kind="stable")]
        columns = (computations.kind, computations.microbatch, computations.chunk)
        found = np.stack([column[rows] for column in columns], axis=1)
        if np.array_equal(found, np.tile(self._columns, (len(regular), 1))):
            return
        for iteration in np.unique(regular).tolist():
            one = found[computations.iteration[rows] == iteration]
            count = int(np.count_nonzero(regular == iteration))
            if not np.array_equal(one, np.tile(self._columns, (count, 1))):
                raise InvalidFieldError(
                    field="iterations.is_regular",
                    expected=f"the {len(self._columns)} computations of the registered order in iteration "
                    f"{iteration}",
                    found=self._difference(one),
                )

    def _are_all_regular(self, iterations: IterationColumns, computations: ComputationColumns) -> bool:
        """Whether rows follow rows as they should: what almost every batch is, told in a few comparisons."""
        numbers = iterations.iteration
        if (
            len(computations.iteration) != len(numbers) * len(self._columns)
            or not iterations.is_regular.all()
        ):
            return False
        shape = (len(numbers), len(self._columns))
        return bool(
            (computations.iteration.reshape(shape) == numbers[:, None]).all()
            and (computations.kind.reshape(shape) == self._columns[:, 0]).all()
            and (computations.microbatch.reshape(shape) == self._columns[:, 1]).all()
            and (computations.chunk.reshape(shape) == self._columns[:, 2]).all()
        )

    def _difference(self, found: IntColumn) -> str:
        if len(found) != len(self._columns):
            return f"{len(found)} computations"
        row = int(np.argmax((found != self._columns).any(axis=1)))
        kind, microbatch, chunk = found[row].tolist()
        return f"{KINDS[kind].value} of microbatch {microbatch}, chunk {chunk} as computation {row} of them"


def _check_lengths(where: str, columns: IterationColumns | ComputationColumns, most: int) -> None:
    expected = len(columns.iteration)
    check_size(f"{where}.iteration", expected, most)
    for column in fields(columns):
        found = len(getattr(columns, column.name))
        if found != expected:
            raise InvalidFieldError(
                field=f"{where}.{column.name}", expected=f"{expected} rows like iteration", found=found
            )


def _check_bounds(field: str, column: IntColumn | FloatColumn, least: float, most: float) -> None:
    # Two reductions tell of almost every column that it is fine; NaN is least and most where there is one.
    if len(column) and not least <= np.minimum.reduce(column) <= np.maximum.reduce(column) <= most:
        _check_column(field, column, (column >= least) & (column <= most), between(least, most))


def _check_column(field: str, column: IntColumn | FloatColumn, is_fine: BoolColumn, expected: str) -> None:
    if not is_fine.all():
        row = int(np.argmin(is_fine))
        raise InvalidFieldError(field=f"{field}[{row}]", expected=expected, found=column[row].item())
