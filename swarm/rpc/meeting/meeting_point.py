"""The servicer of a meeting point: peers that others do not reach wait here, and are connected to their callers.

It is one more service of a peer's gRPC server, and so needs no further port and has the guard's rights and limits. Two
calls, Connect and Take, carry a connection piece by piece: TLS between the two ends.
"""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from swarm.credentials import certificates, identity
from swarm.errors import DeadlineExceeded, IntegrityError, MalformedMessage, NotAllowed, NotReady, WrongRun
from swarm.machine.clock import Clock
from swarm.rpc.callers import Caller, Quota, token_or_address_of
from swarm.rpc.endpoint import endpoint_of
from swarm.rpc.failures import answers_errors
from swarm.rpc.meeting.carrying import (
    PIECE_BYTES,
    RETRY_SECONDS,
    Budget,
    Kind,
    Line,
    MeetingLimits,
    TcpStream,
    first_of,
)
from swarm.rpc.meeting.check import DialBack, peer_address
from swarm.rpc.serving import receive, send
from swarm.rpc.v1 import meeting_pb2 as pb
from swarm.rpc.v1.meeting_pb2_grpc import MeetingServiceServicer
from swarm.types import PeerId

BEAT_SECONDS, SILENCE_SECONDS = 2.5, 8.0
"""How often a peer that waits sends a beat, and after how long without a word either end gives up."""
FIRST_SECONDS = 5.0
"""Longest wait for a stream's first message."""
ANSWER_SECONDS = 5.0
"""Longest wait for the answer of a peer that is called."""
IDLE_SECONDS = 900.0
"""A connection on which nothing moves for this long is closed; gRPC opens another one when it needs it."""
STALL_SECONDS = 30.0
"""Longest wait until one end takes what the other one has sent."""
MEET_SECONDS = 4.0
"""How long two peers that dial each other keep their calls open."""


@dataclass(eq=False)
class _Waiter:
    context: Any
    run_id: str
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def say(self, reply: pb.WaitReply) -> None:
        """Send the peer a beat or a call; if two are due at one moment, one after the other."""
        async with self.writing:
            await send(self.context, reply, SILENCE_SECONDS)


@dataclass(eq=False)
class _Answer:
    """The call, Take or Meet, with which a peer that was called answers."""

    context: Any
    local: str = ""
    """For Meet, the endpoint that the peer has in its own network."""
    released: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the call is needed no longer."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the call has ended."""


