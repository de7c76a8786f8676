"""The page of a demo whose coordinator serves it."""

from playwright.async_api import Page

from perseus.demo.cluster import Cluster


async def log_in(page: Page, cluster: Cluster) -> None:
    """Log in as the cluster's operator."""
    await page.get_by_label("Token").fill(cluster.security.token_file.read_text().strip())
    await page.get_by_role("button", name="Log in").click()
