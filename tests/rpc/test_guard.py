"""Which caller may call what: real servers with real TLS, and all the services of a stage peer."""

import asyncio
import ssl
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer
from grpc_health.v1.health_pb2_grpc import HealthStub, add_HealthServicer_to_server

from swarm.credentials import certificates
from swarm.credentials.identity import Identity
from swarm.machine.clock import SystemClock
from swarm.rpc import guard, tls
from swarm.rpc.callers import BURST_CALLS, ENTRIES_PER_CALL, MAX_KEPT_BYTES, WASTED_CALLS, Callers
from swarm.rpc.channels import ChannelPool
from swarm.rpc.guard import FOR_TRAINERS, FOR_TRAINERS_AT_STAGE_0, Guard
from swarm.rpc.serving import SERVER_OPTIONS, bind_server
from swarm.rpc.v1 import (
    averaging_pb2,
    content_pb2,
    directory_pb2,
    generation_pb2,
    lease_pb2,
    meeting_pb2,
    probe_pb2,
    stage_pb2,
)
from swarm.rpc.v1.averaging_pb2_grpc import (
    AveragingServiceServicer,
    AveragingServiceStub,
    add_AveragingServiceServicer_to_server,
)
from swarm.rpc.v1.content_pb2_grpc import (
    ContentServiceServicer,
    ContentServiceStub,
    add_ContentServiceServicer_to_server,
)
from swarm.rpc.v1.directory_pb2_grpc import (
    DirectoryServiceServicer,
    DirectoryServiceStub,
    add_DirectoryServiceServicer_to_server,
)
from swarm.rpc.v1.generation_pb2_grpc import (
    GenerationServiceServicer,
    GenerationServiceStub,
    add_GenerationServiceServicer_to_server,
)
from swarm.rpc.v1.lease_pb2_grpc import LeaseServiceServicer, LeaseServiceStub, add_LeaseServiceServicer_to_server
from swarm.rpc.v1.meeting_pb2_grpc import (
    MeetingServiceServicer,
    MeetingServiceStub,
    add_MeetingServiceServicer_to_server,
)
from swarm.rpc.v1.probe_pb2_grpc import ProbeServiceServicer, ProbeServiceStub, add_ProbeServiceServicer_to_server
from swarm.rpc.v1.stage_pb2_grpc import StageServiceServicer, StageServiceStub, add_StageServiceServicer_to_server
from swarm.types import PeerRecord, PeerState
from tests.support import locked
from tests.support.chain import eventually
from tests.support.locked import OTHER_PEER, PEER, TRAINER
from tests.support.manual_clock import ManualClock

DENIED, UNREACHABLE = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAVAILABLE
SERVED = grpc.StatusCode.UNIMPLEMENTED
"""The status with which the services below answer each call that reaches them."""


class Clock(SystemClock):
    """The machine's clock, some time ahead."""

    later_seconds = 0.0
    num_waits = 0

    async def sleep(self, seconds: float) -> None:
        self.num_waits += 1
        await super().sleep(seconds)

    def time(self) -> float:
        return super().time() + self.later_seconds


@dataclass
class Server:
    """A server with every service of a peer, of which none does anything."""

    record: PeerRecord
    callers: Callers
    clock: Clock
    averaging: "Averaging"
    directory: "Directory"
    stage: int = 0

    @asynccontextmanager
    async def called_by(self, identity: Identity) -> AsyncIterator[grpc.aio.Channel]:
        """Open a connection of a caller that trusts this server."""
        credentials = tls.pinned_credentials(self.record.certificate_pem, locked.as_member_of_ours(identity))
        if identity is locked.OPEN:
            credentials = tls.pinned_credentials(self.record.certificate_pem)
        async with grpc.aio.secure_channel(self.record.endpoint, credentials, options=tls.PINNED_OPTIONS) as channel:
            yield channel


