"""Streams that send nothing, little, or far too much are ended in time and within bounds, while honest work goes on."""

import asyncio
import random
import sys
import threading
from collections import Counter
from typing import Any

import grpc
import pytest
import torch

from scripts.benches.shared.proc import held_bytes
from swarm.credentials import certificates
from swarm.errors import Overloaded
from swarm.rpc import dispatch
from swarm.rpc.callers import MAX_CALLS, MAX_KEPT_BYTES, Caller
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.rpc.v1.stage_pb2_grpc import StageServiceStub
from swarm.rpc.v1.tensor_pb2 import TensorChunk, TensorHeader
from swarm.rpc.wire import TensorSpec
from swarm.stage import call as stage_call
from swarm.stage.admission import LARGEST_NUM_SLOTS
from swarm.stage.boundary import HIDDEN, TOKENS
from tests.intruders.host import Host, running
from tests.support import locked
from tests.support.chain import eventually
from tests.support.chunks import chunks

INTRUDER = locked.PEER_TOKEN.admit(locked.OPEN)
TRAIN, EVALUATE = "Train", "Evaluate"
BYTES_A_STREAM = 100_000
"""What an idle stream may cost the process, both of its ends counted: they are in one process here."""


async def _ended(call: Any) -> grpc.StatusCode:
    """Wait for a call to end by itself, and return its status."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError:
        pass
    code: grpc.StatusCode = await call.code()
    return code


def _call(channel: grpc.aio.Channel, method: str) -> Any:
    stub: Any = StageServiceStub(channel)
    return stub.Train() if method == TRAIN else stub.Evaluate()


def _open(host: Host, microbatch: int, **fields: Any) -> pb.TrainRequest:
    return pb.TrainRequest(open=pb.Open(address=host.address, microbatch=microbatch, num_samples=2, **fields))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_streams", [100, pytest.param(10_000, marks=pytest.mark.slow)])
async def test_idle_streams(num_streams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """They send nothing, until they are ended. Honest work goes on meanwhile."""
    monkeypatch.setattr(dispatch, "FIRST_SECONDS", 2.0)
    most_calls = most_bytes = num_honest = 0
    async with running() as host, host.connected(INTRUDER) as channel:
        await host.train()
        before = held_bytes("VmRSS")
        calls = [_call(channel, (TRAIN, EVALUATE)[number % 2]) for number in range(num_streams)]
        async with asyncio.TaskGroup() as tasks:
            ending = [tasks.create_task(_ended(call)) for call in calls]
            while not all(task.done() for task in ending):
                most_calls = max(most_calls, host.callers.num_calls)
                most_bytes = max(most_bytes, held_bytes("VmRSS") - before)
                assert await host.train() > 0
                num_honest += 1
        codes = Counter(task.result() for task in ending)
        # gRPC itself refuses streams beyond the limit of one connection, as unavailable.
        expected = {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE}
        assert codes.keys() <= expected, codes
        assert codes[grpc.StatusCode.DEADLINE_EXCEEDED] > 0
        assert 20 < most_calls <= MAX_CALLS + 1
        assert most_bytes < num_streams * BYTES_A_STREAM + (64 << 20)
        assert num_honest > 5
        await host.idles()
        assert await host.train() > 0


async def test_slow_chunks_take_no_slot_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk comes in time, but all of them would take a day."""
    monkeypatch.setattr(stage_call, "MESSAGE_SECONDS", 1.0)
    monkeypatch.setattr(stage_call, "SLOWEST_BYTES_PER_SECOND", 4 << 10)
    monkeypatch.setattr(stage_call, "DRAIN_SECONDS", 0.2)
    async with running(max_in_flight=3) as host, host.connected(INTRUDER) as channel:
        header = TensorHeader(name=HIDDEN, encoding="fp32", shape=(2, 16, 32), num_bytes=4096)

        async def drip(number: int) -> grpc.StatusCode:
            call = _call(channel, TRAIN)
            await call.write(_open(host, 1000 + number))
            try:
                await call.write(pb.TrainRequest(chunks=[TensorChunk(header=header, data=b"x")]))
                while not call.done():
                    await asyncio.sleep(0.1)
                    await call.write(pb.TrainRequest(chunks=[TensorChunk(data=b"x")]))
            except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
                pass
            code: grpc.StatusCode = await call.code()
            return code

        async with asyncio.TaskGroup() as tasks:
            dripping = [tasks.create_task(drip(number)) for number in range(3)]
            stage = host.server.stage
            await eventually(lambda: stage.admission.grants(has_others=False) == 0)
            # Every slot is taken: honest work waits for one, and gets the first that is given up.
            assert await host.train() > 0
        cut_off = {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.INTERNAL}
        assert {task.result() for task in dripping} <= cut_off


