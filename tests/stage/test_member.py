"""A stage enters a run with a state that no peer gave it, and copies the state at the beginning of a round."""

import asyncio
import dataclasses
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

from swarm.config import RunConfig
from swarm.errors import IntegrityError
from swarm.stage.computation import Computation
from swarm.stage.member import StageMember
from swarm.stage.staging import HostReader
from swarm.stage.state import digest_of
from swarm.stage.weights import Round
from swarm.training.round_member import Contribution, RoundResult, Snapshot, Tensors
from tests.support.chain import BOTH, DILOCO, PATIENCE_SECONDS, SYNCHRONOUS, eventually, running_chain
from tests.support.commits import result_of


def _result(round_number: int, contribution: Contribution) -> RoundResult:
    return result_of(round_number, contribution.tensors, total_squared_norm=1.0, lineage=f"after {round_number}")


@BOTH
async def test_what_a_commit_starts_copies_the_state_of_the_new_round(config: RunConfig) -> None:
    async with running_chain(config) as chain:
        peer = chain.peers[0]
        committed: list[int] = []
        member = StageMember(peer.stage, num_alive=lambda: 1, on_commit=lambda: committed.append(peer.stage.round))
        for number in range(2):
            await chain.train_all(range(8 * number, 8 * number + 2), round_number=number)
            await member.apply(_result(number, await member.freeze(number, drop=())))
            snapshot = await member.snapshot()
            assert (snapshot.round, snapshot.lineage) == (number + 1, f"after {number}")
            assert snapshot.digest == digest_of(snapshot.tensors) == digest_of(peer.weights.state())
            # The other stages of this chain commit nothing.
            for other in chain.peers[1:]:
                other.weights.round = Round(number=number + 1, run_samples=16 * (number + 1))
        assert committed == [1, 2]


