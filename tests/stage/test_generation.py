"""A session at stage 0, whose later stages send tokens as they like."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

from swarm.generation.sampling import Sampling
from swarm.hop.session import Order, Piece, Token
from swarm.rpc.v1 import generation_pb2 as pb
from swarm.stage.generation import Session

ORDER = Order(sampling=Sampling(), num_positions=9, vocab_size=8)
PROMPT = pb.GenerateRequest(pieces=[pb.Piece(tokens=[1, 2])], sample=True)


class _Caller:
    """The caller's stream: one message comes, and no further one."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._messages = [PROMPT]

    async def read(self) -> pb.GenerateRequest:
        if not self._messages:
            await asyncio.Event().wait()
        return self._messages.pop()

    async def write(self, reply: pb.GenerateReply) -> None:
        if reply.HasField("sampled"):
            self.tokens.append(reply.sampled.token)


class _Hasty:
    """Later stages that send all tokens without having computed any."""

    rounds = (0,)

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.begun.set()

    async def run(self, on_token: Callable[[Token], Awaitable[None]]) -> None:
        for position in range(2, ORDER.num_positions):
            await on_token(Token(position, 3))

    async def push(self, piece: Piece, *, sample: bool) -> None:
        pass


class _Slow:
    """A decoder that takes its time."""

    async def compute(self, computed: Any, pieces: Sequence[Piece], *, sample: bool) -> Piece:
        await asyncio.sleep(0.01)
        return pieces[0]


async def test_tokens_that_come_too_early_are_no_fault_of_the_stage_before() -> None:
    caller: Any = _Caller()
    parts: dict[str, Any] = {"decoder": _Slow(), "boundary": None, "continuation": _Hasty()}
    computed: Any = SimpleNamespace(order=ORDER, held=SimpleNamespace(number=0), next_round=0)
    session = Session(caller, computed, is_first=True, on_token=lambda: None, **parts)
    async with asyncio.timeout(10):
        await session.run(standby=False)
    assert caller.tokens == [3] * 7
