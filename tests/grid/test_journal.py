"""The durable state, in a real file."""

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from perseus.grid.dsx_flex.breaches import Breach, BreachStatus
from perseus.grid.dsx_flex.values import Constraint
from perseus.grid.journal import Journal, JournalError
from tests.grid.dsx_flex.gateways import NOW_S, message, target, uuid4

BREACH = Breach(
    uuid4(5), "hall-a", uuid4(2), Constraint(7, "watt"), True, NOW_S, BreachStatus.ACTIVE, False, 9.0
)


def test_stored_state_is_restored_in_order(tmp_path: Path) -> None:
    path = tmp_path / "new" / "gateway.db"
    sets = [message(3, target(None), target(0.5, NOW_S, NOW_S + 1, ["hall-ä"])), message(1, target(7))]
    journal = Journal(path)
    for some in [*sets, message(2, target(7))]:
        journal.keep_targets(some)
    journal.keep_breach(BREACH)
    escalated = replace(BREACH, status=BreachStatus.ESCALATED)
    journal.keep_breach(escalated)
    journal.forget_targets([uuid4(2)])
    journal.close()
    again = Journal(path)
    assert again.targets() == sets
    assert again.breaches() == [escalated]
    again.forget_breach(escalated.breach_id)
    assert again.breaches() == []
    again.close()


def test_a_second_gateway_on_the_same_file_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "gateway.db")
    with pytest.raises(
        JournalError, match="expected a file of this gateway alone, found: database is locked"
    ):
        Journal(tmp_path / "gateway.db")
    journal.close()


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as file:
        file.execute("CREATE TABLE theirs (a)")
    file.close()
    text = tmp_path / "text"
    text.write_text("no database at all, but long enough for a header" * 9)
    with pytest.raises(JournalError, match="another application's"):
        Journal(other)
    with pytest.raises(JournalError, match="not a database"):
        Journal(text)
    with pytest.raises(JournalError, match="can't be created"):
        Journal(text / "below" / "gateway.db")


def test_a_message_is_stored_once(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "gateway.db")
    journal.keep_targets(message(1, target(7)))
    with pytest.raises(JournalError, match="can't be written"):
        journal.keep_targets(message(1, target(7)))
    journal.close()
