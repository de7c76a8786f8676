"""Commit markers: whatever part of the past is lost, a marker of it reveals that; nothing else does."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from perseus.service.storage.commit_markers import Boot, History

SECRET = "5ec4e7"


@dataclass
class Database:
    """The memory of a database: boots, and the number of commits."""

    boots: list[Boot] = field(default_factory=list)
    commit_number: int = 0

    def start(self, token: str) -> None:
        number = self.boots[-1].number + 1 if self.boots else 1
        self.boots.append(Boot(number, token, self.commit_number))

    def copy(self) -> "Database":
        return Database(list(self.boots), self.commit_number)

    @property
    def history(self) -> History:
        return History("epoch", SECRET, tuple(self.boots))

    @property
    def marker(self) -> str:
        return self.history.marker(self.commit_number)

    def has_lost(self, marker: str) -> bool:
        return self.history.is_behind(marker, self.commit_number)


STEPS = st.lists(st.sampled_from(["start", "commit"]), max_size=12)


def go(database: Database, steps: list[str], tokens: Iterator[str]) -> list[str]:
    """Take steps; return the marker after each."""
    words = []
    for step in steps:
        if step == "start":
            database.start(next(tokens))
        else:
            database.commit_number += 1
        words.append(database.marker)
    return words


@given(STEPS, STEPS, STEPS)
def test_only_lost_commits_count_as_lost_however_far_the_older_copy_has_advanced(
    before: list[str], lost: list[str], after: list[str]
) -> None:
    tokens = (f"{number:016x}" for number in count(1))
    database = Database()
    database.start(next(tokens))
    known = [database.marker, *go(database, before, tokens)]
    copy = database.copy()
    gone = go(database, lost, tokens)
    assert not any(database.has_lost(marker) for marker in [*known, *gone])
    copy.start(next(tokens))  # opening it begins a boot
    own = [copy.marker, *go(copy, after, tokens)]
    assert not any(copy.has_lost(marker) for marker in [*known, *own])
    assert all(copy.has_lost(marker) for marker in gone)


def test_a_marker_of_another_database_proves_nothing() -> None:
    database = Database()
    database.start("aa")
    own = History("epoch", SECRET, (Boot(1, "aa", 0),))
    assert database.has_lost(own.marker(7))
    for other_user in (History("another", SECRET, own.boots), History("epoch", "bb", own.boots)):
        assert not database.has_lost(other_user.marker(7))
    for nonsense in ("", "x", "1.aa.7", own.marker(7)[:-1] + "0" * 2, "1.aa.7." + "0" * 16, "9" * 5000):
        assert not database.has_lost(nonsense)


def test_markers_of_forgotten_boots_count_as_valid() -> None:
    boots = tuple(Boot(number, f"{number:02x}", number) for number in (5, 6))
    history = History("epoch", SECRET, boots)
    forgotten = History("epoch", SECRET, (Boot(4, "99", 0),)).marker(10**6)
    assert not history.is_behind(forgotten, 7)