@pytest.fixture
async def start() -> AsyncIterator[Callable[..., Any]]:
    async with AsyncExitStack() as stack:

        async def start_one(
            identity: Identity = PEER, *, max_calls: int = 2, max_bytes: int = MAX_KEPT_BYTES
        ) -> Server:
            # The clock that counts the rate of calls stands still.
            clock, callers = Clock(), Callers(ManualClock(), max_calls=max_calls, max_bytes=max_bytes)
            guarding = Guard(authority=identity.authority, callers=callers, clock=clock, stage=lambda: running.stage)
            server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[guarding])
            # Abstract for the type checker only.
            add_StageServiceServicer_to_server(Stage(), server)  # type: ignore[abstract]
            directory = Directory()
            add_DirectoryServiceServicer_to_server(directory, server)
            add_LeaseServiceServicer_to_server(LeaseServiceServicer(), server)  # type: ignore[abstract]
            averaging = Averaging()  # type: ignore[abstract]
            add_AveragingServiceServicer_to_server(averaging, server)
            add_ContentServiceServicer_to_server(ContentServiceServicer(), server)  # type: ignore[abstract]
            add_GenerationServiceServicer_to_server(Generation(), server)
            add_ProbeServiceServicer_to_server(Probe(), server)
            add_MeetingServiceServicer_to_server(Meeting(), server)
            add_HealthServicer_to_server(HealthServicer(), server)
            port = bind_server(server, "127.0.0.1", 0, tls.server_credentials(identity))
            record = PeerRecord(
                peer_id=identity.peer_id, stage=0, announced_at=0.0, state=PeerState.SERVING,
                endpoint=f"127.0.0.1:{port}", certificate_pem=identity.certificate_pem,
            )  # fmt: skip
            running = Server(record, callers, clock, averaging, directory)
            await server.start()
            stack.push_async_callback(server.stop, None)
            return running

        yield start_one


class Stage(StageServiceServicer):
    """Has the real service's calls and streams, but waits for nothing."""

    async def Train(self, request_iterator: Any, context: Any) -> AsyncIterator[stage_pb2.TrainReply]:
        await context.abort(SERVED)
        yield stage_pb2.TrainReply()

    async def Evaluate(self, request_iterator: Any, context: Any) -> AsyncIterator[stage_pb2.EvaluateReply]:
        await context.abort(SERVED)
        yield stage_pb2.EvaluateReply()

    async def Hold(self, request: Any, context: Any) -> AsyncIterator[stage_pb2.HoldReply]:
        await context.abort(SERVED)
        yield stage_pb2.HoldReply()


class Generation(GenerationServiceServicer):
    """Has the real service's calls, but waits for nothing."""

    async def Generate(self, request_iterator: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateReply]:
        await context.abort(SERVED)
        yield generation_pb2.GenerateReply()


class Meeting(MeetingServiceServicer):
    """Has the real service's calls, but waits for nothing."""

    async def Check(self, request: Any, context: Any) -> meeting_pb2.CheckReply:
        return meeting_pb2.CheckReply()

    async def Wait(self, _: Any, context: Any) -> None:  # type: ignore[override]
        await context.abort(SERVED)

    Connect = Take = Meet = Wait  # type: ignore[assignment]


class Probe(ProbeServiceServicer):
    """Answers nothing."""

    async def Probe(self, request_iterator: object, context: Any) -> None:  # type: ignore[override]
        await context.abort(SERVED)


class Directory(DirectoryServiceServicer):
    """Answers with many bytes about every key but the empty one."""

    num_answered = 0

    async def Read(self, request: Any, context: Any) -> directory_pb2.ReadReply:
        self.num_answered += 1
        num_bytes = 1 << 20 if request.key else 1
        return directory_pb2.ReadReply(records=[directory_pb2.SealedRecord(value=bytes(num_bytes))])


class Averaging(AveragingServiceServicer):
    """Reads what comes, as the real service does, and answers with many bytes."""

    num_answering = 0

    async def Exchange(self, request_iterator: Any, context: Any) -> AsyncIterator[averaging_pb2.ExchangeReply]:
        num_messages = 0
        async for _ in request_iterator:
            num_messages += 1
        yield averaging_pb2.ExchangeReply(data=bytes([num_messages]))

    async def Shared(self, request: Any, context: Any) -> AsyncIterator[averaging_pb2.SharedReply]:
        self.num_answering += 1
        try:
            for _ in range(100):
                yield averaging_pb2.SharedReply(data=bytes(1 << 20))
        finally:
            self.num_answering -= 1


async def _code(call: Any) -> grpc.StatusCode:
    """The status with which a call ended."""
    try:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK


