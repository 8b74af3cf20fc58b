"""Trying again for a while: for how long, and what is logged meanwhile."""

import asyncio

import pytest

from swarm.errors import PeerUnavailable
from swarm.machine.patience import FIRST_SECONDS, JOIN_SECONDS, patiently
from swarm.machine.waits import LOOK_SECONDS
from tests.support.virtual_time import LoopClock, in_virtual_time


class _Hopeless(PeerUnavailable):
    """A fault that another attempt cannot avoid."""


class _Peer:
    """A peer that answers after `num_faults` calls, each of which takes `seconds`."""

    def __init__(self, num_faults: float, fault: Exception | None = None, seconds: float = 0.0) -> None:
        self.num_calls = 0
        self._num_faults = num_faults
        self._fault = fault or PeerUnavailable("it is not there")
        self._seconds = seconds

    async def ask(self) -> str:
        self.num_calls += 1
        await asyncio.sleep(self._seconds)
        if self.num_calls <= self._num_faults:
            raise self._fault
        return "here"


@in_virtual_time
async def test_whoever_is_there_is_not_waited_for() -> None:
    assert await patiently(_Peer(0).ask, LoopClock(), "a peer") == "here"
    assert LoopClock().monotonic() == 0.0


@in_virtual_time
async def test_whoever_comes_later_is_found() -> None:
    assert await patiently(_Peer(10).ask, LoopClock(), "a peer") == "here"
    assert LoopClock().monotonic() < JOIN_SECONDS


def test_soon_it_says_what_it_looks_for(caplog: pytest.LogCaptureFixture) -> None:
    times = list[float]()

    @in_virtual_time
    async def look() -> None:
        peer = _Peer(30, seconds=0.5)
        looking = asyncio.create_task(patiently(peer.ask, LoopClock(), "a peer"))
        while not looking.done():
            if len(caplog.records) > len(times):
                times.append(LoopClock().monotonic())
            await asyncio.sleep(0.1)
        with pytest.raises(PeerUnavailable):
            await looking

    look()
    assert times[0] == pytest.approx(FIRST_SECONDS, abs=0.2)
    assert times[1] == pytest.approx(3 * FIRST_SECONDS, abs=2 * LOOK_SECONDS)
    assert caplog.messages[0] == (
        "waiting for a peer (25 s at most; tried 3 times, the last time because it is not there), 2 s so far"
    )


def test_an_attempt_that_takes_long_is_no_silence_either(caplog: pytest.LogCaptureFixture) -> None:
    @in_virtual_time
    async def look() -> None:
        await patiently(_Peer(0, seconds=9.0).ask, LoopClock(), "a peer")

    look()
    assert caplog.messages == [
        "waiting for a peer (25 s at most; tried 1 time), 2 s so far",
        "waiting for a peer (25 s at most; tried 1 time), 6 s so far",
    ]


def test_a_reason_that_is_found_out_late_is_said_at_once(caplog: pytest.LogCaptureFixture) -> None:
    @in_virtual_time
    async def look() -> None:
        await patiently(_Peer(1, seconds=7.0).ask, LoopClock(), "a peer")

    look()
    assert caplog.messages[2] == (
        "waiting for a peer (25 s at most; tried 2 times, the last time because it is not there), 7 s so far"
    )


@in_virtual_time
async def test_it_ends_with_the_last_fault() -> None:
    with pytest.raises(PeerUnavailable, match="it is not there"):
        await patiently(_Peer(1000).ask, LoopClock(), "a peer")
    assert JOIN_SECONDS <= LoopClock().monotonic() <= JOIN_SECONDS + 1.0


@pytest.mark.parametrize("fault", [_Hopeless("another peer answers there"), ValueError("a wrong token")])
def test_what_will_not_change_ends_it_at_once(fault: Exception) -> None:
    peer = _Peer(1000, fault)

    @in_virtual_time
    async def look() -> None:
        await patiently(peer.ask, LoopClock(), "a peer", final=_Hopeless)

    with pytest.raises(type(fault), match=str(fault)):
        look()
    assert peer.num_calls == 1
