"""A demo whose coordinator serves the page to whoever has a token."""

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
    """Browsers have tokens, and no certificates."""

    def of_coordinator(self) -> Mapping[str, str]:
        known = super().of_coordinator().items()
        return {name: value for name, value in known if not name.endswith("CLIENT_CA")}


@contextmanager
def page_served() -> Iterator[None]:
    """Within the block clusters serve the page, and ask browsers for no certificate."""
    http = {"PERSEUS_COORDINATOR_HTTP": "127.0.0.1:0"}
    with patch.dict(os.environ, http), patch.object(demo_cluster, "Security", _ServerTls):
        yield


def http_url(log: Path) -> str:
    """Where the coordinator of that log serves the page."""
    url: str = logged(log, "listening for HTTP")["url"]
    return url


async def log_in(page: Page, cluster: Cluster) -> None:
    """Log in as the cluster's operator."""
    await page.get_by_label("Token").fill(cluster.security.token_file.read_text().strip())
    await page.get_by_role("button", name="Log in").click()
