"""Commit markers: agents hold them so that lost state is detected.

State restored from an older copy, or a log whose end is lost, looks complete to the coordinator that opens
it;
only others know that there was more. So every acknowledgement and every offer carries a marker of the commit
that it followed from, agents send the latest one in their next hello, and the coordinator checks it against
the database's own history: which *boot* (start of a coordinator) made which commits. A marker of a boot that
this history doesn't have, or of a commit that its boot never made here, belongs to state that is lost.

A marker is signed with a secret of the database, so that nobody can fake a loss of state. It is opaque to
agents.
"""

import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass

_MARKER = re.compile(r"([0-9]{1,16})\.([0-9a-f]{1,64})\.([0-9]{1,16})\.([0-9a-f]{16})")

MAX_BOOTS_KEPT = 1000
"""How many boots are remembered; markers of earlier ones can't be checked any more, and count as valid."""


@dataclass(frozen=True, slots=True)
class Boot:
    """One start of a coordinator on a database: the commits above `first_commit` are its own."""

    number: int
    token: str
    first_commit: int


@dataclass(frozen=True, slots=True)
class History:
    """The history of a database: its latest boots, in order, each with its first commit."""

    epoch: str
    secret: str
    boots: Sequence[Boot]

    def marker(self, commit_number: int) -> str:
        """Return the marker of a commit of the latest boot."""
        latest = self.boots[-1]
        return self._signed(latest.number, latest.token, commit_number)

    def is_behind(self, marker: str, commit_number: int) -> bool:
        """Return whether a marker belongs to lost state; `commit_number` is the latest commit.

        A marker without this database's signature proves nothing.
        """
        if (parts := _MARKER.fullmatch(marker)) is None:
            return False
        number, token, commit = int(parts[1]), parts[2], int(parts[3])
        if not hmac.compare_digest(self._signed(number, token, commit), marker):
            return False
        if number < self.boots[0].number:
            return False
        for index, boot in enumerate(self.boots):
            if boot.number == number:
                is_latest = index == len(self.boots) - 1
                last_commit = commit_number if is_latest else self.boots[index + 1].first_commit
                return boot.token != token or commit > last_commit
        return True

    def instance_key(self, instance_id: str) -> str:
        """Return the secret key of the agent that is that instance; it is the same in every epoch."""
        key = hashlib.sha256(f"instance.{self.secret}".encode()).digest()
        return hashlib.blake2b(instance_id.encode(errors="replace"), key=key, digest_size=16).hexdigest()

    def _signed(self, number: int, token: str, commit_number: int) -> str:
        text = f"{number}.{token}.{commit_number}"
        key = f"{self.secret}.{self.epoch}".encode()
        signature = hashlib.blake2b(text.encode(), key=hashlib.sha256(key).digest(), digest_size=8)
        return f"{text}.{signature.hexdigest()}"
