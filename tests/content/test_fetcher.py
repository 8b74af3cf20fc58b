"""Several peers share the work, and all that they send is checked."""

import random

import pytest

from swarm.content.service import Fetcher, Kind, Piece
from swarm.errors import Overloaded, PeerUnavailable
from swarm.machine.clock import Clock, SystemClock
from swarm.rpc.transfers import PATIENCE_SECONDS
from tests.content.lines import FakeLine, after, digest_of, shelf_of
from tests.support.virtual_time import LoopClock, in_virtual_time

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


async def test_what_nobody_has_is_said() -> None:
    line = FakeLine(a=shelf_of(*CONTENTS[1:]))
    with pytest.raises(PeerUnavailable, match=r"no peer that answers has it: \d+ of 20 pieces missing"):
        await _fetch(line)
    with pytest.raises(PeerUnavailable, match="20 of 20"):
        await _fetch(FakeLine())


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
