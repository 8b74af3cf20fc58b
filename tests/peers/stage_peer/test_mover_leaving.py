"""A peer that is told to stop: what it waits for, and what it passes on."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from peers.stage_peer import mover
from swarm.checkpoint import file, writer
from swarm.config import RunConfig
from swarm.events import Leave
from swarm.hop.answers import HopReply
from swarm.rpc.callers import Caller
from swarm.rpc.v1 import averaging_pb2
from swarm.types import Block, PeerState
from tests.peers.stage_peer.movers import ROUND, LocalPeer, train_all, trainer
from tests.support.chain import eventually, held
from tests.support.memory_store import MemoryStore

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
async def mates(
    config: RunConfig, store: MemoryStore, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[LocalPeer, LocalPeer]]:
    """Two peers of stage 0, which wait long for their round; a third one is at the other stage."""
    monkeypatch.setattr(mover, "LAST_QUIET_SECONDS", 30.0)
    async with (
        LocalPeer(config, store, resume=trained).running(0) as mate,
        LocalPeer(config, store, resume=trained).running(1),
        LocalPeer(config, store, resume=trained).running(0) as peer,
    ):
        yield mate, peer


async def test_a_peer_that_is_told_to_stop_serves_until_what_it_has_is_committed(
    config: RunConfig, mates: tuple[LocalPeer, LocalPeer]
) -> None:
    first = ROUND * config.microbatches_per_round
    _, peer = mates
    server = peer.server
    assert server is not None
    await train_all(config, [peer], range(first, first + 4))
    peer.stop.set()
    await asyncio.sleep(0.5)
    record = await peer.record(0)
    assert record is not None
    assert record.state is PeerState.SERVING
    assert server.presence.describe(server.averager).state == PeerState.LEAVING, (
        "nobody moves away because this one serves"
    )
    await train_all(config, mates, range(first + 4, first + config.microbatches_per_round))
    await peer.has_left()
    assert server.stage.round == ROUND + 1


async def test_a_peer_that_is_told_to_stop_with_its_first_microbatch_under_way_serves_until_that_is_committed(
    config: RunConfig, mates: tuple[LocalPeer, LocalPeer]
) -> None:
    first = ROUND * config.microbatches_per_round
    _, peer = mates
    server = peer.server
    assert server is not None
    async with held(server.stage.context.runtime):
        training = asyncio.create_task(train_all(config, [peer], [first]))
        await eventually(lambda: server.stage.admission.num_admitted == 1)
        peer.stop.set()
        await asyncio.sleep(0.3)
    await training
    await train_all(config, mates, range(first + 1, first + config.microbatches_per_round))
    await peer.has_left()
    assert server.stage.round == ROUND + 1


@pytest.fixture
async def last_peer(config: RunConfig, store: MemoryStore, trained: Path) -> AsyncIterator[LocalPeer]:
    """The only peer of the last stage."""
    async with LocalPeer(config, store, resume=trained).running(1) as peer:
        yield peer


async def test_a_peer_that_drains_waits_for_the_acknowledgement_of_what_it_has_answered(
    config: RunConfig, store: MemoryStore, trained: Path, last_peer: LocalPeer
) -> None:
    async with LocalPeer(config, store, resume=trained).running(0) as peer:
        server, last = peer.server, last_peer.server
        assert server is not None
        assert last is not None
        async with trainer(config, [peer]) as train:
            reply = await train(ROUND * config.microbatches_per_round)
            await eventually(lambda: server.stage.admission.num_admitted == last.stage.admission.num_admitted == 0)
            draining = [asyncio.create_task(one.drain(10.0)) for one in (server, last)]
            await asyncio.sleep(0.3)
            assert not any(drain.done() for drain in draining)
            await reply.ack()
            assert await asyncio.gather(*draining) == [True, True]
        assert server.stage.counters["committed"] == last.stage.counters["committed"] == 1


async def test_a_stage_s_last_holder_stays_until_whoever_is_on_its_way_has_the_state(
    config: RunConfig, store: MemoryStore, last_peer: LocalPeer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise what the stage has learnt would be gone with that holder."""
    assert last_peer.server is not None
    handlers, asked, goes_on = last_peer.server.averager.handlers, asyncio.Event(), asyncio.Event()
    download = handlers.download

    async def slowly(
        request: averaging_pb2.DownloadRequest, *caller: Caller
    ) -> AsyncIterator[averaging_pb2.DownloadReply]:
        asked.set()
        await goes_on.wait()
        async for reply in download(request, *caller):
            yield reply

    monkeypatch.setattr(handlers, "download", slowly)
    (tmp_path / "nothing").mkdir()
    joiner = LocalPeer(config, store, resume=tmp_path / "nothing")
    await joiner.rebalancer.goes((Block(1),))
    joiner.served.put_nowait(1)  # The block begins at once.
    async with joiner.running(1):
        await asked.wait()
        last_peer.stop.set()
        await asyncio.sleep(0.5)
        assert Leave() not in last_peer.log.events
        goes_on.set()
        assert await joiner.next_served() == 1
        await last_peer.has_left()
        assert (await joiner.state())[0] == ROUND


