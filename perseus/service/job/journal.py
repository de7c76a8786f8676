"""Where the parts of a job's state machine write down what they want done."""

from collections.abc import Hashable

from perseus.service.domain.commands import Announce, Command, Store
from perseus.service.domain.events import Happening
from perseus.service.domain.evidence import EVIDENCE, Evidence
from perseus.service.domain.model import EventType
from perseus.service.domain.records import Record, record_key


class Journal:
    """Commands of one input, in order; of records with the same key only the last.

    Attributes:
        sequence: number of the last event announced.
    """

    def __init__(self) -> None:
        self.sequence = 0
        self._records: dict[Hashable, Record] = {}
        self._commands: list[Command] = []

    def do(self, command: Command) -> None:
        """Want something done."""
        self._commands.append(command)

    def store(self, record: Record) -> None:
        """Want a record stored."""
        key = record_key(record)
        self._records.pop(key, None)
        self._records[key] = record

    def announce(self, kind: EventType, message: str, evidence: Evidence | None = None) -> None:
        """Want an event stored and told, with the evidence that its type has."""
        assert type(evidence) is EVIDENCE.get(kind, type(None)), f"{kind} does not go with {evidence}"
        self.sequence += 1
        self._commands.append(Announce(Happening(self.sequence, kind, message, evidence)))

    def take(self) -> list[Command]:
        """Return what has gathered, records first."""
        commands = [*map(Store, self._records.values()), *self._commands]
        self._records, self._commands = {}, []
        return commands
