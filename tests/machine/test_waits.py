"""What a process waits for, in its log and for status requests."""

import asyncio
import itertools

import pytest

from swarm.errors import PeerUnavailable
from swarm.machine.waits import (
    FIRST_SECONDS,
    JOIN_SECONDS,
    LONGEST_GAP_SECONDS,
    Waits,
    patiently,
)
from tests.support.virtual_time import LoopClock, in_virtual_time


def test_a_wait_is_told_within_five_seconds_and_then_less_and_less_often(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    waits = Waits()
    told = []
    with waits.on(lambda seconds: f"a donor, asked {seconds:.0f} s ago"):
        for tenths in range(3000):
            num_lines = len(caplog.messages)
            waits.look(tenths / 10)
            told += [tenths / 10] * (len(caplog.messages) - num_lines)
    assert told[0] == FIRST_SECONDS < 5.0
    assert caplog.messages[0] == "waiting for a donor, asked 4 s ago, 4 s so far"
    gaps = [later - earlier for earlier, later in itertools.pairwise(told)]
    assert gaps == sorted(gaps)
    assert gaps[-1] == pytest.approx(LONGEST_GAP_SECONDS)
    caplog.clear()
    waits.look(1000.0)
    assert (caplog.messages, waits.present) == ([], "")


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
async def test_whoever_comes_later_is_found_and_whoever_is_there_not_waited_for() -> None:
    assert await patiently(_Peer(0).ask, LoopClock(), "a peer") == "here"
    assert LoopClock().monotonic() == 0.0
    assert await patiently(_Peer(10).ask, LoopClock(), "a peer") == "here"
    assert LoopClock().monotonic() < JOIN_SECONDS


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
