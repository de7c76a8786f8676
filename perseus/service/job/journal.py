"""Where the parts of a job's state machine write down what they want done."""

from collections.abc import Hashable

from perseus.service.domain.commands import Announce, Command, Store
from perseus.service.domain.events import Happening
from perseus.service.domain.evidence import EVIDENCE, EventsDropped, Evidence
from perseus.service.domain.model import EventType
from perseus.service.domain.records import Record, record_key
from perseus.service.job.event_budget import EventBudget


class Journal:
    """Commands of one input, in order; of records with the same key only the last.

    Attributes:
        sequence: number of the last event announced.
    """

    def __init__(self, rank_count: int = 1) -> None:
        self.sequence = 0
        self._budget = EventBudget(rank_count)
        self._records: dict[Hashable, Record] = {}
        self._commands: list[Command] = []

    def begin(self, now_s: float) -> None:
        """An input is taken at this time."""
        if dropped_count := self._budget.fill(now_s):
            self._tell_dropped(dropped_count, is_over=True)

    def do(self, command: Command) -> None:
        """Want something done."""
        self._commands.append(command)

    def store(self, record: Record) -> None:
        """Want a record stored."""
        key = record_key(record)
        self._records.pop(key, None)
        self._records[key] = record

    def announce(self, kind: EventType, message: str, evidence: Evidence | None = None) -> None:
        """Want an event stored and told, with the evidence that its type has, if there is room for it."""
        assert type(evidence) is EVIDENCE.get(kind, type(None)), f"{kind} does not go with {evidence}"
        if self._budget.take(kind):
            self._tell(kind, message, evidence)
        elif self._budget.dropped_count == 1:
            self._tell_dropped(1, is_over=False)

    def _tell_dropped(self, dropped_count: int, *, is_over: bool) -> None:
        so_far = "were dropped, and no more are" if is_over else "are dropped from now on"
        many = f"{dropped_count} events" if is_over else "events"
        self._tell(
            EventType.EVENTS_DROPPED,
            f"agents cause more events than are kept: {many} {so_far}",
            EventsDropped(dropped_count, is_over),
        )

    def _tell(self, kind: EventType, message: str, evidence: Evidence | None) -> None:
        self.sequence += 1
        self._commands.append(Announce(Happening(self.sequence, kind, message, evidence)))

    def take(self) -> list[Command]:
        """Return what has gathered, records first."""
        commands = [*map(Store, self._records.values()), *self._commands]
        self._records, self._commands = {}, []
        return commands
