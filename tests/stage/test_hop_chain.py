"""Microbatches through real servers: gradients, versions, rounds and evaluation are those of one process."""

import asyncio
import dataclasses
import gc
import itertools
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch

from swarm.config import RoundsConfig, RunConfig, WireConfig
from swarm.errors import Overloaded, RoundGone
from swarm.hop.answers import HopListener
from swarm.hop.holds import HeldAt
from swarm.hop.retries import HopLimits
from swarm.machine.clock import ManualClock
from swarm.model.adapters import trained_parameters
from swarm.model.masks import DropoutKey
from swarm.model.transformer import build_transformer
from swarm.routing.router import Router
from swarm.routing.throughput import Observation
from swarm.rpc.v1.stage_pb2 import DescribeRequest
from swarm.stage import servicer
from swarm.stage.boundary import HIDDEN, TOKENS
from swarm.stage.buckets import GradientBucket, Version
from swarm.stage.incoming import Incoming
from swarm.stage.runtime import Runtime
from swarm.stage.slots import FEW
from swarm.stage.task_queue import Priority
from swarm.training import optim, samples
from swarm.training.microbatch import Microbatch
from swarm.types import PeerId
from tests.support.chain import (
    DILOCO,
    INT8,
    LORA,
    SYNCHRONOUS,
    Chain,
    Peer,
    assert_close,
    eventually,
    reference,
    running_chain,
    samples_of,
    tokens,
)
from tests.support.partial import partial_config
from tests.support.proxy import Direction, Proxy
from tests.support.rounding import RoundingModel, rounding_reference

_DROPOUT = dataclasses.replace(SYNCHRONOUS, model=dataclasses.replace(SYNCHRONOUS.model, dropout=0.2))
_SHARDS = dataclasses.replace(
    SYNCHRONOUS, model=dataclasses.replace(_DROPOUT.model, block_types=("parallel", "tp", "spd"), num_shards=2)
)


# -- gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [SYNCHRONOUS, DILOCO, _DROPOUT, LORA, _SHARDS])
@pytest.mark.parametrize("graph_bytes", [1 << 30, 0])
async def test_a_chain_accumulates_the_gradient_of_one_process(config: RunConfig, graph_bytes: int) -> None:
    """Several microbatches in flight; graphs kept or computed again."""
    async with running_chain(config, graph_bytes=graph_bytes) as chain:
        losses = await chain.train_all(range(6))
        assert losses == pytest.approx(reference(config, range(6))[0], abs=1e-5)
        chain.assert_accumulated(range(6))
        chain.assert_idle()
        assert chain.counts("committed") == chain.counts("forwards") == chain.counts("backwards") == [6, 6, 6]


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "int8"])
async def test_a_chain_that_rounds_is_one_process_that_rounds_there(dtype: Any) -> None:
    """So is its evaluation. Token ids are not rounded."""
    config = dataclasses.replace(_DROPOUT, wire=WireConfig(dtype=dtype))
    batch = tokens(config, 99)
    async with running_chain(config) as chain:
        losses = await chain.train_all(range(4))
        expected_losses, expected = rounding_reference(config, range(4))
        assert losses == pytest.approx(expected_losses, rel=1e-4)
        for name, value in chain.sums().items():
            assert float((value - expected[name]).norm()) <= 1e-4 * float(expected[name].norm()), name
        loss = await chain.evaluate({TOKENS: batch})
        assert loss == pytest.approx(float(RoundingModel(config).loss(batch, None).detach()), rel=1e-4)
        chain.assert_idle()


async def test_through_a_bottleneck_goes_exactly_what_one_process_computes() -> None:
    config = dataclasses.replace(_DROPOUT, model=dataclasses.replace(_DROPOUT.model, bottleneck_dim=4))
    batch = tokens(config, 99)
    async with running_chain(config) as chain:
        losses = await chain.train_all(range(4))
        assert losses == pytest.approx(reference(config, range(4))[0], abs=1e-5)
        chain.assert_accumulated(range(4))
        loss = await chain.evaluate({TOKENS: batch[:, :9]})
        with torch.no_grad():
            expected = float(build_transformer(config, device="cpu").loss(batch[:, :9].long()))
        assert loss == pytest.approx(expected, abs=1e-5)


