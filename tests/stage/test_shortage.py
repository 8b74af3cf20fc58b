"""Too little memory: a peer takes fewer microbatches, and leaves if it has none for one."""

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from swarm.errors import NotReady, Overloaded
from swarm.machine.clock import SystemClock
from swarm.stage.admission import TRIES, Shortage
from swarm.stage.boundary import TOKENS
from swarm.stage.graphs import GraphBudget
from swarm.training.samples import Microbatch
from tests.support.chain import (
    ANY_HOP,
    DILOCO,
    GRAPH_BYTES,
    SYNCHRONOUS,
    Chain,
    Peer,
    eventually,
    running_chain,
    tokens,
)

CPU = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4294967296 bytes.")
GPU = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB.")


def _shortage() -> Shortage:
    return Shortage(1, GraphBudget(limit_bytes=1000, graph_bytes=10))


def test_each_failure_halves_what_is_in_flight_and_the_graphs(caplog: pytest.LogCaptureFixture) -> None:
    budget = GraphBudget(limit_bytes=1000, graph_bytes=10, num_kept=6)
    shortage = Shortage(1, budget)
    for number, (in_flight, most) in enumerate([(12, 6), (6, 3), (3, 1)]):
        shortage.failed(CPU, num_reductions=number, in_flight=in_flight)
        assert shortage.most_in_flight == most
    assert budget.limit_bytes == 30
    assert "no room for 4.0 GiB" in caplog.text
    assert len(caplog.records) == 3


def test_failures_in_a_row_at_one_microbatch_are_the_end() -> None:
    shortage = _shortage()
    shortage.failed(GPU, num_reductions=0, in_flight=1)
    for _ in range(TRIES - 1):
        shortage.failed(GPU, num_reductions=1, in_flight=1)
    shortage.succeeded()
    for _ in range(TRIES - 1):
        shortage.failed(GPU, num_reductions=1, in_flight=1)
    assert shortage.fault is None
    shortage.failed(GPU, num_reductions=1, in_flight=1)
    assert shortage.fault is not None
    said = str(shortage.fault)
    assert "stage 1 ran out of memory at 3 microbatches in a row, one at a time (no room for 4.00 GiB)" in said
    for setting in ("data.microbatch_size", "data.sequence_length", "model.gradient_checkpointing"):
        assert setting in said


# -- at a stage --------------------------------------------------------------------------------------------------------


def _fail(peer: Peer, monkeypatch: pytest.MonkeyPatch, method: str, fails: Callable[[], bool]) -> None:
    """Let a peer's backend run out of memory as long as `fails` returns true."""
    monkeypatch.setattr("swarm.stage.admission.SHORTAGE_RETRY_SECONDS", 0.01)
    real = getattr(peer.backend, method)

    def scripted(*arguments: Any, **options: Any) -> Any:
        if fails():
            raise CPU
        return real(*arguments, **options)

    monkeypatch.setattr(peer.backend, method, scripted)


async def _train_all(chain: Chain, indices: Sequence[int]) -> None:
    async with asyncio.timeout(20.0):
        await chain.train_all(indices)


@pytest.mark.parametrize(("stage", "method"), [(0, "forward"), (1, "forward"), (1, "_collect"), (2, "forward_loss")])
async def test_a_peer_that_fails_with_many_in_flight_takes_fewer_and_loses_nothing(
    stage: int, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_chain(SYNCHRONOUS, max_in_flight=(16, 16, 16)) as chain:
        (peer,) = chain.at(stage)
        _fail(peer, monkeypatch, method, lambda: peer.stage.admission.num_admitted > 2)
        async with peer.held():
            training = asyncio.create_task(_train_all(chain, range(8)))
            if stage == 0:
                await eventually(lambda: peer.stage.admission.num_admitted == 8)
            else:
                await eventually(lambda: peer.stage.admission.num_admitted > 2)
        await training
        assert peer.stage.admission.fault is None
        assert peer.backend.budget.limit_bytes < GRAPH_BYTES, "half as many as there were"
        chain.assert_accumulated(range(8))
        await eventually(lambda: all(peer.stage.admission.num_admitted == 0 for peer in chain.peers))
        chain.assert_idle()


class Ahead(SystemClock):
    """A clock that a test moves forward."""

    seconds = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.seconds


@ANY_HOP
async def test_a_peer_that_fails_at_every_microbatch_gives_up_and_another_does_its_work(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    clock = Ahead()
    async with running_chain(DILOCO, num_peers=(1, 2, 1), hop_clock=clock) as chain:
        broken, sound = chain.at(1)
        _fail(broken, monkeypatch, "forward", lambda: True)
        num_trained = 0
        async with asyncio.timeout(60.0):
            while broken.stage.admission.fault is None:
                await chain.train_all([num_trained])
                num_trained += 1
                clock.seconds += 1000.0  # The broken peer is banned no more.
            await broken.stage.admission.gives_up()
        assert (broken.stage.counters["committed"], sound.stage.counters["committed"]) == (0, num_trained)
        assert sum("no room for 4.0 GiB" in record.getMessage() for record in caplog.records) <= 2 * (TRIES + 1)
        with pytest.raises(NotReady, match="has no memory, and leaves"):
            broken.stage.admission.admit(Microbatch(index=1, round=0, num_samples=2))
    assert "internal error" not in caplog.text


async def test_what_exceeds_the_memory_is_told_to_come_again() -> None:
    """The bound holds for each round separately: microbatches of the next round wait, and must not block those of this
    round."""
    async with running_chain(SYNCHRONOUS) as chain:
        stage = chain.at(1)[0].stage
        microbatch = Microbatch(index=0, round=0, num_samples=2)
        slots = [stage.admission.admit(dataclasses.replace(microbatch, index=index)) for index in range(4)]
        stage.admission.ran_out_of_memory(CPU, slots[0])
        with pytest.raises(Overloaded, match="no memory for more"):
            stage.admission.admit(microbatch)
        assert stage.admission.grants(has_others=False) == 0
        following = stage.admission.admit(dataclasses.replace(microbatch, index=8, round=1))
        for slot in (*slots, following):
            stage.admission.leave(slot)
        slots = [stage.admission.admit(microbatch), stage.admission.admit(microbatch)]
        with pytest.raises(Overloaded, match="no memory for more"):
            stage.admission.admit(microbatch)
        for slot in slots:
            stage.admission.leave(slot)


async def test_an_evaluation_without_memory_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The peer does not leave because of this, since training may still go on."""
    async with running_chain(DILOCO, num_peers=(2, 1, 1)) as chain:
        peer = chain.at(0)[0]
        _fail(peer, monkeypatch, "evaluate", lambda: True)
        async with asyncio.timeout(20.0):
            while not caplog.records:
                await chain.evaluate({TOKENS: tokens(DILOCO, 0)})
        assert peer.stage.admission.fault is None
        assert peer.backend.budget.limit_bytes == GRAPH_BYTES
    assert "a call failed for want of memory: no room for 4.0 GiB" in caplog.text
