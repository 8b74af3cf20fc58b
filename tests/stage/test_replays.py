"""Replays: a microbatch that one stage lacks is computed at that stage alone, and added to its sum once."""

import dataclasses
from collections.abc import Mapping

import pytest
import torch

from swarm.errors import Overloaded
from swarm.stage.call import Incoming
from swarm.training.samples import Microbatch
from swarm.types import Block
from tests.support.chain import ANY_HOP, SYNCHRONOUS, eventually, running_chain

pytestmark = ANY_HOP


@pytest.fixture(autouse=True)
def _offered_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.stage.settings.synchronous.REPLAY_GAP_SECONDS", 0.05)


async def test_a_replay_accumulates_only_where_it_is_missing() -> None:
    async with running_chain(SYNCHRONOUS) as chain:
        await chain.train_all([0, 1], accumulate_only_at=1)
        assert chain.num_samples() == [0, 4, 0]
        assert chain.counts("backwards") == [0, 2, 2], "the stage before the one that lacks it gets no gradient"
        assert [sorted(peer.stage.ledger.committed(0)) for peer in chain.peers] == [[], [0, 1], []]
        await chain.train_all([0, 1], accumulate_only_at=2)
        assert chain.counts("backwards") == [0, 2, 4]
        await chain.train_all([0, 1], accumulate_only_at=0)
        assert chain.counts("backwards") == [2, 2, 4], "those behind know what they answer"
        chain.assert_accumulated([0, 1])
        chain.assert_idle()


@pytest.mark.parametrize("stage", [0, 1, 2])
async def test_a_replay_is_computed_at_the_stage_that_lacks_it_alone(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that knows the microbatch gets no tensors. It sends on and answers the same as before, and knows which
    peer comes next."""
    microbatches, receive, received = range(6), Incoming.tensors, []

    async def note(incoming: Incoming) -> Mapping[str, torch.Tensor]:
        received.append(incoming)
        return await receive(incoming)

    async with running_chain(SYNCHRONOUS, num_peers=(2, 2, 2)) as chain:
        routes = {}
        for microbatch in microbatches:
            reply = await chain.train(microbatch)
            await chain.ack(reply)
            routes[microbatch] = dict(reply.route)
        dead = chain.at(stage)[0]
        lost = [m for m in microbatches if routes[m].pop(Block(stage)) == dead.peer_id]
        assert lost, "the peers of a stage share its work"
        await dead.stop()
        alive = dataclasses.replace(chain, peers=[peer for peer in chain.peers if peer is not dead])
        alive.update([peer.record for peer in alive.peers])
        forwards, backwards = alive.counts("forwards"), alive.counts("backwards")
        monkeypatch.setattr(Incoming, "tensors", note)
        for microbatch in lost:
            # The peer of stage 0 already knows the rest of the path.
            hints = {block: peer for block, peer in routes[microbatch].items() if stage == 0 or block.stage == 0}
            reply = await chain.train(microbatch, accumulate_only_at=stage, hints=hints)
            await chain.ack(reply)
        alive.assert_accumulated(microbatches)
        assert len(received) == len(lost)
        more = [len(lost) * (peer.backend.stage == stage) for peer in alive.peers]
        assert [after - before for before, after in zip(forwards, alive.counts("forwards"), strict=True)] == more
        assert [after - before for before, after in zip(backwards, alive.counts("backwards"), strict=True)] == more
        alive.assert_idle()


async def test_a_replay_goes_to_whoever_did_the_replay_before_it() -> None:
    """It does not go to the peers of the first time, although a peer on the path knows them: they may have lost the
    microbatch."""
    async with running_chain(SYNCHRONOUS, num_peers=(1, 2, 2)) as chain:
        for microbatch in range(4):
            reply = first = await chain.train(microbatch)
            await chain.ack(reply)
            for stage in (2, 1):
                reply = await chain.train(microbatch, accumulate_only_at=stage, hints=reply.route)
                await chain.ack(reply)
            assert reply.route[Block(1)] != first.route[Block(1)]
            assert reply.route[Block(2)] != first.route[Block(2)]
        assert sum(peer.stage.counters["forwards"] for peer in chain.at(2)) == 2 * 4, "the last replay needs none there"


@pytest.mark.parametrize("stage", [0, 1, 2])
async def test_a_replay_is_done_by_another_peer_than_the_one_that_has_it(stage: int) -> None:
    """The leader may no longer reach the peer that has it, although others still do."""
    num_peers = [1, 1, 1]
    num_peers[stage] = 2
    async with running_chain(SYNCHRONOUS, num_peers=num_peers) as chain:
        await chain.train_all(range(4))
        await chain.train_all(range(4), accumulate_only_at=stage)
        assert chain.num_samples() == [16 if each == stage else 8 for each in range(3)]
        assert [sorted(peer.stage.ledger.committed(0)) for peer in chain.at(stage)] == [[0, 1, 2, 3]] * 2
        chain.assert_idle()


@pytest.mark.parametrize("stage", [1, 2])
async def test_a_replay_joins_what_answers_a_gradient_which_it_is_not_sent(stage: int) -> None:
    async with running_chain(SYNCHRONOUS) as chain:
        first = await chain.train(0)
        await chain.ack(await chain.train(0, accumulate_only_at=stage))
        first.close()
        await eventually(lambda: chain.num_samples()[stage] == 2)
        assert chain.counts("forwards")[stage] == 1, "nothing is computed twice"


@pytest.mark.parametrize("stage", [1, 2])
async def test_a_microbatch_does_not_join_its_replay_which_the_stages_behind_have_not_added(stage: int) -> None:
    """The replay's gradient is taken out of the sum, so that the microbatch counts once in the end."""
    async with running_chain(SYNCHRONOUS) as chain:
        await chain.train(0, accumulate_only_at=stage)
        await chain.train_all([0])
        await eventually(lambda: chain.num_samples() == [2, 2, 2])
        chain.assert_accumulated([0])
        assert chain.counts("rolled_back")[stage] == 1


async def test_a_replay_for_another_stage_passes_one_that_has_closed_its_round() -> None:
    """Stage 0 waits until the other stages commit. Microbatches that they lost with a peer have to pass stage 0."""
    async with running_chain(SYNCHRONOUS) as chain:
        await chain.train_all([0, 1])
        first = chain.peers[0]
        await first.stage.context.runtime.control(first.weights.contribute)
        await chain.train_all([2], accumulate_only_at=1)
        await chain.train_all([2], accumulate_only_at=2)
        assert chain.num_samples() == [4, 6, 6]
        microbatch = Microbatch(index=3, round=0, num_samples=2)
        for only_at in (None, 0):
            with pytest.raises(Overloaded, match="is being averaged"):
                first.stage.admission.admit(dataclasses.replace(microbatch, accumulate_only_at=only_at))


async def test_what_another_stage_lost_before_anybody_knew_passes_a_stage_that_has_closed_its_round() -> None:
    """Stage 0's leader does not know of the loss, so the microbatch is run as a new one. Stage 1 waits for stage 0."""
    async with running_chain(SYNCHRONOUS) as chain:
        await chain.train_all([0, 1])
        middle = chain.peers[1]
        await middle.stage.context.runtime.control(middle.weights.contribute)
        await chain.train_all([2])
        assert chain.num_samples() == [6, 4, 6]
        assert [2 in peer.stage.ledger.committed(0) for peer in chain.peers] == [True, False, True]
        await middle.stage.context.runtime.control(middle.weights.reopen)
        await chain.train_all([2], accumulate_only_at=1)
        chain.assert_accumulated([0, 1, 2])
        chain.assert_idle()