async def test_conversations_are_learnt_as_in_one_process() -> None:
    """The rows hold several documents with few targets, and one microbatch has none."""
    config = partial_config(num_stages=3)
    batch = samples_of(config, 7)
    async with running_chain(config, num_peers=(1, 2, 1)) as chain:
        losses = await chain.train_all(range(4))
        assert losses == pytest.approx(reference(config, range(4))[0], abs=1e-5)
        chain.assert_accumulated(range(4))
        loss = await chain.evaluate(batch)
        with torch.no_grad():
            expected = float(build_transformer(config, device="cpu").summed_loss(batch))
        assert loss == pytest.approx(expected / samples.amount(batch).targets, abs=1e-5)
        chain.assert_idle()


async def test_an_int8_replay_is_accumulated_with_the_same_numbers() -> None:
    async with running_chain(INT8) as whole, running_chain(INT8) as parts:
        await whole.train_all([0])
        for stage in (2, 0, 1):
            await parts.train_all([0], accumulate_only_at=stage)
        expected = whole.sums()
        assert all(torch.equal(value, expected[name]) for name, value in parts.sums().items())


async def test_a_task_whose_task_group_has_failed_before_is_not_taken_for_cancelled() -> None:
    """An evaluation is repeated because the swarm moved on, say, and then a sample of text is written."""

    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError

    async with running_chain(SYNCHRONOUS) as chain:
        with suppress(ExceptionGroup):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(fail())
        await chain.ack(await chain.train(0))
        chain.assert_accumulated([0])


async def test_replicas_share_the_work_and_together_hold_the_gradient() -> None:
    async with running_chain(SYNCHRONOUS, num_peers=(2, 2, 2)) as chain:
        await chain.train_all(range(8))
        chain.assert_accumulated(range(8))
        chain.assert_idle()
        assert min(chain.counts("committed")) > 0


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
    """A peer that knows the microbatch is sent nothing, repeats what it sent and answered, and knows the next one."""
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
        lost = [m for m in microbatches if routes[m].pop(stage) == dead.peer_id]
        assert lost, "the peers of a stage share its work"
        await dead.stop()
        alive = dataclasses.replace(chain, peers=[peer for peer in chain.peers if peer is not dead])
        alive.update([peer.record for peer in alive.peers])
        forwards, backwards = alive.counts("forwards"), alive.counts("backwards")
        monkeypatch.setattr(Incoming, "tensors", note)
        for microbatch in lost:
            # The peer of stage 0 need not be told what it knows of the rest.
            hints = {peer: name for peer, name in routes[microbatch].items() if stage == 0 or peer == 0}
            reply = await chain.train(microbatch, accumulate_only_at=stage, hints=hints)
            await chain.ack(reply)
        alive.assert_accumulated(microbatches)
        assert len(received) == len(lost)
        more = [len(lost) * (peer.backend.stage == stage) for peer in alive.peers]
        assert [after - before for before, after in zip(forwards, alive.counts("forwards"), strict=True)] == more
        assert [after - before for before, after in zip(backwards, alive.counts("backwards"), strict=True)] == more
        alive.assert_idle()


async def test_a_replay_goes_to_whoever_did_the_replay_before_it() -> None:
    """It does not go to the peers of the first time, which a peer on its way knows: they may have lost it."""
    async with running_chain(SYNCHRONOUS, num_peers=(1, 2, 2)) as chain:
        for microbatch in range(4):
            reply = first = await chain.train(microbatch)
            await chain.ack(reply)
            for stage in (2, 1):
                reply = await chain.train(microbatch, accumulate_only_at=stage, hints=reply.route)
                await chain.ack(reply)
            assert reply.route[1] != first.route[1]
            assert reply.route[2] != first.route[2]
        assert sum(peer.stage.counters["forwards"] for peer in chain.at(2)) == 2 * 4, "the last replay needs none there"


@pytest.mark.parametrize("stage", [0, 1, 2])
async def test_a_replay_is_done_by_another_peer_than_the_one_that_has_it(stage: int) -> None:
    """The leader may hear nothing of the peer that has it, though others still reach that peer."""
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
    """The replay's gradient is taken out of the sum, so that there is one in the end."""
    async with running_chain(SYNCHRONOUS) as chain:
        await chain.train(0, accumulate_only_at=stage)
        await chain.train_all([0])
        await eventually(lambda: chain.num_samples() == [2, 2, 2])
        chain.assert_accumulated([0])
        assert chain.counts("rolled_back")[stage] == 1


async def test_a_replay_for_another_stage_passes_one_that_has_closed_its_round() -> None:
    """Stage 0 waits for the other stages to commit. What they lost with a peer has to come through stage 0."""
    async with running_chain(SYNCHRONOUS) as chain:
        await chain.train_all([0, 1])
        first = chain.peers[0]
        await first.stage.context.runtime.control(first.weights.close)
        await chain.train_all([2], accumulate_only_at=1)
        await chain.train_all([2], accumulate_only_at=2)
        assert chain.num_samples() == [4, 6, 6]
        microbatch = Microbatch(index=3, round=0, num_samples=2)
        for only_at in (None, 0):
            with pytest.raises(Overloaded, match="is being averaged"):
                first.stage.admission.admit(dataclasses.replace(microbatch, accumulate_only_at=only_at))


