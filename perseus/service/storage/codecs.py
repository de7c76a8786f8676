"""Codecs between values and columns: JSON documents `[version, value]` for values that are only read whole.

Fields with a default may be added to a value without a new version: earlier releases ignore them, and a
missing one takes its default. A change that earlier releases would misunderstand needs a new version, which
they refuse to read.

Values that could not be read back are refused by name: a number that is not finite, or exceeds 64 bits.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from perseus.service.domain.measured import Period, StageKey
from perseus.service.domain.model import (
    Clocks,
    HoldClocks,
    PlannedClocks,
    Rank,
    StockClocks,
)
from perseus.service.domain.power import BudgetRecord
from perseus.service.domain.records import Counters, JobRecord
from perseus.service.domain.slot_power import Division, SlotPower
from perseus.service.domain.specification import JobSpec, Parallelism, Registration
from perseus.solver import Measurement

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SpecSize:
    """What lists show of a specification."""

    parallelism: Parallelism


VERSION = 1
"""Version of the documents that are written here, and the only one that is read."""

_BEGINNING = re.compile(r"\s*\[\s*([0-9]+)\s*,")
"""The beginning of a document, with its version."""

_MAX_INTEGER = 2**63 - 1


class UnstorableError(ValueError):
    """A value could not be read back; the text names its field."""


class Json(Generic[T]):
    """Values of one type as JSON text; `name` is for errors."""

    def __init__(self, name: str, kind: Any) -> None:
        # Pydantic writes infinities as null unless configured otherwise, which works only for a tuple.
        self._adapter: TypeAdapter[tuple[int, T]] = TypeAdapter(
            tuple[int, kind],
            config={"ser_json_inf_nan": "constants"},
        )
        self._name = name

    def dump(self, value: T) -> str:
        """Return the text.

        Raises:
            UnstorableError: a number is not finite.
        """
        text = self._adapter.dump_json((VERSION, value)).decode()
        # The search in the text costs next to nothing; names may contain these words too, so check further.
        if "Infinity" in text or "NaN" in text:
            self._refuse_constants(text)
        return text

    def load(self, text: str) -> T:
        """Return the value.

        Raises:
            ValueError: the text has another version, or is not such a value.
        """
        version = _BEGINNING.match(text)
        if version is not None and int(version[1]) != VERSION:
            what = ", which is newer than this Perseus" if int(version[1]) > VERSION else ""
            raise ValueError(f"{self._name}: expected version {VERSION}, found {version[1]}{what}")
        try:
            return self._adapter.validate_json(text)[1]
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            where = ".".join([self._name, *map(str, problem["loc"][1:])])
            raise ValueError(f"{where}: {problem['msg']}, found {problem['input']!r}") from None

    def _refuse_constants(self, text: str) -> None:
        found = next(_constants(json.loads(text)[1], self._name), None)
        if found is not None:
            path, number = found
            raise UnstorableError(f"{path}: expected a finite number, found {number}")


def _constants(value: object, path: str) -> Iterator[tuple[str, float]]:
    """Yield the paths and values of numbers that are not finite."""
    match value:
        case float() if not math.isfinite(value):
            yield path, value
        case dict():
            for name, part in value.items():
                yield from _constants(part, f"{path}.{name}")
        case list():
            for index, part in enumerate(value):
                yield from _constants(part, f"{path}[{index}]")


def integer(field: str, value: int) -> int:
    """Return a number if it fits into a column.

    Raises:
        UnstorableError: it exceeds 64 bits.
    """
    if not -_MAX_INTEGER <= value <= _MAX_INTEGER:
        raise UnstorableError(f"{field}: expected a number of 64 bits, found {value}")
    return value


def figure(field: str, value: float) -> float:
    """Return a number if it is finite.

    Raises:
        UnstorableError: it is not.
    """
    if not math.isfinite(value):
        raise UnstorableError(f"{field}: expected a finite number, found {value}")
    return value


def figures(field: str, values: Sequence[float]) -> Sequence[float]:
    """Return a column if all its numbers are finite.

    Raises:
        UnstorableError: one is not.
    """
    if not all(map(math.isfinite, values)):
        row = next(row for row, value in enumerate(values) if not math.isfinite(value))
        raise UnstorableError(f"{field}[{row}]: expected a finite number, found {values[row]}")
    return values


SPEC: Json[JobSpec] = Json("spec", JobSpec)
SPEC_SIZE: Json[SpecSize] = Json("spec", SpecSize)
REGISTRATIONS: Json[tuple[Registration, ...]] = Json("registrations", tuple[Registration, ...])
NO_REGISTRATIONS = REGISTRATIONS.dump(())
RECORD: Json[JobRecord] = Json("record", JobRecord)
COUNTERS: Json[Counters] = Json("counters", Counters)
RANK: Json[Rank] = Json("rank", Rank)
PERIOD: Json[Period] = Json("period", Period)
SLOT_POWER: Json[SlotPower] = Json("slot power", SlotPower)
DIVISION: Json[Division] = Json("division", Division)
BUDGET: Json[BudgetRecord] = Json("budget", BudgetRecord)
PATTERNS: Json[tuple[str, ...]] = Json("a token's patterns", tuple[str, ...])
STAGE_VERSIONS: Json[tuple[int, ...]] = Json("offer.stage_versions", tuple[int, ...])
MEASUREMENTS: Json[list[tuple[StageKey, Measurement]]] = Json(
    "profile.measurements", list[tuple[StageKey, Measurement]]
)
_CLOCKS: dict[str, Json[Any]] = {
    "stock": Json("offer.clocks", StockClocks),
    "hold": Json("offer.clocks", HoldClocks),
    "plan": Json("offer.clocks", PlannedClocks),
}
_CLOCKS_TYPE: dict[type, str] = {StockClocks: "stock", HoldClocks: "hold", PlannedClocks: "plan"}


def dump_clocks(clocks: Clocks) -> tuple[str, str, str]:
    """Return the digest, the type and the text of clocks."""
    kind = _CLOCKS_TYPE[type(clocks)]
    content = _CLOCKS[kind].dump(clocks)
    digest = hashlib.blake2b(f"{kind}\n{content}".encode(), digest_size=16).hexdigest()
    return digest, kind, content


def load_clocks(kind: str, content: str) -> Clocks:
    """Return stored clocks; raise ValueError if they can't be read."""
    if kind not in _CLOCKS:
        raise ValueError(f"offer.clocks: expected one of {', '.join(_CLOCKS)}, found {kind!r}")
    clocks: Clocks = _CLOCKS[kind].load(content)
    return clocks
