"""Read profiles from the CSV format that Zeus users already have.

Columns ``stage,instruction,frequency,time,energy``: stage from 0, ``forward``, ``backward``,
``backward-input``, ``backward-weight`` or ``recomputation``, MHz, seconds, joules per GPU. Optional columns:
``chunk``, a stage's model chunk, and ``time_se`` and ``energy_se``, the standard errors, empty where unknown.
Rows are numbered like an editor's lines: the header is row 1.

Every other named column is a further setting, such as ``power_limit_w`` or ``kernel``. Together with the
clock it identifies a row's option (:mod:`perseus.solver.setting`). There may then be several rows per clock.
"""

import csv
import io
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import NoReturn

from perseus.regular_file import read_bounded
from perseus.solver.bounds import MAX_CLOCK_MHZ, MAX_ENERGY_J, MAX_TIME_S, MIN_ENERGY_J
from perseus.solver.computation import Kind
from perseus.solver.errors import ProfileError
from perseus.solver.pipeline import ProfileKey
from perseus.solver.profile import MeasuredSetting, Measurement, highest
from perseus.solver.setting import (
    Further,
    Setting,
    check_name,
    expected_value,
    in_order,
    is_value,
    unit_of,
)

_COLUMNS = ("stage", "instruction", "frequency", "time", "energy")
_OPTIONAL_COLUMNS = ("chunk", "time_se", "energy_se")
_MAX_STAGE = 4095
_MAX_CHUNK = 255
_PS = 1e-12
_INSTRUCTIONS = {kind.value: kind for kind in Kind if kind is not Kind.FIXED}
_SPLIT = {Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT}


def read_profile_csv(path: Path, gpus_per_stage: int) -> dict[ProfileKey, tuple[Measurement, ...]]:
    """Read every stage's measurements, energies multiplied by ``gpus_per_stage``.

    They are of type `MeasuredSetting` if the file has columns of further settings.

    Raises:
        ProfileError: the file can't be read as such a table, a column or row appears twice, a value is
            impossible or missing, or a stage or instruction is missing, or its stage's highest clock. The
            message names file, row, column, and what was expected and found.
    """
    if gpus_per_stage < 1:
        raise ProfileError(
            f"gpus_per_stage: expected at least 1, found {gpus_per_stage}", found=gpus_per_stage
        )
    rows: dict[_RowKey, tuple[int, Measurement]] = {}
    try:
        text = read_bounded(path).decode("utf-8-sig")
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        further_columns = _check_header(path, reader.fieldnames)
        for row in reader:
            cells = _Cells(path, reader.line_num, row)
            if None in row:
                cells.refuse("after the last", "nothing", repr(",".join(row[None])))
            key, measurement = cells.measurement(gpus_per_stage, further_columns)
            if key in rows:
                cells.refuse(
                    ",".join(("frequency", *further_columns)),
                    f"one row per stage, instruction and {'setting' if further_columns else 'clock'}",
                    f"the same as in row {rows[key][0]}",
                )
            rows[key] = (reader.line_num, measurement)
    except UnicodeDecodeError as error:
        raise ProfileError(
            f"{path}: expected UTF-8 text, found byte 0x{error.object[error.start]:02x} at {error.start}",
            file=path,
        ) from None
    except csv.Error as error:
        raise ProfileError(
            f"{path}, row {reader.reader.line_num}: expected CSV, found {error}", file=path
        ) from None
    except OSError as error:
        raise ProfileError(f"{path}: expected a readable file, found: {error.strerror}", file=path) from None
    profiles: dict[ProfileKey, list[Measurement]] = {}
    for of, setting in sorted(rows, key=lambda row: (row[0], in_order(row[1]))):
        profiles.setdefault(of, []).append(rows[of, setting][1])
    _check_complete(path, profiles)
    return {key: tuple(measurements) for key, measurements in profiles.items()}


_RowKey = tuple[ProfileKey, int | Setting]
"""A row's identity: (stage, chunk and instruction; clock or setting)."""