class _OwnLine:
    """A connection of this process to a peer that waits here. It is this peer's own work, so no budget counts it."""

    kind = Kind.RELAYED

    def __init__(self, answer: _Answer) -> None:
        self._answer = answer

    async def carry(self, stream: TcpStream) -> None:
        reader, writer = stream
        try:
            await first_of(self._send(reader), self._receive(writer), self._answer.gone.wait())
        finally:
            writer.close()
            await self.close()

    async def close(self) -> None:
        self._answer.released.set()

    async def _send(self, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(PIECE_BYTES):
            await send(self._answer.context, pb.Carried(data=data), STALL_SECONDS)

    async def _receive(self, writer: asyncio.StreamWriter) -> None:
        while (piece := await receive(self._answer.context, IDLE_SECONDS)) is not None:
            writer.write(piece.data)
            await writer.drain()


@answers_errors
class MeetingPoint(MeetingServiceServicer):
    def __init__(
        self, own_id: PeerId, limits: MeetingLimits, clock: Clock, *, insecure: bool,
        is_exchanging: Callable[[], bool], run_id: str = "",
    ) -> None:  # fmt: skip
        """`run_id` is the run whose peers are served; left out, those of all runs are, each with its own."""
        self._own_id = own_id
        self._run_id = run_id
        self._dial_back = DialBack(clock, insecure=insecure)
        self.budget = Budget(limits, clock, is_exchanging)
        self._places = Quota("waiting peers", limits.max_waiting, retry_seconds=RETRY_SECONDS)
        self._waiting: dict[PeerId, _Waiter] = {}
        self._expected: dict[str, asyncio.Future[_Answer]] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def Check(self, request: pb.CheckRequest, context: Any) -> pb.CheckReply:
        _require_same_run(request.run_id, self._run_id)
        return await self._dial_back.answer(request, context)

    async def Wait(self, _: Any, context: Any) -> None:  # type: ignore[override]
        with self._places.taken(token_or_address_of(context)):
            challenge = secrets.token_bytes(32)
            await send(context, pb.WaitReply(challenge=challenge), FIRST_SECONDS)
            proof = (await _read(context, "proof", FIRST_SECONDS)).proof
            _require_same_run(proof.run_id, self._run_id)
            peer_id, waiter = self._proved(proof, challenge), _Waiter(context, proof.run_id)
            # The peer has proved its key, so a waiter under its id is this peer too, over a connection that it has
            # lost.
            self._waiting[peer_id] = waiter
            try:
                beat: pb.Beat | None = pb.Beat()
                while beat is not None:
                    await waiter.say(pb.WaitReply(beat=pb.Beat()))
                    beat = await receive(context, SILENCE_SECONDS)
            finally:
                if self._waiting.get(peer_id) is waiter:
                    del self._waiting[peer_id]

    async def Connect(self, _: Any, context: Any) -> None:  # type: ignore[override]
        first = await _read(context, "to", FIRST_SECONDS)
        caller = token_or_address_of(context)
        async with self._wanted(first, caller) as answer:
            for end in (answer.context, context):
                await send(end, pb.Carried(data=b""), FIRST_SECONDS)
            await first_of(
                self._pass_on(caller, context, answer.context),
                self._pass_on(caller, answer.context, context),
                answer.gone.wait(),
            )

    async def Take(self, _: Any, context: Any) -> None:  # type: ignore[override]
        first = await _read(context, "token", FIRST_SECONDS)
        await self._answer(first.token, _Answer(context))

    async def Meet(self, request: pb.MeetRequest, context: Any) -> None:  # type: ignore[override]
        if request.WhichOneof("message") == "token":
            await self._answer(request.token, _Answer(context, request.local))
        else:
            await self._meet(request, token_or_address_of(context), context)

    async def line_to(self, peer_id: PeerId) -> Line:
        """Connect this process itself to a peer that waits here. Raises NotReady if the peer does not wait here. Raises
        DeadlineExceeded if it does not answer."""
        answer = await self._called(peer_id, self._run_id, Caller(self._own_id), is_meeting=False)
        try:
            await send(answer.context, pb.Carried(data=b""), FIRST_SECONDS)
        except BaseException:
            answer.released.set()
            raise
        return _OwnLine(answer)

    def _proved(self, proof: pb.WaitProof, challenge: bytes) -> PeerId:
        try:
            peer_id = certificates.peer_id_of(proof.certificate_pem)
            identity.verify(proof.certificate_pem, signed_bytes(self._own_id, peer_id, challenge), proof.signature)
        except IntegrityError as error:
            raise NotAllowed(f"no proof of who waits: {error}") from None
        if peer_id != proof.peer_id:
            raise NotAllowed("no proof of who waits: the certificate is another peer's")
        return peer_id

    async def _called(self, peer_id: str, run_id: str, caller: Caller, *, is_meeting: bool) -> _Answer:
        """Call a peer that waits. Raises NotReady if it does not wait here, WrongRun if it waits for callers of another
        run, and DeadlineExceeded if it does not answer."""
        waiter = self._waiting.get(PeerId(peer_id))
        if waiter is None:
            raise NotReady(f"{peer_id[:8]} does not wait here")
        _require_same_run(run_id, waiter.run_id)
        token, answer = secrets.token_hex(16), asyncio.get_running_loop().create_future()
        self._expected[token] = answer
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                call = pb.Called(token=token, is_meeting=is_meeting, caller=caller)
                await waiter.say(pb.WaitReply(call=call))
                found: _Answer = await asyncio.shield(answer)
                return found
        except TimeoutError:
            raise DeadlineExceeded(f"{peer_id[:8]} does not answer") from None
        except BaseException:
            if answer.done():
                answer.result().released.set()
            raise
        finally:
            del self._expected[token]
            answer.cancel()

    async def _answer(self, token: str, answer: _Answer) -> None:
        expected = self._expected.get(token)
        if expected is None or expected.done():
            raise NotReady("nobody waits for this answer any longer")
        expected.set_result(answer)
        try:
            await answer.released.wait()
        finally:
            answer.gone.set()

    @asynccontextmanager
    async def _wanted(self, first: pb.Carried | pb.MeetRequest, caller: Caller) -> AsyncIterator[_Answer]:
        """Have the answer of the peer that a caller wants inside the block, and count that for the caller."""
        _require_same_run(first.run_id, self._run_id)
        with self.budget.connection(caller):
            is_meeting = isinstance(first, pb.MeetRequest)
            answer = await self._called(first.to, first.run_id, caller, is_meeting=is_meeting)
            try:
                yield answer
            finally:
                answer.released.set()

    async def _pass_on(self, caller: Caller, source: Any, target: Any) -> None:
        while (piece := await receive(source, IDLE_SECONDS)) is not None:
            if piece.WhichOneof("message") != "data" or len(piece.data) > PIECE_BYTES:
                raise MalformedMessage("no piece of a connection")
            await self.budget.spend(caller, len(piece.data))
            await send(target, piece, STALL_SECONDS)

    async def _meet(self, request: pb.MeetRequest, caller: Caller, context: Any) -> None:
        async with self._wanted(request, caller) as answer:
            here, there, secret = peer_address(context), peer_address(answer.context), secrets.token_bytes(32)
            is_near = here[0] == there[0]
            for end, address, local in ((answer.context, here, request.local), (context, there, answer.local)):
                reply = pb.MeetReply(observed=endpoint_of(*address), local=local if is_near else "", secret=secret)
                await send(end, reply, FIRST_SECONDS)
            # The routers of both peers keep the ports for as long as these calls are open.
            await first_of(asyncio.sleep(MEET_SECONDS), answer.gone.wait())


def signed_bytes(meeting_point: PeerId, peer_id: PeerId, challenge: bytes) -> bytes:
    """The bytes that a peer signs in order to wait. They name the meeting point, so the signature is not valid at
    another one."""
    return json.dumps(["swarm wait", meeting_point, peer_id, challenge.hex()]).encode()


def _require_same_run(named: str, served: str) -> None:
    """Raise WrongRun if a message names another run than the one that is served; either may be empty, for any run."""
    if named and served and named != served:
        raise WrongRun(f"run {named[:80]!r} is not {served!r}, which is served here")


async def _read(context: Any, kind: str, seconds: float) -> Any:
    """The next message, which has to be of this kind. Raises DeadlineExceeded, MalformedMessage."""
    message = await receive(context, seconds)
    found = None if message is None else message.WhichOneof("message")
    if found != kind:
        raise MalformedMessage(f"{found or 'nothing'} came instead of {kind}")
    return message
