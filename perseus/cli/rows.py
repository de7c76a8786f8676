"""Output of commands: the same rows as JSON or CSV for scripts, or as a table for people.

Names and units are those of the contract's messages (`protos/perseus/v1`): a message becomes an object of its
fields, whole numbers stay numbers, enum values lose their prefix, times are RFC 3339 in UTC, and unknown
values are null. In CSV a message of plain values takes a column for each (`baseline.energy_j`), a list of
plain values is separated by spaces, and any other compound value is one cell of JSON, as are the messages of
a `oneof`, under its name. Numbers that JSON lacks (infinite, NaN) are null.
"""

import csv
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer
from rich.console import RenderableType

from perseus.cli.terminal import print_whole

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from google.protobuf.timestamp_pb2 import Timestamp

# protobuf's descriptors have two implementations with unrelated types.
Descriptor: TypeAlias = Any
FieldDescriptor: TypeAlias = Any
EnumDescriptor: TypeAlias = Any

Row = Mapping[str, Any]

_TIME = "google.protobuf.Timestamp"
UNKNOWN_WHILE_ZERO = {
    f"perseus.v1.{field}": deciding or field.split(".")[1]
    for field, deciding in {
        "Baseline.energy_j": "",
        "GpuLimitsChanged.before_power_limit_w": "",
        "GpuLimitsChanged.power_limit_w": "",
        "Job.latency_cost_percent": "t_min_s",
        "Job.max_planned_iteration_time_s": "",
        "Job.min_planned_iteration_time_s": "",
        "Job.set_latency_s": "",
        "Job.t_min_s": "",
        "Job.t_slow_s": "",
        "Job.t_star_s": "",
        "Rank.power_limit_w": "",
        "Solved.set_latency_s": "",
        "Straggler.iteration_time_s": "",
        "StragglerReported.target_time_s": "",
    }.items()
}
"""Fields that are unknown, not 0, while a field of their message is 0: another one, or they themselves."""
_WORD_BEGIN = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


class Format(StrEnum):
    """The output formats of a command."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


FormatOption = Annotated[
    Format, typer.Option("--format", help="A table for people; json or csv, complete, for scripts.")
]


def show_rows(
    wanted: Format, rows: Sequence[Row], columns: Sequence[str], table: Callable[[], RenderableType]
) -> None:
    """Print rows: as a JSON array, as CSV of `columns`, or `table`."""
    match wanted:
        case Format.JSON:
            print_json(rows)
        case Format.CSV:
            _print_csv(rows, columns)
        case Format.TABLE:
            print_whole(table())


def show_messages(
    wanted: Format,
    messages: Iterable["Message"],
    descriptor: Descriptor,
    table: Callable[[], RenderableType],
) -> None:
    """Print messages of one type, a row for each."""
    flatten = _flattened if wanted is Format.CSV else row_of
    rows = [] if wanted is Format.TABLE else [flatten(message) for message in messages]
    show_rows(wanted, rows, _columns_of(descriptor) if wanted is Format.CSV else (), table)


def show_message(wanted: Format, message: "Message", tables: Callable[[], Iterable[RenderableType]]) -> None:
    """Print one message: as a JSON object, as CSV of one row, or `tables`."""
    match wanted:
        case Format.JSON:
            print_json(row_of(message))
        case Format.CSV:
            _print_csv([_flattened(message)], _columns_of(message.DESCRIPTOR))
        case Format.TABLE:
            print_whole(*tables())


def show_row(wanted: Format, row: Row, tables: Callable[[], Iterable[RenderableType]]) -> None:
    """Print one row that is not a message: as a JSON object, as CSV of one row, or `tables`."""
    match wanted:
        case Format.JSON:
            print_json(row)
        case Format.CSV:
            _print_csv([row], list(row))
        case Format.TABLE:
            print_whole(*tables())


def print_json(value: object, *, is_line: bool = False) -> None:
    """Print a value as ASCII JSON, whatever the output's encoding."""
    sys.stdout.write(json.dumps(value, indent=None if is_line else 2, allow_nan=False) + "\n")


def row_of(message: "Message") -> dict[str, Any]:
    """Return a message as JSON values by field name. Of a `oneof`, only the set field is included."""
    present = {field.name for field, _ in message.ListFields()}
    return {
        field.name: _value(message, field, field.name in present)
        for field in message.DESCRIPTOR.fields
        if field.name in present or field.containing_oneof is None or _is_optional(field)
    }


def _value(message: "Message", field: FieldDescriptor, is_present: bool) -> Any:
    if field.has_presence and not is_present:
        return None
    deciding = UNKNOWN_WHILE_ZERO.get(field.full_name)
    if deciding is not None and not getattr(message, deciding):
        return None
    value = getattr(message, field.name)
    if field.is_repeated:
        return [_plain(each, field) for each in value]
    return _plain(value, field)


def _plain(value: Any, field: FieldDescriptor) -> Any:
    if field.message_type is not None:
        return _time(value) if field.message_type.full_name == _TIME else row_of(value)
    if field.enum_type is not None:
        return _enum_name(value, field.enum_type)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value.hex() if isinstance(value, bytes) else value


def _time(value: "Timestamp") -> str:
    return value.ToDatetime(UTC).isoformat().replace("+00:00", "Z")


def _enum_name(number: int, kind: EnumDescriptor) -> str:
    """Return an enum value as people write it; as its number if only a newer coordinator knows it."""
    prefix = _WORD_BEGIN.sub("_", kind.name).upper() + "_"
    known = kind.values_by_number.get(number)
    return str(number) if known is None else known.name.removeprefix(prefix).lower()


def _is_optional(field: FieldDescriptor) -> bool:
    """Whether a field's `oneof` is proto3's `optional`, which is a synthetic one of a single field."""
    return bool(field.containing_oneof.name == f"_{field.name}")


# ------------------------------------------------------------------------- CSV


def _print_csv(rows: Iterable[Row], columns: Sequence[str]) -> None:
    writer = csv.DictWriter(sys.stdout, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)


def _cell(value: Any) -> Any:
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
        case list() if not any(isinstance(each, dict | list | str) for each in value):
            return " ".join(str(_cell(each)) for each in value)
        case dict() | list():
            return json.dumps(value, separators=(",", ":"), allow_nan=False)
    return value


def _columns_of(descriptor: Descriptor) -> list[str]:
    """Return the columns of a message type: all of them, whichever fields are set."""
    columns: dict[str, None] = {}
    for field in descriptor.fields:
        if field.containing_oneof is not None and not _is_optional(field):
            columns[field.containing_oneof.name] = None
        elif _is_flat(field):
            columns.update({f"{field.name}.{part.name}": None for part in field.message_type.fields})
        else:
            columns[field.name] = None
    return list(columns)


def _is_flat(field: FieldDescriptor) -> bool:
    """Whether each part of a field has its own column."""
    kind = field.message_type
    if kind is None or field.is_repeated or kind.full_name == _TIME:
        return False
    parts = kind.fields
    is_plain = all(part.message_type is None and not part.is_repeated for part in parts)
    return is_plain and all(part.containing_oneof is None or _is_optional(part) for part in parts)


def _flattened(message: "Message") -> dict[str, Any]:
    row: dict[str, Any] = {}
    whole = row_of(message)
    for field in message.DESCRIPTOR.fields:
        if field.containing_oneof is not None and not _is_optional(field):
            if field.name in whole:
                row[field.containing_oneof.name] = {field.name: whole[field.name]}
        elif _is_flat(field):
            row.update({f"{field.name}.{name}": part for name, part in (whole[field.name] or {}).items()})
        else:
            row[field.name] = whole[field.name]
    return row
