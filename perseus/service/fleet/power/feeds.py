"""Assigns ranks to feeds by host name, as the operator configured."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache

from perseus.service.domain.power import DEFAULT_FEED, Feed
from perseus.service.fleet.power.curve import StageFeeds

_HOSTS_KEPT = 65_536


@dataclass(frozen=True, slots=True)
class Feeds:
    """The configured feeds, each with patterns of the hosts on it; the first match counts.

    A host that matches none is on the feed `default`, which always exists. `with_last_plan`: feeds whose
    fail-safe is the last plan, which outlasts the coordinator, rather than stock.
    """

    feeds: Mapping[str, Feed] = field(default_factory=dict)
    hosts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    with_last_plan: Collection[str] = ()

    def all(self) -> dict[str, Feed]:
        """Return all feeds by name."""
        return {DEFAULT_FEED: Feed(DEFAULT_FEED), **self.feeds}

    def of_host(self, hostname: str) -> str:
        """Return the feed that a host is on."""
        return _of_host(tuple((name, tuple(some)) for name, some in self.hosts.items()), hostname)


@lru_cache(_HOSTS_KEPT)
def _of_host(hosts: tuple[tuple[str, tuple[str, ...]], ...], hostname: str) -> str:
    fitting = (name for name, some in hosts if any(fnmatchcase(hostname, pattern) for pattern in some))
    return next(fitting, DEFAULT_FEED)


def placement(
    feeds: Feeds, hostnames: Iterable[str], stage_count: int, tensor_count: int
) -> list[list[StageFeeds]]:
    """Return the feeds of each pipeline's stages; `hostnames` are of all ranks, in their order."""
    names = [feeds.of_host(hostname) for hostname in hostnames]
    stages: list[StageFeeds] = []
    for first in range(0, len(names), tensor_count):
        own = names[first : first + tensor_count]
        stages.append({name: own.count(name) / tensor_count for name in dict.fromkeys(own)})
    return [stages[first : first + stage_count] for first in range(0, len(stages), stage_count)]


def shares(placed: Sequence[Sequence[StageFeeds]]) -> dict[str, float]:
    """Return the share of a job's GPUs on each feed."""
    found: dict[str, float] = {}
    count = sum(len(stages) for stages in placed)
    for stages in placed:
        for stage in stages:
            for name, share in stage.items():
                found[name] = found.get(name, 0.0) + share / count
    return found
