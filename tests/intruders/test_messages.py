"""Malformed and mutated messages to every call of a real stage peer. Each gets a proper answer, and nothing breaks.

They come from a member with a peer's token, who may call everything, and from anybody in an open run.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
import torch
from google.protobuf.message import Message

from scripts.benches.shared.proc import held_bytes
from swarm.credentials.identity import Identity, generate
from swarm.rpc import callers
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.rpc.v1 import lease_pb2, stage_pb2
from swarm.rpc.v1.stage_pb2 import Address
from swarm.stage.boundary import HIDDEN, TOKENS
from tests.intruders.host import Host, running
from tests.intruders.mutations import mutant
from tests.support import locked
from tests.support.chunks import chunks

AT_ONCE = 32
MEMORY_BYTES = 200 << 20
"""How much may be added to the process by whatever comes; its caches and arenas have to fit in."""

UNEXPECTED = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL}
"""What an exception that nobody caught ends in."""
CUT_OFF = "Internal error from Core"
"""What gRPC says to a caller whose call ended while it was still writing, whatever the server said."""


@dataclass(frozen=True)
class Attack:
    """A call, with valid messages for it."""

    method: str
    messages: Sequence[Message]
    streams: bool = False

    @property
    def lasts(self) -> bool:
        """Whether the call lasts until its caller ends it."""
        return self.method.endswith("/Hold")


def attacks(address: Address, own_id: str) -> list[Attack]:
    """Every call, with valid messages."""
    tokens, hidden = torch.zeros(2, 17, dtype=torch.int32), torch.zeros(2, 16, 32)
    tensors = [*chunks(TOKENS, tokens), *chunks(HIDDEN, hidden)]
    ballot, standing = pb.Ballot(attempt=1, leader_id=own_id), pb.Standing(round=0)
    contact = pb.Contact(peer_id=own_id, endpoints="127.0.0.1:1")
    common: dict[str, Any] = {"address": address, "peer_id": own_id}
    share = pb.Share(contact=contact, num_samples=2, num_targets=2, norm=1.0, num_elements=10, round_samples=2)
    partner = pb.Partner(stage=1, digest="d", contact=contact)
    evaluation = stage_pb2.EvaluateOpen(address=address, num_samples=2, sequence_length=16)
    opening = stage_pb2.Open(address=address, microbatch=1 << 20, num_samples=2)
    exchange = pb.ExchangeOpen(**common, ballot=ballot, shares_digest="d")
    report = pb.ReportRequest(
        address=address, sender=contact, standing=standing, committed_gaps=[1, 2], prepared=ballot
    )
    unary = {
        "/swarm.rpc.v1.StageService/Hold": stage_pb2.HoldRequest(address=address),
        "/swarm.rpc.v1.StageService/Describe": stage_pb2.DescribeRequest(run_id=address.run_id),
        "/swarm.rpc.v1.LeaseService/Acquire": lease_pb2.AcquireRequest(
            address=address, trainer_id=own_id, count=2, holding=[1], released=[2]
        ),
        "/swarm.rpc.v1.AveragingService/Report": report,
        "/swarm.rpc.v1.AveragingService/Begin": pb.BeginRequest(
            **common, ballot=ballot, standing=standing, drop_gaps=[1]
        ),
        "/swarm.rpc.v1.AveragingService/Average": pb.AverageRequest(
            **common, ballot=ballot, shares=[share], timeout_seconds=0.1
        ),
        "/swarm.rpc.v1.AveragingService/Commit": pb.CommitRequest(
            **common, digest="d", total_squared_norm=1.0, partners=[partner], stage_squared_norm=1.0
        ),
        "/swarm.rpc.v1.AveragingService/Abort": pb.AbortRequest(**common, ballot=ballot, reason="r"),
        "/swarm.rpc.v1.AveragingService/Barrier": pb.BarrierRequest(**common, wait_seconds=0.01),
        "/swarm.rpc.v1.AveragingService/Shared": pb.SharedRequest(**common, digest="d"),
        "/swarm.rpc.v1.AveragingService/Download": pb.DownloadRequest(**common, offer=pb.OfferRequest()),
    }
    streams: dict[str, list[Message]] = {
        "/swarm.rpc.v1.StageService/Train": [
            stage_pb2.TrainRequest(open=opening), *(stage_pb2.TrainRequest(chunks=[chunk]) for chunk in tensors),
            stage_pb2.TrainRequest(ack=stage_pb2.Ack()),
        ],
        "/swarm.rpc.v1.StageService/Evaluate": [
            stage_pb2.EvaluateRequest(open=evaluation),
            *(stage_pb2.EvaluateRequest(chunks=[chunk]) for chunk in tensors),
        ],
        "/swarm.rpc.v1.AveragingService/Exchange": [
            pb.ExchangeRequest(open=exchange), pb.ExchangeRequest(data=b"\x00" * 40)
        ],
    }  # fmt: skip
    segment = pb.DownloadRequest(**common, segment=pb.SegmentRequest(snapshot=b"s", index=1))
    results = pb.DownloadRequest(**common, results=pb.ResultsRequest(standing=standing))
    return [
        *(Attack(method, [message]) for method, message in unary.items()),
        *(Attack("/swarm.rpc.v1.AveragingService/Download", [request]) for request in (segment, results)),
        *(Attack(method, messages, streams=True) for method, messages in streams.items()),
    ]


async def _answer(channel: grpc.aio.Channel, attack: Attack, requests: Sequence[bytes]) -> tuple[Any, str]:
    """Make a call with these bytes, and return how it ended."""
    streaming: Any = channel.stream_stream(attack.method)
    unary: Any = channel.unary_stream(attack.method)
    call: Any = streaming(timeout=20) if attack.streams else unary(requests[0], timeout=20)
    try:
        if attack.streams:
            for request in requests:
                await call.write(request)
            await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            if attack.lasts:
                call.cancel()
                break
    except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
        pass
    return await call.code(), await call.details() or ""


async def bombard(host: Host, channel: grpc.aio.Channel, num_messages: int, seed: int, own_id: str) -> Counter[str]:
    """Send this many messages, several in each stream. Return how the calls ended."""
    known = attacks(host.address, own_id)
    chance = random.Random(seed)
    endings: Counter[str] = Counter()
    sent = 0

    async def one(attack: Attack, requests: list[bytes]) -> None:
        code, details = await _answer(channel, attack, requests)
        endings[code.name] += 1
        assert code not in UNEXPECTED or details == CUT_OFF, (attack.method, code, details)
        assert "internal error" not in details, (attack.method, details)

    while sent < num_messages:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                attack = chance.choice(known)
                requests = [message.SerializeToString() for message in attack.messages]
                victim = chance.randrange(len(requests))
                requests[victim] = mutant(attack.messages[victim], chance)
                tasks.create_task(one(attack, requests))
                sent += len(requests)
    return endings


@pytest.fixture(params=["a member", "anybody in an open run"])
def sides(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Identity, Identity, Identity]:
    """The identities of the peer that serves, of an honest caller, and of the intruder, whose calls need not wait."""
    monkeypatch.setattr(callers, "CALLS_PER_SECOND", 1e9)
    if request.param == "a member":
        return locked.PEER, locked.OTHER_PEER, locked.PEER_TOKEN.admit(generate())
    return locked.OPEN, generate(), generate()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_messages", [400, 50_000])
async def test_no_message_breaks_anything(sides: tuple[Identity, Identity, Identity], num_messages: int) -> None:
    """test_records tries as many records."""
    serving, honest, intruder = sides
    async with running(identity=serving, honest=honest) as host, host.connected(intruder) as channel:
        await host.train()
        await bombard(host, channel, 200, 0, intruder.peer_id)
        before = held_bytes("VmRSS")
        endings = await bombard(host, channel, num_messages, 1, intruder.peer_id)
        assert endings.total() > 0.3 * num_messages
        assert endings["INVALID_ARGUMENT"] > 0
        assert held_bytes("VmRSS") - before < MEMORY_BYTES
        await host.idles()
        assert await host.train() > 0


async def test_a_trainers_messages_come_to_nothing_but_what_trainers_do() -> None:
    async with running() as host, host.connected(locked.TRAINER) as channel:
        for attack in attacks(host.address, locked.TRAINER.peer_id):
            code, _ = await _answer(channel, attack, [attack.messages[0].SerializeToString()])
            allowed = attack.method.rpartition("/")[2] in ("Describe", "Acquire")
            assert code is (grpc.StatusCode.OK if allowed else grpc.StatusCode.PERMISSION_DENIED), attack.method
