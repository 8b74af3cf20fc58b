"""Bad messages to a stage are refused with the right error, and the peer goes on serving."""

import asyncio
import gc
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
import pytest
import torch

from swarm.errors import (
    IncompatibleVersion,
    MalformedMessage,
    Overloaded,
    PeerUnavailable,
    RoundMismatch,
    SwarmError,
    WrongRun,
    WrongStage,
)
from swarm.rpc.ask import describe
from swarm.rpc.bounds import CHUNK_BYTES
from swarm.rpc.failures import translate
from swarm.rpc.tls import CLIENT_OPTIONS, MAX_MESSAGE_BYTES
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.rpc.v1.stage_pb2_grpc import StageServiceStub
from swarm.rpc.v1.tensor_pb2 import TensorChunk, TensorHeader
from swarm.rpc.wire import TensorReader
from swarm.stage import call as stage_call
from swarm.stage.boundary import TOKENS
from swarm.types import PROTOCOLS
from tests.support.chain import DILOCO, INT8, SYNCHRONOUS, Chain, Peer, eventually, running_chain, tokens
from tests.support.chunks import chunks, int8_blocks

_TOKENS = tokens(SYNCHRONOUS, 0)
_HIDDEN = torch.zeros(2, 16, 32)
_WRONG_TOKENS = _TOKENS.index_fill(1, torch.tensor([3]), 64)
_NAN = _HIDDEN.index_fill(1, torch.tensor([3]), float("nan"))


@pytest.fixture
async def chain() -> AsyncIterator[Chain]:
    """A chain. At the end of each test no slot may be lost, and a valid microbatch must pass."""
    async with running_chain(SYNCHRONOUS) as chain:
        yield chain
        await eventually(lambda: all(peer.stage.admission.num_admitted == 0 for peer in chain.peers))
        await chain.train_all([0, 1])
        chain.assert_accumulated([0, 1])
        chain.assert_idle()


def _open(**changes: Any) -> pb.TrainRequest:
    address = pb.Address(
        run_id=changes.pop("run_id", SYNCHRONOUS.run_id),
        stage=changes.pop("stage", 1),
        variant=changes.pop("variant", 0),
        protocol_version=changes.pop("protocol_version", PROTOCOLS.newest),
    )
    return pb.TrainRequest(open=pb.Open(**{"address": address, "microbatch": 0, "num_samples": 2, **changes}))


def _tensors(**tensors: torch.Tensor) -> list[pb.TrainRequest]:
    return [pb.TrainRequest(chunks=[chunk]) for name, tensor in tensors.items() for chunk in chunks(name, tensor)]


async def _send(peer: Peer, method: str, requests: Iterable[Any]) -> list[Any]:
    """Send messages, and return all answers of a peer. Raises the error with which it refuses."""
    async with grpc.aio.insecure_channel(peer.record.endpoint, options=CLIENT_OPTIONS) as channel:
        call = getattr(StageServiceStub(channel), method)(iter(requests), timeout=20)
        try:
            return [reply async for reply in call]
        except grpc.aio.AioRpcError as error:
            raise translate(error) from None


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (pb.DescribeRequest(), None),
        (pb.DescribeRequest(stage=1), None),
        (pb.DescribeRequest(stage=0), "serves stage 1, not 0"),
        (pb.DescribeRequest(stage=1, variant=2), r"serves stage 1, not 1\.2"),
    ],
)
async def test_a_peer_describes_a_block_that_it_serves(chain: Chain, request_: Any, says: str | None) -> None:
    async with grpc.aio.insecure_channel(chain.peers[1].record.endpoint) as channel:
        describing = describe(channel, request_, seconds=20.0)
        if says is None:
            assert (await describing).stage == 1
        else:
            with pytest.raises(WrongStage, match=says):
                await describing


