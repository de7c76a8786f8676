"""Agents' measurements as columns of equal length, and their validation.

Columns are lists: a batch has some twenty rows, and for so few a single numpy call costs more than a pass in
Python. The fast path compares whole columns; only unusual batches are checked row by row.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perseus.service.domain.bounds import (
    MAX_COMPUTATION_ROWS,
    MAX_COUNT,
    MAX_DURATION_S,
    MAX_INFORMATION,
    MAX_ITERATION_ROWS,
    MAX_JOINT_SAMPLE_COUNT,
    MAX_RANK_ENERGY_J,
    MAX_RANK_POWER_W,
    MAX_RELATIVE_WORK,
    MAX_SAMPLE_COUNT,
    MAX_TOTAL_TIME_S,
    MIN_DURATION_S,
    MIN_POWER_W,
    MIN_RELATIVE_WORK,
    between,
    check_range,
    check_size,
)
from perseus.service.domain.errors import InvalidFieldError
from perseus.solver import MAX_CLOCK_MHZ, Computation, Kind

IntColumn = NDArray[np.int64]
FloatColumn = NDArray[np.float64]

KINDS = tuple(Kind)
"""The kinds that the indices in a `kind` column refer to."""

_KINDS_KNOWN = frozenset(range(len(KINDS)))
_KIND_INDEX = {kind: index for index, kind in enumerate(KINDS)}

_WORK_RANGE = between(MIN_RELATIVE_WORK, MAX_RELATIVE_WORK)

_Row = tuple[int, int, int]
"""Index of the kind, microbatch and chunk."""


class IterationColumns(NamedTuple):
    """Finished iterations of one rank. `clock_event_reasons` holds NVML's bits, 0 for none.

    `gap_*` describe the gaps before the iterations. `capped_clock_mhz` is the clock that the GPU reached
    while it was capped, 0 where it was not. `relative_work` is 0 where the trainer does not report it, `work`
    where no hook counts it. These columns are empty if the agent does not report them.
    """

    iteration: Sequence[int]
    plan_version: Sequence[int]
    duration_s: Sequence[float]
    energy_j: Sequence[float]
    is_regular: Sequence[bool]
    clock_event_reasons: Sequence[int]
    gap_time_s: Sequence[float] = ()
    gap_energy_j: Sequence[float] = ()
    gap_slowed_time_s: Sequence[float] = ()
    capped_clock_mhz: Sequence[int] = ()
    relative_work: Sequence[float] = ()
    has_clock_change: Sequence[bool] = ()
    work: Sequence[float] = ()

    def check(self) -> None:
        """Refuse invalid columns.

        Raises:
            InvalidFieldError: names the column.
        """
        if self._is_plain_row():
            return
        _check_lengths("iterations", self, MAX_ITERATION_ROWS)
        _check_bounds("iterations.iteration", self.iteration, 0, MAX_COUNT)
        _check_bounds("iterations.plan_version", self.plan_version, 0, MAX_COUNT)
        _check_bounds("iterations.duration_s", self.duration_s, MIN_DURATION_S, MAX_DURATION_S)
        _check_bounds("iterations.energy_j", self.energy_j, 0, MAX_RANK_ENERGY_J)
        _check_bounds("iterations.clock_event_reasons", self.clock_event_reasons, 0, MAX_COUNT)
        _check_bounds("iterations.gap_time_s", self.gap_time_s, 0, MAX_DURATION_S)
        _check_bounds("iterations.gap_energy_j", self.gap_energy_j, 0, MAX_RANK_ENERGY_J)
        _check_bounds("iterations.gap_slowed_time_s", self.gap_slowed_time_s, 0, MAX_DURATION_S)
        _check_bounds("iterations.capped_clock_mhz", self.capped_clock_mhz, 0, MAX_CLOCK_MHZ)
        _check_bounds("iterations.work", self.work, 0, MAX_COUNT)
        if self.relative_work:
            _check_rows("iterations.relative_work", self.relative_work, _is_work, f"0, or {_WORK_RANGE}")

    def _is_plain_row(self) -> bool:
        """Return whether this is one valid row without relative work, as nearly always; in one expression."""
        iterations, versions, durations_s, energies_j, are_regular, reasons, *optional = self
        return (
            len(iterations) == 1
            and len(versions) == len(durations_s) == len(energies_j) == len(are_regular) == len(reasons) == 1
            and (not any(optional) or self._is_rest_plain())
            and 0 <= iterations[0] <= MAX_COUNT
            and 0 <= versions[0] <= MAX_COUNT
            and MIN_DURATION_S <= durations_s[0] <= MAX_DURATION_S
            and 0 <= energies_j[0] <= MAX_RANK_ENERGY_J
            and 0 <= reasons[0] <= MAX_COUNT
        )

    def _is_rest_plain(self) -> bool:
        bounded = (
            (self.gap_time_s, MAX_DURATION_S),
            (self.gap_energy_j, MAX_RANK_ENERGY_J),
            (self.gap_slowed_time_s, MAX_DURATION_S),
            (self.capped_clock_mhz, MAX_CLOCK_MHZ),
            (self.work, MAX_COUNT),
        )
        return (
            not self.relative_work
            and len(self.has_clock_change) <= 1
            and all(
                not column or (len(column) == 1 and 0 <= column[0] <= maximum) for column, maximum in bounded
            )
        )


class ComputationColumns(NamedTuple):
    """Computations of one rank. `kind` holds indices into KINDS, `clock_mhz` 0 for stock.

    Columns of integers must not be changed: batches of a stage share those that are the same. Short rows are
    those of one regular iteration, without the columns that the rank's order has (`Order.whole`).
    """

    iteration: Sequence[int]
    kind: Sequence[int]
    microbatch: Sequence[int]
    chunk: Sequence[int]
    begin_s: Sequence[float]
    duration_s: Sequence[float]
    clock_mhz: Sequence[int]

    def check(self, *, is_known: bool = False) -> None:
        """Refuse invalid columns.

        `is_known`: kinds, microbatches and chunks are those of columns that have been checked.

        Raises:
            InvalidFieldError: names the column.
        """
        if self.is_short:
            self._check_short()
        else:
            _check_lengths("computations", self, MAX_COMPUTATION_ROWS)
        _check_bounds("computations.iteration", self.iteration, 0, MAX_COUNT)
        if not is_known:
            _check_bounds("computations.microbatch", self.microbatch, 0, MAX_COUNT)
            _check_bounds("computations.chunk", self.chunk, 0, MAX_COUNT)
        for clock_mhz in {*self.clock_mhz}:
            if not 0 <= clock_mhz <= MAX_CLOCK_MHZ:
                row = self.clock_mhz.index(clock_mhz)
                check_range(f"computations.clock_mhz[{row}]", clock_mhz, 0, MAX_CLOCK_MHZ)
        if not (is_known or _KINDS_KNOWN.issuperset(self.kind)):
            _check_rows("computations.kind", self.kind, _KINDS_KNOWN.__contains__, "a known kind")
        _check_bounds("computations.begin_s", self.begin_s, 0, MAX_DURATION_S)
        _check_bounds("computations.duration_s", self.duration_s, 0, MAX_DURATION_S)

    @property
    def is_short(self) -> bool:
        """Whether these are short rows."""
        return bool(self.duration_s) and not (self.iteration or self.kind or self.microbatch or self.chunk)

    def _check_short(self) -> None:
        count = len(self.duration_s)
        check_size("computations.duration_s", count, MAX_COMPUTATION_ROWS)
        for name, column in (("begin_s", self.begin_s or self.duration_s), ("clock_mhz", self.clock_mhz)):
            if len(column) != count:
                raise InvalidFieldError(
                    field=f"computations.{name}", expected=f"{count} rows like duration_s", found=len(column)
                )

    def iterations(self) -> list[int]:
        """Return the iterations that have rows, in order."""
        own = self.iteration
        # Nearly every batch holds a single one.
        return [own[0]] if own and own.count(own[0]) == len(own) else sorted(set(own))

    def of_iteration(self, iteration: int) -> "ComputationColumns":
        """Return the rows of one iteration."""
        own = self.iteration
        if own.count(iteration) == len(own):
            return self
        rows = [row for row, number in enumerate(own) if number == iteration]
        return ComputationColumns(*([column[row] for row in rows] for column in self))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class EnergySample:
    """Time and energy of one kind of computation at one clock.

    The energy may be negative while it rests on few windows.
    """

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
    """One rank's energy under a plan so far, by its energy counter; blocking power None if undetermined.

    `undetermined` has the times of other computations, at energy 0. The information on the powers of
    `samples`, `undetermined` and waiting is the inverse of their covariance, 1/W², as a lower triangle by
    rows, and that times the powers, 1/W; both are empty if it was not reported. The samples are those of an
    iteration with this `work`, stated or counted; 0 if unknown.
    """

    plan_version: int
    iteration_count: int
    samples: tuple[EnergySample, ...]
    blocking_power_w: float | None
    blocking_power_se_w: float
    undetermined: tuple[EnergySample, ...] = ()
    power_information: tuple[float, ...] = ()
    power_information_vector: tuple[float, ...] = ()
    work: float = 0.0

    def check(self) -> None:
        """Refuse impossible figures.

        Raises:
            InvalidFieldError: names the figure.
        """
        check_range("energy.plan_version", self.plan_version, 0, MAX_COUNT)
        check_range("energy.iteration_count", self.iteration_count, 0, MAX_COUNT)
        check_range("energy.work", self.work, 0, MAX_COUNT)
        if self.blocking_power_w is not None:
            check_range("energy.blocking_power_w", self.blocking_power_w, MIN_POWER_W, MAX_RANK_POWER_W)
        check_range("energy.blocking_power_se_w", self.blocking_power_se_w, 0, MAX_RANK_POWER_W)
        check_size("energy.samples", len(self.samples), MAX_SAMPLE_COUNT)
        self._check_information()
        seen = set()
        for where, sample in self.places():
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

    def places(self) -> Iterator[tuple[str, EnergySample]]:
        """Return each sample, undetermined ones too, with its place in the message."""
        for name, samples in (("samples", self.samples), ("undetermined", self.undetermined)):
            for row, sample in enumerate(samples):
                yield f"energy.{name}[{row}]", sample

    def _check_information(self) -> None:
        where, size = "energy.power_information", len(self.samples) + len(self.undetermined) + 1
        if not (self.power_information or self.power_information_vector):
            check_size("energy.undetermined", len(self.undetermined), 0)
            return
        check_size("energy.samples", size - 1, MAX_JOINT_SAMPLE_COUNT)
        for name, column, expected in (
            (where, self.power_information, size * (size + 1) // 2),
            (f"{where}_vector", self.power_information_vector, size),
        ):
            if len(column) != expected:
                raise InvalidFieldError(field=name, expected=f"{expected} numbers", found=len(column))
            _check_rows(
                name, column, lambda value: abs(value) <= MAX_INFORMATION, f"at most {MAX_INFORMATION}"
            )


@dataclass(frozen=True, slots=True)
class ClockStatistics:
    """How well a rank's clocks have followed a plan; the contract defines each figure."""

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
    set_latency_count: int = 0

    def check(self) -> None:
        """Refuse impossible figures.

        Raises:
            InvalidFieldError: names the figure.
        """
        for name in (
            "plan_version",
            "set_count",
            "computation_count",
            "late_raise_count",
            "missed_count",
            "set_latency_count",
        ):
            check_range(f"clocks.{name}", getattr(self, name), 0, MAX_COUNT)
        for name in ("computation_time_s", "on_clock_time_s"):
            check_range(f"clocks.{name}", getattr(self, name), 0, MAX_TOTAL_TIME_S)
        for name in ("set_latency_s", "margin_s"):
            check_range(f"clocks.{name}", getattr(self, name), 0, MAX_DURATION_S)
        if self.prediction_error_s is not None:
            check_range("clocks.prediction_error_s", self.prediction_error_s, 0, MAX_DURATION_S)