@pytest.fixture
def digesting(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """An event. Until it is set, no state is digested."""
    let_go = threading.Event()

    def digest_later(tensors: Tensors, reader: HostReader | None = None) -> str:
        assert let_go.wait(PATIENCE_SECONDS)
        return digest_of(tensors, reader)

    monkeypatch.setattr("swarm.stage.member.digest_of", digest_later)
    yield let_go
    let_go.set()


@BOTH
async def test_a_stage_trains_while_its_state_is_digested(config: RunConfig, digesting: threading.Event) -> None:
    """A digest of several GB takes seconds. Only the next commit, which writes to that state, waits for it."""
    async with running_chain(config) as chain:
        peer = chain.peers[0]
        member = StageMember(peer.stage, num_alive=lambda: 1)
        await chain.train_all([0])
        digest = await member.apply(_result(0, await member.freeze(0, drop=())))
        expected = digest_of(peer.weights.state())
        for other in chain.peers[1:]:
            other.weights.round = Round(number=1, run_samples=16)
        await chain.train_all(range(8, 16), round_number=1)
        assert peer.weights.round.stepped.samples == (0 if config.rounds.synchronous else 16)
        second = asyncio.create_task(member.apply(_result(1, await member.freeze(1, drop=()))))
        await asyncio.sleep(0.02)
        assert not digest.done()
        assert peer.stage.round == 1
        digesting.set()
        assert await digest == member.reports[0].state_digest == expected
        assert await (await second) == digest_of(peer.weights.state()) != expected


async def test_a_commit_waits_until_the_state_before_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are made outside the compute thread, also of moments to which the commit writes."""
    copying, let_go = threading.Event(), threading.Event()

    def copy_later(reader: HostReader, tensor: torch.Tensor) -> torch.Tensor:
        copying.set()
        assert let_go.wait(PATIENCE_SECONDS)
        return tensor.detach().clone()

    async with running_chain(SYNCHRONOUS) as chain:
        peer = chain.peers[0]
        member = StageMember(peer.stage, num_alive=lambda: 1)
        for number in range(2):
            await chain.train_all([8 * number], round_number=number)
            contribution = await member.freeze(number, drop=())
            if number == 1:
                monkeypatch.setattr(HostReader, "copy", copy_later)
                pinning = asyncio.create_task(member.snapshot())
                await eventually(copying.is_set)
            committing = asyncio.create_task(member.apply(_result(number, contribution)))
            if number == 1:
                await asyncio.sleep(0.02)
                assert peer.stage.round == 1
                let_go.set()
                snapshot = await pinning
                assert (snapshot.round, snapshot.digest) == (1, digest_of(snapshot.tensors))
            await committing
            for other in chain.peers[1:]:
                other.weights.round = Round(number=number + 1, run_samples=16 * (number + 1))
        assert peer.stage.round == 2


async def test_a_checkpoint_s_state_enters_with_its_position() -> None:
    async with running_chain(DILOCO) as chain:
        peer = chain.peers[0]
        member = StageMember(peer.stage, num_alive=lambda: 1)
        initial = await member.snapshot()
        tensors = {name: value + 1 for name, value in initial.tensors.items()}
        snapshot = Snapshot(round=40, run_samples=640, lineage="forty", tensors=tensors, digest=digest_of(tensors))
        await member.install(snapshot, highest_microbatch=321, source="checkpoint")
        progress = member.progress()
        assert (progress.round, progress.run_samples, progress.lineage) == (40, 640, "forty")
        assert progress.highest_microbatch == 321
        assert digest_of(peer.weights.state()) == snapshot.digest
        assert (await member.snapshot()).digest == snapshot.digest
        with pytest.raises(IntegrityError):
            await member.install(dataclasses.replace(snapshot, digest="0"), source="checkpoint")


@BOTH
@pytest.mark.parametrize("held", [True, False])
async def test_a_closing_that_was_cut_short_is_reopened(config: RunConfig, held: bool) -> None:
    """The leader died, which ended the call. It does not matter whether the compute thread had already begun."""
    async with running_chain(config) as chain:
        peer = chain.peers[1]
        member = StageMember(peer.stage, num_alive=lambda: 1)
        reply = await chain.train(0)
        last_undo = peer.held()
        if held:
            await last_undo.__aenter__()
        closing = asyncio.create_task(member.freeze(0, drop=()))
        if held:
            await asyncio.sleep(0.02)
        else:
            await eventually(lambda: peer.weights.round.closed)
        closing.cancel()
        with suppress(asyncio.CancelledError):
            await closing
        if held:
            await last_undo.__aexit__(None, None, None)
        await member.reopen(0)
        assert not peer.weights.round.closed
        reply.close()
        await chain.train_all([1])
        assert 1 in peer.stage.ledger.committed(0)


async def test_what_comes_while_a_closing_waits_for_the_compute_thread_does_not_join_the_sum() -> None:
    """So nothing has to be taken out again."""
    async with running_chain(SYNCHRONOUS) as chain:
        last = chain.peers[2]
        member = StageMember(last.stage, num_alive=lambda: 1)
        await chain.train_all([0])
        async with last.held():
            closing = asyncio.create_task(member.freeze(0, drop=()))
            training = asyncio.create_task(chain.train(1))
            await eventually(lambda: last.stage.counters["forwards"] == 2)
            assert last.stage.ledger.find(1) is None
        contribution = await closing
        assert contribution.committed == {0}
        assert contribution.num_samples == SYNCHRONOUS.data.microbatch_size
        (await training).close()


async def test_what_begins_between_an_abort_and_the_result_that_is_decided_all_the_same_joins_no_sum() -> None:
    """A member that missed the commit opens the round again, and then learns of the result."""
    async with running_chain(SYNCHRONOUS) as chain:
        last = chain.peers[2]
        member = StageMember(last.stage, num_alive=lambda: 1)
        await chain.train_all([0])
        result = _result(0, await member.freeze(0, drop=()))
        await member.reopen(0)
        async with last.held():
            before = asyncio.create_task(chain.train(1))
            await eventually(lambda: last.stage.ledger.find(1) is not None)
            applying = asyncio.create_task(member.apply(result))
            await eventually(lambda: last.weights.round.closed)
            after = asyncio.create_task(chain.train(2))
            await eventually(lambda: last.stage.counters["forwards"] == 3)
        await applying
        for training in (before, after):
            (await training).close()
        assert (last.weights.round.number, last.weights.buckets.open().num_samples) == (1, 0)


@BOTH
async def test_what_comes_while_a_state_is_installed_is_not_taken_for_counted(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_chain(config) as chain:
        last, num_begun = chain.peers[2], 0
        begin = last.stage.begin

        def counted(*arguments: Any) -> Computation:
            nonlocal num_begun
            num_begun += 1
            return begin(*arguments)

        member = StageMember(last.stage, num_alive=lambda: 1)
        snapshot = await member.snapshot()
        await chain.train(1)
        async with last.held():
            # Tentative gradients are rolled back first, and that has to wait.
            installing = asyncio.create_task(member.install(snapshot))
            await eventually(lambda: last.stage.ledger.find(1) is None)
            monkeypatch.setattr(last.stage, "begin", counted)
            training = asyncio.create_task(chain.train(0))
            await eventually(lambda: num_begun > 0)
            await asyncio.sleep(0.1)
        await installing
        await chain.ack(await training)
        assert last.stage.ledger.committed(0) == {0}
        assert last.weights.buckets.open().num_samples == config.data.microbatch_size
