"""Where programs enter a run: by an invite, by a peer's endpoint, or at addresses."""

import asyncio
import dataclasses
import logging
from pathlib import Path

import pytest

from peers.shared.entrance import Entrance, find_entrance
from peers.shared.run_options import EntranceOptions, RunOptions
from scripts.benches.shared.ports import free_ports
from swarm import config as configs
from swarm.credentials.identity import generate
from swarm.errors import PeerUnavailable
from swarm.machine import waits
from swarm.machine.clock import SystemClock
from swarm.rpc.entry import Entry
from swarm.rpc.invite import Invite
from swarm.types import PeerId
from tests.support import locked
from tests.support.chain import eventually
from tests.support.manual_clock import ManualClock
from tests.support.shown_run import shown_run

CONFIG = configs.load_preset("tiny")
NODE = "/ip4/127.0.0.1/tcp/4001/p2p/12D3KooWQfGkQq4wGkyNqHUBd7HScWJGfNYsPzRUnGwkKDUdJhqZ"
ENTRY = Entry(PeerId("ab" * 20), "192.0.2.1:4001")


def _options(invite: str | None = None, *initial_peers: str, token: str | None = None) -> EntranceOptions:
    return RunOptions(invite=invite, initial_peers=initial_peers, token=token)


def _find(options: EntranceOptions, *peers: str) -> Entrance:
    clock = ManualClock(locked.NOW.timestamp())
    return find_entrance(options, {}, prog="swarm-trainer", clock=clock, peers=peers)


def _invite(*entries: Entry, is_locked: bool = False) -> str:
    return str(Invite.fitting(CONFIG.run_id, entries or [ENTRY], is_locked=is_locked))


async def test_an_invite_leads_to_the_addresses_that_its_peer_knows() -> None:
    async with shown_run(CONFIG, generate(), NODE) as run:
        gone = Entry(PeerId("cd" * 20), "127.0.0.1:1")
        entrance = _find(_options(_invite(gone, run.entry)))
        assert entrance.run == CONFIG.digest[:16]
        assert await entrance.dht_addresses(SystemClock()) == (NODE,)
        assert await _find(_options(), str(run.entry)).dht_addresses(SystemClock()) == (NODE,)


@pytest.mark.parametrize("content", ['{"stage": 0}', "A book # with a chapter\n", "[1]", "5", ""])
def test_a_file_without_an_invite_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"ready\.json holds no invite: name a file that a peer wrote"):
        _find(_options(f"@{path}"))
    with pytest.raises(FileNotFoundError):
        _find(_options(f"@{tmp_path / 'other'}"))
    with pytest.raises(ValueError, match=r"^@ names no file: write @FILE$"):
        _find(_options("@"))


async def test_an_invite_to_another_run_is_refused() -> None:
    """The peer is the right one, and has begun another run since."""
    other = dataclasses.replace(CONFIG, run="other")
    async with shown_run(other, generate(), NODE) as run:
        with pytest.raises(ValueError, match=r"^the invite is to another run than the one at .*, other\.[0-9a-f]{16}:"):
            await _find(_options(_invite(run.entry))).dht_addresses(SystemClock())


async def test_a_locked_run_wants_a_token_before_anybody_is_called() -> None:
    with pytest.raises(ValueError, match=r"^the run is locked: ask its owner for a token, and give INVITE#TOKEN"):
        _find(_options(_invite(is_locked=True)))
    for options in (
        _options(f"{_invite(is_locked=True)}#{locked.TRAINER_TOKEN}"),
        _options(_invite(is_locked=True), token=str(locked.TRAINER_TOKEN)),
    ):
        entrance = _find(options)
        assert str(entrance.token) == str(locked.TRAINER_TOKEN)
        assert entrance.entries == (ENTRY,)


async def test_a_peer_that_starts_at_the_same_moment_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waits, "SAY_SECONDS", 0.2)
    monkeypatch.setattr(waits, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(waits, "LOOK_SECONDS", 0.05)
    own, (port,) = generate(), free_ports(1)
    entrance = _find(_options(_invite(Entry(PeerId(own.peer_id), f"127.0.0.1:{port}"))))
    with caplog.at_level(logging.WARNING):
        finding = asyncio.create_task(entrance.dht_addresses(SystemClock()))
        await eventually(lambda: "waiting for the run" in caplog.text)
        async with shown_run(CONFIG, own, NODE, port=port):
            assert await finding == (NODE,)
    assert f"waiting for the run at 127.0.0.1:{port} (25 s at most; tried " in caplog.text
    assert "the last time because no peer of the run answers: no swarm-peer answers at" in caplog.text


async def test_a_run_with_tls_is_not_entered_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "JOIN_SECONDS", 0.1)
    async with shown_run(CONFIG, generate(), NODE) as run:
        entrance = dataclasses.replace(_find(_options(_invite(run.entry))), insecure=True)
        with pytest.raises(PeerUnavailable, match=r"uses TLS: leave out --insecure$"):
            await entrance.dht_addresses(SystemClock())
