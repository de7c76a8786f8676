"""A coordinator's metrics as a scraper sees them."""

import ssl
from collections.abc import Mapping

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parsed(text: str) -> Samples:
    """Return the value of a sample by its name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def get(
    url: str, headers: Mapping[str, str] | None = None, context: ssl.SSLContext | None = None
) -> tuple[int, str]:
    """Return status and body."""
    async with (
        aiohttp.ClientSession() as session,
        session.get(url, headers=headers, ssl=context if context is not None else True) as response,
    ):
        return response.status, await response.text()


async def scrape(url: str, context: ssl.SSLContext | None = None) -> Samples:
    status, text = await get(url, context=context)
    assert status == 200, text
    return parsed(text)


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]
