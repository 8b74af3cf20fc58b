"""Averaging over real gRPC on loopback."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import grpc
import pytest
import torch

from swarm.averaging.averager import Averager
from swarm.averaging.wire.transport import REPORT, Transport
from swarm.errors import DeadlineExceeded, NotReady, WrongRun, WrongStage
from swarm.rpc.channels import ChannelPool
from swarm.rpc.serving import SERVER_OPTIONS, bind_server
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.rpc.v1.averaging_pb2_grpc import AveragingServiceServicer, add_AveragingServiceServicer_to_server
from swarm.rpc.v1.stage_pb2 import Address
from swarm.types import PROTOCOLS, PeerRecord
from tests.averaging import doubles
from tests.averaging.doubles import make_context, record
from tests.averaging.fake_stage import FakeStage, make_config
from tests.averaging.nodes import Node

pytestmark = pytest.mark.usefixtures("guarded")

until = partial(doubles.until, seconds=60.0)
"""Its usual patience is for virtual time."""


@pytest.fixture
async def nodes() -> AsyncIterator[list[Node]]:
    directory: list[PeerRecord] = []
    nodes = [Node() for _ in range(3)]
    for number, node in enumerate(nodes, start=1):
        await node.start(number, make_config("diloco", microbatches=4, codec="fp16"), directory)
        directory.append(node.record)
    yield nodes
    for node in nodes:
        await node.stop()


async def test_three_members_commit_and_a_joiner_downloads(nodes: list[Node]) -> None:
    for index, node in enumerate(nodes):
        node.stage.learn(index)
    nodes[0].stage.learn(3)
    await until(lambda: all(node.stage.round == 1 for node in nodes))
    assert len({node.stage.digest for node in nodes}) == 1
    result = nodes[0].stage.results[0]
    assert len(result.members) == 3
    joiner = Node()
    await joiner.start(4, make_config("diloco", microbatches=4, codec="fp16"), [node.record for node in nodes])
    try:
        await until(lambda: joiner.stage.round == 1)
        assert torch.equal(joiner.stage.anchor, nodes[0].stage.anchor)
    finally:
        await joiner.stop()


async def test_member_that_stops_in_mid_exchange_is_left_out(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, survivors = nodes[1], [nodes[0], nodes[2]]
    stopping: list[asyncio.Task[None]] = []

    async def die(*_: object) -> None:
        if not stopping:
            stopping.append(asyncio.create_task(victim.kill()))
        await asyncio.sleep(30)

    monkeypatch.setattr(victim.averager.handlers, "serve", die)
    victim.stage.learn(8)
    nodes[2].stage.learn(0, 1)
    await asyncio.sleep(0.2)
    nodes[0].stage.learn(2, 3)
    await until(lambda: all(node.stage.round == 1 for node in survivors))
    assert stopping
    assert survivors[0].stage.digest == survivors[1].stage.digest
    assert survivors[0].stage.results[0].members == tuple(node.record.peer_id for node in survivors)
    assert survivors[0].stage.results[0].num_samples == 8
    assert victim.stage.round == 0


async def test_strangers_are_refused_with_the_right_error(nodes: list[Node]) -> None:
    transport = Transport(nodes[0].channels)
    config = make_config("diloco", microbatches=4, codec="fp16")
    for address, error in (
        (Address(run_id="other", protocol_version=PROTOCOLS.newest, stage=0), WrongRun),
        (Address(run_id=config.run_id, protocol_version=PROTOCOLS.newest, stage=7), WrongStage),
    ):
        with pytest.raises(error):
            await transport.call(nodes[1].record, REPORT, pb.ReportRequest(address=address), timeout_seconds=2.0)


class Dripping(AveragingServiceServicer):
    """A donor that always sends something in time, but next to nothing."""

    async def Download(self, request: pb.DownloadRequest, context: object) -> AsyncIterator[pb.DownloadReply]:
        for _ in range(100):
            await asyncio.sleep(0.1)
            yield pb.DownloadReply(data=b"x")


async def test_a_donor_that_drips_is_given_up() -> None:
    server, channels = grpc.aio.server(options=SERVER_OPTIONS), ChannelPool(insecure=True)
    add_AveragingServiceServicer_to_server(Dripping(), server)  # type: ignore[abstract]  # for the type checker only
    donor = record(1, endpoint=f"127.0.0.1:{bind_server(server, '127.0.0.1', 0, None)}")
    await server.start()
    num_pieces = 0

    async def download() -> None:
        nonlocal num_pieces
        async for _ in Transport(channels).download(donor, pb.DownloadRequest(), silence_seconds=1.0):
            num_pieces += 1

    with pytest.raises(DeadlineExceeded, match=r"only \d+ bytes came"):
        await download()
    assert 0 < num_pieces < 100
    await channels.close()
    await server.stop(None)


class Silent(AveragingServiceServicer):
    """A donor that takes a call, and sends no more than one message."""

    async def Exchange(self, request_iterator: object, context: object) -> AsyncIterator[pb.ExchangeReply]:
        yield pb.ExchangeReply(reduced=pb.Reduced(squared_norm=1.0))
        await asyncio.Event().wait()


async def test_an_exchange_with_a_member_that_falls_silent_ends_long_before_its_deadline() -> None:
    server, channels = grpc.aio.server(options=SERVER_OPTIONS), ChannelPool(insecure=True)
    add_AveragingServiceServicer_to_server(Silent(), server)  # type: ignore[abstract]  # for the type checker only
    member = record(1, endpoint=f"127.0.0.1:{bind_server(server, '127.0.0.1', 0, None)}")
    await server.start()
    with pytest.raises(DeadlineExceeded, match="nothing came from"):
        await Transport(channels).exchange(
            member, pb.ExchangeOpen(), b"", reply_bytes=8, timeout_seconds=600.0, silence_seconds=0.2
        )
    await channels.close()
    await server.stop(None)


async def test_peer_that_does_not_run_yet_is_not_ready() -> None:
    averager = Averager(make_context(record(1)), FakeStage())
    address = Address(run_id=make_config().run_id, protocol_version=PROTOCOLS.newest, stage=0)
    with pytest.raises(NotReady):
        await averager.handlers.handle(REPORT, pb.ReportRequest(address=address))