def _calls(channel: Any, identity: Identity) -> dict[str, Any]:
    """Every call that there is, made in the caller's own name."""
    stage: Any = StageServiceStub(channel)
    lease: Any = LeaseServiceStub(channel)
    directory: Any = DirectoryServiceStub(channel)
    averaging: Any = AveragingServiceStub(channel)
    content: Any = ContentServiceStub(channel)
    generation: Any = GenerationServiceStub(channel)
    probe: Any = ProbeServiceStub(channel)
    meeting: Any = MeetingServiceStub(channel)
    health: Any = HealthStub(channel)
    pb, own = averaging_pb2, identity.peer_id
    seconds = {"timeout": 10.0}
    # A caller that is still writing when its call ends may get an error of gRPC itself; calls without a claim write
    # nothing.
    calls: dict[str, Any] = {
        "/swarm.rpc.v1.StageService/Train": lambda: stage.Train(**seconds),
        "/swarm.rpc.v1.StageService/Evaluate": lambda: stage.Evaluate(**seconds),
        "/swarm.rpc.v1.StageService/Hold": lambda: stage.Hold(stage_pb2.HoldRequest(), **seconds),
        "/swarm.rpc.v1.StageService/Describe": lambda: stage.Describe(stage_pb2.DescribeRequest(), **seconds),
        "/swarm.rpc.v1.DirectoryService/Read": lambda: directory.Read(directory_pb2.ReadRequest(), **seconds),
        "/swarm.rpc.v1.LeaseService/Acquire": lambda: lease.Acquire(
            lease_pb2.AcquireRequest(trainer_id=own), **seconds
        ),
        "/swarm.rpc.v1.AveragingService/Report": lambda: averaging.Report(
            pb.ReportRequest(sender=pb.Contact(peer_id=own)), **seconds
        ),
        "/swarm.rpc.v1.AveragingService/Exchange": lambda: averaging.Exchange(
            iter([pb.ExchangeRequest(open=pb.ExchangeOpen(peer_id=own)), pb.ExchangeRequest(data=b"x")]), **seconds
        ),
        "/swarm.rpc.v1.ProbeService/Probe": lambda: probe.Probe(**seconds),
        "/swarm.rpc.v1.MeetingService/Check": lambda: meeting.Check(meeting_pb2.CheckRequest(peer_id=own), **seconds),
        "/swarm.rpc.v1.MeetingService/Wait": lambda: meeting.Wait(**seconds),
        "/swarm.rpc.v1.MeetingService/Connect": lambda: meeting.Connect(**seconds),
        "/swarm.rpc.v1.MeetingService/Take": lambda: meeting.Take(**seconds),
        "/swarm.rpc.v1.MeetingService/Meet": lambda: meeting.Meet(meeting_pb2.MeetRequest(), **seconds),
        "/swarm.rpc.v1.GenerationService/Generate": lambda: generation.Generate(**seconds),
        "/swarm.rpc.v1.ContentService/Weights": lambda: content.Weights(
            content_pb2.ContentRequest(peer_id=own), **seconds
        ),
        "/swarm.rpc.v1.ContentService/Tokenizer": lambda: content.Tokenizer(
            content_pb2.ContentRequest(peer_id=own), **seconds
        ),
        "/grpc.health.v1.Health/Check": lambda: health.Check(health_pb2.HealthCheckRequest(service="none"), **seconds),
    }
    for name in ("Begin", "Average", "Commit", "Abort", "Barrier", "Shared", "Download"):
        request = getattr(pb, f"{name}Request")(peer_id=own)
        calls[f"/swarm.rpc.v1.AveragingService/{name}"] = lambda name=name, request=request: getattr(averaging, name)(
            request, **seconds
        )
    return calls


async def test_every_call_is_tried_here() -> None:
    files: tuple[Any, ...] = (
        stage_pb2, lease_pb2, averaging_pb2, directory_pb2, content_pb2, generation_pb2, probe_pb2, meeting_pb2
    )  # fmt: skip
    services = [service for file in files for service in file.DESCRIPTOR.services_by_name.values()]
    ours = {f"/{service.full_name}/{method.name}" for service in services for method in service.methods}
    health = {"/grpc.health.v1.Health/Check"}
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        assert set(_calls(channel, PEER)) == ours | health
    assert not (FOR_TRAINERS | FOR_TRAINERS_AT_STAGE_0) - ours - health


async def _answers(server: Server, identity: Identity) -> dict[str, grpc.StatusCode]:
    async with server.called_by(identity) as channel:
        return {name: await _code(call()) for name, call in _calls(channel, identity).items()}


