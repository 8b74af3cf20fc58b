"""A peer that moves: with real servers and real weights, in one process."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from peers.stage_peer import mover, server
from peers.stage_peer.served_block import ServedBlock
from swarm.averaging.averager import Averager
from swarm.checkpoint import file
from swarm.config import RunConfig
from swarm.errors import NotReady
from swarm.events import Install, Join, Leave
from swarm.types import Block, ClaimState, PeerState
from tests.peers.stage_peer.movers import ROUND, LocalPeer, trainer
from tests.support.chain import eventually
from tests.support.memory_store import MemoryStore

pytestmark = pytest.mark.usefixtures("quick")


def _assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


async def test_a_peer_takes_the_other_stage_s_state_and_writes_its_checkpoints(
    config: RunConfig, store: MemoryStore, trained: Path, tmp_path: Path
) -> None:
    # The peer has no checkpoint to begin with: all that it has comes from others.
    nothing, written = tmp_path / "nothing", tmp_path / "written"
    nothing.mkdir()
    async with (
        LocalPeer(config, store, resume=trained).running(0),
        LocalPeer(config, store, resume=trained).running(1) as holder,
        LocalPeer(config, store, resume=nothing, checkpoints=written).running(0) as peer,
    ):
        assert (await peer.state())[0] == ROUND
        peer.rebalancer.orders.put_nowait(1)
        assert await peer.next_served() == 1
        (number, state), (_, expected) = await peer.state(), await holder.state()
        assert number == ROUND
        _assert_same(state, expected)
        left, arrived = await peer.record(0), await peer.record(1)
        assert left is not None
        assert arrived is not None
        assert (left.state, arrived.state, arrived.moves) == (PeerState.LEAVING, PeerState.SERVING, 1)
        assert arrived.device == "cpu"
        (claim,) = [c for c in await peer.directory.claims() if c.peer_id == peer.peer_id]
        assert claim.state is ClaimState.WITHDRAWN
    assert {name.stage for name in file.names(written)} == {0, 1}, "one on leaving each"
    kinds = [type(event) for event in peer.log.events]
    # The audit needs this: the events about each stage begin with its state, and end as it is left.
    assert kinds == [Install, Install, Join, Leave] * 2
    assert peer.log.blocks == [Block(0)] * 4 + [Block(1)] * 4


async def test_a_joiner_serves_no_initial_weights_though_its_first_question_was_lost(
    config: RunConfig, store: MemoryStore, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(averager: Averager) -> None:
        await asyncio.sleep(0)

    nothing = tmp_path / "nothing"
    nothing.mkdir()
    async with LocalPeer(config, store, resume=trained).running(0):
        monkeypatch.setattr(Averager, "join", lost)
        async with LocalPeer(config, store, resume=nothing).running(0) as peer:
            assert (await peer.state())[0] == ROUND


async def test_it_goes_back_if_nobody_gives_it_the_state(
    config: RunConfig, store: MemoryStore, trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    made = list[weakref.ref[ServedBlock]]()

    def noted(*parts: Any) -> ServedBlock:
        block = ServedBlock(*parts)
        if parts[0].directory is peer.directory:
            made.append(weakref.ref(block))
        return block

    nothing = tmp_path / "nothing"
    nothing.mkdir()
    peer = LocalPeer(config, store, resume=nothing)
    monkeypatch.setattr(server, "ServedBlock", noted)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(LocalPeer(config, store, resume=trained).running(0))
        await stack.enter_async_context(peer.running(0))
        async with LocalPeer(config, store, resume=trained).running(1):
            pass
        # The only holder of stage 1 is gone.
        peer.rebalancer.orders.put_nowait(1)
        assert await peer.next_served() == 0
        gc.collect()
        assert [block() is None for block in made] == [True, True, False], "nothing keeps the stage that failed"
        number, _ = await peer.state()
        assert number == ROUND
        record = await peer.record(0)
        assert record is not None
        assert (record.state, record.moves) == (PeerState.SERVING, 0)
    assert "cannot begin at stage 1: nobody holds stage 1 any more" in caplog.text


async def test_it_serves_nothing_that_it_could_not_download(
    config: RunConfig, store: MemoryStore, trained: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    async def refuse(*_: object) -> AsyncIterator[None]:
        raise NotReady("not now")
        yield

    async with (
        LocalPeer(config, store, resume=trained).running(0),
        LocalPeer(config, store, resume=trained).running(1) as holder,
        LocalPeer(config, store, resume=trained).running(0) as peer,
    ):
        assert holder.server is not None
        monkeypatch.setattr(holder.server.averager.handlers, "download", refuse)
        peer.rebalancer.orders.put_nowait(1)
        assert await peer.next_served() == 0
        number, _ = await peer.state()
        assert number == ROUND
        assert await peer.record(1) is None, "it was never announced there"
    assert "cannot begin at stage 1: the state of stage 1 could not be downloaded" in caplog.text
    assert "--start-over" not in caplog.text


@pytest.mark.parametrize("first", [True, False])
async def test_a_peer_that_is_told_to_stop_while_it_enters_a_stage_ends(
    config: RunConfig,
    store: MemoryStore,
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    first: bool,
) -> None:
    async def hang(*_: object) -> AsyncIterator[None]:
        asked.set()
        await asyncio.Event().wait()
        yield

    def at_once() -> float:
        return asyncio.get_running_loop().time() + 10.0  # A silent donor is given up after 15 s.

    asked = asyncio.Event()
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    async with (
        LocalPeer(config, store, resume=trained).running(0),
        LocalPeer(config, store, resume=trained).running(1) as holder,
    ):
        assert holder.server is not None
        monkeypatch.setattr(holder.server.averager.handlers, "download", hang)
        peer = LocalPeer(config, store, resume=nothing if first else trained)
        async with asyncio.timeout(60.0) as patience:
            if first:
                peer.served.put_nowait(1)  # The block begins at once.
                async with peer.running(1):
                    await asked.wait()
                    patience.reschedule(at_once())
            else:
                async with peer.running(0):
                    peer.rebalancer.orders.put_nowait(1)
                    await asked.wait()
                    patience.reschedule(at_once())
        assert not patience.expired()


async def test_it_stays_if_nobody_else_serves_its_stage(
    config: RunConfig, store: MemoryStore, trained: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        LocalPeer(config, store, resume=trained).running(0) as peer,
        LocalPeer(config, store, resume=trained).running(1),
    ):
        peer.rebalancer.orders.put_nowait(1)
        async with asyncio.timeout(10.0):
            while "stays at stage 0: too few others serve it" not in caplog.text:  # noqa: ASYNC110 - of another logger
                await asyncio.sleep(0.05)
        await asyncio.sleep(0.2)
        record = await peer.record(0)
        assert record is not None
        assert record.state is PeerState.SERVING
        assert peer.served.empty()


async def test_a_peer_that_is_told_to_stop_while_it_drains_leaves(
    config: RunConfig, store: MemoryStore, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The peer does not wait for the round, which is not complete.
    for name in ("ROUND_SECONDS", "LAST_ROUND_SECONDS"):
        monkeypatch.setattr(mover, name, 0.0)
    async with (
        LocalPeer(config, store, resume=trained).running(0),
        LocalPeer(config, store, resume=trained).running(1),
        LocalPeer(config, store, resume=trained).running(0) as peer,
    ):
        server = peer.server
        assert server is not None
        async with trainer(config, [peer]) as train:
            reply = await train(ROUND * config.microbatches_per_round)
            peer.rebalancer.orders.put_nowait(1)
            # The peer drains until the microbatch is acknowledged.
            await eventually(lambda: server.presence.state is PeerState.LEAVING)
            peer.stop.set()
            await eventually(lambda: server.presence.describe(server.averager).state == PeerState.LEAVING)
            await reply.ack()
        await peer.has_left()
        assert set(peer.log.blocks) == {Block(0)}
        assert await peer.record(1) is None
