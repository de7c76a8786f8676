"""Who may read the page, and who may control: tokens over TLS, as in production."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from playwright.async_api import expect

from perseus.demo.security import Security
from perseus.service.server import running
from perseus.v1 import token_service_pb2
from tests.ports import free_port
from tests.service.grpc_fakes import Client, make_secured_settings
from tests.web.browser import browsing, in_browser, inaccessible, log_in, panel

pytestmark = in_browser


@asynccontextmanager
async def guarded(folder: Path) -> AsyncIterator[tuple[str, Client, str]]:
    """Run a coordinator that asks for tokens; yield its page's URL, an operator's client and its token."""
    security = Security(folder / "security")
    http = f"127.0.0.1:{free_port()}"
    settings = make_secured_settings(folder, security, http=http, tls_client_ca=None)
    async with running(settings) as (address, _), security.channels(address).open() as channel:
        client = Client(channel)
        await client.register()
        yield f"https://{http}", client, security.token_file.read_text().strip()


async def test_logging_in_and_out(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (url, client, token), browsing(expected=["401", "403"]) as page:
        await page.goto(f"{url}/#/jobs/job")
        await expect(page.get_by_label("Token")).to_be_focused()
        assert await inaccessible(page) == []
        await log_in(page, "perseus_wrong")
        await expect(page.get_by_role("alert")).to_have_text("This token is unknown or no longer valid.")
        agent = token_service_pb2.SCOPE_AGENT
        await log_in(
            page, (await client.ask("CreateToken", name="a", scope=agent, job_patterns=["*"])).secret
        )
        await expect(page.get_by_role("alert")).not_to_have_text("This token is unknown or no longer valid.")
        await expect(page.get_by_role("alert")).not_to_be_empty()

        # The login leads to the page that was opened.
        await log_in(page, token)
        await expect(page.get_by_role("heading", name="job", level=1)).to_be_visible()
        await expect(panel(page, "Controls")).to_be_visible()
        assert await page.evaluate("document.cookie") == ""
        stored = await page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}])")
        assert token not in stored + await page.content()

        await page.reload()
        await expect(panel(page, "Controls")).to_be_visible()
        await page.get_by_role("button", name="Log out").click()
        await expect(page.get_by_label("Token")).to_be_visible()
        await page.reload()
        await expect(page.get_by_label("Token")).to_be_visible()


async def test_a_reader_sees_everything_and_controls_nothing(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (url, client, _), browsing(expected=["401"]) as page:
        await page.goto(f"{url}/#/jobs/job")
        reader = token_service_pb2.SCOPE_READER
        await log_in(page, (await client.ask("CreateToken", name="wall", scope=reader)).secret)
        await expect(page.locator("#who")).to_contain_text("wall (reader)")
        await expect(panel(page, "Ranks")).to_contain_text("4 expected")
        await expect(page.get_by_role("heading", name="Controls")).to_have_count(0)
        # Revoking a token ends its session on the page.
        await client.ask("RevokeToken", name="wall")
        await expect(page.get_by_text("The session has ended.")).to_be_visible()
        await expect(page.get_by_label("Token")).to_be_visible()