async def test_what_another_stage_lost_before_anybody_knew_passes_a_stage_that_has_closed_its_round() -> None:
    """Stage 0's leader does not know, so it has the microbatch run as a new one; stage 1 waits for stage 0."""
    async with running_chain(SYNCHRONOUS) as chain:
        await chain.train_all([0, 1])
        middle = chain.peers[1]
        await middle.stage.context.runtime.control(middle.weights.close)
        await chain.train_all([2])
        assert chain.num_samples() == [6, 4, 6]
        assert [2 in peer.stage.ledger.committed(0) for peer in chain.peers] == [True, False, True]
        await middle.stage.context.runtime.control(middle.weights.reopen)
        await chain.train_all([2], accumulate_only_at=1)
        chain.assert_accumulated([0, 1, 2])
        chain.assert_idle()


# -- versions ----------------------------------------------------------------------------------------------------------


def _versions() -> list[Version]:
    """All copies of weights in this process, anchors included."""
    gc.collect()
    return [found for found in gc.get_objects() if type(found) is Version]


def _num_versions(peer: Peer, others: Sequence[Version]) -> int:
    """How many versions of a peer's stage are in memory, without `others`, which earlier tests have left."""
    names, known = peer.weights.masters.keys(), set(map(id, others))
    return sum(found.parameters.keys() == names and id(found) not in known for found in _versions())


async def test_a_step_between_forward_and_backward_does_not_change_the_gradient() -> None:
    """With DiLoCo the gradient is that of the forward's weights, and few versions come to life meanwhile."""

    def step(peer: Peer) -> bool:
        """Have an inner batch arrive. Returns whether a step was taken."""
        before = peer.weights.version
        peer.weights.buckets.open().add(
            [torch.ones_like(p) for p in before.parameters.values()], samples.Amount(16, 16)
        )
        peer.weights.step_if_due()
        return peer.weights.version is not before

    others = _versions()
    async with running_chain(DILOCO) as chain:
        first, middle, last = chain.peers
        async with last.held():
            training = asyncio.create_task(chain.train(0))
            await eventually(lambda: len(last.stage.ledger) == 1)
            for peer in (first, middle):
                assert await peer.runtime.control(partial(step, peer))
                assert await peer.runtime.control(partial(step, peer))
                assert _num_versions(peer, others) == 2, "the one between is of no use to anybody"
        reply = await training
        assert chain.num_samples() == [2, 2, 2]
        chain.assert_accumulated([0])
        await chain.ack(reply)
        for peer in (first, middle):
            assert await peer.runtime.control(partial(step, peer)), "now nothing is computed with the version before"


# -- rounds ------------------------------------------------------------------------------------------------------------


async def test_whoever_waits_for_the_next_round_is_answered_when_it_begins() -> None:
    async with running_chain(SYNCHRONOUS) as chain:
        servicer = chain.peers[0].servicer
        request = DescribeRequest(after_round=0, wait_seconds=60.0)
        waiting = asyncio.create_task(servicer.Describe(request, None))
        await servicer.Describe(DescribeRequest(after_round=0, wait_seconds=0.1), None)
        assert not waiting.done()
        await chain.train_all([0])
        await _commit(chain)
        async with asyncio.timeout(10.0):
            await waiting


async def test_nothing_is_left_of_a_microbatch_that_counts() -> None:
    """With DiLoCo Python need not look for cycles first. A leftover would hold an inner step's weights and bucket."""
    gc.disable()
    try:
        async with running_chain(DILOCO) as chain:
            reply = await chain.train(0)
            entries = [peer.stage.ledger.find(0) for peer in chain.peers]
            computations = [weakref.ref(entry.computation) for entry in entries if entry and entry.computation]
            assert len(computations) == 3
            await chain.ack(reply)
            del reply
            await eventually(lambda: not any(computation() for computation in computations))
    finally:
        gc.enable()


