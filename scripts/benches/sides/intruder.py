"""A process that misuses a peer as fast as it can, for the bench `intruders`.

FILE has the target, TALLY gets how many calls were begun and how those ended that have.
"""

import asyncio
import contextlib
import json
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc

from scripts.benches.shared.common import write_json
from swarm.credentials.identity import generate
from swarm.credentials.token import Token
from swarm.rpc import tls
from swarm.rpc.tls import CLIENT_OPTIONS
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.rpc.v1.tensor_pb2 import TensorChunk, TensorHeader
from swarm.stage.boundary import HIDDEN
from swarm.types import PROTOCOLS

AT_ONCE = 64
TALLY_SECONDS = 0.25  # How often the tally is written
TRAIN, BEGIN = "/swarm.rpc.v1.StageService/Train", "/swarm.rpc.v1.AveragingService/Begin"
FAULTS = (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError)


class Intruder:
    """One connection to the peer, and the calls over it."""

    def __init__(self, channel: grpc.aio.Channel, target: dict[str, Any]) -> None:
        self._channel = channel
        self._random = random.Random(0)
        self._address = pb.Address(run_id=target["run_id"], protocol_version=PROTOCOLS.newest, stage=1)
        self._samples = target["num_samples"]
        self._num_calls = 0
        self._outcomes: Counter[str] = Counter()

    async def malformed(self) -> None:
        """Send bytes that are not a message, or a message with random content."""
        call: Any = self._channel.unary_unary(BEGIN)
        await call(self._random.randbytes(self._random.randrange(200)), timeout=20)

    async def opens(self) -> None:
        async with asyncio.timeout(5), self._opened() as (call, answer):
            await answer
            call.cancel()

    async def idle(self) -> None:
        call: Any = self._channel.stream_stream(TRAIN)()
        await call.read()

    async def slow(self) -> None:
        """Send a tensor very slowly, one byte at a time."""
        header = TensorHeader(name=HIDDEN, encoding="fp32", shape=(1, 1, 1), num_bytes=4)
        chunk = pb.TrainRequest(chunks=[TensorChunk(header=header, data=b"x")]).SerializeToString()
        async with self._opened() as (call, answer):
            with contextlib.suppress(*FAULTS):
                while not call.done():
                    await call.write(chunk)
                    await asyncio.sleep(1.0)
            await answer

    @contextlib.asynccontextmanager
    async def _opened(self) -> AsyncIterator[tuple[Any, "asyncio.Task[Any]"]]:
        """Begin to hand over a microbatch. Yields the call, and the task that reads the peer's answer."""
        opening = pb.Open(address=self._address, microbatch=self._random.randrange(1 << 40), num_samples=self._samples)
        call: Any = self._channel.stream_stream(TRAIN)()
        # Answers are read from the beginning, because after a failed write gRPC no longer gives the peer's error.
        answer = asyncio.create_task(call.read())
        try:
            with contextlib.suppress(*FAULTS):
                await call.write(pb.TrainRequest(open=opening).SerializeToString())
            yield call, answer
        finally:
            answer.cancel()
            # If the caller did not wait for the answer, it is discarded.
            await asyncio.wait({answer})
            if not answer.cancelled():
                answer.exception()

    async def run(self, kind: str, tally: Path) -> None:
        async def again() -> None:
            task = asyncio.current_task()
            assert task is not None
            # gRPC may turn a cancellation into the call's own error, which would then be counted as an outcome.
            while not task.cancelling():
                self._num_calls += 1
                outcome = "OK"
                try:
                    await getattr(self, kind)()
                except (*FAULTS, TimeoutError) as error:
                    outcome = _name_of(error)
                    await asyncio.sleep(0)
                self._outcomes[outcome] += 1

        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(again())
            while True:
                await asyncio.sleep(TALLY_SECONDS)
                write_json(tally, {"at": time.monotonic(), "calls": self._num_calls, "outcomes": self._outcomes})


def _name_of(error: Exception) -> str:
    """The name under which an outcome is counted: the peer's error, or the fault of this side."""
    if not isinstance(error, grpc.aio.AioRpcError):
        return type(error).__name__
    # gRPC itself raises this for a message that it did not send because the call had ended.
    return "InternalError" if error.details() == "Internal error from Core" else error.code().name


def main(kind: str, file: Path, tally: Path) -> None:
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    asyncio.run(intrude(json.loads(file.read_text(encoding="utf-8")), kind, tally))


async def intrude(target: dict[str, Any], kind: str, tally: Path) -> None:
    """Make the calls of this kind until killed. The channel is made here, because it belongs to the event loop in which
    it is made."""
    identity = Token.parse(target["token"]).admit(generate())
    credentials = tls.pinned_credentials(target["certificate_pem"], identity)
    options = (*CLIENT_OPTIONS, *tls.PINNED_OPTIONS)
    channel = grpc.aio.secure_channel(target["endpoint"], credentials, options=options)
    await Intruder(channel, target).run(kind, tally)
