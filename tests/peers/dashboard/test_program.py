"""swarm-dashboard as a user starts it: what it refuses, shows and remembers."""

import asyncio
import dataclasses
import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import connect

from peers.commands import command_line
from peers.dashboard import program
from peers.dashboard.program import DashboardOptions
from swarm import config as configs
from swarm.credentials.identity import generate
from swarm.rpc.invite import Invite
from tests.peers.dashboard.test_app import apply
from tests.support.shown_run import shown_run

CONFIG = configs.load_preset("tiny")
OTHER = dataclasses.replace(CONFIG, run="other")
INVITE, NODE = "swarm://1abc", "/ip4/127.0.0.1/tcp/1/p2p/x"


def test_a_locked_run_is_not_shown_to_everybody(capsys: pytest.CaptureFixture[str]) -> None:
    options = DashboardOptions(invites=(INVITE,), host="0.0.0.0", port=0)
    with pytest.raises(ValueError, match="would show a locked run to everybody: add --view-token"):
        program.take_address(options, is_locked=True)
    listener, token = program.take_address(options, is_locked=False)
    listener.close()
    assert token is None
    assert "everybody who reaches http://0.0.0.0" in capsys.readouterr().err
    locked = DashboardOptions(invites=(INVITE,), host="0.0.0.0", port=0, view_token="s3cret")
    listener, token = program.take_address(locked, is_locked=True)
    listener.close()
    assert token == "s3cret"


async def _told(arguments: list[str], runs: set[str], *, embed: bool = False) -> dict[str, Any]:
    """The state that a dashboard sends to a viewer once it has found these runs. The dashboard is then ended: by Ctrl-C
    or, if it is embedded, by closing its stdin."""
    dashboard = await asyncio.create_subprocess_exec(
        *command_line("dashboard", [*arguments, *(["--embed"] if embed else [])]), stdin=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert dashboard.stderr is not None
    assert dashboard.stdin is not None
    try:
        async with asyncio.timeout(60.0):
            said = ""
            while (found := re.search(r"at (http://127\.0\.0\.1:\d+)\n", said)) is None:
                line = await dashboard.stderr.readline()
                assert line, said
                said += line.decode()
            async with connect(f"{found[1].replace('http', 'ws')}/live", max_size=None) as socket:
                await socket.send("")
                message: dict[str, Any] = json.loads(await socket.recv())
                state = message["whole"]
                assert state["runs"].keys() == runs
                while not all("peers" in run for run in state["runs"].values()):
                    state = apply(state, json.loads(await socket.recv())["patch"])
                message["whole"] = state
                if embed:
                    dashboard.stdin.close()
                else:
                    dashboard.send_signal(signal.SIGINT)
                assert await dashboard.wait() == 0, (await dashboard.stderr.read()).decode()
                return message
    finally:
        if dashboard.returncode is None:
            dashboard.kill()
            await dashboard.wait()


async def test_it_watches_and_remembers(tmp_path: Path) -> None:
    """The dashboard also comes back with what it remembers, with another run beside the first."""
    async with shown_run(CONFIG, generate(), NODE) as run, shown_run(OTHER, generate(), NODE) as other:
        invite, others = (str(Invite.fitting(one.config.run_id, [one.entry], is_locked=False)) for one in (run, other))
        arguments = [invite, "--port", "0", "--history", str(tmp_path)]
        first = await _told(arguments, {CONFIG.run_id})
        second = await _told([others, *arguments], {CONFIG.run_id, OTHER.run_id}, embed=True)
    assert list(second["whole"]["runs"]) == [OTHER.run_id, CONFIG.run_id]
    shown = second["whole"]["runs"][OTHER.run_id]
    assert [peer["peer_id"] for peer in shown["peers"].values()] == [other.entry.peer_id]
    assert (tmp_path / f"{OTHER.run_id}.json").exists()
    for message, num_events in ((first, 1), (second, 2)):
        shown = message["whole"]["runs"][run.config.run_id]
        ((key, peer),) = shown["peers"].items()
        assert (key, peer["name"], peer["state"]) == (f"0/{run.entry.peer_id}", "first", "unreachable")
        assert shown["join"]["Give a machine to the run"] == f"swarm-peer {invite}"
        assert [event["text"] for event in shown["events"]][-num_events:] == [
            "this page begins to watch: peers 0, trainers 0"
        ] * num_events
        assert message["history"][run.config.run_id]["hour"]["columns"]["peers"][-1] == 0.0
    assert json.loads((tmp_path / f"{run.config.run_id}.json").read_text())["run"] == run.config.run_id
