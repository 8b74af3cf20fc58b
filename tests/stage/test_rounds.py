"""Rounds of a chain take the steps of one process, and microbatches of the next round wait for the commit."""

import asyncio
import time

import pytest
import torch

from swarm.config import RunConfig
from swarm.errors import StaleMicrobatch
from swarm.hop.answers import HopListener
from swarm.hop.retries import HopLimits
from swarm.model.adapters import trained_parameters
from swarm.model.masks import DropoutKey
from swarm.model.stages import build_transformer
from swarm.rpc.v1.stage_pb2 import DescribeRequest
from swarm.stage import call, servicer
from swarm.stage.boundary import HIDDEN, TOKENS
from swarm.stage.context import StageLimits
from swarm.stage.ledger import EntryState
from swarm.stage.state import digest_of
from swarm.training.samples import Microbatch
from swarm.types import Block
from tests.support.chain import (
    BOTH,
    LORA,
    SYNCHRONOUS,
    assert_close,
    eventually,
    failures_of,
    reference,
    running_chain,
    tokens,
)
from tests.support.chain_rounds import apply_average, begin_next_round, commit_round, member_of
from tests.support.tape import TapeRecorder


async def test_whoever_waits_for_the_next_round_is_answered_when_it_begins() -> None:
    async with running_chain(SYNCHRONOUS) as chain:
        servicer = chain.peers[0].servicer
        request = DescribeRequest(after_round=0, wait_seconds=60.0)
        waiting = asyncio.create_task(servicer.Describe(request, None))
        await servicer.Describe(DescribeRequest(after_round=0, wait_seconds=0.1), None)
        assert not waiting.done()
        await chain.train_all([0])
        await commit_round(chain)
        async with asyncio.timeout(10.0):
            await waiting


@pytest.mark.parametrize(
    ("config", "warms_up"),
    [(SYNCHRONOUS, False), (SYNCHRONOUS, True), pytest.param(LORA, False, marks=pytest.mark.slow)],
    ids=["all", "recorded", "adapters"],
)
async def test_synchronous_rounds_follow_adamw_in_one_process(config: RunConfig, warms_up: bool) -> None:
    """One stage has two peers, and gradients are clipped by their norm over all stages."""
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
    async with running_chain(
        config, num_peers=(1, 2, 1), new_recorder=lambda _: TapeRecorder(), warms_up=warms_up
    ) as chain:
        assert all(bool(peer.backend.function.num_recorded) == warms_up for peer in chain.peers)
        for number in range(2):
            microbatches = range(8 * number, 8 * number + 8)
            losses = await chain.train_all(microbatches, round_number=number)
            await commit_round(chain)
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
            # If a gradient is almost zero, Adam magnifies its rounding error, to a tenth of a step at most.
            assert_close(peer.weights.masters, {name: parameters[name] for name in peer.weights.masters}, 1e-3)
        left, right = chain.at(1)
        assert digest_of(left.weights.state()) == digest_of(right.weights.state())


async def test_a_later_stage_holds_the_next_rounds_microbatches_until_it_commits() -> None:
    async with running_chain(SYNCHRONOUS) as chain:
        first, *others = chain.peers
        await first.runtime.control(lambda: apply_average(first, first.weights.contribute().tensors))
        training = asyncio.create_task(chain.train(8, round_number=1))
        await eventually(lambda: chain.peers[1].stage.admission.num_admitted == 1)
        await asyncio.sleep(0.1)
        assert chain.counts("forwards") == [1, 0, 0]
        await begin_next_round(others)
        await chain.ack(await training)
        assert [peer.stage.ledger.committed(1) for peer in chain.peers] == [{8}] * 3


async def test_stage_0_holds_the_next_rounds_microbatches_while_it_is_averaged() -> None:
    """Where stage 0 is not being averaged, no trainer can have been granted them."""
    async with running_chain(SYNCHRONOUS) as chain:
        first = chain.peers[0]
        training = asyncio.create_task(chain.train(8, round_number=1))
        await eventually(lambda: first.stage.counters["busy_replies"] > 1)
        assert first.stage.admission.num_admitted == 0
        average = await first.runtime.control(first.weights.contribute)
        await eventually(lambda: first.stage.admission.num_admitted == 1)
        await asyncio.sleep(0.1)
        assert chain.counts("forwards") == [0, 0, 0]
        await first.runtime.control(lambda: apply_average(first, average.tensors))
        member_of(first).round_began()
        await begin_next_round(chain.peers[1:])
        await chain.ack(await training)
        assert [peer.stage.ledger.committed(1) for peer in chain.peers] == [{8}] * 3