def _is_served(code: grpc.StatusCode) -> bool:
    return code in (SERVED, grpc.StatusCode.OK, grpc.StatusCode.NOT_FOUND)


async def test_peers_may_call_everything_in_their_own_name(start: Any) -> None:
    answers = await _answers(await start(), OTHER_PEER)
    assert all(map(_is_served, answers.values())), answers
    assert answers["/swarm.rpc.v1.AveragingService/Exchange"] is grpc.StatusCode.OK


@pytest.mark.parametrize("stage", [0, 1])
async def test_trainers_may_call_what_trainers_need(start: Any, stage: int) -> None:
    server = await start()
    server.stage = stage
    allowed = FOR_TRAINERS | (FOR_TRAINERS_AT_STAGE_0 if stage == 0 else frozenset())
    for name, code in (await _answers(server, TRAINER)).items():
        # A caller that is still writing when its call ends may get an error of gRPC itself.
        refused = (DENIED, grpc.StatusCode.INTERNAL) if name.endswith("Exchange") else (DENIED,)
        assert _is_served(code) if name in allowed else code in refused, name
    assert server.callers.num_bytes == 0


@pytest.mark.parametrize(
    "intruder",
    [locked.OPEN, locked.EXPIRED, locked.FOREIGN, locked.passed_on()],
    ids=["no token", "expired", "another run", "passed on"],
)
async def test_strangers_are_not_even_heard(start: Any, intruder: Identity) -> None:
    answers = await _answers(await start(), intruder)
    assert set(answers.values()) == {UNREACHABLE}


async def test_a_stolen_certificate_is_of_no_use_without_its_key(start: Any) -> None:
    thief = replace(OTHER_PEER, key_pem=locked.OPEN.key_pem)
    assert set((await _answers(await start(), thief)).values()) == {UNREACHABLE}


async def test_a_tokens_own_certificate_is_nobody(start: Any, tmp_path: Path) -> None:
    """This holds although the owner has signed it. gRPC's clients would not show a token alone, so this client is
    another one."""
    server, shown = await start(), tmp_path / "shown.pem"
    token = locked.PEER_TOKEN
    shown.write_text(certificates.to_pem(token.certificate) + certificates.key_pem(token.key))
    # The loop ends when the server hangs up. How a client hears of that depends on what it is just doing.
    with suppress(ssl.SSLError, ConnectionError):
        async with asyncio.timeout(10.0), _asking_without_taking(server, READ, SMALL, shown=shown) as reader:
            await reader.read()
    assert server.directory.num_answered == 0
    shown.write_text(OTHER_PEER.certificate_pem + OTHER_PEER.key_pem)
    async with _asking_without_taking(server, READ, SMALL, shown=shown):
        await eventually(lambda: server.directory.num_answered == 1)


async def test_a_connection_ends_to_be_of_use_with_its_token(start: Any) -> None:
    server = await start()
    async with server.called_by(OTHER_PEER) as channel:
        call = _calls(channel, OTHER_PEER)["/swarm.rpc.v1.AveragingService/Begin"]
        assert await _code(call()) is SERVED
        server.clock.later_seconds = 31 * 86_400.0
        assert await _code(call()) is DENIED


async def test_nobody_speaks_for_another_member(start: Any) -> None:
    server = await start()
    async with server.called_by(OTHER_PEER) as channel:
        answers = {name: await _code(call()) for name, call in _calls(channel, PEER).items()}
    silent = {
        *("StageService/Train", "StageService/Evaluate", "StageService/Describe", "GenerationService/Generate"),
        *("DirectoryService/Read", "ProbeService/Probe"),
        *("MeetingService/Wait", "MeetingService/Connect", "MeetingService/Take", "MeetingService/Meet"),
        *("StageService/Hold", "Health/Check"),
    }
    for name, code in answers.items():
        method = name.rpartition(".")[2]
        assert _is_served(code) if method in silent else code is not grpc.StatusCode.OK, name
        assert method in {*silent, "AveragingService/Exchange"} or code is DENIED, name


async def test_in_an_open_run_nothing_is_asked(start: Any) -> None:
    server = await start(locked.OPEN)
    answers = await _answers(server, locked.OPEN)
    assert all(map(_is_served, answers.values())), answers


