"""A call measures the link to its peer: how long the tensors took, and nothing else."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from google.protobuf.message import Message

from swarm.generation.engine import collect
from swarm.generation.sampling import Sampling
from swarm.hop.session import PIECE_TOKENS
from swarm.pipeline.swarm_engine import SwarmEngine
from swarm.routing.throughput import Line, Observation
from swarm.rpc import channels
from swarm.rpc.callers import Caller, Callers
from swarm.rpc.serving import MESSAGE_SECONDS
from swarm.rpc.tls import client_options
from swarm.rpc.wire import NewBytes, Piece
from swarm.stage import servicer
from swarm.stage.call import Incoming
from swarm.types import Block, PeerId
from tests.support.chain import DILOCO, SYNCHRONOUS, Chain, eventually, running_chain
from tests.support.manual_clock import ManualClock
from tests.support.proxy import Direction, Proxy


async def test_the_time_that_tensors_take_is_the_links() -> None:
    """Buffers take tensors at once, and a small message passes: only the peer knows when all are there."""
    data = dataclasses.replace(SYNCHRONOUS.data, sequence_length=512)
    config = dataclasses.replace(DILOCO, data=data)
    async with running_chain(config, num_peers=(1, 2, 1)) as chain:
        _, far = chain.at(1)
        host, port = far.record.endpoint.split(":")
        async with Proxy(host, int(port)) as proxy:
            proxy.links[Direction.TO_SERVER].bytes_per_second = 400_000
            chain.update([
                peer.record if peer is not far else peer.record.model_copy(update={"endpoint": proxy.address})
                for peer in chain.peers
            ])  # fmt: skip
            for index in range(8):
                await chain.train_all([index])
            seconds = chain.peers[0].router.expected_seconds(Block(1), far.peer_id, 1)
            assert seconds is not None
            hidden_bytes = 2 * 512 * 32 * 4
            assert seconds > 0.5 * hidden_bytes / 400_000 / 2


@pytest.mark.parametrize("eager", [False, True])
async def test_a_link_is_measured_with_a_credit_and_without_one(eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The question that is asked first without a credit is no part of the measurement."""
    links, clock = list[float | None](), ManualClock()
    async with running_chain(DILOCO, hop_clock=clock) as chain:
        if eager:
            await chain.train_all([0])  # This microbatch's answer brings the credit.
        router, slow = chain.peers[0].router, chain.peers[1]
        succeeded = router.succeeded

        def note(block: Block, peer_id: PeerId, reply: Observation) -> None:
            links.append(reply.link_seconds)
            succeeded(block, peer_id, reply)

        class Slowly(Incoming):
            def __init__(
                self, kind: type[Message], context: Any, caller: Caller, callers: Callers, memory: NewBytes
            ) -> None:
                super().__init__(kind, context, caller, callers, memory)
                self.is_slow = callers is slow.callers

            async def read(self, seconds: float = MESSAGE_SECONDS) -> tuple[Any, list[Piece]]:
                message, pieces = await super().read(seconds)
                if self.is_slow and not message.HasField("ack"):
                    clock.advance(0.5)
                return message, pieces

        monkeypatch.setattr(router, "succeeded", note)
        monkeypatch.setattr(servicer, "Incoming", Slowly)
        await chain.train_all([1])
    # There is one message each way: with a credit the question goes along with the tensors.
    assert links == [0.5]


def test_the_line_is_measured_while_anything_is_on_its_way() -> None:
    line = Line()
    assert line.bytes_per_second == 0.0
    for now, num_bytes in ((10, None), (11, None), (12, 100), (14, 200), (20, None), (21, 0)):
        if num_bytes is None:
            line.leaves(now)
        else:
            line.arrives(num_bytes, now)
    assert line.bytes_per_second == pytest.approx(300 / 5)


def test_a_line_carries_what_it_carried_when_nothing_else_held_it_up() -> None:
    line, now = Line(), 0.0
    measured: list[float] = []
    for seconds in [10.0] * 8 + [2.0] * 8 + [50.0] * 64:
        line.leaves(now)
        line.arrives(100, now + seconds)
        now += seconds + 1
        measured.append(line.bytes_per_second)
    assert measured[7] == pytest.approx(10)
    assert set(measured[15 + 8 : -8]) == {50}, "the other end was busy for a while"
    assert measured[-1] == pytest.approx(2), "but not for ever: the line has become slower"


