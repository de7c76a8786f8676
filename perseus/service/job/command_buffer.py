"""The buffer in which the parts of a job's state machine collect commands."""

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
"""The event field for each type of details message."""

_TYPES = {kind: name.removeprefix("JOB_EVENT_TYPE_").lower() for name, kind in event_pb2.JobEventType.items()}
"""The details field of each event type, unless types share it or have none."""


class CommandBuffer:
    """The commands of one input, in order; of records with the same key, only the last one.

    Attributes:
        sequence: number of the last announced event.
        wall_time_s: the time of the input on the wall clock, which its events show.
    """

    def __init__(self, rank_count: int = 1, wall_time_s: float = 0.0) -> None:
        self.sequence = 0
        self.wall_time_s = wall_time_s
        self._rate_limit = EventRateLimit(rank_count)
        self._records: dict[Hashable, Record] = {}
        self._commands: list[Command] = []

    def begin(self, now_s: float, wall_time_s: float) -> None:
        """Begin to take an input at this time."""
        self.wall_time_s = wall_time_s
        if dropped_count := self._rate_limit.fill(now_s):
            self._announce_dropped(dropped_count, is_over=True)

    def do(self, command: Command) -> None:
        """Add a command."""
        self._commands.append(command)

    def store(self, record: Record) -> None:
        """Add a record to store."""
        key = record_key(record)
        self._records.pop(key, None)
        self._records[key] = record

    def announce(
        self, kind: event_pb2.JobEventType.ValueType, message: str, details: Message | None = None
    ) -> None:
        """Add an event with its details to store and publish, if the rate limit allows it."""
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
        """Return and clear the collected commands, records first."""
        commands = [*map(Store, self._records.values()), *self._commands]
        self._records, self._commands = {}, []
        return commands
