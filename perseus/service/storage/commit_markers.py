"""Check words: what agents hold of the state's age, so that lost state shows.

State restored from an older copy, or a log whose end is lost, looks whole to the coordinator that opens it;
only others know that there was more. So every acknowledgement and every offer has a word for the
commit that it followed from, agents say the latest one at their next hello, and it is held against the
history that the database has of itself: which *generation* (start of a coordinator) made which commits. A
word of a generation that this history doesn't have, or of a commit that its generation never made here, is of
state that is gone.

A word is signed with a secret of the database, so that nobody can make up that state was lost. It is
opaque to agents.
"""

import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass

_MARKER = re.compile(r"([0-9]{1,16})\.([0-9a-f]{1,64})\.([0-9]{1,16})\.([0-9a-f]{16})")

MAX_BOOTS_KEPT = 1000
"""Starts that are remembered; words of earlier ones can't be checked any more, and count as fine."""


@dataclass(frozen=True, slots=True)
class Boot:
    """One start of a coordinator on a database: the commits above `first_commit` are its own."""

    number: int
    token: str
    first_commit: int


@dataclass(frozen=True, slots=True)
class History:
    """What a database knows of its own past: the latest generations, by number, and of how many commits."""

    epoch: str
    secret: str
    boots: Sequence[Boot]

    def marker(self, commit_number: int) -> str:
        """Return the word for a commit of the latest generation."""
        latest = self.boots[-1]
        return self._signed(latest.number, latest.token, commit_number)

    def is_behind(self, marker: str, commit_number: int) -> bool:
        """Tell whether a word is of state that is not here; `commit_number` is that of the latest commit.

        What this database's secret has not signed tells nothing.
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
        """Return what only the agent that is that instance has been told; the same in every epoch."""
        key = hashlib.sha256(f"instance.{self.secret}".encode()).digest()
        return hashlib.blake2b(instance_id.encode(errors="replace"), key=key, digest_size=16).hexdigest()

    def _signed(self, number: int, token: str, commit_number: int) -> str:
        text = f"{number}.{token}.{commit_number}"
        key = f"{self.secret}.{self.epoch}".encode()
        signature = hashlib.blake2b(text.encode(), key=hashlib.sha256(key).digest(), digest_size=8)
        return f"{text}.{signature.hexdigest()}"
