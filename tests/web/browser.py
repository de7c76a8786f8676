"""A real browser: Debian's Chromium, driven by Playwright's package; nothing is downloaded."""

import os
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Literal

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Locator, Page, async_playwright, expect

CHROMIUM = shutil.which("chromium")
WAIT_MS = 20_000

in_browser = [
    pytest.mark.skipif(
        CHROMIUM is None, reason="needs chromium; `make test-web` installs it, as root on Debian"
    ),
    pytest.mark.slow("a real browser, on real coordinators"),
    # One browser for all tests, which share its event loop.
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.usefixtures("browser"),
]
expect.set_options(timeout=WAIT_MS)

Scheme = Literal["light", "dark"]


@asynccontextmanager
async def launched() -> AsyncIterator[Browser]:
    """Start the browser."""
    # As root, Chromium starts without its sandbox only.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        await browser.close()


_shared: AbstractAsyncContextManager[Browser] | None = None


@asynccontextmanager
async def shared() -> AsyncIterator[None]:
    """Start the browser once for all pages that are opened in this block, on this event loop."""
    global _shared
    async with launched() as browser:
        _shared = nullcontext(browser)
        yield
        _shared = None


@asynccontextmanager
async def browsing(
    *, scheme: Scheme = "light", width: int = 1280, height: int = 900, expected: Sequence[str] = ()
) -> AsyncIterator[Page]:
    """Open a page; fail on any error in its console, except those with these words.

    Certificates come from the test's own authority, and are not checked.
    """
    console_errors: list[str] = []
    async with _shared or launched() as browser:
        context = await browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, ignore_https_errors=True
        )
        page = await context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.on(
            "console", lambda message: console_errors.append(message.text) if message.type != "log" else None
        )
        page.on("pageerror", lambda error: console_errors.append(str(error)))
        yield page
        await context.close()
    unexpected = [each for each in console_errors if not any(words in each for words in expected)]
    assert unexpected == [], "\n".join(unexpected)


async def log_in(page: Page, token: str) -> None:
    """Log in with a token."""
    await page.get_by_label("Token").fill(token)
    await page.get_by_role("button", name="Log in").click()


def figure(page: Page, name: str) -> Locator:
    """Return the value of one of the large figures, by its name."""
    named = page.get_by_text(name, exact=True)
    return page.locator(".figure").filter(has=named).locator(".value")


def panel(page: Page, title: str) -> Locator:
    """Return the panel with that title."""
    return page.locator("section.panel").filter(has=page.get_by_role("heading", name=title, exact=True))


async def choose(page: Page, choice: str, option: str, within: Locator | None = None) -> None:
    """Choose one of some options, side by side, by a click on its label."""
    options = (within or page).get_by_role("group", name=choice, exact=True)
    radio = page.get_by_role("radio", name=option, exact=True)
    await options.locator("label").filter(has=radio).click()
    await expect(options.locator(radio)).to_be_checked()


async def inaccessible(page: Page) -> list[str]:
    """Return axe-core's findings."""
    found = (await Axe().run(page)).response["violations"]
    return [f"{each['id']}: {each['nodes'][0]['html'][:200]}" for each in found]


async def is_scrolled_sideways(page: Page) -> bool:
    """Return whether the page is wider than its window."""
    wide: bool = await page.evaluate("document.documentElement.scrollWidth > window.innerWidth")
    return wide