class GpuLimits(NamedTuple):
    """Limits that others have set on a rank's GPU: its power limit (0 if unknown), and power profiles."""

    power_limit_w: float
    power_profiles: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ForeignClock:
    """The clock at which another client of the driver holds a GPU, and the wanted one, 0 for stock."""

    clock_mhz: int
    wanted_mhz: int


class TelemetryBatch(NamedTuple):
    """Measurements of one rank, each part already checked by itself.

    `is_thinned`: the coordinator left out its computations.
    """

    sequence: int
    iterations: IterationColumns
    computations: ComputationColumns
    energy: EnergyEstimate | None
    dropped_batch_count: int
    clocks: ClockStatistics | None = None
    gpu_limits: GpuLimits | None = None
    foreign_clock: ForeignClock | None = None
    is_thinned: bool = False

    def check(self, *, is_known: bool = False) -> None:
        """Refuse invalid numbers; `is_known` as in `ComputationColumns.check`.

        Raises:
            InvalidFieldError: names the number or column.
        """
        check_range("sequence", self.sequence, 1, MAX_COUNT)
        check_range("dropped_batch_count", self.dropped_batch_count, 0, MAX_COUNT)
        self.iterations.check()
        self.computations.check(is_known=is_known)
        ours, theirs = self.iterations.iteration, self.computations.iteration
        if theirs and not (len(ours) == 1 and theirs.count(ours[0]) == len(theirs)):
            known = set(ours)
            _check_rows("computations.iteration", theirs, known.__contains__, "one of iterations.iteration")
        if self.computations.is_short and [*self.iterations.is_regular] != [True]:
            raise InvalidFieldError(
                field="computations.iteration",
                expected="a row for each of duration_s, as these are not of a single regular iteration",
                found=0,
            )
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
        for mhz in {*clocks_mhz}:
            if mhz and mhz not in supported_clocks_mhz:
                known = {0, *supported_clocks_mhz}
                _check_rows(
                    "computations.clock_mhz", clocks_mhz, known.__contains__, "a clock of the rank's GPU"
                )
        for where, sample in self.energy.places() if self.energy else ():
            if sample.clock_mhz != 0 and sample.clock_mhz not in supported_clocks_mhz:
                raise InvalidFieldError(
                    field=f"{where}.clock_mhz",
                    expected="a clock of the rank's GPU",
                    found=sample.clock_mhz,
                )

    def check_order(self, order: "Order") -> bool:
        """Refuse regular iterations, and energy samples, of computations that the rank's order does not have.

        Return whether the batch is exactly one regular iteration with its computations in order.

        Raises:
            InvalidFieldError: quotes the iteration, or the sample.
        """
        is_plain = order.is_just(self.iterations, self.computations)
        if not is_plain and not self.is_thinned:
            order.check_regular(self.iterations, self.computations)
        for where, sample in self.energy.places() if self.energy else ():
            if (sample.kind, sample.chunk) not in order.keys:
                raise InvalidFieldError(
                    field=where,
                    expected="kinds and chunks of the rank's order",
                    found=f"{sample.kind.value} of chunk {sample.chunk}",
                )
        return is_plain

    def until(self, iteration: int) -> "TelemetryBatch":
        """Return the batch without rows of later iterations."""
        return self._replace(
            iterations=IterationColumns(*_rows_until(self.iterations, iteration)),
            computations=ComputationColumns(*_rows_until(self.computations, iteration)),
        )