async def _commit(chain: Chain) -> None:
    """Do by hand what averaging does at the end of a round."""
    averages = []
    for stage in range(3):
        bucket = GradientBucket(
            sums={name: torch.zeros_like(p) for name, p in chain.at(stage)[0].weights.masters.items()}
        )
        for peer in chain.at(stage):
            contribution = await peer.runtime.control(peer.weights.close)
            amount = contribution.amount
            bucket.add([mean * amount.targets for mean in contribution.tensors.values()], amount)
        averages.append(bucket.mean())
    squared_norm = sum(optim.squared_norm(average.values()) for average in averages)
    for peer in chain.peers:
        await peer.runtime.control(partial(_apply, peer, averages[peer.backend.stage], squared_norm))
        peer.stage.round_began()


def _apply(peer: Peer, average: dict[str, torch.Tensor], squared_norm: float = 0.0) -> None:
    peer.weights.commit(average, total_squared_norm=squared_norm, num_samples=16, num_members=1, lineage="")


@pytest.mark.parametrize("config", [SYNCHRONOUS, LORA], ids=["all", "adapters"])
async def test_synchronous_rounds_follow_adamw_in_one_process(config: RunConfig) -> None:
    """Two peers at one stage, and clipping by the norm over all stages."""
    model = build_transformer(config, device="cpu")
    parameters = trained_parameters(model)
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in parameters.values() if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters.values() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=0.01,
        betas=(0.9, 0.95),
    )
    async with running_chain(config, num_peers=(1, 2, 1)) as chain:
        for number in range(3):
            microbatches = range(8 * number, 8 * number + 8)
            losses = await chain.train_all(microbatches, round_number=number)
            await _commit(chain)
            expected = []
            for microbatch in microbatches:
                key = DropoutKey(seed=config.data.seed, microbatch=microbatch)
                loss = model.loss(tokens(config, microbatch).long(), key)
                (loss / 8).backward()  # type: ignore[no-untyped-call]  # torch's
                expected.append(float(loss.detach()))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adamw.step()
            adamw.zero_grad()
            assert losses == pytest.approx(expected, abs=1e-4)
        for peer in chain.peers:
            # Where a gradient is next to nothing, Adam magnifies the rounding: to a tenth of one step at most.
            assert_close(peer.weights.masters, {name: parameters[name] for name in peer.weights.masters}, 1e-3)
        left, right = chain.at(1)
        assert left.weights.state_digest() == right.weights.state_digest()


async def test_diloco_rounds_follow_nesterov_on_the_anchors() -> None:
    """DiLoCo: v <- mu v + g; theta <- theta - lr (g + mu v), g weighted by each member's samples."""
    config = dataclasses.replace(DILOCO, rounds=RoundsConfig(round_samples=16, inner_batch_samples=4))
    async with running_chain(config, num_peers=(1, 2, 1)) as chain:
        members = chain.at(1)
        anchor = {name: value.detach().clone() for name, value in members[0].weights.masters.items()}
        velocity = {name: torch.zeros_like(value) for name, value in anchor.items()}
        microbatches = itertools.count()
        for number in range(2):
            while min(counts := [member.weights.round_samples for member in members]) == 0:
                # Most microbatches may go to one peer, while the other is slow to answer its first.
                await chain.train_all([next(microbatches) for _ in range(10)], round_number=number)
            inner = [{n: p.detach().clone() for n, p in member.weights.masters.items()} for member in members]
            await _commit(chain)
            for name, start in anchor.items():
                steps = [count * (start - values[name]) for count, values in zip(counts, inner, strict=True)]
                gradient = torch.stack(steps).sum(dim=0) / sum(counts)
                velocity[name] = 0.9 * velocity[name] + gradient
                anchor[name] = start - 0.7 * (gradient + 0.9 * velocity[name])
            for member in members:
                assert_close(member.weights.masters, anchor, 1e-6)


async def test_a_later_stage_holds_the_next_rounds_microbatches_until_it_commits() -> None:
    async with running_chain(SYNCHRONOUS) as chain:
        first, *others = chain.peers
        await first.runtime.control(lambda: _apply(first, first.weights.close().tensors))
        training = asyncio.create_task(chain.train(8, round_number=1))
        await eventually(lambda: chain.peers[1].stage.admission.num_admitted == 1)
        await asyncio.sleep(0.1)
        assert chain.counts("forwards") == [1, 0, 0]
        for peer in others:
            await peer.runtime.control(partial(_apply, peer, peer.weights.close().tensors))
            peer.stage.round_began()
        await chain.ack(await training)
        assert [peer.stage.ledger.committed(1) for peer in chain.peers] == [{8}] * 3


