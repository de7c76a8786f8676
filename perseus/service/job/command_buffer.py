"""Where the parts of a job's state machine write down what they want done."""

from collections.abc import Hashable

from google.protobuf.message import Message

from perseus.service.domain.commands import Announce, Command, Store
from perseus.service.domain.messages import time_to_proto
from perseus.service.domain.records import Record, record_key
from perseus.service.job.event_rate_limit import EventRateLimit
from perseus.v1 import event_pb2

_FIELDS = {
    field.message_type.full_name: field.name
    for field in event_pb2.JobEvent.DESCRIPTOR.oneofs_by_name["details"].fields
    if field.message_type is not None
}
"""The field of an event for each message of details."""

_TYPES = {kind: name.removeprefix("JOB_EVENT_TYPE_").lower() for name, kind in event_pb2.JobEventType.items()}
"""The field of each type's details, unless several types share them, or it has none."""


class CommandBuffer:
    """Commands of one input, in order; of records with the same key only the last.

    Attributes:
        sequence: number of the last event announced.
        wall_time_s: the time of the input on the wall clock, which its events show.
    """

    def __init__(self, rank_count: int = 1, wall_time_s: float = 0.0) -> None:
        self.sequence = 0
        self.wall_time_s = wall_time_s
        self._rate_limit = EventRateLimit(rank_count)
        self._records: dict[Hashable, Record] = {}
        self._commands: list[Command] = []

    def begin(self, now_s: float, wall_time_s: float) -> None:
        """An input is taken at this time."""
        self.wall_time_s = wall_time_s
        if dropped_count := self._rate_limit.fill(now_s):
            self._announce_dropped(dropped_count, is_over=True)

    def do(self, command: Command) -> None:
        """Want something done."""
        self._commands.append(command)

    def store(self, record: Record) -> None:
        """Want a record stored."""
        key = record_key(record)
        self._records.pop(key, None)
        self._records[key] = record

    def announce(
        self, kind: event_pb2.JobEventType.ValueType, message: str, details: Message | None = None
    ) -> None:
        """Want an event stored and told, with the details that its type has, if there is room for it."""
        if self._rate_limit.take(kind):
            self._append(kind, message, details)
        elif self._rate_limit.dropped_count == 1:
            self._announce_dropped(1, is_over=False)

    def _announce_dropped(self, dropped_count: int, *, is_over: bool) -> None:
        so_far = "were dropped, and no more are" if is_over else "are dropped from now on"
        many = f"{dropped_count} events" if is_over else "events"
        self._append(
            event_pb2.JOB_EVENT_TYPE_EVENTS_DROPPED,
            f"agents cause more events than are kept: {many} {so_far}",
            event_pb2.EventsDropped(dropped_count=dropped_count, is_over=is_over),
        )

    def _append(self, kind: event_pb2.JobEventType.ValueType, message: str, details: Message | None) -> None:
        self.sequence += 1
        event = event_pb2.JobEvent(
            sequence=self.sequence,
            create_time=time_to_proto(self.wall_time_s),
            type=kind,
            message=message,
        )
        own_field, field = _TYPES[kind], None if details is None else _FIELDS[details.DESCRIPTOR.full_name]
        is_shared = own_field not in _FIELDS.values() and field not in _TYPES.values()
        assert field == own_field or is_shared, f"{own_field} does not go with {field}"
        if details is not None and field is not None:
            getattr(event, field).CopyFrom(details)
        self._commands.append(Announce(event))

    def take(self) -> list[Command]:
        """Return what has gathered, records first."""
        commands = [*map(Store, self._records.values()), *self._commands]
        self._records, self._commands = {}, []
        return commands