class Order:
    """A rank's computations in an iteration, prepared for comparison with columns.

    Attributes:
        keys: its kinds and chunks.
    """

    def __init__(self, computations: Sequence[Computation]) -> None:
        self.keys = frozenset((each.kind, each.chunk) for each in computations)
        self._kinds = [_KIND_INDEX[each.kind] for each in computations]
        self._microbatches = [each.microbatch for each in computations]
        self._chunks = [each.chunk for each in computations]

    def whole(self, batch: TelemetryBatch) -> TelemetryBatch:
        """Return a batch whose rows are not short any more.

        Raises:
            InvalidFieldError: the order has another number of computations.
        """
        rows, count = batch.computations, len(self._kinds)
        if not rows.is_short:
            return batch
        if len(rows.duration_s) != count:
            raise InvalidFieldError(
                field="computations.duration_s",
                expected=f"{count} rows, as many as the registered order has",
                found=len(rows.duration_s),
            )
        iteration = [batch.iterations.iteration[0]] * count
        whole = ComputationColumns(iteration, self._kinds, self._microbatches, self._chunks, *rows[4:])
        return batch._replace(computations=whole)

    def is_just(self, iterations: IterationColumns, computations: ComputationColumns) -> bool:
        """Return whether these are one regular iteration with its rows in this order, as usual."""
        return (
            len(iterations.iteration) == 1
            and iterations.is_regular[0]
            and computations.kind == self._kinds
            and computations.microbatch == self._microbatches
            and computations.chunk == self._chunks
        )

    def compact(self, computations: ComputationColumns) -> ComputationColumns:
        """Return one regular iteration's columns in a tenth of the memory.

        All such iterations share their common columns, and the others are arrays, not lists of objects.
        """
        return ComputationColumns(
            computations.iteration,
            self._kinds,
            self._microbatches,
            self._chunks,
            array("d", computations.begin_s),
            array("d", computations.duration_s),
            array("i", computations.clock_mhz),
        )

    def check_regular(self, iterations: IterationColumns, computations: ComputationColumns) -> None:
        """Refuse regular iterations whose computations differ from these or their order.

        Raises:
            InvalidFieldError: quotes the first such iteration.
        """
        counts = Counter(
            number
            for number, is_regular in zip(iterations.iteration, iterations.is_regular, strict=True)
            if is_regular
        )
        found: dict[int, list[_Row]] = {number: [] for number in sorted(counts)}
        rows = zip(computations.kind, computations.microbatch, computations.chunk, strict=True)
        for number, row in zip(computations.iteration, rows, strict=True):
            if number in found:
                found[number].append(row)
        own = list(zip(self._kinds, self._microbatches, self._chunks, strict=True))
        for number, one in found.items():
            if one != own * counts[number]:
                raise InvalidFieldError(
                    field="iterations.is_regular",
                    expected=f"the {len(own)} computations of the registered order in iteration {number}",
                    found=self._difference(one, own),
                )

    def _difference(self, found: Sequence[_Row], own: Sequence[_Row]) -> str:
        if len(found) != len(own):
            return f"{len(found)} computations"
        row = next(row for row, (one, expected) in enumerate(zip(found, own, strict=True)) if one != expected)
        kind, microbatch, chunk = found[row]
        return f"{KINDS[kind].value} of microbatch {microbatch}, chunk {chunk} as computation {row} of them"


