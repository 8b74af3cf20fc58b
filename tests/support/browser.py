"""Debian's Chromium, driven by playwright's Python package without browsers of its own.

What needs it is skipped where one of the two is missing: apt install chromium, and the extra browser.
"""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest


@asynccontextmanager
async def chromium() -> AsyncIterator[Any]:
    """A playwright Browser."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("there is no Chromium: apt install chromium")
    playwright = pytest.importorskip("playwright.async_api", reason="the extra browser is not installed")
    async with playwright.async_playwright() as driver:
        # A container has no user namespaces to build a sandbox of.
        browser = await driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def page_at(
    browser: Any, url: str, *, width: int = 1440, height: int = 900, expected: str = "", **options: Any
) -> AsyncIterator[Any]:
    """A page that shows the URL; nothing may go wrong in it until the block ends.

    It fails for scripts' errors, for what the page's policy refused, and for requests to other places.

    Args:
        expected: faults with these words are none.
        options: of the browser's context.
    """
    faults: list[str] = []

    def note(fault: str) -> None:
        if not expected or expected not in fault:
            faults.append(fault)

    context = await browser.new_context(viewport={"width": width, "height": height}, **options)
    page = await context.new_page()
    origin = url.partition("/#")[0]
    page.on("pageerror", lambda error: note(str(error)))
    page.on("console", lambda message: note(message.text) if message.type in ("error", "warning") else None)
    page.on("request", lambda request: None if request.url.startswith(origin) else note(request.url))
    try:
        await page.goto(url)
        yield page
        assert faults == []
    finally:
        await context.close()
