"""Ways to look at runs: several runs side by side, by their invites, or all runs of one DHT."""

import dataclasses
import time
from collections.abc import Sequence

import pytest

from peers.shared import lan
from peers.shared.entrance import Entrance
from peers.status import lookout
from peers.status.lookout import lookouts_on, views
from peers.status.program import ViewOptions
from peers.status.view import SwarmView
from swarm import config as configs
from swarm.config import RunConfig
from swarm.credentials.identity import generate
from swarm.dht import keys
from swarm.dht import node as dht_node
from swarm.dht.directory import Directory
from swarm.dht.node import DhtNode
from swarm.errors import PeerUnavailable
from swarm.machine.clock import SystemClock, run_loop
from swarm.rpc.entry import Entry
from swarm.rpc.invite import Invite
from swarm.types import PeerId, PeerRecord, PeerState, RunRecord
from tests.support.shown_run import ShownRun, shown_run

CONFIG = configs.load_preset("tiny")
OTHER = dataclasses.replace(CONFIG, run="other")
NODE = "/ip4/127.0.0.1/tcp/1/p2p/x"
NOBODY = Entry(PeerId("cd" * 20), "127.0.0.1:1")


def _invite(run: ShownRun) -> str:
    return str(Invite.fitting(run.config.run_id, [run.entry], is_locked=False))


def _entrances(*invites: str) -> list[Entrance]:
    return ViewOptions(invites=invites).entrances("swarm-status", {}, SystemClock())


async def _seen(*invites: str) -> list[SwarmView]:
    async with lookouts_on(_entrances(*invites)) as lookouts:
        return await views(lookouts)


async def test_a_run_that_is_not_there_hides_no_other(caplog: pytest.LogCaptureFixture) -> None:
    gone = str(Invite.fitting(OTHER.run_id, [NOBODY], is_locked=False))
    async with shown_run(CONFIG, generate(), NODE) as one:
        assert [view.run for view in await _seen(gone, _invite(one))] == [CONFIG.run_id]
    assert "what is at 127.0.0.1:1 is not shown: no peer of the run answers" in caplog.text
    with pytest.raises(PeerUnavailable, match="no peer of the run answers"):
        await _seen(gone)


async def test_a_run_that_falls_silent_hides_no_other(caplog: pytest.LogCaptureFixture) -> None:
    async with (
        shown_run(CONFIG, generate(), NODE) as one,
        shown_run(OTHER, generate(), NODE) as other,
        lookouts_on(_entrances(_invite(one), _invite(other))) as lookouts,
    ):
        await one.server.stop(None)
        assert [view.run for view in await views(lookouts)] == [OTHER.run_id]
        assert f"what is at {CONFIG.run_id} is not shown" in caplog.text
        await other.server.stop(None)
        with pytest.raises(PeerUnavailable):
            await views(lookouts)


def test_all_runs_of_the_network_are_shown_but_those_that_need_a_token(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def invite(config: RunConfig, *, is_locked: bool = False) -> str:
        return str(Invite.fitting(config.run_id, [NOBODY], is_locked=is_locked))

    found = [invite(OTHER), invite(dataclasses.replace(CONFIG, run="theirs"), is_locked=True), invite(CONFIG)]
    monkeypatch.setattr(lan, "found_invites", lambda *, insecure: found)
    options = ViewOptions(lan=True, runs=True)
    entrances = options.entrances("swarm-dashboard", {}, SystemClock())
    assert [entrance.run for entrance in entrances] == [one.run_id.rpartition(".")[2] for one in (OTHER, CONFIG)]
    assert not options.asks_the_dht
    assert "a run of this network is not shown: the run is locked" in caplog.text
    del found[2], found[0]
    with pytest.raises(ValueError, match=r"^the run is locked"):
        options.entrances("swarm-dashboard", {}, SystemClock())


async def _announce(node: DhtNode, config: RunConfig) -> None:
    """Announce a run, and a peer of its stage 0."""
    own, clock = generate(), SystemClock()
    directory = Directory(node, own, config.run_id, clock)
    await directory.announce(RunRecord(peer_id=own.peer_id, config_json=configs.to_json(config)), 60.0)
    record = PeerRecord(
        peer_id=own.peer_id, name=f"of {config.run}", announced_at=time.time(), stage=0, endpoint="127.0.0.1:1",
        certificate_pem=own.certificate_pem, state=PeerState.SERVING,
    )  # fmt: skip
    await directory.announce(record, 60.0)


def _found(entrance: Entrance) -> Sequence[tuple[str, str]]:
    """Each run that is announced there, and the first peer of its stage 0."""

    async def look() -> list[SwarmView]:
        async with lookouts_on([entrance], all_runs=True) as lookouts:
            return await views(lookouts)

    return [(view.run, view.stages[0].peers[0].name) for view in run_loop(look())]


@pytest.mark.slow
def test_all_runs_of_a_dht_are_found_the_named_one_first(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each node keeps the records of its own run alone: where two runs have come to share a DHT, each has nodes."""
    nodes: list[DhtNode] = []
    try:
        for config in (CONFIG, OTHER, CONFIG, OTHER):
            initial_peers = nodes[0].addresses() if nodes else []
            nodes.append(dht_node.start(clock=SystemClock(), host="127.0.0.1", initial_peers=initial_peers))
            nodes[-1].belong_to(keys.of_run(config.run_id, config.blocks), None)
        for node, config in zip(nodes, (CONFIG, OTHER), strict=False):
            run_loop(_announce(node, config))
        entrance = Entrance(addresses=tuple(nodes[0].addresses()), token=None, insecure=False)
        assert set(_found(entrance)) == {(config.run_id, f"of {config.run}") for config in (CONFIG, OTHER)}
        # That is so however many others are announced.
        monkeypatch.setattr(lookout, "MOST_RUNS", 1)
        for config in (CONFIG, OTHER):
            named = dataclasses.replace(entrance, run=config.run_id.rpartition(".")[2])
            assert _found(named) == [(config.run_id, f"of {config.run}")]
        assert "1 more runs are announced at /ip4/127.0.0.1/tcp/" in caplog.text
    finally:
        for node in nodes:
            node.shutdown()