async def test_evaluations_take_no_place_from_training_nor_from_those_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Evaluations are run one at a time. Those whose callers gave up are forgotten at once, and callers take turns."""
    monkeypatch.setattr(stage_call, "PROGRESS_SECONDS", 0.1)
    release = threading.Event()
    waiting: list[str] = []
    ended: list[str] = []
    async with running() as host, host.connected(INTRUDER) as channel, host.connected(locked.OTHER_PEER) as honest:
        runtime = host.server.stage.context.runtime
        opening = pb.EvaluateOpen(address=host.address, num_samples=2, sequence_length=16)
        tensors = {TOKENS: torch.zeros(2, 17, dtype=torch.int32), HIDDEN: torch.zeros(2, 16, 32)}

        async def evaluate(at: grpc.aio.Channel, who: str) -> None:
            call = _call(at, EVALUATE)
            await call.write(pb.EvaluateRequest(open=opening))
            for name, tensor in tensors.items():
                for chunk in chunks(name, tensor):
                    await call.write(pb.EvaluateRequest(chunks=[chunk]))
            assert (await call.read()).HasField("progress")
            waiting.append(who)
            assert await _ended(call) is grpc.StatusCode.OK
            ended.append(who)

        blocked = asyncio.create_task(runtime.control(lambda: release.wait(30)))
        try:
            given_up = [asyncio.create_task(evaluate(channel, "given up")) for _ in range(20)]
            await eventually(lambda: waiting.count("given up") == 20)
            assert runtime.queue_length == 2
            for task in given_up:
                task.cancel()
            await eventually(lambda: runtime.queue_length == 1 and host.is_idle)
            many = [asyncio.create_task(evaluate(channel, "many")) for _ in range(20)]
            await eventually(lambda: waiting.count("many") == 20)
            one = asyncio.create_task(evaluate(honest, "one"))
            await eventually(lambda: "one" in waiting)
        finally:
            release.set()
        await asyncio.gather(blocked, one, *many)
        assert ended.index("one") < 10


# -- too much ----------------------------------------------------------------------------------------------------------


BOMBER = """
import grpc, sys
address, root, key, chain = sys.argv[1:]
credentials = grpc.ssl_channel_credentials(root.encode(), key.encode(), chain.encode())
options = [("grpc.ssl_target_name_override", "swarm-peer"), ("grpc.max_send_message_length", -1)]
with grpc.secure_channel(address, credentials, options=options) as channel:
    call = channel.unary_unary("/swarm.rpc.v1.StageService/Describe")
    for compression in (grpc.Compression.Gzip, grpc.Compression.Deflate):
        try:
            call(bytes(128 << 20), timeout=60, compression=compression)
        except grpc.RpcError as error:
            print(error.code().name)
