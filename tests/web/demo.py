"""A demo whose coordinator serves the page to everybody with a token."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from playwright.async_api import Page

from perseus.demo import cluster as demo_cluster
from perseus.demo.cluster import Cluster
from perseus.demo.security import Security
from tests.event_log import logged


class _ServerTls(Security):
    """Browsers have tokens, but no certificates."""

    def of_coordinator(self) -> Mapping[str, str]:
        known = super().of_coordinator().items()
        return {name: value for name, value in known if not name.endswith("CLIENT_CA")}


@contextmanager
def page_served() -> Iterator[None]:
    """Let clusters serve the page, and require no certificates of browsers, for the length of the block."""
    http = {"PERSEUS_COORDINATOR_HTTP": "127.0.0.1:0"}
    with patch.dict(os.environ, http), patch.object(demo_cluster, "Security", _ServerTls):
        yield


def http_url(log: Path) -> str:
    """Return the page's URL from the coordinator's log."""
    url: str = logged(log, "listening for HTTP")["url"]
    return url


async def log_in(page: Page, cluster: Cluster) -> None:
    """Log in as the cluster's operator."""
    await page.get_by_label("Token").fill(cluster.security.token_file.read_text().strip())
    await page.get_by_role("button", name="Log in").click()
