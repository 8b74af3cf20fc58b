"""A peer that moves: with real servers and real weights, in one process."""

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from peers.shared import process
from peers.stage_peer import checkpoints, mover, others, own_backend, rebalancer
from peers.stage_peer import server as stage_server
from swarm.averaging.averager import Averager
from swarm.checkpoint import file
from swarm.config import RunConfig
from swarm.errors import Fatal, NotReady
from swarm.events.kinds import Install, Join, Leave, Move
from swarm.hop.answers import HopReply
from swarm.machine.clock import SystemClock
from swarm.model.stages import build_stage
from swarm.rpc.channels import ChannelPool
from swarm.rpc.v1 import averaging_pb2
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.stage.context import StageLimits
from swarm.stage.shortage import TRIES
from swarm.training.microbatch import Microbatch
from swarm.types import ClaimState, PeerRecord, PeerState
from tests.checkpoint.states import cut, write_cut
from tests.peers.stage_peer.movers import LocalPeer, train_all, trainer
from tests.support.chain import eventually, held
from tests.support.memory_store import MemoryStore

ROUND = 3


@pytest.fixture
def config() -> RunConfig:
    return cut(2)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(SystemClock())


@pytest.fixture
def trained(tmp_path: Path, config: RunConfig) -> Path:
    """Checkpoints of both stages, with which the first peers begin."""
    folder = tmp_path / "trained"
    folder.mkdir()
    write_cut(folder, config, ROUND)
    return folder


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(mover, "COMMIT_SECONDS", 0.5)
    monkeypatch.setattr(others, "SETTLE_SECONDS", 1.0)


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
    # The audit needs this: events after a move are about the new stage, beginning with its state.
    assert kinds == [Install, Install, Join, Move, Install, Install, Join, Leave]
    assert peer.log.events[3] == Move(stage=1)


async def test_a_peer_tells_which_one_a_stage_without_a_peer_had_last(
    config: RunConfig, store: MemoryStore, trained: Path
) -> None:
    async with LocalPeer(config, store, resume=trained).running(0) as peer:
        server = peer.server
        assert server is not None

        def last_peers() -> list[pb.LastPeer]:
            return list(server.presence.describe(server.averager).last_peers)

        async with LocalPeer(config, store, resume=trained).running(1) as other:
            record = await other.record(1)
            assert record is not None
            await eventually(lambda: bool(peer.known.others(1)))
            assert not last_peers()
        await eventually(lambda: bool(last_peers()))
        (last,) = last_peers()
        assert (last.stage, last.name, last.has_left) == (1, record.name or other.peer_id[:8], True)


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


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 40.00 GiB\nand much more to say"),
            "40.00 GiB",
        ),
        (MemoryError(), "what was needed"),
    ],
)
async def test_a_stage_that_does_not_fit_is_one_line(
    config: RunConfig, store: MemoryStore, trained: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, error: Exception, reason: str,
) -> None:  # fmt: skip
    """A peer that moves there goes back."""

    def no_memory(run: RunConfig, stage: int, **more: Any) -> torch.nn.Module:
        if stage == 1:
            raise error
        return build_stage(run, stage, **more)

    async with (
        LocalPeer(config, store, resume=trained).running(0),
        LocalPeer(config, store, resume=trained).running(1),
        LocalPeer(config, store, resume=trained).running(0) as peer,
    ):
        monkeypatch.setattr(own_backend, "build_stage", no_memory)
        peer.rebalancer.orders.put_nowait(1)
        assert await peer.next_served() == 0
    assert f"stage 1 does not fit on cpu (no room for {reason}): take more stages" in caplog.text


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        (torch.OutOfMemoryError("Tried to allocate 2.00 GiB.\n"), Fatal, "ran out of memory (no room for 2.00 GiB)"),
        (RuntimeError("a bug"), RuntimeError, "a bug"),
    ],
)
async def test_a_stage_that_runs_out_of_memory_while_it_serves_is_one_line(
    config: RunConfig, store: MemoryStore, trained: Path, error: Exception, expected: type[Exception], message: str
) -> None:
    async def fail() -> None:
        raise error

    async def serve() -> None:
        async with LocalPeer(config, store, resume=trained).running(0) as peer:
            assert peer.tasks is not None
            peer.tasks.create_task(fail())
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as raised:
        await serve()
    assert all(isinstance(leaf, expected) and message in str(leaf) for leaf in process.leaves(raised.value))