_REFUSED: list[tuple[list[Any], type[SwarmError], str]] = [
    ([_open(stage=2)], WrongStage, "serves stage 1, not 2"),
    ([_open(stage=4_000_000_000)], WrongStage, "serves stage 1"),
    ([_open(variant=1)], WrongStage, r"serves stage 1, not 1\.1"),
    ([_open(variant=4_000_000_000)], WrongStage, "serves stage 1"),
    ([_open(run_id="other.0123456789abcdef")], WrongRun, "run 'other.0123456789abcdef' is not"),
    ([_open(run_id="r" * 100_000)], WrongRun, "which this peer serves"),
    ([_open(protocol_version=99)], IncompatibleVersion, r"speaks protocol 99, and this peer \d+( to \d+)?: update"),
    ([_open(num_samples=3)], MalformedMessage, "has 2 samples, not 3"),
    ([_open(round=1)], MalformedMessage, "microbatch 0 is not of round 1"),
    ([], MalformedMessage, "begins with Open"),
    ([pb.TrainRequest()], MalformedMessage, "begins with Open"),
    ([pb.TrainRequest(ack=pb.Ack())], MalformedMessage, "begins with Open"),
    ([_open()], MalformedMessage, "ended before its tensors"),
    ([_open(), *_tensors(tokens=_TOKENS)], MalformedMessage, "ended before its tensors"),
    ([_open(), _open()], MalformedMessage, "a tensor chunk is expected"),
    ([_open(), *_tensors(tokens=_TOKENS[:, 1:])], MalformedMessage, r"\[2, 16\], expected 'int32' \[2, 17\]"),
    ([_open(), *_tensors(tokens=_TOKENS.float())], MalformedMessage, "'fp32' .*expected 'int32'"),
    ([_open(), *_tensors(hidden=_HIDDEN.half())], MalformedMessage, "'fp16' .*expected 'fp32'"),
    ([_open(), *_tensors(weights=_HIDDEN)], MalformedMessage, "'weights' is not expected"),
    ([_open(), *_tensors(tokens=_TOKENS, hidden=_NAN)], MalformedMessage, "holds NaN"),
    ([_open(), *_tensors(tokens=_WRONG_TOKENS, hidden=_HIDDEN)], MalformedMessage, "outside the vocabulary"),
]
"""What a peer of stage 1 is sent, and how it refuses that."""


async def test_what_makes_no_sense_is_refused(chain: Chain) -> None:
    for requests, error, message in _REFUSED:
        with pytest.raises(error, match=message):
            await _send(chain.peers[1], "Train", requests)


@pytest.mark.parametrize(
    ("hidden", "message"),
    [
        (int8_blocks(float("nan")), "a scale of int8 is not a number"),
        (int8_blocks(-1.0), "a scale of int8 is not a number"),
        (int8_blocks(600.0), "numbers beyond 65504"),
        (int8_blocks(1.0, code=-128), "holds the code -128"),
        (int8_blocks(1.0, num_blocks=9), r"\[1170\], expected 'int8' \[1040\]"),
        (_HIDDEN, "'fp32' .*expected 'int8'"),
    ],
)
async def test_blocks_that_nobody_encodes_are_refused_and_change_nothing(hidden: torch.Tensor, message: str) -> None:
    """This holds for forwards and for evaluation."""
    requests = [_open(run_id=INT8.run_id), *_tensors(tokens=_TOKENS, hidden=hidden)]
    evaluation = [*_evaluate(run_id=INT8.run_id), *_as_evaluation(tokens=_TOKENS, hidden=hidden)]
    async with running_chain(INT8) as chain:
        with pytest.raises(MalformedMessage, match=message):
            await _send(chain.peers[1], "Train", requests)
        with pytest.raises(MalformedMessage, match=message):
            await _send(chain.peers[1], "Evaluate", evaluation)
        assert not any(value.any() for value in chain.sums().values())
        await chain.train_all([0])
        assert chain.num_samples() == [2, 2, 2]
        chain.assert_idle()


async def test_a_tensor_that_claims_to_be_huge_is_refused_before_it_comes(chain: Chain) -> None:
    header = TensorHeader(name=TOKENS, encoding="int32", shape=(2, 17), num_bytes=1 << 40)
    with pytest.raises(MalformedMessage, match="1099511627776 bytes, expected 136"):
        await _send(chain.peers[1], "Train", [_open(), pb.TrainRequest(chunks=[TensorChunk(header=header)])])


