"""A newcomer whose only holder lies, or says nothing, does not wait for it without end."""

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peers.stage_peer import own_state
from peers.stage_peer.others import Others
from peers.stage_peer.own_state import OwnState
from peers.stage_peer.resume import ResumeOptions
from swarm.averaging.donor import snapshot_id
from swarm.averaging.wire.transport import REPORT
from swarm.errors import MalformedMessage, NotReady, PeerUnavailable
from swarm.machine.waits import Waits
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.rpc.v1.tensor_pb2 import TensorHeader
from swarm.types import Block
from tests.averaging.doubles import Network, Peer, network_of, peer_id, stages, until
from tests.averaging.fake_stage import make_config
from tests.support.virtual_time import LoopClock, in_virtual_time

SILENT_SECONDS = 6.0
"""As long beside the short timings of these tests as SILENT_SECONDS is beside the real ones."""


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_state, "SILENT_SECONDS", SILENT_SECONDS)
    monkeypatch.setattr("swarm.averaging.donor.SEGMENT_BYTES", 16)


async def _arrive(network: Network, newcomer: Peer, *, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a newcomer get its state as swarm-peer does. Raises what OwnState.arrive raises."""
    stage, clock, waits = newcomer.stage, LoopClock(), Waits()

    async def find_others(*_: object, **__: object) -> Others:
        return Others(held_at=1)

    monkeypatch.setattr(own_state, "find_others", find_others)
    others = [peer.record for peer in network.peers.values() if peer is not newcomer]
    membership = SimpleNamespace(
        config=network.config, clock=clock, waits=waits, known=SimpleNamespace(others=lambda block: others)
    )
    options = SimpleNamespace(resume=ResumeOptions(), checkpoints=None)
    masters = SimpleNamespace(backend=SimpleNamespace(weights=SimpleNamespace(masters={})))

    class _Stage:
        block, context = Block(0), masters

        @property
        def round(self) -> int:
            return stage.round

    async def begin(**_: object) -> None: ...

    member = SimpleNamespace(begin=begin)
    own = OwnState(cast("Any", membership), cast("Any", _Stage()), cast("Any", member), cast("Any", options))
    await own.begin()
    await own.arrive(newcomer.averager)


def _lie(holder: Peer, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a holder never give a state that is of use, though it is announced."""
    honest, honest_id, num_asked = holder.averager.handlers.download, b"", 0

    async def download(request: pb.DownloadRequest) -> AsyncIterator[pb.DownloadReply]:
        nonlocal honest_id, num_asked
        num_asked += 1
        if kind == "nothing":
            raise MalformedMessage("it says no")
        if request.HasField("segment"):
            if kind == "tiny states":
                yield pb.DownloadReply(data=bytes(4))
                return
            if kind == "ever new parts" and request.segment.index:
                raise PeerUnavailable("it says no more")
            request.segment.snapshot = honest_id
            if kind == "wrong results":
                holder.stage.learn(2 * num_asked, 2 * num_asked + 1)
                await until(lambda number=holder.stage.round: holder.stage.round > number)  # type: ignore[misc]
        async for reply in honest(request):
            header = reply.header
            if reply.HasField("result"):
                reply.result.state_digest = "00"
            elif reply.data:
                reply.data = bytes(len(reply.data)) if kind == "wrong segments" else reply.data
            elif kind == "wrong header":
                header.segment_bytes = 0
            else:
                honest_id = snapshot_id(header)
                if kind == "wrong results":
                    yield reply
                    continue
                header.state_digest = f"{num_asked:064x}"
                if kind == "tiny states":
                    del header.tensors[1:], header.segment_digests[:]
                    header.tensors[0].CopyFrom(TensorHeader(name="anchor", encoding="fp32", shape=[1], num_bytes=4))
                    header.segment_digests.append(hashlib.sha256(bytes(4)).digest())
            yield reply

    async def report(request: pb.ReportRequest) -> pb.ReportReply:
        raise PeerUnavailable("it is silent")

    monkeypatch.setattr(holder.averager.handlers, "download", download)
    if kind == "no answer":
        holder.instead[REPORT.name] = report


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("wrong state", "the state that 00000000 gave is wrong: the snapshot does not match its digest"),
        pytest.param("wrong header", "00000000: 72 bytes do not come in 5 segments", marks=pytest.mark.slow),
        pytest.param("tiny states", "the state that 00000000 gave is wrong", marks=pytest.mark.slow),
        ("ever new parts", "00000000: it says no more"),
        pytest.param("wrong segments", "00000000: segment 0 does not match its digest", marks=pytest.mark.slow),
        pytest.param("wrong results", "00000000 twice gave another state", marks=pytest.mark.slow),
        ("nothing", "no peer offers a snapshot that would be of use; 00000000: it says no"),
        ("no answer", "from 00000000: announced, and silent when asked for it"),
    ],
)
@in_virtual_time
async def test_the_only_holder_that_never_gives_its_state_is_not_waited_for_without_end(
    kind: str, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with network_of(make_config("diloco", microbatches=2), 2) as network:
        (holder,) = stages(network, 2)
        holder.learn(0, 1)
        await until(lambda: holder.round == 1)
        _lie(network.peers[peer_id(2)], kind, monkeypatch)
        began_at = asyncio.get_running_loop().time()
        with pytest.raises(NotReady) as ended:
            await asyncio.wait_for(_arrive(network, network.add(1), monkeypatch=monkeypatch), 100.0)
        assert SILENT_SECONDS <= asyncio.get_running_loop().time() - began_at < 3 * SILENT_SECONDS
    assert why in f"{ended.value} {caplog.text}"
    assert "Start this peer again when" in str(ended.value)
    assert "--start-over" not in str(ended.value)
    assert len(caplog.records) < 60, "the same line is not repeated at each try"


@pytest.mark.parametrize("silent_seconds", [0.0, SILENT_SECONDS - 2.0])
@in_virtual_time
async def test_an_honest_holder_is_waited_for(silent_seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    async with network_of(make_config("diloco", microbatches=2), 2) as network:
        (holder,) = stages(network, 2)
        holder.learn(0, 1)
        await until(lambda: holder.round == 1)
        network.freeze(2)
        asyncio.get_running_loop().call_later(silent_seconds, network.thaw, 2)
        newcomer = network.add(1)
        await _arrive(network, newcomer, monkeypatch=monkeypatch)
        assert newcomer.stage.digest == holder.digest
