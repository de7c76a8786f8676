"""Where the parts of a job's state machine write down what they want done."""

from collections.abc import Hashable

from perseus.service.domain.commands import Announce, Command, Store
from perseus.service.domain.model import EventType, Happening
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

    def announce(self, kind: EventType, message: str, **attributes: object) -> None:
        """Want an event stored and told; attributes are kept as text."""
        self.sequence += 1
        texts = {name: str(value) for name, value in attributes.items()}
        self._commands.append(Announce(Happening(self.sequence, kind, message, texts)))

    def take(self) -> list[Command]:
        """Return what has gathered, records first."""
        commands = [*map(Store, self._records.values()), *self._commands]
        self._records, self._commands = {}, []
        return commands
