"""Assignment of hosts, stages and jobs to feeds."""

import pytest

from perseus.service.domain.power import DEFAULT_FEED, Feed
from perseus.service.fleet.power.feeds import Feeds, placement, shares

HALLS = Feeds({"a": Feed("a"), "b": Feed("b")}, {"a": ("a-*", "old-?"), "b": ("*-7",)})


@pytest.mark.parametrize(
    ("hostname", "feed"),
    [("a-1", "a"), ("a-7", "a"), ("b-7", "b"), ("old-1", "a"), ("old-12", "default"), ("", "default")],
)
def test_the_first_matching_pattern_counts(hostname: str, feed: str) -> None:
    assert HALLS.of_host(hostname) == feed


def test_the_default_feed_always_exists_and_may_be_configured() -> None:
    assert set(HALLS.all()) == {"a", "b", DEFAULT_FEED}
    assert Feeds({DEFAULT_FEED: Feed(DEFAULT_FEED, limit_w=5.0)}).all()[DEFAULT_FEED].limit_w == 5.0


def test_stages_have_shares_of_their_ranks() -> None:
    hostnames = ["a-1", "b-7", "a-1", "a-1", "x", "x", "b-7", "b-7"]
    placed = placement(HALLS, hostnames, stage_count=2, tensor_count=2)
    assert placed == [[{"a": 0.5, "b": 0.5}, {"a": 1.0}], [{"default": 1.0}, {"b": 1.0}]]
    assert shares(placed) == {"a": 0.375, "b": 0.375, "default": 0.25}
