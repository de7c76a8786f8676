"""What agents measure, as columns of equal length, and the checks at the door.

Columns go from repeated fields straight into numpy arrays; nothing here touches one sample at a time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from perseus.service.domain.errors import InvalidFieldError
from perseus.solver import Computation, Kind

IntColumn = NDArray[np.int64]
FloatColumn = NDArray[np.float64]
BoolColumn = NDArray[np.bool_]

KINDS = tuple(Kind)
"""A `kind` column holds indices into this."""

MAX_ROWS = 1_000_000


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
        _check_lengths("iterations", self)
        _check_column("iterations.iteration", self.iteration, self.iteration >= 0, "0 or more")
        _check_column("iterations.plan_version", self.plan_version, self.plan_version >= 0, "0 or more")
        _check_column(
            "iterations.duration_s", self.duration_s, _is_positive(self.duration_s), "a positive number"
        )
        _check_column(
            "iterations.energy_j", self.energy_j, _is_amount(self.energy_j), "a number of 0 or more"
        )
        reasons = self.clock_event_reasons
        _check_column("iterations.clock_event_reasons", reasons, reasons >= 0, "0 or more")


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
        _check_lengths("computations", self)
        for name in ("iteration", "microbatch", "chunk", "clock_mhz"):
            column = getattr(self, name)
            _check_column(f"computations.{name}", column, column >= 0, "0 or more")
        known = (self.kind >= 0) & (self.kind < len(KINDS))
        _check_column("computations.kind", self.kind, known, "a known kind")
        for name in ("begin_s", "duration_s"):
            column = getattr(self, name)
            _check_column(f"computations.{name}", column, _is_amount(column), "a number of 0 or more")

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
    """What one rank's energy counter says of a plan so far."""

    plan_version: int
    iteration_count: int
    samples: tuple[EnergySample, ...]
    blocking_power_w: float
    blocking_power_se_w: float

    def check(self) -> None:
        """Refuse figures that can't be.

        Raises:
            InvalidFieldError: names the figure.
        """
        _check_number("energy.plan_version", self.plan_version, self.plan_version >= 0, "0 or more")
        _check_number("energy.iteration_count", self.iteration_count, self.iteration_count >= 0, "0 or more")
        for name in ("blocking_power_w", "blocking_power_se_w"):
            value = getattr(self, name)
            _check_number(f"energy.{name}", value, value >= 0, "a number of 0 or more")
        seen = set()
        for sample in self.samples:
            where = f"energy.samples({sample.kind.value}, chunk {sample.chunk}, {sample.clock_mhz} MHz)"
            _check_number(f"{where}.chunk", sample.chunk, sample.chunk >= 0, "0 or more")
            _check_number(f"{where}.clock_mhz", sample.clock_mhz, sample.clock_mhz >= 0, "0 or more")
            _check_number(
                f"{where}.computation_count",
                sample.computation_count,
                sample.computation_count > 0,
                "1 or more",
            )
            _check_number(f"{where}.time_s", sample.time_s, sample.time_s > 0, "a positive number")
            _check_number(f"{where}.energy_j", sample.energy_j, True, "a finite number")
            for name in ("time_se_s", "energy_se_j"):
                value = getattr(sample, name)
                _check_number(f"{where}.{name}", value, value >= 0, "a number of 0 or more")
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
        for column in fields(self):
            value = getattr(self, column.name)
            if value is not None:
                _check_number(f"clocks.{column.name}", value, value >= 0, "0 or more")


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
        _check_number("sequence", self.sequence, self.sequence >= 1, "1 or more")
        _check_number(
            "dropped_batch_count", self.dropped_batch_count, self.dropped_batch_count >= 0, "0 or more"
        )
        self.iterations.check()
        self.computations.check()
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
        for sample in self.energy.samples if self.energy else ():
            is_known = sample.clock_mhz == 0 or sample.clock_mhz in supported_clocks_mhz
            _check_number("energy.samples.clock_mhz", sample.clock_mhz, is_known, "a clock of the rank's GPU")

    def check_order(self, order: Sequence[Computation]) -> None:
        """Refuse energy of kinds and chunks that the rank's order does not have.

        Raises:
            InvalidFieldError: quotes the sample.
        """
        known = {(computation.kind, computation.chunk) for computation in order} if self.energy else set()
        for sample in self.energy.samples if self.energy else ():
            if (sample.kind, sample.chunk) not in known:
                raise InvalidFieldError(
                    field="energy.samples",
                    expected="kinds and chunks of the rank's order",
                    found=f"{sample.kind.value} of chunk {sample.chunk}",
                )


def _is_amount(column: FloatColumn) -> BoolColumn:
    return np.isfinite(column) & (column >= 0)


def _is_positive(column: FloatColumn) -> BoolColumn:
    return np.isfinite(column) & (column > 0)


def _check_lengths(where: str, columns: IterationColumns | ComputationColumns) -> None:
    expected = len(columns.iteration)
    if expected > MAX_ROWS:
        raise InvalidFieldError(
            field=f"{where}.iteration", expected=f"at most {MAX_ROWS} rows", found=expected
        )
    for column in fields(columns):
        found = len(getattr(columns, column.name))
        if found != expected:
            raise InvalidFieldError(
                field=f"{where}.{column.name}", expected=f"{expected} rows like iteration", found=found
            )


def _check_column(field: str, column: IntColumn | FloatColumn, is_fine: BoolColumn, expected: str) -> None:
    if not is_fine.all():
        row = int(np.argmin(is_fine))
        raise InvalidFieldError(field=f"{field}[{row}]", expected=expected, found=column[row].item())


def _check_number(field: str, value: float, is_fine: bool, expected: str) -> None:
    if not (math.isfinite(value) and is_fine):
        raise InvalidFieldError(field=field, expected=expected, found=value)