@pytest.mark.parametrize(("round_samples", "part"), [(4, 1), (8, 2), (10, 3)])
async def test_a_peer_with_its_part_of_a_round_in_flight_leaves_others_the_rest(round_samples: int, part: int) -> None:
    """Its part of the microbatches, of two samples each, is that of one of two members."""
    rounds = RoundsConfig(setting="synchronous", round_samples=round_samples)
    async with running_chain(dataclasses.replace(SYNCHRONOUS, rounds=rounds)) as chain:
        peer = chain.peers[0]
        average = await peer.runtime.control(peer.weights.close)
        commit = partial(peer.weights.commit, total_squared_norm=1.0, num_samples=4, num_members=2, lineage="")
        await peer.runtime.control(partial(commit, average.tensors))
        microbatch = Microbatch(index=round_samples // 2, round=1, num_samples=2)
        admission = peer.stage.admission
        slots = [admission.admit(microbatch, has_others=True) for _ in range(part)]
        with pytest.raises(Overloaded, match="its part"):
            admission.admit(microbatch, has_others=True)
        admission.leave(slots.pop())
        slots.append(admission.admit(microbatch, has_others=True))
        for slot in (*slots, admission.admit(microbatch)):
            admission.leave(slot)


async def test_stage_0_holds_the_next_rounds_microbatches_while_it_is_averaged() -> None:
    """Where it is not, nobody can have been granted them."""
    async with running_chain(SYNCHRONOUS) as chain:
        first = chain.peers[0]
        training = asyncio.create_task(chain.train(8, round_number=1))
        await eventually(lambda: first.stage.counters["busy_replies"] > 1)
        assert first.stage.admission.num_admitted == 0
        average = await first.runtime.control(first.weights.close)
        await eventually(lambda: first.stage.admission.num_admitted == 1)
        await asyncio.sleep(0.1)
        assert chain.counts("forwards") == [0, 0, 0]
        await first.runtime.control(lambda: _apply(first, average.tensors))
        first.stage.round_began()
        for peer in chain.peers[1:]:
            await peer.runtime.control(partial(_apply, peer, peer.weights.close().tensors))
            peer.stage.round_began()
        await chain.ack(await training)
        assert [peer.stage.ledger.committed(1) for peer in chain.peers] == [{8}] * 3


async def test_who_waits_for_a_peers_commit_hears_of_it_all_the_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait is longer than callers bear silence. A peer that would take longer says so, and is not banned."""
    monkeypatch.setattr(servicer, "PROGRESS_SECONDS", 0.1)
    limits = HopLimits(silence_seconds=1.0, retry_seconds=0.02)
    async with running_chain(SYNCHRONOUS, hop_limits=limits, round_wait_seconds=3.0) as chain:
        first = chain.peers[0]
        failures = _failures(first.router)
        await first.runtime.control(lambda: _apply(first, first.weights.close().tensors))
        second = chain.peers[1].stage.admission
        training = asyncio.create_task(chain.train(8, round_number=1))
        await eventually(lambda: second.num_admitted == 1)
        await asyncio.sleep(2.0)
        assert second.num_admitted == 1
        await eventually(lambda: second.num_admitted == 0)  # Not ready, for now.
        await eventually(lambda: second.num_admitted == 1)
        await asyncio.sleep(2.0)
        assert failures == []
        for peer in chain.peers[1:]:
            await peer.runtime.control(partial(_apply, peer, peer.weights.close().tensors))
            peer.stage.round_began()
        await chain.ack(await training)
        # The line to that peer is not taken for slow either, though two samples waited for two seconds.
        seconds = first.router.expected_seconds(chain.peers[1].peer_id, 1)
        assert seconds is not None
        assert seconds < 0.5
        assert chain.counts("forwards") == [1, 1, 1]
        chain.assert_idle()


async def test_who_gives_up_while_it_waits_for_a_peers_commit_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer, "PROGRESS_SECONDS", 0.1)
    async with running_chain(SYNCHRONOUS) as chain:
        second = chain.peers[1]
        num_tasks = len(asyncio.all_tasks())
        microbatch = Microbatch(index=8, round=1, num_samples=2)
        tensors = {TOKENS: tokens(SYNCHRONOUS, 8), HIDDEN: torch.zeros(2, 16, 32)}
        waiting = asyncio.create_task(chain.peers[0].hop.train(microbatch, tensors, HopListener(), {}))
        await eventually(lambda: second.stage.admission.num_admitted == 1)
        await asyncio.sleep(0.5)
        waiting.cancel()
        await eventually(lambda: second.stage.admission.num_admitted == 0)
        await eventually(lambda: len(asyncio.all_tasks()) <= num_tasks)
        assert second.callers.num_bytes == 0
        assert second.stage.ledger.find(8) is None
        chain.assert_idle()


# -- lines -------------------------------------------------------------------------------------------------------------


async def test_the_time_that_tensors_take_is_the_links() -> None:
    """Buffers take tensors at once, and a small message passes: only the peer knows when all are there."""
    data = dataclasses.replace(SYNCHRONOUS.data, sequence_length=512)
    config = dataclasses.replace(DILOCO, data=data)
    async with running_chain(config, num_peers=(1, 2, 1)) as chain:
        near, far = chain.at(1)
        host, port = far.record.endpoint.split(":")
        async with Proxy(host, int(port)) as proxy:
            proxy.links[Direction.TO_SERVER].bytes_per_second = 200_000
            chain.update([
                peer.record if peer is not far else peer.record.model_copy(update={"endpoint": proxy.address})
                for peer in chain.peers
            ])  # fmt: skip
            for index in range(12):
                await chain.train_all([index])
            to_near, to_far = (chain.peers[0].router.expected_seconds(peer.peer_id, 1) for peer in (near, far))
            assert to_near is not None
            assert to_far is not None
            hidden_bytes = 2 * 512 * 32 * 4
            assert to_far > 0.5 * hidden_bytes / 200_000 / 2
            assert to_far > 2 * to_near


@pytest.mark.parametrize("eager", [False, True])
async def test_a_link_is_measured_with_a_credit_and_without_one(eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The question that is asked first without a credit is no part of the measurement."""
    links, clock = list[float | None](), ManualClock()
    async with running_chain(DILOCO, hop_clock=clock) as chain:
        if eager:
            await chain.train_all([0])  # Its answer brings the credit.
        router = chain.peers[0].router
        succeeded, read = router.succeeded, Incoming.read

        def note(peer_id: PeerId, reply: Observation) -> None:
            links.append(reply.link_seconds)
            succeeded(peer_id, reply)

        async def slowly(incoming: Incoming, *args: float) -> Any:
            message = await read(incoming, *args)
            if incoming._callers is chain.peers[1].callers and not message.HasField("ack"):
                clock.advance(0.5)
            return message

        monkeypatch.setattr(router, "succeeded", note)
        monkeypatch.setattr(Incoming, "read", slowly)
        await chain.train_all([1])
    # There is one message each way: with a credit the question goes along with the tensors.
    assert links == [0.5]


async def test_nothing_sent_says_nothing_of_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a peer that has the tensors already would look nearer than it is."""
    links: list[float | None] = []
    async with running_chain(SYNCHRONOUS) as chain:
        succeeded = chain.router.succeeded

        def note(peer_id: PeerId, reply: Observation) -> None:
            links.append(reply.link_seconds)
            succeeded(peer_id, reply)

        monkeypatch.setattr(chain.router, "succeeded", note)
        first = await chain.train(0)
        again = await chain.train(0, hints={0: chain.peers[0].peer_id})
        first.close()
        await chain.ack(again)
    assert [link is None for link in links] == [False, True]


# -- busy peers --------------------------------------------------------------------------------------------------------


def _failures(*routers: Router) -> list[PeerId]:
    """The peers that these routers are told have failed, from now on."""
    failures: list[PeerId] = []
    for router in routers:
        router.failed = lambda peer_id, **_: failures.append(peer_id)  # type: ignore[method-assign]
    return failures


@pytest.mark.parametrize("full", [0, 1])
async def test_busy_is_waited_out_and_bans_nobody(full: int) -> None:
    """At the first stage the trainer waits; at a later one the stage before it does."""
    max_in_flight = [2 if stage == full else 16 for stage in range(3)]
    async with running_chain(SYNCHRONOUS, max_in_flight=max_in_flight) as chain:
        failures = _failures(chain.router, chain.peers[0].router)
        async with chain.peers[2].held():
            training = asyncio.create_task(chain.train_all(range(6)))
            await eventually(lambda: chain.counts("busy_replies")[full] > 3)
        await training
        chain.assert_accumulated(range(6))
        chain.assert_idle()
        assert failures == []


async def test_a_peer_whose_microbatches_are_all_elsewhere_takes_on_more() -> None:
    """It takes no more than its largest number, and only while the next stage does not refuse what it has."""
    async with running_chain(SYNCHRONOUS, max_in_flight=(2, 16, 16), largest_in_flight=4) as chain:
        first = chain.peers[0].stage.admission
        async with chain.peers[2].held():
            training = asyncio.create_task(chain.train_all(range(6)))
            await eventually(lambda: first.num_admitted == 4)
            await eventually(lambda: chain.counts("busy_replies")[0] > 3)
            assert first.num_admitted == 4
        await training
        chain.assert_accumulated(range(6))
        chain.assert_idle()


async def test_a_peer_that_is_refused_further_on_is_held_up() -> None:
    async with running_chain(SYNCHRONOUS, max_in_flight=(16, 16, 1)) as chain:
        hop = chain.peers[1].hop
        assert not hop.is_held_up
        async with chain.peers[2].held():
            training = asyncio.create_task(chain.train_all(range(2)))
            await eventually(lambda: hop.is_held_up and chain.counts("busy_replies")[2] > 0)
            await eventually(lambda: not chain.peers[0].hop.is_held_up)  # All of its own are taken.
        await training
        await eventually(lambda: not hop.is_held_up)


def _let_work_wait(monkeypatch: pytest.MonkeyPatch, *peers: Peer) -> None:
    """Have these peers say that some tasks are at their compute threads."""

    class BusyRuntime(Runtime):
        @property
        def queue_length(self) -> int:
            return FEW

    for peer in peers:
        monkeypatch.setattr(peer.runtime, "__class__", BusyRuntime)


async def test_a_microbatch_goes_where_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_chain(SYNCHRONOUS, num_peers=(4, 1, 1)) as chain:
        busy, *others = chain.at(0)
        _let_work_wait(monkeypatch, busy)
        failures = _failures(chain.router)
        for index in range(6):
            reply = await chain.train(index)
            assert reply.num_busy == 0, "the window is not to shrink for it"
            await chain.ack(reply)
        assert busy.stage.counters["committed"] == 0
        assert busy.stage.counters["busy_replies"] > 0
        assert sum(peer.stage.counters["committed"] for peer in others) == 6
        assert not chain.trainer.is_held_up
        assert failures == []
        chain.assert_accumulated(range(6))


@pytest.mark.parametrize(("num_peers", "num_sent_on"), [(1, 0), (3, 0), (4, 1), (9, 2)])
async def test_where_work_waits_everywhere_the_last_one_that_is_asked_takes_it(
    num_peers: int, num_sent_on: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among a few peers every sender knows enough of them: the first one takes it."""
    async with running_chain(SYNCHRONOUS, num_peers=(num_peers, 1, 1)) as chain:
        _let_work_wait(monkeypatch, *chain.at(0))
        await chain.ack(await chain.train(0))
        assert sum(peer.stage.counters["busy_replies"] for peer in chain.at(0)) == num_sent_on
        chain.assert_accumulated([0])


async def test_busy_against_a_credit_bans_nobody() -> None:
    """A credit is advice: by the time it is used, somebody else may have taken the room."""
    async with running_chain(SYNCHRONOUS, max_in_flight=(1, 1, 1)) as chain:
        await chain.train_all([0])
        failures = _failures(chain.router)
        async with chain.another_trainer() as other:
            async with chain.peers[2].held():
                theirs = asyncio.create_task(chain.train(1, hop=other))
                await eventually(lambda: chain.peers[0].stage.admission.num_admitted == 1)
                ours = asyncio.create_task(chain.train_all([2]))
                await eventually(lambda: chain.counts("busy_replies")[0] > 0)
            await chain.ack(await theirs)
            await ours
        chain.assert_accumulated([0, 1, 2])
        assert failures == []


@pytest.fixture
def talkative(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send signs of life all the time."""
    monkeypatch.setattr(servicer, "PROGRESS_SECONDS", 0.01)


@pytest.mark.usefixtures("talkative")
async def test_a_slow_peer_with_a_full_queue_is_not_taken_for_stalled() -> None:
    clock = ManualClock()
    async with running_chain(DILOCO, hop_clock=clock) as chain:
        first = chain.peers[0]
        chain.router.succeeded(
            first.peer_id, Observation(num_samples=2, busy_seconds=10.0, link_seconds=None, queue_length=17)
        )
        async with first.held():
            training = asyncio.create_task(chain.train(0))
            await eventually(lambda: len(first.stage.ledger) == 1)
            clock.advance(18 * 10.0)
            await asyncio.sleep(0.2)
        reply = await training
        assert reply.num_reroutes == 0
        await chain.ack(reply)


@pytest.mark.usefixtures("talkative")
async def test_who_stalls_alone_is_asked_again_and_given_longer() -> None:
    """The peer has answered no call yet, and may be no faster than that."""
    clock = ManualClock()
    async with running_chain(DILOCO, hop_clock=clock) as chain:
        first = chain.peers[0]
        async with first.held():
            training = asyncio.create_task(chain.train(0))
            await eventually(lambda: len(first.stage.ledger) == 1)
            clock.advance(121.0)
            await eventually(lambda: first.stage.admission.num_admitted == 0)
            await eventually(lambda: first.stage.admission.num_admitted == 1, meanwhile=lambda: clock.advance(0.01))
            clock.advance(200.0)
            await asyncio.sleep(0.2)
        reply = await training
        assert reply.num_reroutes == 1
        await chain.ack(reply)


async def test_a_leaving_peer_is_left_alone_and_not_banned() -> None:
    async with running_chain(SYNCHRONOUS, num_peers=(1, 2, 1)) as chain:
        leaving, staying = chain.at(1)
        leaving.stage.admission.close()
        await chain.train_all(range(4))
        assert (leaving.stage.counters["forwards"], staying.stage.counters["forwards"]) == (0, 4)
        assert chain.peers[0].router.banned(1) == set()


# -- evaluation --------------------------------------------------------------------------------------------------------


async def test_evaluation_is_the_references_on_the_anchor() -> None:
    """Inner steps since then do not count, and dropout is off."""
    config = dataclasses.replace(
        DILOCO, model=_DROPOUT.model, rounds=RoundsConfig(round_samples=16, inner_batch_samples=2)
    )
    model = build_transformer(config, device="cpu")
    batch = tokens(config, 99)
    async with running_chain(config) as chain:
        await chain.train_all(range(4))
        assert min(peer.weights.round_samples for peer in chain.peers) > 0
        with torch.no_grad():
            expected = float(model.loss(batch.long()))
        loss = await chain.evaluate({TOKENS: batch})
        assert loss == pytest.approx(expected, abs=1e-5)
        chain.assert_idle()


async def test_the_anchor_of_the_round_before_can_still_be_evaluated() -> None:
    async with running_chain(SYNCHRONOUS) as chain:
        batch = {TOKENS: tokens(SYNCHRONOUS, 99)[:1, :6]}
        before = await chain.evaluate(batch)
        await chain.train_all(range(8))
        await _commit(chain)
        assert await chain.evaluate(batch) == before
        assert await chain.evaluate(batch, round_number=1) != before
        await chain.train_all(range(8, 16), round_number=1)
        await _commit(chain)
        with pytest.raises(RoundGone, match=r"no peer of stage 0 has .*: round 0 is not kept, this peer is at 2"):
            await chain.evaluate(batch)


async def test_an_evaluation_has_its_turn_however_much_training_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes after older work and before later work: otherwise it would never end at a bottleneck."""
    async with running_chain(SYNCHRONOUS) as chain:
        last, order = chain.peers[2], list[str]()
        inputs = {TOKENS: tokens(SYNCHRONOUS, 99), HIDDEN: torch.zeros(2, 16, 32)}
        evaluate = last.backend.evaluate

        def note(*args: Any, **named: Any) -> torch.Tensor:
            order.append("evaluate")
            return evaluate(*args, **named)

        monkeypatch.setattr(last.backend, "evaluate", note)

        def forward(name: str) -> asyncio.Task[tuple[None, float]]:
            work = last.runtime.run(partial(order.append, name), priority=Priority.FORWARD, age=last.runtime.next_age())
            return asyncio.create_task(work)

        async with last.held():
            forwards = [forward("before")]
            await eventually(lambda: last.runtime.queue_length == 2)
            evaluating = asyncio.create_task(chain.peers[1].hop.evaluate(inputs, [HeldAt(last.peer_id, 0)]))
            await eventually(lambda: last.runtime.queue_length == 3)
            forwards += [forward("after") for _ in range(3)]
            await eventually(lambda: last.runtime.queue_length == 6)
        await asyncio.gather(evaluating, *forwards)
        assert order == ["before", "evaluate", "after", "after", "after"]


async def test_an_evaluation_that_waits_keeps_no_rounds_weights() -> None:
    async with running_chain(SYNCHRONOUS) as chain:
        last = chain.peers[2]
        inputs = {TOKENS: tokens(SYNCHRONOUS, 99), HIDDEN: torch.zeros(2, 16, 32)}
        async with last.held():
            evaluating = asyncio.create_task(chain.peers[1].hop.evaluate(inputs, [HeldAt(last.peer_id, 0)]))
            await eventually(lambda: last.runtime.queue_length == 2)
            # Control work comes first: two rounds pass.
            passing = [
                asyncio.create_task(last.runtime.control(lambda: _apply(last, last.weights.close().tensors)))
                for _ in range(2)
            ]
            await eventually(lambda: last.runtime.queue_length == 4)
        await asyncio.gather(*passing)
        with pytest.raises(RoundGone, match="round 0 is not kept"):
            await evaluating