"""


async def test_a_decompression_bomb_stays_packed() -> None:
    """The message has an eighth of a megabyte, and would become an eighth of a gigabyte. A process of its own packs
    it."""
    async with running() as host:
        await host.train()
        before = held_bytes("VmRSS")
        arguments = [
            host.record.endpoint, certificates.first_pem(host.record.certificate_pem), INTRUDER.key_pem,
            INTRUDER.certificate_pem,
        ]  # fmt: skip
        bomber = await asyncio.create_subprocess_exec(
            sys.executable, "-c", BOMBER, *arguments, stdout=asyncio.subprocess.PIPE
        )
        largest = before
        while bomber.returncode is None:
            largest = max(largest, held_bytes("VmRSS"))
            await asyncio.sleep(0.02)
        output, _ = await bomber.communicate()
        assert output.split() == [b"RESOURCE_EXHAUSTED"] * 2
        assert largest - before < 64 << 20
        assert await host.train() > 0


async def test_what_is_kept_for_one_caller_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations wait for the compute thread with their tensors."""
    monkeypatch.setattr(stage_call, "DRAIN_SECONDS", 0.2)
    async with running() as host, host.connected(INTRUDER) as channel:
        host.callers.kept[False].each = 10 * (2 * 17 * 4 + 2 * 16 * 32 * 4)
        opening = pb.EvaluateRequest(open=pb.EvaluateOpen(address=host.address, num_samples=2, sequence_length=16))
        calls = [_call(channel, EVALUATE) for _ in range(15)]
        for call in calls:
            await call.write(opening)
        await eventually(lambda: sum(call.done() for call in calls) == 5)
        assert {await call.code() for call in calls if call.done()} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert await host.train() > 0
        for call in calls:
            call.cancel()


@pytest.mark.parametrize("max_in_flight", [4, 200])
async def test_what_is_kept_for_one_caller_follows_from_how_much_is_admitted(
    max_in_flight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However large they are, all microbatches that have a slot are kept, and those that were answered and wait for the
    Ack."""
    monkeypatch.setattr(stage_call, "MAX_KEPT_BYTES", 1)
    async with running(max_in_flight=max_in_flight) as host:
        callers = host.callers
        num_bytes = 2 * 17 * 4 + 2 * 16 * 32 * 4
        for _ in range(max_in_flight + LARGEST_NUM_SLOTS):
            callers.keep(Caller("neighbour"), num_bytes, training=True)
        with pytest.raises(Overloaded):
            callers.keep(Caller("neighbour"), num_bytes, training=True)
        callers.release(Caller("neighbour"), callers.num_bytes)


def test_what_is_kept_for_one_caller_is_never_less_than_always() -> None:
    tokens = TensorSpec(shape=(2, 17), encoding="int32")
    assert stage_call.max_kept_bytes({TOKENS: tokens}, LARGEST_NUM_SLOTS) == MAX_KEPT_BYTES
    hidden = TensorSpec(shape=(8, 2048, 4096), encoding="bf16")
    assert stage_call.max_kept_bytes({HIDDEN: hidden}, LARGEST_NUM_SLOTS) >= LARGEST_NUM_SLOTS * hidden.num_bytes


# -- one caller's flood ------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_flood_leaves_others_their_turn() -> None:
    """Every microbatch of the flood is right; there are only too many, and busy is no reason for it to wait."""
    async with running(max_in_flight=4) as host, host.connected(INTRUDER) as channel:
        chance, over = random.Random(0), asyncio.Event()
        tensors = {TOKENS: torch.zeros(2, 17, dtype=torch.int32), HIDDEN: torch.zeros(2, 16, 32)}
        parts = [pb.TrainRequest(chunks=[chunk]) for name, value in tensors.items() for chunk in chunks(name, value)]
        endings: Counter[str] = Counter()

        async def flood() -> None:
            while not over.is_set():
                call = _call(channel, TRAIN)
                try:
                    await call.write(_open(host, chance.randrange(10**6, 10**9)))
                    reply = await call.read()
                    if reply is not grpc.aio.EOF and reply.HasField("accepted"):
                        for part in parts:
                            await call.write(part)
                        while (reply := await call.read()) is not grpc.aio.EOF and not reply.HasField("done"):
                            pass
                        await call.write(pb.TrainRequest(ack=pb.Ack()))
                        await call.done_writing()
                    if reply is not grpc.aio.EOF:
                        endings["busy" if reply.HasField("busy") else "done"] += 1
                except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
                    endings["error"] += 1
                finally:
                    call.cancel()

        async with asyncio.TaskGroup() as tasks:
            for _ in range(8):
                tasks.create_task(flood())
            await eventually(lambda: endings["busy"] > 20)
            for _ in range(20):
                assert await host.train() > 0
            over.set()
        # Refused once, it has the next slot that becomes free.
        assert host.num_busy <= 3 * 20
