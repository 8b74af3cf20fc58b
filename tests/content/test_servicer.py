"""The servicer of content over real gRPC: what it sends, to how many callers at once, and when."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import pytest

from swarm.content.service import (
    MOST_CALLS_OF_ONE,
    PIECE_BYTES,
    ContentServicer,
    Fetcher,
    Kind,
    Line,
    Piece,
    Shelf,
    Shelves,
    nothing,
)
from swarm.errors import IntegrityError, MalformedMessage, NotReady, Overloaded, PeerUnavailable, SwarmError, WrongRun
from swarm.machine.clock import SystemClock
from swarm.rpc.channels import ChannelPool
from swarm.rpc.serving import SERVER_OPTIONS, bind_server
from swarm.rpc.transfers import Turns
from swarm.rpc.v1.content_pb2_grpc import add_ContentServiceServicer_to_server
from swarm.types import PeerRecord
from tests.averaging.doubles import until
from tests.content.lines import digest_of, record, shelf_of

LARGE = bytes(range(256)) * ((2 * PIECE_BYTES + 512) // 256)


@asynccontextmanager
async def _serving(
    weights: Shelf, tokenizer: Shelf = nothing, *, is_exchanging: Callable[[], bool] = lambda: False
) -> AsyncIterator[PeerRecord]:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    shelves = Shelves(weights=weights, tokenizer=tokenizer)
    servicer = ContentServicer(
        "run", shelves, is_exchanging=is_exchanging, clock=SystemClock(),
        turns=Turns(SystemClock(), is_training=lambda: False),
    )  # fmt: skip
    add_ContentServiceServicer_to_server(servicer, server)
    port = bind_server(server, "127.0.0.1", 0, None)
    await server.start()
    try:
        yield record("donor", f"127.0.0.1:{port}")
    finally:
        await server.stop(grace=None)


@pytest.fixture
async def channels() -> AsyncIterator[ChannelPool]:
    channels = ChannelPool(insecure=True)
    yield channels
    await channels.close()


async def test_content_comes_whole_and_by_its_kind(channels: ChannelPool) -> None:
    line = Line("run", channels, own_id="a")
    async with _serving(shelf_of(LARGE), shelf_of(b"words")) as donor:
        assert await line.ask(donor, Kind.WEIGHTS, digest_of(LARGE), max_bytes=len(LARGE)) == LARGE
        assert await line.ask(donor, Kind.TOKENIZER, digest_of(b"words"), max_bytes=99) == b"words"
        with pytest.raises(NotReady, match="it is not here"):
            await line.ask(donor, Kind.TOKENIZER, digest_of(LARGE), max_bytes=len(LARGE))


def _unreadable(_: str) -> bytes:
    raise IntegrityError("the file is gone")


@pytest.mark.parametrize(
    ("shelf", "run", "max_bytes", "fault", "message"),
    [
        (lambda _: b"something else", "run", 99, IntegrityError, "does not match its digest"),
        (shelf_of(LARGE), "run", len(LARGE) - 1, MalformedMessage, "sends more than"),
        (lambda _: LARGE[:-1], "run", len(LARGE), IntegrityError, "does not match its digest"),
        (_unreadable, "run", 99, NotReady, "it cannot be read here"),
        (shelf_of(LARGE), "another", 99, WrongRun, "'another' is not 'run'"),
    ],
)
async def test_what_is_not_what_was_asked_for_is_refused(
    shelf: Shelf, run: str, max_bytes: int, fault: type[SwarmError], message: str, channels: ChannelPool
) -> None:
    async with _serving(shelf) as donor:
        with pytest.raises(fault, match=message):
            await Line(run, channels, own_id="a").ask(donor, Kind.WEIGHTS, digest_of(LARGE), max_bytes=max_bytes)


async def test_one_caller_has_only_so_many_at_once(channels: ChannelPool) -> None:
    go_on = threading.Event()

    num_served = 0

    def slowly(sha256: str) -> bytes | None:
        nonlocal num_served
        num_served += 1
        go_on.wait(20.0)
        return shelf_of(b"x")(sha256)

    line = Line("run", channels, own_id="a")

    async def ask() -> bytes:
        return await line.ask(donor, Kind.WEIGHTS, digest_of(b"x"), max_bytes=1)

    async with _serving(slowly) as donor, asyncio.TaskGroup() as tasks:
        asking = [tasks.create_task(ask()) for _ in range(MOST_CALLS_OF_ONE)]
        await until(lambda: num_served == MOST_CALLS_OF_ONE)
        with pytest.raises(Overloaded):
            await ask()
        go_on.set()
        assert [await task for task in asking] == [b"x"] * MOST_CALLS_OF_ONE
    async with _serving(shelf_of(b"x")) as donor:
        # Places are free again when calls end.
        for _ in range(2 * MOST_CALLS_OF_ONE):
            await ask()


async def test_training_comes_first(channels: ChannelPool) -> None:
    is_exchanging = True
    async with _serving(shelf_of(b"x"), is_exchanging=lambda: is_exchanging) as donor, asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(
            Line("run", channels, own_id="a").ask(donor, Kind.WEIGHTS, digest_of(b"x"), max_bytes=1)
        )
        await asyncio.sleep(0.3)
        assert not asking.done()
        is_exchanging = False
        assert await asking == b"x"


async def test_a_donor_that_dies_in_mid_piece_is_unavailable_and_another_one_sends_it(channels: ChannelPool) -> None:
    line, is_exchanging = Line("run", channels, own_id="a"), False

    def begin_exchange() -> bool:
        # The exchange begins with the second part of the piece, which then does not come.
        nonlocal is_exchanging
        before, is_exchanging = is_exchanging, True
        return before

    async with _serving(shelf_of(LARGE)) as other:
        async with _serving(shelf_of(LARGE), is_exchanging=begin_exchange) as donor:
            asking = asyncio.create_task(line.ask(donor, Kind.WEIGHTS, digest_of(LARGE), max_bytes=len(LARGE)))
            await until(lambda: is_exchanging)
            await asyncio.sleep(0.05)
            assert not asking.done()
        with pytest.raises(PeerUnavailable):
            await asking
        found = list[bytes]()
        fetcher = Fetcher(line, Kind.WEIGHTS, lambda: [donor, other], SystemClock(), random.Random(0))
        await fetcher.fetch([Piece(sha256=digest_of(LARGE), max_bytes=len(LARGE), keep=found.append)])
        assert found == [LARGE]