class _Cells:
    """One row's cells, and the place to name when one of them is wrong."""

    def __init__(self, path: Path, row_number: int, row: Mapping[str | None, object]) -> None:
        self._path, self._row_number, self._row = path, row_number, row

    def refuse(self, column: str, expected: str, found: str) -> NoReturn:
        raise ProfileError(
            f"{self._path}, row {self._row_number}, column {column}: expected {expected}, found {found}",
            file=self._path,
            row=self._row_number,
            column=column,
            expected=expected,
            found=found,
        )

    def measurement(self, gpus_per_stage: int, further_columns: Sequence[str]) -> tuple[_RowKey, Measurement]:
        stage = self._integer("stage", 0, _MAX_STAGE)
        instruction = self._text("instruction")
        if instruction not in _INSTRUCTIONS:
            self.refuse("instruction", f"one of {', '.join(_INSTRUCTIONS)}", repr(instruction))
        chunk = self._integer("chunk", 0, _MAX_CHUNK) if "chunk" in self._row else 0
        clock_mhz = self._integer("frequency", 1, MAX_CLOCK_MHZ)
        time_s = self._positive("time", "seconds", _PS, MAX_TIME_S)
        min_j, max_j = MIN_ENERGY_J / gpus_per_stage, MAX_ENERGY_J / gpus_per_stage
        energy_j = self._positive("energy", "joules", min_j, max_j) * gpus_per_stage
        time_se_s = self._error("time_se", "seconds", MAX_TIME_S)
        # All GPUs of a stage are measured in the same way, so their errors are common and add up.
        energy_se_j = self._error("energy_se", "joules", max_j) * gpus_per_stage
        measurement = (
            MeasuredSetting(
                clock_mhz,
                time_s,
                energy_j,
                time_se_s,
                energy_se_j,
                further=self._further(further_columns),
            )
            if further_columns
            else Measurement(clock_mhz, time_s, energy_j, time_se_s, energy_se_j)
        )
        return ((stage, chunk, _INSTRUCTIONS[instruction]), measurement.setting), measurement

    def _further(self, columns: Sequence[str]) -> Further:
        further = []
        for column in columns:
            text = self._text(column)
            value = text if unit_of(column) is None else _number(text)
            if not is_value(column, value):
                self.refuse(column, expected_value(column), repr(text))
            further.append((column, value))
        return tuple(further)

    def _error(self, column: str, unit: str, maximum: float) -> float:
        """Return a standard error; 0 if the column is missing or the cell empty."""
        text = str(self._row.get(column) or "").strip()
        if not text:
            return 0.0
        number = _number(text)
        if not (math.isfinite(number) and number >= 0):
            self.refuse(column, f"a finite number of {unit} of 0 or more, or nothing", repr(text))
        if number > maximum:
            self.refuse(column, f"at most {maximum:g} {unit}", repr(text))
        return number

    def _text(self, column: str) -> str:
        value = self._row[column]
        if value is None:
            self.refuse(column, "a value", "nothing")
        return str(value).strip()

    def _integer(self, column: str, minimum: int, maximum: int) -> int:
        text = self._text(column)
        number = _number(text)
        if not (number.is_integer() and number >= minimum):
            self.refuse(column, f"a whole number of at least {minimum}", repr(text))
        if number > maximum:
            self.refuse(column, f"a whole number of at most {maximum}", repr(text))
        return int(number)

    def _positive(self, column: str, unit: str, minimum: float, maximum: float) -> float:
        text = self._text(column)
        number = _number(text)
        if not (math.isfinite(number) and number > 0):
            self.refuse(column, f"a positive, finite number of {unit}", repr(text))
        if not minimum <= number <= maximum:
            self.refuse(column, f"from {minimum:g} to {maximum:g} {unit}", repr(text))
        return number


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _check_header(path: Path, columns: Sequence[str] | None) -> tuple[str, ...]:
    """Return the columns of further settings. Unnamed ones don't count: some tables begin with an index."""
    expected = ",".join(_COLUMNS)
    if not columns:
        raise ProfileError(f"{path}: expected the columns {expected}, found an empty file", file=path)
    for column in _COLUMNS:
        if column not in columns:
            raise ProfileError(
                f"{path}, row 1: expected the columns {expected}, found no {column} in {','.join(columns)}",
                file=path,
                row=1,
                column=column,
            )
    for column, count in Counter(filter(None, columns)).items():
        if count > 1:
            raise ProfileError(
                f"{path}, row 1, column {column}: expected each column once, found it {count} times",
                file=path,
                row=1,
                column=column,
            )
    further = tuple(column for column in columns if column and column not in (*_COLUMNS, *_OPTIONAL_COLUMNS))
    for column in further:
        try:
            check_name(column)
        except ProfileError as error:
            raise ProfileError(f"{path}, row 1: {error}", file=path, row=1, column=column) from None
    return further


def _check_complete(path: Path, profiles: Mapping[ProfileKey, Sequence[Measurement]]) -> None:
    """Check that every chunk of every stage has a forward and a backward, whole or split.

    Each computation has its own clocks, as a scan may end where energy rises; but at its stage's highest one,
    at which it runs without Perseus, savings begin.
    """
    if not profiles:
        raise ProfileError(f"{path}: expected at least one row below the header, found none", file=path)
    chunk_count = 1 + max(chunk for _, chunk, _ in profiles)
    highest_mhz: dict[int, int] = {}
    for (stage, _, _), measured in profiles.items():
        highest_mhz[stage] = max(highest_mhz.get(stage, 0), highest(measured).clock_mhz)
    for stage, chunk in product(range(1 + max(stage for stage, _, _ in profiles)), range(chunk_count)):
        found = {kind for kind in Kind if (stage, chunk, kind) in profiles}
        for kind in sorted(found | {Kind.FORWARD} | (set() if found >= _SPLIT else {Kind.BACKWARD})):
            measured = profiles.get((stage, chunk, kind), ())
            if measured and highest(measured).clock_mhz == highest_mhz[stage]:
                continue
            where = f"stage {stage} chunk {chunk}" if chunk_count > 1 else f"stage {stage}"
            at = f" at the stage's highest clock, {highest_mhz[stage]} MHz" if stage in highest_mhz else ""
            listed = f"{highest(measured).clock_mhz} MHz as its highest" if measured else "no row"
            raise ProfileError(
                f"{path}: expected {where} {kind.value}{at}, found {listed}",
                file=path,
                stage=stage,
                chunk=chunk,
                instruction=kind.value,
            )
