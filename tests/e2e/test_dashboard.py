"""swarm-dashboard beside a real swarm, in a real Chromium: what it shows is what swarm-status says."""

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from peers.commands import command_line
from tests.support.browser import chromium, page_at
from tests.support.swarm import CONFIG, write_text

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

FOLLOWED_SECONDS = 120.0
ROWS = """() => {
  const headings = [...document.querySelectorAll("#peers thead th")].map((cell) => cell.textContent);
  return [...document.querySelectorAll("#peers tbody tr")].map((row) => Object.fromEntries(
    [...row.children].map((cell, index) => [headings[index], cell.textContent])));
}"""


@asynccontextmanager
async def _running(program: str, *arguments: str, **options: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(*command_line(program, arguments), start_new_session=True, **options)
    try:
        yield process
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGINT)
            await asyncio.wait_for(process.wait(), 60.0)


async def _invite(folder: Path) -> str:
    """The first invite that a peer prints."""
    async with asyncio.timeout(120.0):
        while True:
            for log in sorted((folder / "logs").glob("peer-*.log")):
                if found := re.search(r"swarm://\w+", log.read_text()):
                    return found[0]
            await asyncio.sleep(0.2)


async def _status(invite: str) -> dict[tuple[int, str], dict[str, Any]]:
    """What swarm-status says of each peer, by stage and name."""
    async with _running("status", invite, "--json", stdout=asyncio.subprocess.PIPE) as process:
        stdout, _ = await process.communicate()
    view = json.loads(stdout)
    return {(row["stage"], peer["name"]): peer for row in view["stages"] for peer in row["peers"]}


async def _compare(page: Any, invite: str) -> bool:
    """Whether the page shows the same as swarm-status. Between two calls of swarm-status only numbers may have
    changed."""
    before = await _status(invite)
    await asyncio.sleep(2.5)
    shown = {(int(row["stage"]), row["peer"]): row for row in await page.evaluate(ROWS)}
    await asyncio.sleep(2.5)
    after = await _status(invite)
    states = [{key: peer["state"] for key, peer in seen.items()} for seen in (before, after)]
    if states[0] != states[1]:
        return False
    assert {key: row["state"].split(" ")[0] for key, row in shown.items()} == states[0]
    for key, row in shown.items():
        for column, name in (("forwards", "forwards"), ("backwards", "backwards"), ("round", "round")):
            assert before[key][name] <= int(row[column]) <= after[key][name], (key, column)
    return True


async def _tells_of_both(page: Any) -> bool:
    """Whether the page lists the events that one peer has gone, and that another one serves."""
    events = await page.inner_text("#events")
    return all(re.search(words, events) for words in (r"has gone|does not answer", r"serves stage \d"))


async def test_a_swarm_with_a_kill_and_a_join_is_followed(tmp_path: Path) -> None:
    config = CONFIG.format(dataset=write_text(tmp_path / "text.txt"), setting="diloco")
    (tmp_path / "run.toml").write_text(config.replace("num_layers = 2", "num_layers = 3"))
    swarm = [
        "--config", str(tmp_path / "run.toml"), "--output", str(tmp_path / "out"), "--stages", "3", "--steps", "5000",
    ]  # fmt: skip
    drama = ["--peers-per-stage", "2", "--kill-at", "20", "--join-at", "60"]
    async with _running("local", *swarm, *drama, stdout=asyncio.subprocess.DEVNULL), chromium() as browser:
        invite = await _invite(tmp_path / "out")
        page_options = [invite, "--port", "0", "--history", str(tmp_path / "history")]
        async with _running("dashboard", *page_options, stderr=asyncio.subprocess.PIPE) as dashboard:
            assert dashboard.stderr is not None
            url = ""
            while not url:
                line = (await asyncio.wait_for(dashboard.stderr.readline(), 60.0)).decode()
                url = next(iter(re.findall(r"shows .* at (http://\S+)", line)), "")
            async with page_at(browser, url) as page:
                await page.wait_for_selector("#peers tbody tr")
                assert invite.startswith("swarm://")
                assert "swarm-peer swarm://" in await page.inner_text("#join")
                num_compared, end = 0, time.monotonic() + FOLLOWED_SECONDS
                # On a busy machine the swarm comes to the step of the kill only later.
                while time.monotonic() < end or num_compared < 3 or not await _tells_of_both(page):
                    num_compared += await _compare(page, invite)
                assert await page.locator(".rounds .cell.in").count() > 10
                assert "Loss: from" in (await page.get_attribute("#loss", "aria-label"))
        (history,) = (tmp_path / "history").glob("*.json")
        assert json.loads(history.read_text())["contributions"]["peers"]