def _rows_until(columns: IterationColumns | ComputationColumns, iteration: int) -> Iterator[list[Any]]:
    rows = [row for row, number in enumerate(columns.iteration) if number <= iteration]
    return ([column[row] for row in rows] if column else [] for column in columns)


def _is_work(value: float) -> bool:
    return value == 0 or MIN_RELATIVE_WORK <= value <= MAX_RELATIVE_WORK


def _check_lengths(where: str, columns: IterationColumns | ComputationColumns, maximum: int) -> None:
    expected = len(columns.iteration)
    check_size(f"{where}.iteration", expected, maximum)
    if len(set(map(len, columns))) > 1:
        for name, column in zip(columns._fields, columns, strict=True):
            if len(column) != expected and (column or name not in columns._field_defaults):
                if not expected:
                    raise InvalidFieldError(
                        field=f"{where}.iteration", expected=f"{len(column)} rows like {name}", found=0
                    )
                raise InvalidFieldError(
                    field=f"{where}.{name}", expected=f"{expected} rows like iteration", found=len(column)
                )


def _check_bounds(field: str, column: Sequence[float], minimum: float, maximum: float) -> None:
    # If no value is below 0, a sum within the maximum bounds every value: the cheapest test, which almost
    # every column passes. A NaN anywhere makes the sum NaN.
    if column and not (0 <= minimum <= min(column) and sum(column) <= maximum):
        _check_rows(field, column, lambda value: minimum <= value <= maximum, between(minimum, maximum))


def _check_rows(field: str, column: Sequence[float], is_fine: Callable[[float], bool], expected: str) -> None:
    for row, value in enumerate(column):
        if not is_fine(value):
            raise InvalidFieldError(field=f"{field}[{row}]", expected=expected, found=value)
