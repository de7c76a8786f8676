"""Answers that are made once for all callers."""

import asyncio

import pytest

from perseus.metrics.readings import Readings
from perseus.service.web import single_flight_cache
from perseus.service.web.scrape import Scrape
from perseus.service.web.single_flight_cache import SingleFlightCache


class Maker:
    """Makes numbers; each takes so many seconds of the clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.took_s = 0.001
        self.count = 0
        self.fails = False

    async def make(self) -> int:
        self.count += 1
        self.now_s += self.took_s
        await asyncio.sleep(0)
        if self.fails:
            raise ValueError("planted")
        return self.count


async def test_simultaneous_callers_share_a_fresh_answer() -> None:
    maker = Maker()
    answers: SingleFlightCache[int] = SingleFlightCache(4, lambda: maker.now_s)
    assert set(await asyncio.gather(*(answers.get("a", maker.make) for _ in range(5)))) == {1}
    maker.now_s += single_flight_cache.MIN_FRESH_S - 0.01
    assert await answers.get("a", maker.make) == 1
    maker.now_s += 0.02
    assert await answers.get("a", maker.make) == 2
    assert await answers.get("b", maker.make) == 3


@pytest.mark.parametrize(("took_s", "fresh_s"), [(0.05, 5.0), (3.0, single_flight_cache.MAX_FRESH_S)])
async def test_an_expensive_answer_is_kept_longer(took_s: float, fresh_s: float) -> None:
    maker = Maker()
    answers: SingleFlightCache[int] = SingleFlightCache(4, lambda: maker.now_s)
    maker.took_s = took_s
    await answers.get("a", maker.make)
    maker.now_s += fresh_s - 0.01
    assert await answers.get("a", maker.make) == 1
    maker.now_s += 0.02
    assert await answers.get("a", maker.make) == 2


async def test_failures_are_not_kept_and_the_oldest_answer_is_dropped() -> None:
    maker = Maker()
    answers: SingleFlightCache[int] = SingleFlightCache(2, lambda: maker.now_s)
    maker.fails = True
    with pytest.raises(ValueError, match="planted"):
        await answers.get("a", maker.make)
    maker.fails = False
    assert await answers.get("a", maker.make) == 2
    for key in ("b", "a", "c"):
        await answers.get(key, maker.make)
    assert len(answers._kept) == 2
    assert await answers.get("a", maker.make) == 2
    assert await answers.get("b", maker.make) == 5


async def test_simultaneous_scrapes_share_an_answer() -> None:
    maker = Maker()

    async def collect() -> Readings:
        await maker.make()
        return Readings()

    scrape = Scrape(collect, lambda: maker.now_s)
    text = await scrape.answer("text/plain")
    assert await scrape.answer("text/plain") is text
    assert "openmetrics" in (await scrape.answer("application/openmetrics-text; version=1.0.0"))[1]
    assert maker.count == 1
    maker.now_s += 1.01
    await scrape.answer("text/plain")
    assert maker.count == 2
