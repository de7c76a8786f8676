"""Warnings that are given once of each kind: what is not understood once comes a thousand times a second."""

import re

import structlog

_KINDS = 64
"""Kinds that are told; further ones are not, so that nobody can fill the memory with them."""


class Once:
    """Warns in a log, once of each kind."""

    def __init__(self, log: structlog.stdlib.BoundLogger) -> None:
        self._log = log
        self._kinds: set[tuple[str, ...]] = set()

    def warn(self, event: str, *kind: str, **details: object) -> None:
        """Warn, unless the like was told before. Row numbers in a kind's parts do not tell kinds apart."""
        key = (event, *(re.sub(r"\[\d+\]", "", part) for part in kind))
        if key not in self._kinds and len(self._kinds) < _KINDS:
            self._kinds.add(key)
            self._log.warning(event, **details)