@pytest.mark.parametrize(("server_is", "caller"), [(PEER, OTHER_PEER), (locked.OPEN, locked.OPEN)])
async def test_the_calls_of_one_caller_are_counted(start: Any, server_is: Identity, caller: Identity) -> None:
    server = await start(server_is)
    async with server.called_by(caller) as channel:
        stub: Any = AveragingServiceStub(channel)
        idle = [stub.Exchange() for _ in range(2)]
        for call in idle:
            await call.write(averaging_pb2.ExchangeRequest(data=b"x"))
        await eventually(lambda: server.callers.num_calls == 2)
        assert await _code(stub.Exchange()) is grpc.StatusCode.RESOURCE_EXHAUSTED
        for call in idle:
            call.cancel()
        await eventually(lambda: server.callers.num_calls == 0)
        assert _is_served(await _code(_calls(channel, caller)["/swarm.rpc.v1.StageService/Describe"]()))


async def test_nonsense_waits_its_turn_as_well(start: Any) -> None:
    """To refuse a call costs as much as to answer it."""
    server = await start(max_calls=1000)
    async with server.called_by(OTHER_PEER) as channel:
        nonsense = channel.unary_unary("/swarm.rpc.v1.AveragingService/Begin")
        for at_once in (BURST_CALLS // WASTED_CALLS, 20):
            assert server.clock.num_waits == 0
            codes = await asyncio.gather(*(_code(nonsense(b"\xff")) for _ in range(at_once)))
            assert set(codes) == {grpc.StatusCode.INVALID_ARGUMENT}
        assert server.clock.num_waits == 20


READ = b"/swarm.rpc.v1.DirectoryService/Read"
LARGE, SMALL = directory_pb2.ReadRequest(key="x"), directory_pb2.ReadRequest()
"""Sizes of the answers that are wanted."""


async def test_a_call_goes_on_until_its_answer_is_taken(start: Any) -> None:
    """gRPC would hold any number of answers for a caller that takes none."""
    server = await start(locked.OPEN)
    async with _asking_without_taking(server, READ, LARGE, times=2), server.called_by(locked.OPEN) as channel:
        await eventually(lambda: server.callers.num_bytes > 2 << 20)
        assert server.callers.num_calls == 2
        stub: Any = DirectoryServiceStub(channel)
        assert await _code(stub.Read(SMALL)) is grpc.StatusCode.RESOURCE_EXHAUSTED
    await eventually(lambda: server.callers.num_calls == server.callers.num_bytes == 0)


async def test_small_answers_that_are_not_taken_are_calls_under_way(start: Any) -> None:
    server = await start(locked.OPEN)
    async with _asking_without_taking(server, READ, SMALL, times=2):
        await eventually(lambda: server.directory.num_answered == 2)
        await asyncio.sleep(0.1)
        assert (server.callers.num_calls, server.callers.num_bytes) == (2, 0)
    await eventually(lambda: server.callers.num_calls == 0)


async def test_answers_that_are_not_taken_have_a_limit(start: Any) -> None:
    server = await start(locked.OPEN, max_calls=1000, max_bytes=3 << 19)
    async with server.called_by(locked.OPEN) as channel:
        stub: Any = DirectoryServiceStub(channel)
        async with _asking_without_taking(server, READ, LARGE):
            await eventually(lambda: server.callers.num_bytes > 1 << 20)
            assert await _code(stub.Read(LARGE)) is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await _code(stub.Read(SMALL)) is grpc.StatusCode.OK
        await eventually(lambda: server.callers.num_bytes == 0)
        for _ in range(3):
            assert await _code(stub.Read(LARGE)) is grpc.StatusCode.OK


@asynccontextmanager
async def _asking_without_taking(
    server: Server, method: bytes, request: Message, *, times: int = 1, shown: Path | None = None
) -> AsyncIterator[asyncio.StreamReader]:
    """Ask for something over a connection, and take no byte of the answer, which gRPC's clients would take.

    It is HTTP/2 with an initial window of 0.

    Args:
        shown: a file with the certificate that the client shows, and its key; without it, none is shown.
    """
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    trusting.set_alpn_protocols(["h2"])
    if shown is not None:
        trusting.load_cert_chain(shown)
    host, port = server.record.endpoint.split(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=trusting)
    window = struct.pack(">HI", 4, 0)
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, window))
    headers = {
        b":method": b"POST", b":scheme": b"https", b":path": method,
        b":authority": b"x", b"te": b"trailers", b"content-type": b"application/grpc",
    }  # fmt: skip
    # Each header is a literal without indexing.
    packed = b"".join(bytes([0, len(name)]) + name + bytes([len(value)]) + value for name, value in headers.items())
    message = request.SerializeToString()
    for stream_id in range(1, 2 * times, 2):
        writer.write(_frame(1, 4, stream_id, packed))
        writer.write(_frame(0, 1, stream_id, struct.pack(">xI", len(message)) + message))
    await writer.drain()
    try:
        yield reader
    finally:
        writer.transport.abort()