async def test_a_peer_that_has_no_memory_for_one_microbatch_leaves_in_good_order_and_says_why(
    config: RunConfig, store: MemoryStore, trained: Path
) -> None:
    peer = LocalPeer(config, store, resume=trained)

    async def serve() -> None:
        async with peer.running(0):
            assert peer.server is not None
            stage = peer.server.stage
            size, first = config.data.microbatch_size, ROUND * config.microbatches_per_round
            microbatch = Microbatch(index=first, round=ROUND, num_samples=size)
            for _ in range(1 + TRIES):
                slot = stage.admission.admit(microbatch)
                stage.admission.ran_out_of_memory(MemoryError(), slot)
                stage.admission.leave(slot)
            await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as raised:
        async with asyncio.timeout(20.0):
            await serve()
    (fault,) = set(process.leaves(raised.value))
    assert isinstance(fault, Fatal)
    assert str(fault).startswith("stage 0 ran out of memory at 3 microbatches in a row")
    assert Leave() in peer.log.events
    record = await peer.record(0)
    assert record is not None
    assert record.state is PeerState.LEAVING


async def test_what_is_not_about_memory_is_not_said_to_be(
    config: RunConfig, store: MemoryStore, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(run: RunConfig, stage: int, **more: Any) -> torch.nn.Module:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(own_backend, "build_stage", broken)
    peer = LocalPeer(config, store, resume=trained)
    async with asyncio.TaskGroup() as tasks:
        with pytest.raises(RuntimeError, match=r"^mat1 and mat2 shapes cannot be multiplied$"):
            await peer.make_server(0, 0, False, tasks)


async def test_to_and_fro(config: RunConfig, store: MemoryStore, trained: Path) -> None:
    async with (
        LocalPeer(config, store, resume=trained).running(0),
        LocalPeer(config, store, resume=trained).running(1),
        LocalPeer(config, store, resume=trained).running(0) as peer,
    ):
        for stage in (1, 0, 1):
            peer.rebalancer.orders.put_nowait(stage)
            assert await peer.next_served() == stage
        record = await peer.record(1)
        assert record is not None
        assert record.moves == 3


async def test_it_goes_back_if_nobody_gives_it_the_state(
    config: RunConfig, store: MemoryStore, trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(LocalPeer(config, store, resume=trained).running(0))
        peer = await stack.enter_async_context(LocalPeer(config, store, resume=nothing).running(0))
        async with LocalPeer(config, store, resume=trained).running(1):
            pass
        # The only holder of stage 1 is gone.
        peer.rebalancer.orders.put_nowait(1)
        assert await peer.next_served() == 0
        gc.collect()
        assert [made() is None for made in peer.made] == [True, True, False], "nothing keeps the stage that failed"
        number, _ = await peer.state()
        assert number == ROUND
        record = await peer.record(0)
        assert record is not None
        assert (record.state, record.moves) == (PeerState.SERVING, 0)
    assert "cannot begin at stage 1: nobody holds stage 1 any more" in caplog.text


async def test_holders_that_are_announced_and_silent_send_it_back(
    config: RunConfig, store: MemoryStore, trained: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(LocalPeer(config, store, resume=trained).running(0))
        peer = await stack.enter_async_context(LocalPeer(config, store, resume=trained).running(0))
        async with LocalPeer(config, store, resume=trained).running(1) as holder:
            record = await holder.record(1)
            assert record is not None
        # The record is as if the peer had died without a word.
        dead = record.model_copy(update={"state": PeerState.SERVING})
        await holder.directory.announce_peer(dead, 60.0)
        peer.rebalancer.orders.put_nowait(1)
        assert await peer.next_served() == 0
    assert "cannot begin at stage 1: those who hold it do not answer" in caplog.text


async def test_it_serves_nothing_that_it_could_not_download(
    config: RunConfig, store: MemoryStore, trained: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    async def refuse(_: object) -> AsyncIterator[None]:
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
    async def hang(_: object) -> AsyncIterator[None]:
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


async def test_it_stays_if_the_others_of_its_stage_hold_another_state(
    config: RunConfig, store: MemoryStore, trained: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    async def began_anew(
        config: RunConfig, records: Sequence[PeerRecord], channels: ChannelPool
    ) -> list[pb.DescribeReply]:
        replies = await others.answers(config, records, channels)
        for reply in replies:
            reply.lineage = "anew"
        return replies

    monkeypatch.setattr(rebalancer, "answers", began_anew)
    async with (
        LocalPeer(config, store, resume=trained).running(0),
        LocalPeer(config, store, resume=trained).running(1),
        LocalPeer(config, store, resume=trained).running(0) as peer,
    ):
        peer.rebalancer.orders.put_nowait(1)
        await eventually(lambda: "stays at stage 0: too few others serve it with its state" in caplog.text)


async def test_a_peer_that_is_told_to_stop_while_it_drainsleaves(
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
        assert Move(stage=1) not in peer.log.events
        assert await peer.record(1) is None


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

    async def slowly(request: averaging_pb2.DownloadRequest) -> AsyncIterator[averaging_pb2.DownloadReply]:
        asked.set()
        await goes_on.wait()
        async for reply in download(request):
            yield reply

    monkeypatch.setattr(handlers, "download", slowly)
    (tmp_path / "nothing").mkdir()
    joiner = LocalPeer(config, store, resume=tmp_path / "nothing")
    await joiner.rebalancer.goes(1, from_stage=None)
    joiner.served.put_nowait(1)  # The block begins at once.
    async with joiner.running(1):
        await asked.wait()
        last_peer.stop.set()
        await asyncio.sleep(1.5)
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
    """That is so while its last checkpoint is being written, and while one that was due is."""
    monkeypatch.setattr(checkpoints, "LAST_CHECKPOINT_SECONDS", 1.0)
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
    assert f"no checkpoint of round {ROUND} in {folder}: not written within 1 s; does the disk hang?" in caplog.text


async def test_a_peer_that_ends_waits_for_no_retry(
    config: RunConfig, store: MemoryStore, trained: Path, last_peer: LocalPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No caller can reach the peer any more."""
    monkeypatch.setattr(mover, "LAST_DRAIN_SECONDS", 0.0)
    monkeypatch.setattr(stage_server, "StageLimits", partial(StageLimits, orphan_seconds=60.0))
    async with asyncio.timeout(15.0) as patience, LocalPeer(config, store, resume=trained).running(0) as peer:
        server = peer.server
        assert server is not None
        async with trainer(config, [peer]) as train:
            first = ROUND * config.microbatches_per_round
            gone, _ = await train(first), await train(first + 1)
            gone.close()
            await eventually(lambda: server.stage.answers.num_unacknowledged == 1)
            peer.stop.set()
            await peer.has_left()
    assert not patience.expired()


@pytest.fixture
async def idle_peer(
    config: RunConfig, mates: tuple[LocalPeer, LocalPeer], monkeypatch: pytest.MonkeyPatch
) -> LocalPeer:
    """A peer with a part of a round that no trainer goes on with; each stage has one other peer."""
    monkeypatch.setattr(mover, "LAST_QUIET_SECONDS", 0.5)
    _, peer = mates
    await train_all(config, [peer], [ROUND * config.microbatches_per_round])
    return peer


async def test_a_peer_that_is_told_to_stop_where_nobody_trains_does_not_wait_for_its_round(
    idle_peer: LocalPeer,
) -> None:
    idle_peer.stop.set()
    await idle_peer.has_left()


async def test_a_peer_that_is_told_to_stop_while_its_round_waits_for_a_silent_mate_waits_as_well(
    idle_peer: LocalPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise what the peer has would have to be done again."""
    assert idle_peer.server is not None
    monkeypatch.setattr(idle_peer.server.averager, "misses_member", lambda: True)
    idle_peer.stop.set()
    await asyncio.sleep(1.5)
    assert Leave() not in idle_peer.log.events
    monkeypatch.undo()
    await idle_peer.has_left()


async def test_a_peer_that_is_told_to_stop_before_it_moves_gives_up_its_claim(idle_peer: LocalPeer) -> None:
    """Others would believe for a while that it comes to their stage."""
    idle_peer.rebalancer.orders.put_nowait(1)
    await asyncio.sleep(0.5)
    idle_peer.stop.set()
    await idle_peer.has_left()
    claims = [claim for claim in await idle_peer.directory.claims() if claim.peer_id == idle_peer.peer_id]
    assert [claim.state for claim in claims] == [ClaimState.WITHDRAWN]
