"""The page in a real Chromium: what it shows of made-up swarms, whether it is accessible, and how it shows strange
names.

Chromium is Debian's, driven by playwright's Python package, without the browsers that playwright brings. The tests are
skipped if one of the two is missing: install them with apt install chromium, and the extra browser.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import pytest

from peers.dashboard.app import Hub, page_of
from peers.dashboard.history import History
from peers.dashboard.watcher import Watcher
from peers.shared.web import Listener
from peers.status.contributions import Tallies
from peers.status.lookout import Lookout
from peers.status.peer_row import PeerRow
from peers.status.view import Joining, SwarmView
from swarm import config as configs
from swarm.config import Timeline
from swarm.machine.clock import SystemClock
from tests.support.views import peer, view

pytestmark = pytest.mark.e2e

CONFIG = configs.load_preset("tiny")
HOSTILE = '<img src=x onerror="document.title=`owned`"><script>document.title="owned"</script>'
TABLE = """() => [...document.querySelectorAll("#peers tbody tr")].map(
  (row) => [...row.children].map((cell) => cell.textContent))"""


class _Shown:
    """A lookout whose views a test chooses, and a dashboard that shows them."""

    def __init__(self) -> None:
        self.timeline = Timeline(CONFIG)
        self.joining = Joining(peer="swarm-peer swarm://1abc")
        self.seen = view()
        lookout, history = cast(Lookout, self), History(run=CONFIG.run_id)
        self.watcher = Watcher(lookout, history, clock=SystemClock(), interval_seconds=2.0)
        self.is_over = asyncio.Event()
        self.serving: asyncio.Task[None] | None = None
        self.hub = Hub(lambda: {CONFIG.run_id: self.watcher.series})

    async def view(self) -> SwarmView:
        return self.seen

    async def tallies(self) -> Tallies:
        return Tallies(CONFIG.run_id)

    async def hear_amendments(self) -> None:
        pass

    async def show(self, seen: SwarmView) -> None:
        """Show this view to all viewers."""
        self.seen = seen
        await self.watcher.look()
        self.hub.publish({"runs": {CONFIG.run_id: self.watcher.state}})

    async def stop(self) -> None:
        """Stop as if the dashboard had ended."""
        assert self.serving is not None
        self.is_over.set()
        await self.serving


@asynccontextmanager
async def _dashboard(*, token: str | None = None, port: int = 0) -> AsyncIterator[tuple[str, _Shown]]:
    listener = Listener("127.0.0.1", port, option="--port")
    try:
        async with asyncio.TaskGroup() as tasks:
            shown = _Shown()
            page = page_of(shown.hub, token=token, names=["localhost"])
            shown.serving = tasks.create_task(listener.serve(page, shown.is_over, with_websockets=True))
            try:
                yield listener.url, shown
            finally:
                shown.is_over.set()
    finally:
        listener.close()


@asynccontextmanager
async def _chromium() -> AsyncIterator[Any]:
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
async def _page_at(browser: Any, url: str, *, width: int = 1440, **options: Any) -> AsyncIterator[Any]:
    """Open a page with the URL; `options` are of the browser's context.

    The block fails after an error in a script, something that the page's policy refused, or a request to another host.
    """
    faults: list[str] = []
    context = await browser.new_context(viewport={"width": width, "height": 900}, **options)
    page = await context.new_page()
    origin = url.partition("/#")[0]
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda said: faults.append(said.text) if said.type in ("error", "warning") else None)
    page.on("request", lambda request: None if request.url.startswith(origin) else faults.append(request.url))
    try:
        await page.goto(url)
        yield page
        assert faults == []
    finally:
        await context.close()


def _swarm(round_number: int = 7) -> SwarmView:
    """Three stages. One peer is silent, and one is on its way to its stage."""

    def row(name: str, **figures: Any) -> PeerRow:
        rounds = tuple(range(max(0, round_number - 8), round_number))
        return peer(
            name, round=round_number, recent_rounds=rounds, samples=64, **{"samples_per_second": 9.5, **figures}
        )

    return view(
        [row("ann", committed=50, started_at=1.5e9), row("bob", samples_per_second=3.25)],
        [row("cid", state="unreachable"), row("dan", loop_lag_seconds=1.5)],
        [row("eve"), peer("fay", state="joining")],
        step=round_number,
    )


async def test_it_shows_what_status_has_and_follows_it() -> None:
    async with _chromium() as browser, _dashboard() as (url, shown):
        await shown.show(_swarm())
        async with _page_at(browser, url) as page:
            await page.wait_for_selector("#peers tbody tr")
            cells = [row["cells"] for row in shown.watcher.state["peers"].values()]
            rows = await page.evaluate(TABLE)
            columns = shown.watcher.state["columns"]["peer"]
            assert sorted(row[1 : 1 + len(columns)] for row in rows) == sorted([c[n] for n in columns] for c in cells)
            assert [row[0] for row in rows] == ["0", "0", "1", "1", "2", "2"]
            assert await page.inner_text("#state") == "Training"
            assert await page.locator(".chip[data-state=unreachable]").count() == 1
            assert await page.locator(".links path").count() > 0
            assert await page.inner_text("#join code") == "swarm-peer swarm://1abc"
            assert await page.locator(".rounds .cell.in").count() > 20

            # One viewer's peer dies, and the page shows it.
            gone = _swarm(8)
            await shown.show(
                replace(gone, stages=(replace(gone.stages[0], peers=gone.stages[0].peers[:1]), *gone.stages[1:]))
            )
            await page.wait_for_function("() => document.querySelectorAll('#peers tbody tr').length === 5")
            assert "bob of stage 0 has gone" in await page.inner_text("#events")
            assert [row[0] for row in await page.evaluate(TABLE)] == ["0", "1", "1", "2", "2"]

            await page.fill("#find", "DAN")
            assert [row[1] for row in await page.evaluate(TABLE)] == ["dan"]
            await page.get_by_role("button", name="dan", exact=True).click()
            assert await page.inner_text("#details-name") == "dan, stage 1"
            assert "loop lag seconds\n1.5 s" in await page.inner_text("#details-figures")


@pytest.mark.slow
async def test_several_runs_are_side_by_side_and_one_is_chosen() -> None:
    async with _chromium() as browser, _dashboard() as (url, shown):
        await shown.show(_swarm())
        first = shown.watcher.state
        other = {**first, "name": "other", "figures_now": {**first["figures_now"], "loss": 1.25}, "trainers": []}
        ended = {**other, "peers": {}}
        unseen = {"name": "unseen", "run": "unseen.2", "fault": "nobody answers", "interval_seconds": 2.0}
        runs = {CONFIG.run_id: first, "other.1": other, "other.3": ended, "unseen.2": unseen}
        shown.hub.publish({"runs": runs})
        async with _page_at(browser, url) as page:
            await page.wait_for_selector("#runs tbody tr")
            cells = """() => [...document.querySelectorAll("#runs tbody tr")].map(
              (row) => [...row.children].slice(0, 3).map((cell) => cell.textContent))"""
            assert await page.evaluate(cells) == [
                [CONFIG.run, "Training", "2.500"],
                ["other.1", "Nobody trains", "1.250"],
                ["other.3", "No peer is there", "1.250"],
                ["unseen", "Cannot be seen", "\u2013"],
            ]
            assert await page.inner_text("#name") == CONFIG.run
            await page.get_by_role("button", name="other.1", exact=True).click()
            assert await page.inner_text("#name") == "other"
            assert "1.250" in await page.inner_text("#now")
            # The run stays chosen, and what happens to the other runs is seen.
            shown.hub.publish({"runs": {**runs, CONFIG.run_id: {**first, "trainers": []}}})
            await page.wait_for_function(
                "() => document.querySelector('#runs tbody tr').children[1].textContent === 'Nobody trains'"
            )
            assert await page.inner_text("#name") == "other"
            await page.get_by_role("button", name="unseen", exact=True).click()
            assert not await page.is_visible("#one")


@pytest.mark.slow
async def test_names_that_peers_choose_stay_text() -> None:
    names = [HOSTILE[:64], "'\"`${alert(1)}", "javascript:alert(1)", "\u202egnp.exe", "a" * 64]
    async with _chromium() as browser, _dashboard() as (url, shown):
        refused = peer("r", refusals=(HOSTILE,))
        await shown.show(view([*map(peer, names), refused], name=HOSTILE[:64]))
        async with _page_at(browser, url) as page:
            await page.wait_for_selector("#peers tbody tr")
            await shown.show(view([*map(peer, names[1:]), refused], name=HOSTILE[:64]))
            await page.wait_for_function("() => document.querySelectorAll('#peers tbody tr').length === 5")
            assert {row[1] for row in await page.evaluate(TABLE)} == {*names[1:], "r"}
            await page.locator(".chip").nth(1).click()
            assert await page.locator("main img, main script, dialog img, dialog script").count() == 0
            assert "owned" not in await page.title()


@pytest.mark.slow
async def test_a_locked_page_asks_for_its_token() -> None:
    async with _chromium() as browser, _dashboard(token="s3cret") as (url, shown):
        await shown.show(_swarm())
        async with _page_at(browser, url) as page:
            await page.fill("#token", "wrong")
            await page.keyboard.press("Enter")
            await page.wait_for_selector("text=That is not the token.")
            assert await page.locator("#peers tbody tr").count() == 0
            await page.fill("#token", "s3cret")
            await page.keyboard.press("Enter")
            await page.wait_for_selector("#peers tbody tr")
        async with _page_at(browser, f"{url}/#s3cret") as page:
            await page.wait_for_selector("#peers tbody tr")
            assert "s3cret" not in page.url


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 768, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_everybody_can_read_it(width: int, scheme: str) -> None:
    """axe-core finds nothing, nothing is wider than the screen, and all can be reached by keyboard."""
    axe = pytest.importorskip("axe_playwright_python.async_playwright", reason="the extra browser is not installed")
    async with _chromium() as browser, _dashboard() as (url, shown):
        await shown.show(_swarm())
        async with _page_at(browser, url, width=width, color_scheme=scheme, reduced_motion="reduce") as page:
            await page.wait_for_selector("#peers tbody tr")
            assert await page.evaluate("document.documentElement.dataset.theme") == scheme
            assert await page.evaluate("document.documentElement.scrollWidth") <= width
            # The browser's debugger inserts axe's script into the page. The page's policy does not apply to it.
            results = await axe.Axe().run(page)
            assert results.violations_count == 0, results.generate_report()
            reached = set()
            for _ in range(60):
                await page.keyboard.press("Tab")
                reached.add(await page.evaluate("document.activeElement.id || document.activeElement.className"))
            assert {"theme", "chip", "find", "events"} <= {name.split(" ")[0] for name in reached}
            await page.locator(".chip").nth(1).focus()
            await page.keyboard.press("Enter")
            assert await page.locator("#details[open]").count() == 1
            results = await axe.Axe().run(page)
            assert results.violations_count == 0, results.generate_report()
            await page.keyboard.press("Escape")
            assert await page.locator("#details[open]").count() == 0
