"""The servicer of content over real gRPC, and fetchers: several peers share the work, and what they send is checked."""

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
from swarm.machine.clock import Clock, SystemClock
from swarm.rpc.channels import ChannelPool
from swarm.rpc.serving import SERVER_OPTIONS, bind_server
from swarm.rpc.transfers import PATIENCE_SECONDS, Turns
from swarm.rpc.v1.content_pb2_grpc import add_ContentServiceServicer_to_server
from swarm.types import PeerRecord
from tests.averaging.doubles import until
from tests.content.lines import FakeLine, after, digest_of, record, shelf_of
from tests.support.virtual_time import LoopClock, in_virtual_time

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


# -- several peers share the work --------------------------------------------------------------------------------------


CONTENTS = [bytes([number]) * 9 for number in range(20)]


async def _fetch(line: FakeLine, fetcher: Fetcher | None = None, *, clock: Clock | None = None) -> dict[int, bytes]:
    found: dict[int, bytes] = {}

    def keeper(number: int) -> Piece:
        return Piece(sha256=digest_of(CONTENTS[number]), max_bytes=9, keep=lambda data: found.__setitem__(number, data))

    fetcher = fetcher or Fetcher(line, Kind.WEIGHTS, line.donors, clock or SystemClock(), random.Random(0))
    await fetcher.fetch([keeper(number) for number in range(len(CONTENTS))])
    assert sorted(found) == list(range(len(CONTENTS)))
    return found


async def test_what_one_lacks_comes_from_others() -> None:
    line = FakeLine(a=shelf_of(), b=shelf_of(*CONTENTS), c=shelf_of(*CONTENTS[:3]))
    found = await _fetch(line)
    assert [found[number] for number in range(20)] == CONTENTS
    assert line.num_sent["b"] > 0


async def test_a_donor_that_dies_is_replaced_and_nothing_comes_twice() -> None:
    line = FakeLine(a=shelf_of(*CONTENTS), b=shelf_of(*CONTENTS))
    line.faults["a"] = after(4, PeerUnavailable("it hung up"))
    found = await _fetch(line)
    assert [found[number] for number in range(20)] == CONTENTS
    assert line.num_sent == {"a": 4, "b": 16}


async def test_a_liar_is_not_asked_again() -> None:
    line = FakeLine(liar=lambda _: b"something", honest=shelf_of(*CONTENTS))
    fetcher = Fetcher(line, Kind.WEIGHTS, line.donors, SystemClock(), random.Random(0))
    assert list((await _fetch(line, fetcher)).values()) != []
    num_lies = line.num_asked["liar"]
    await _fetch(line, fetcher)
    assert line.num_asked["liar"] == num_lies > 0
    assert line.num_sent["honest"] == 40


@in_virtual_time
async def test_a_busy_donor_is_waited_for_but_not_for_ever() -> None:
    clock = LoopClock()
    line = FakeLine(a=shelf_of(*CONTENTS))
    began_at = clock.monotonic()

    def busy_for(seconds: float) -> None:
        if clock.monotonic() < began_at + seconds:
            raise Overloaded("others are served now", retry_after_seconds=0.5)

    line.faults["a"] = lambda _: busy_for(30.0)
    await _fetch(line, clock=clock)
    assert 30.0 <= clock.monotonic() - began_at < 32.0
    line.faults["a"] = lambda _: busy_for(1e9)
    with pytest.raises(PeerUnavailable):
        await _fetch(line, clock=clock)
    assert clock.monotonic() - began_at < 32.0 + PATIENCE_SECONDS + 2.0