async def test_who_waits_for_a_peers_commit_hears_of_it_all_the_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait is longer than callers accept silence. The peer says that it needs longer, and is not banned."""
    for module in (call, servicer):
        monkeypatch.setattr(module, "PROGRESS_SECONDS", 0.1)
    limits = HopLimits(silence_seconds=1.0, retry_seconds=0.02)
    async with running_chain(SYNCHRONOUS, hop_limits=limits, round_wait_seconds=2.0) as chain:
        first = chain.peers[0]
        failures = failures_of(first.router)
        await first.runtime.control(lambda: apply_average(first, first.weights.contribute().tensors))
        second = chain.peers[1].stage.admission
        training = asyncio.create_task(chain.train(8, round_number=1))
        await eventually(lambda: second.num_admitted == 1)
        await asyncio.sleep(1.2)
        assert second.num_admitted == 1
        await eventually(lambda: second.num_admitted == 0)  # The peer is not ready for now.
        await eventually(lambda: second.num_admitted == 1)
        await asyncio.sleep(1.2)
        assert failures == []
        began_at = time.monotonic()
        await begin_next_round(chain.peers[1:])
        await chain.ack(await training)
        # The line to that peer does not count as slow either, although two samples waited there before that.
        seconds = first.router.expected_seconds(Block(1), chain.peers[1].peer_id, 1)
        assert seconds is not None
        assert 2 * seconds < time.monotonic() - began_at + 1.1
        assert chain.counts("forwards") == [1, 1, 1]
        chain.assert_idle()


async def test_who_gives_up_while_it_waits_for_a_peers_commit_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (call, servicer):
        monkeypatch.setattr(module, "PROGRESS_SECONDS", 0.1)
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


# -- the end of a round ------------------------------------------------------------------------------------------------


async def test_before_a_round_closes_doubles_and_the_unacknowledged_are_taken_out() -> None:
    async with running_chain(SYNCHRONOUS) as chain:
        middle = chain.peers[1]
        await chain.train_all([0, 1])
        reply = await chain.train(2)
        await member_of(middle).freeze(0, drop=[1])
        assert middle.stage.ledger.committed(0) == {0}
        assert (middle.weights.buckets.open().num_samples, middle.num_idle) == (2, (0, 0, 0, 0))
        await chain.ack(reply)
        assert chain.states(2)[:2] == [EntryState.COMMITTED, None]
        await middle.runtime.control(middle.weights.reopen)
        await chain.train_all([1, 2], accumulate_only_at=1)
        assert middle.stage.ledger.committed(0) == {0, 1, 2}


async def test_what_is_being_undone_is_out_of_the_sum_before_a_round_closes() -> None:
    """This holds although the ledger no longer knows the microbatch."""
    async with running_chain(SYNCHRONOUS) as chain:
        middle = chain.peers[1]
        await chain.train_all([0, 1])
        await chain.train(2)
        entry = middle.stage.ledger.find(2)
        assert entry is not None
        assert entry.computation is not None
        middle.stage.endings.discard(entry.computation)
        await member_of(middle).freeze(0, drop=())
        assert middle.weights.buckets.open().num_samples == 4


async def test_microbatches_of_the_round_before_the_last_are_stale() -> None:
    async with running_chain(SYNCHRONOUS) as chain:
        await begin_next_round([chain.peers[0]])
        await begin_next_round([chain.peers[0]])
        with pytest.raises(StaleMicrobatch, match="round 0 has committed"):
            await chain.train(0)
        assert chain.counts("forwards") == [0, 0, 0]


@pytest.mark.parametrize("falls_behind", ["before it is asked", "while they wait"])
async def test_what_is_ahead_of_a_peer_that_catches_up_goes_to_another(falls_behind: str) -> None:
    """The peer has nothing to do, but whatever it took would have to wait for its download."""
    async with running_chain(SYNCHRONOUS, num_peers=(1, 2, 1)) as chain:
        behind, other = chain.at(1)
        is_behind = falls_behind == "before it is asked"
        behind.stage.present_round.set_behind(is_behind)
        await begin_next_round([peer for peer in chain.peers if peer is not behind])
        if not is_behind:
            other.stage.admission.close()
        training = asyncio.create_task(chain.train_all([8, 9], round_number=1))
        if not is_behind:
            await eventually(lambda: behind.stage.admission.num_admitted == 2)
        behind.stage.present_round.set_behind(True)
        other.stage.admission.open()
        async with asyncio.timeout(StageLimits.round_wait_seconds / 2):
            await training
        assert [peer.stage.counters["forwards"] for peer in (behind, other)] == [0, 2]


@pytest.mark.parametrize("late", [0, 1, 2])
async def test_a_stage_that_has_to_repeat_a_round_gets_it_with_that_rounds_weights(late: int) -> None:
    """The stage lost all its peers and came back from a checkpoint, when the others had committed already."""
    async with running_chain(SYNCHRONOUS, max_in_flight=(2, 2, 2)) as chain:
        await begin_next_round([peer for peer in chain.peers if peer.backend.stage != late])
        # Microbatches that wait for the late stage take no slots from those that this stage needs.
        ahead = [asyncio.create_task(chain.train(index, round_number=1)) for index in (8, 9)]
        if late > 0:
            await eventually(lambda: chain.peers[late].stage.admission.num_admitted == 2)
        await chain.train_all([0, 1], accumulate_only_at=late)
        # A microbatch of the late stage's own round counts there, and nowhere else.
        await chain.train_all([2])
        expected = reference(SYNCHRONOUS, [0, 1, 2])[1]
        sums = chain.peers[late].weights.buckets.open().sums
        assert_close(sums, {name: expected[name] for name in sums}, 1e-5)
        assert chain.num_samples() == [6 if stage == late else 0 for stage in range(3)]
        await begin_next_round([chain.peers[late]])
        for reply in await asyncio.gather(*ahead):
            await chain.ack(reply)
        assert chain.num_samples() == [4, 4, 4]
        await eventually(lambda: chain.is_idle)


@BOTH
async def test_before_another_state_is_installed_everything_is_forgotten(config: RunConfig) -> None:
    async with running_chain(config) as chain:
        first = chain.peers[0]
        await chain.train_all([0])
        async with chain.peers[2].held():
            training = asyncio.create_task(chain.train(1))
            await eventually(lambda: len(chain.peers[2].stage.ledger) == 2)
            training.cancel()
            async with first.stage.changing_state():
                assert len(first.stage.ledger) == 0
            assert first.weights.buckets.open().num_tentative == first.weights.version.users == 0
