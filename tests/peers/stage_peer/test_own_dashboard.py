"""A page beside a peer: what is refused before the peer begins, and that the page lives as long as the peer does."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import connect

from peers.stage_peer import own_dashboard
from peers.stage_peer.options import PeerOptions
from peers.stage_peer.own_dashboard import OwnDashboard, require_page
from swarm import config as configs
from swarm.credentials.identity import generate
from tests.support.shown_run import shown_run

CONFIG = configs.load_preset("tiny")


def _options(**options: Any) -> PeerOptions:
    return PeerOptions(preset="tiny", **{"dashboard_port": 0, **options})


@pytest.mark.parametrize(
    ("options", "is_locked", "complaint"),
    [
        (
            {"dashboard_host": "0.0.0.0"},
            True,
            "--dashboard-host 0.0.0.0 would show a locked run to everybody: set SWARM",
        ),
    ],
)
def test_what_cannot_be_shown_is_refused(options: dict[str, Any], is_locked: bool, complaint: str) -> None:
    with pytest.raises(ValueError, match=f"^{complaint}"):
        require_page(_options(**options), {}, is_locked=is_locked)


@pytest.mark.slow
async def test_the_page_is_there_from_when_the_peer_serves_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(own_dashboard, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(own_dashboard, "NICENESS", 0)
    async with shown_run(CONFIG, generate(), "/ip4/127.0.0.1/tcp/1/p2p/x") as run:
        page = OwnDashboard(_options(), run.entry.peer_id, int(run.entry.endpoint.rpartition(":")[2]), None)
        running = asyncio.create_task(page.run())
        page.begin()
        said = ""
        async with asyncio.timeout(60.0):
            while (found := re.search(r"at (http://127\.0\.0\.1:\d+)\n", said)) is None:
                await asyncio.sleep(0.05)
                said += capfd.readouterr().err
            async with connect(f"{found[1].replace('http', 'ws')}/live", max_size=None) as viewer:
                await viewer.send("")
                message = json.loads(await viewer.recv())
            assert list(message["whole"]["runs"]) == [CONFIG.run_id]
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()
        with pytest.raises(OSError, match="Connect call failed"):
            await connect(f"{found[1].replace('http', 'ws')}/live")
    assert (tmp_path / "dashboard" / run.entry.peer_id / f"{CONFIG.run_id}.json").exists()


async def test_a_page_that_fails_is_said_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(own_dashboard, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(own_dashboard, "command_line", lambda program, arguments: ["false"])
    page = OwnDashboard(_options(), "ab" * 20, 1, None)
    page.begin()
    await asyncio.wait_for(page.run(), 10.0)
    assert caplog.messages == ["the dashboard has ended with exit code 1; the peer goes on without"]