def _frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream_id) + payload


async def test_long_lists_wait_their_turn_as_well(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each entry is checked before it is known whether it makes sense."""
    server = await start()
    looked_at: list[Any] = []

    def require_bounds(message: Any, *, finite: bool) -> None:
        looked_at.append(message)

    monkeypatch.setattr(guard, "require_bounds", require_bounds)
    num_entries = 4096
    partners = [averaging_pb2.Partner()] * num_entries
    request = averaging_pb2.CommitRequest(peer_id=OTHER_PEER.peer_id, partners=partners)
    async with server.called_by(OTHER_PEER) as channel:
        stub: Any = AveragingServiceStub(channel)
        num_at_once = BURST_CALLS // (num_entries // ENTRIES_PER_CALL + 1)
        for _ in range(num_at_once):
            assert await _code(stub.Commit(request)) is SERVED
        assert server.clock.num_waits == 0
        del looked_at[:]
        call = asyncio.ensure_future(_code(stub.Commit(request)))
        await eventually(lambda: server.clock.num_waits == 1)
        assert not looked_at
        assert await call is SERVED
        assert looked_at == [request]


async def test_who_takes_no_answer_is_cut_off(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC waits for a reader as long as its connection lives."""
    monkeypatch.setattr(guard, "PIECE_SECONDS", 0.3)
    server = await start()
    async with server.called_by(OTHER_PEER) as channel:
        stub: Any = AveragingServiceStub(channel)
        call = stub.Shared(averaging_pb2.SharedRequest(peer_id=OTHER_PEER.peer_id))
        await eventually(lambda: server.averaging.num_answering == 1)
        await eventually(lambda: server.averaging.num_answering == 0)
        call.cancel()
        await eventually(lambda: server.callers.num_calls == 0)


async def test_who_takes_no_byte_of_an_answer_is_cut_off_and_counted(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC keeps the bytes of an answer until the connection ends."""
    monkeypatch.setattr(guard, "PIECE_SECONDS", 0.3)
    server = await start(locked.OPEN)
    shared = b"/swarm.rpc.v1.AveragingService/Shared"
    async with _asking_without_taking(server, shared, averaging_pb2.SharedRequest()):
        await eventually(lambda: server.averaging.num_answering == 1)
        await eventually(lambda: server.averaging.num_answering == 0)
        await asyncio.sleep(0.1)
        assert server.callers.num_calls == 1
    await eventually(lambda: server.callers.num_calls == 0)


# -- the other side --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("server_is", [locked.OPEN, locked.FOREIGN, locked.EXPIRED, TRAINER])
async def test_members_call_nobody_but_the_peers_of_their_run(start: Any, server_is: Identity) -> None:
    server = await start(server_is)
    pool = ChannelPool(identity=PEER)
    with pytest.raises(Exception, match="is no peer of this run"):
        pool.channel(server.record)
    await pool.close()


async def test_members_call_the_very_peer_of_the_record(start: Any) -> None:
    """Another peer that the same token let in does not pass for the one of the record."""
    server = await start(OTHER_PEER)
    pool = ChannelPool(identity=PEER)
    stub: Any = StageServiceStub(pool.channel(server.record))
    assert await _code(stub.Describe(stage_pb2.DescribeRequest(), timeout=10)) is SERVED
    claimed = {"peer_id": locked.PEER.peer_id}
    with pytest.raises(Exception, match="shows the certificate of"):
        pool.channel(server.record.model_copy(update=claimed))
    lured = server.record.model_copy(update={**claimed, "certificate_pem": PEER.certificate_pem})
    stub = StageServiceStub(pool.channel(lured))
    assert await _code(stub.Describe(stage_pb2.DescribeRequest(), timeout=10)) is UNREACHABLE
    await pool.close()