async def test_a_peer_that_ends_passes_on_what_was_acknowledged_to_it(
    config: RunConfig, store: MemoryStore, trained: Path, last_peer: LocalPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mover, "LAST_DRAIN_SECONDS", 0.0)
    last = last_peer.server
    assert last is not None
    async with LocalPeer(config, store, resume=trained).running(0) as peer:
        server = peer.server
        assert server is not None
        async with trainer(config, [peer]) as train:
            reply = await train(ROUND * config.microbatches_per_round)
            passing_on = HopReply.ack

            async def late(reply: HopReply) -> None:
                await peer.has_left()
                await asyncio.sleep(0.5)
                await passing_on(reply)

            monkeypatch.setattr(HopReply, "ack", late)
            await passing_on(reply)
            await eventually(lambda: server.stage.answers.num_settling > 0)
            peer.stop.set()
            await eventually(lambda: last.stage.answers.num_unacknowledged == 0)
    assert last.stage.counters["committed"] == 1


@pytest.mark.parametrize("regular", [False, True], ids=["on leaving", "before"])
async def test_a_peer_whose_disk_hangs_ends_all_the_same(
    config: RunConfig, store: MemoryStore, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, *, regular: bool,
) -> None:  # fmt: skip
    """This holds while its last checkpoint is being written, and while a regular one is."""
    monkeypatch.setattr(writer, "LAST_CHECKPOINT_SECONDS", 0.2)
    disk, folder = threading.Event(), tmp_path / "written"
    monkeypatch.setattr(file, "write", lambda *_, **__: disk.wait())
    peer = LocalPeer(config, store, resume=trained, checkpoints=folder)
    try:
        async with asyncio.timeout(20.0), peer.running(0):
            assert peer.server is not None
            if regular:
                peer.server.checkpoints.begin()
    finally:
        disk.set()
    assert Leave() in peer.log.events
    assert f"no checkpoint of round {ROUND} in {folder}: not written within 0 s; does the disk hang?" in caplog.text


@pytest.fixture
async def idle_peer(
    config: RunConfig, mates: tuple[LocalPeer, LocalPeer], monkeypatch: pytest.MonkeyPatch
) -> LocalPeer:
    """A peer with a part of a round that no trainer goes on with; each stage has one other peer."""
    monkeypatch.setattr(mover, "LAST_QUIET_SECONDS", 0.5)
    _, peer = mates
    await train_all(config, [peer], [ROUND * config.microbatches_per_round])
    return peer


async def test_a_peer_that_is_told_to_stop_while_its_round_waits_for_a_silent_mate_waits_as_well(
    idle_peer: LocalPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the peer's microbatches would have to be computed again."""
    assert idle_peer.server is not None
    monkeypatch.setattr(idle_peer.server.averager, "misses_member", lambda: True)
    idle_peer.stop.set()
    await asyncio.sleep(0.5)
    assert Leave() not in idle_peer.log.events
    monkeypatch.undo()
    await idle_peer.has_left()
