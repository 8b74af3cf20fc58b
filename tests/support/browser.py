"""Debian's Chromium, driven by playwright's Python package, without the browsers that playwright brings.

Tests that need it are skipped if one of the two is missing: install them with apt install chromium, and the extra
browser.
"""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest


@asynccontextmanager
async def chromium() -> AsyncIterator[Any]:
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("there is no Chromium: apt install chromium")
    playwright = pytest.importorskip("playwright.async_api", reason="the extra browser is not installed")
    async with playwright.async_playwright() as driver:
        # Chromium's sandbox needs user namespaces, which a container does not have.
        browser = await driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def page_at(
    browser: Any, url: str, *, width: int = 1440, height: int = 900, expected: str = "", **options: Any
) -> AsyncIterator[Any]:
    """Open a page with the URL. Until the block ends, no error may happen in it.

    The block fails after an error in a script, something that the page's policy refused, or a request to another host.

    Args:
        expected: errors that contain these words are ignored.
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