async def test_a_tensor_that_goes_on_and_on_is_cut_off(chain: Chain) -> None:
    header = TensorHeader(name=TOKENS, encoding="int32", shape=(2, 17), num_bytes=136)
    endless = [pb.TrainRequest(chunks=[TensorChunk(data=bytes(CHUNK_BYTES))])] * 8
    with pytest.raises((MalformedMessage, PeerUnavailable)):
        await _send(chain.peers[1], "Train", [_open(), pb.TrainRequest(chunks=[TensorChunk(header=header)]), *endless])


async def test_a_message_above_the_limit_ends_its_call_only(chain: Chain) -> None:
    with pytest.raises(PeerUnavailable, match="RESOURCE_EXHAUSTED"):
        await _send(chain.peers[1], "Train", [_open(run_id="r" * (MAX_MESSAGE_BYTES + 1))])


async def test_only_an_ack_may_follow_the_answer(chain: Chain) -> None:
    requests = [_open(microbatch=1), *_tensors(tokens=tokens(SYNCHRONOUS, 1), hidden=_HIDDEN), _open()]
    with pytest.raises(MalformedMessage, match="only an Ack is expected"):
        await _send(chain.peers[1], "Train", requests)
    for peer in chain.peers[1:]:
        await peer.stage.endings.discard_all(peer.stage.ledger.uncommitted())


@pytest.mark.slow
async def test_what_is_refused_after_its_answer_is_taken_out_of_what_others_have_added() -> None:
    """For this the gradient is computed again from the tensors of the call, although the call itself no longer keeps
    them."""
    async with running_chain(SYNCHRONOUS) as chain:
        await chain.train_all([0])
        before = {name: value.clone() for name, value in chain.peers[1].weights.buckets.open().sums.items()}
        requests = [_open(microbatch=1), *_tensors(tokens=tokens(SYNCHRONOUS, 1), hidden=_HIDDEN), _open()]
        with pytest.raises(MalformedMessage, match="only an Ack is expected"):
            await _send(chain.peers[1], "Train", requests)
        assert chain.num_samples()[1] == 4
        await eventually(lambda: chain.num_samples()[1] == 2)
        for name, value in chain.peers[1].weights.buckets.open().sums.items():
            torch.testing.assert_close(value, before[name], rtol=1e-4, atol=1e-6)


def _busy(_: Any) -> None:
    raise Overloaded("enough in flight", retry_after_seconds=0.05)