async def test_nothing_sent_says_nothing_of_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a peer that already has the tensors would seem nearer than it is."""
    links: list[float | None] = []
    async with running_chain(SYNCHRONOUS) as chain:
        succeeded = chain.router.succeeded

        def note(block: Block, peer_id: PeerId, reply: Observation) -> None:
            links.append(reply.link_seconds)
            succeeded(block, peer_id, reply)

        monkeypatch.setattr(chain.router, "succeeded", note)
        first = await chain.train(0)
        again = await chain.train(0, hints={Block(0): chain.peers[0].peer_id})
        first.close()
        await chain.ack(again)
    assert [link is None for link in links] == [False, True]


async def test_a_line_that_microbatches_fill_is_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ping, and its answer, wait behind them."""
    monkeypatch.setattr(channels, "CLIENT_OPTIONS", client_options(50, 200))
    async with _through_a_proxy(monkeypatch) as (chain, proxy, failures):
        for link in proxy.links.values():
            link.bytes_per_second = 200_000
        await chain.train_all([0])
        assert failures == []


async def test_a_line_is_slow_where_the_answer_comes_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is so at home, where less goes up than comes down."""
    async with _through_a_proxy(monkeypatch) as (chain, proxy, failures):
        pool, record = chain.peers[0].channels, chain.peers[0].router.records(Block(1))[0]
        await chain.train_all([0])
        await eventually(lambda: not pool.patience(record, HIDDEN_BYTES).is_needed)
        assert pool.is_connected(record)
        pool.lost(record)
        proxy.links[Direction.TO_CLIENT].bytes_per_second = 100_000
        await chain.train_all([1])
        assert pool.patience(record, HIDDEN_BYTES).is_needed
        assert failures == []


async def test_a_line_that_a_prompt_fills_is_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "CLIENT_OPTIONS", client_options(50, 200))
    async with _through_a_proxy(monkeypatch, width=128) as (chain, proxy, failures):
        proxy.links[Direction.TO_SERVER].bytes_per_second = 300_000
        engine = SwarmEngine(chain.trainer, chain.config)
        assert len(await collect(engine, [1] * PIECE_TOKENS, Sampling(temperature=0.0), 2)) == 2
        assert failures == []


HIDDEN_BYTES = 2 * 512 * 32 * 4


@asynccontextmanager
async def _through_a_proxy(
    monkeypatch: pytest.MonkeyPatch, *, width: int = 32
) -> AsyncIterator[tuple[Chain, Proxy, list[dict[str, object]]]]:
    """A chain with a proxy before its stage 1, and what its stage 0 tells the router of failures there."""
    config = dataclasses.replace(
        DILOCO, data=dataclasses.replace(DILOCO.data, sequence_length=512),
        model=dataclasses.replace(DILOCO.model, d_model=width),
    )  # fmt: skip
    failures: list[dict[str, object]] = []
    async with running_chain(config) as chain:
        first, far = chain.peers[:2]
        monkeypatch.setattr(first.router, "failed", lambda *_, **why: failures.append(why))
        host, port = far.record.endpoint.split(":")
        async with Proxy(host, int(port)) as proxy:
            first.router.update(Block(1), [far.record.model_copy(update={"endpoint": proxy.address})])
            yield chain, proxy, failures


async def test_a_frozen_peer_is_noticed_by_pings_once_its_line_has_shown_that_it_is_fast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channels, "CLIENT_OPTIONS", client_options(50, 500))
    async with _through_a_proxy(monkeypatch) as (chain, proxy, failures):
        first, far = chain.peers[:2]
        await chain.train_all([0])
        await eventually(lambda: not first.channels.patience(first.router.records(Block(1))[0], HIDDEN_BYTES).is_needed)
        async with far.held():
            training = asyncio.create_task(chain.train(1))
            await eventually(lambda: far.stage.ledger.find(1) is not None)
            proxy.stall()
            await eventually(lambda: failures != [])
            proxy.resume()
        await chain.ack(await training)
