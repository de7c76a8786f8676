"""Grants: which user may claim which GPU, as written by an operator or a batch system.

A grant file has one grant per line, and comments after `#`:

    alice: 0 1                        # a user's name or number, and GPUs: by index …
    1004: GPU-8f6c1a2e-…  all         # … by UUID, or all
    bob: 2 3 slurm-job=17 slurm-account=physics

A word with `=` is a label of the jobs that are registered under this grant.

A file with a mistake grants nothing, and while there is one, every claim needs a grant. Nothing here reads
files; the agent rereads them for every claim.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

ALL = "all"

_USER = re.compile(r"[A-Za-z0-9_.@\\+-]{1,256}\$?")
_GPU = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_MAX_INDEX_DIGITS = 4
_MAX_LABELS = 16
# As the coordinator accepts them; a value has no space or `#`, which have a meaning here.
_LABEL = re.compile(r"([a-z0-9][a-z0-9._-]{0,62})=([A-Za-z0-9_.,:;@/+=-]{0,256})")

Labels = tuple[tuple[str, str], ...]
"""Keys and values, by key."""


class MalformedGrantError(ValueError):
    """A malformed line; the message has its number, the expected form and the text found."""


@dataclass(frozen=True, slots=True)
class User:
    """A user as the kernel knows them; `name` is their number if the node has no name for it."""

    uid: int
    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Grant:
    """`user` (a name or a number) may claim `gpus`: indexes as decimals, UUIDs, or `ALL`."""

    user: str
    gpus: frozenset[str]
    labels: Labels = ()

    def is_for(self, user: User) -> bool:
        """Whether the grant is for a user. A number is compared with user numbers only, never with names."""
        return self.user == str(user.uid) if self.user.isdecimal() else self.user == user.name

    def covers(self, uuid: str, index: int) -> bool:
        """Whether a GPU is granted."""
        return bool(self.gpus & {ALL, uuid, str(index)})

    def names(self, uuid: str, index: int) -> bool:
        """Whether the grant names this GPU, not only `ALL`."""
        return bool(self.gpus & {uuid, str(index)})


@dataclass(frozen=True, slots=True)
class Grants:
    """All grants of a node. `problems` has one text for each malformed file."""

    grants: tuple[Grant, ...] = ()
    problems: tuple[str, ...] = ()


def parse(text: str) -> tuple[Grant, ...]:
    """Return the grants of one file. Raises `MalformedGrantError`, naming the line, at the first mistake."""
    return tuple(_parse_lines(text.splitlines()))


def _parse_lines(lines: Iterable[str]) -> Iterable[Grant]:
    for number, line in enumerate(lines, 1):
        content = line.split("#", 1)[0].strip()
        if not content:
            continue
        user, colon, gpus = (part.strip() for part in content.partition(":"))
        if not colon or not _USER.fullmatch(user):
            raise MalformedGrantError(f"line {number}: expected USER: GPU …, found {content[:80]!a}")
        words = gpus.split()
        names = [word for word in words if "=" not in word]
        if not names:
            raise MalformedGrantError(f"line {number}: expected a GPU's index or UUID, or all, found none")
        labels = dict(_label(number, word) for word in words if "=" in word)
        if len(labels) > _MAX_LABELS:
            raise MalformedGrantError(
                f"line {number}: expected at most {_MAX_LABELS} labels, found {len(labels)}"
            )
        yield Grant(user, frozenset(_gpu(number, name) for name in names), tuple(sorted(labels.items())))


def _label(number: int, word: str) -> tuple[str, str]:
    found = _LABEL.fullmatch(word)
    if found is None:
        raise MalformedGrantError(f"line {number}: expected a label KEY=VALUE, found {word[:80]!a}")
    return found[1], found[2]


def _gpu(number: int, name: str) -> str:
    if name.isascii() and name.isdecimal() and len(name) <= _MAX_INDEX_DIGITS:
        return str(int(name))
    if name == ALL or (_GPU.fullmatch(name) and not name.isdecimal()):
        return name
    raise MalformedGrantError(f"line {number}: expected a GPU's index or UUID, or {ALL}, found {name[:80]!a}")