async def test_who_sends_eagerly_over_a_slow_line_hears_that_a_peer_is_busy(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the caller writes, it does not notice that its call has ended. What it sends meanwhile is not kept."""
    monkeypatch.setattr(stage_call, "DRAIN_SECONDS", 0.2)
    monkeypatch.setattr(stage_call, "SLOWEST_BYTES_PER_SECOND", 1 << 10)
    peer = chain.peers[1]
    monkeypatch.setattr(peer.stage.setting, "check", _busy)
    async with grpc.aio.insecure_channel(peer.record.endpoint, options=CLIENT_OPTIONS) as channel:
        stub: Any = StageServiceStub(channel)
        call = stub.Train(timeout=20)
        await call.write(_open(eager=True))
        for part in _tensors(tokens=_TOKENS, hidden=_HIDDEN):
            await asyncio.sleep(0.5)
            assert peer.callers.num_bytes == 0
            await call.write(part)
        await call.done_writing()
        assert (await call.read()).HasField("busy")
        assert await call.code() is grpc.StatusCode.OK


async def test_nothing_is_kept_of_what_was_refused_while_the_rest_of_it_comes(chain: Chain) -> None:
    """A caller could make this last for minutes, in many calls."""
    async with grpc.aio.insecure_channel(chain.peers[1].record.endpoint, options=CLIENT_OPTIONS) as channel:
        stub: Any = StageServiceStub(channel)
        call = stub.Evaluate(timeout=20)
        header = next(iter(_as_evaluation(hidden=_HIDDEN)))
        header.chunks[0].data = b""
        for request in [*_evaluate(), *_as_evaluation(tokens=_TOKENS), header]:
            await call.write(request)
        readers: list[TensorReader] = []

        def is_refused() -> bool:
            readers[:] = [found for found in gc.get_objects() if type(found) is TensorReader and not found.complete]
            return any(reader._name == "hidden" for reader in readers)

        await eventually(is_refused)
        await eventually(lambda: not any(reader._buffer or reader.tensors for reader in readers))
        assert not call.done()
        call.cancel()


async def test_in_diloco_any_round_may_be_named() -> None:
    """With DiLoCo peers may be at different rounds. A microbatch counts for the round in which it is acknowledged."""
    async with running_chain(DILOCO) as chain:
        await chain.train_all([0], round_number=17)
        assert [peer.stage.ledger.committed(0) for peer in chain.peers] == [{0}] * 3


# -- evaluation --------------------------------------------------------------------------------------------------------


def _evaluate(tensors: Iterable[pb.EvaluateRequest] = (), **changes: Any) -> list[pb.EvaluateRequest]:
    address = pb.Address(
        run_id=changes.pop("run_id", SYNCHRONOUS.run_id),
        stage=changes.pop("stage", 1),
        variant=changes.pop("variant", 0),
        protocol_version=PROTOCOLS.newest,
    )
    settings = {"num_samples": 2, "sequence_length": 16, "later": [pb.HeldRound()], **changes}
    opening = pb.EvaluateOpen(address=address, **settings)
    return [pb.EvaluateRequest(open=opening), *tensors]


def _as_evaluation(**tensors: torch.Tensor) -> list[pb.EvaluateRequest]:
    return [pb.EvaluateRequest(chunks=request.chunks) for request in _tensors(**tensors)]


_REFUSED_EVALUATIONS: list[tuple[list[Any], type[SwarmError], str]] = [
    ([], MalformedMessage, "begins with its open message"),
    (_as_evaluation(tokens=_TOKENS), MalformedMessage, "begins with its open message"),
    (_evaluate(stage=0), WrongStage, "serves stage 1, not 0"),
    (_evaluate(run_id="x"), WrongRun, "run 'x' is not"),
    (_evaluate(round=5), RoundMismatch, "round 5 is not kept, this peer is at 0"),
    (_evaluate(num_samples=0), MalformedMessage, "not 0 of 16"),
    (_evaluate(num_samples=1_000_000_000), MalformedMessage, "at most 2 samples of 16 tokens"),
    (_evaluate(sequence_length=17), MalformedMessage, "not 2 of 17"),
    (_evaluate(later=[]), MalformedMessage, "names the rounds of 1 later stages"),
    (_evaluate(later=[pb.HeldRound()] * 2), MalformedMessage, "names the rounds of 1 later stages"),
    (_evaluate(_as_evaluation(hidden=_HIDDEN.half())), MalformedMessage, "expected 'fp32'"),
    (_evaluate(_as_evaluation(tokens=_TOKENS, hidden=_NAN)), MalformedMessage, "holds NaN"),
    (_evaluate(_as_evaluation(tokens=_WRONG_TOKENS, hidden=_HIDDEN)), MalformedMessage, "outside the vocabulary"),
]


async def test_an_evaluation_that_makes_no_sense_is_refused(chain: Chain) -> None:
    for requests, error, message in _REFUSED_EVALUATIONS:
        with pytest.raises(error, match=message):
            await _send(chain.peers[1], "Evaluate", requests)


@pytest.mark.parametrize("method", ["Train", "Evaluate"])
@pytest.mark.parametrize("data", [b"\xff", b"\x12\x05\x12", b"\x1a\x00" * 65])
async def test_bytes_that_are_no_message_are_refused(method: str, data: bytes) -> None:
    async with running_chain(SYNCHRONOUS) as chain:
        async with grpc.aio.insecure_channel(chain.peers[1].record.endpoint, options=CLIENT_OPTIONS) as channel:
            open_call: Any = channel.stream_stream(f"/swarm.rpc.v1.StageService/{method}")
            call = open_call(iter([data]), timeout=20)
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await call.read()
        assert "that is no message of this call" in str(refusal.value.details())
        chain.assert_idle()
