"""What a process waits for, in its log and for status requests."""

import asyncio
import itertools

import pytest

from swarm.errors import PeerUnavailable
from swarm.machine.waits import (
    FIRST_SECONDS,
    JOIN_SECONDS,
    LONGEST_GAP_SECONDS,
    LOOK_SECONDS,
    SAY_SECONDS,
    Waits,
    patiently,
)
from swarm.rpc.transfers import Arriving
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


def test_the_wait_within_another_is_what_it_comes_down_to() -> None:
    waits = Waits()
    with waits.on("the state"):
        waits.look(0.0)
        waits.look(3.0)
        with waits.on("an offer of gpu-1"):
            waits.look(3.5)
            assert waits.present == "the state (4 s)"
            waits.look(5.0)
            assert waits.present == "an offer of gpu-1 (2 s)"
        waits.look(6.0)
        assert waits.present == "the state (6 s)"


def test_what_is_waited_for_now_and_then_begins_anew_each_time(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    waits, stage = Waits(), ""
    with waits.on(lambda _: stage):
        for second in range(40):
            stage = "" if second % 4 == 3 else "stage 2"
            waits.look(float(second))
        assert not caplog.messages
        stage = "stage 2"
        for second in range(40, 45):
            waits.look(float(second))
    assert caplog.messages == ["waiting for stage 2, 4 s so far"]


def test_how_far_a_download_is() -> None:
    arriving = Arriving("the state of stage 1", 500_000_000)
    assert arriving.in_words(0.0) == "the state of stage 1: 0.0 of 500.0 MB, 0.00 MB/s"
    arriving.add(20_000_000, "gpu-1")
    arriving.add(20_000_000, "gpu-2")
    expected = "the state of stage 1: 40.0 of 500.0 MB from gpu-1, gpu-2, 10.00 MB/s, 46 s left"
    assert arriving.in_words(4.0) == expected
    arriving.lost("gpu-1")
    arriving.add(600_000_000, "gpu-2")
    assert arriving.in_words(64.0) == "the state of stage 1: 500.0 of 500.0 MB from gpu-2, 10.00 MB/s, 0 s left"


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
    assert times[0] == pytest.approx(SAY_SECONDS, abs=0.2)
    assert times[1] == pytest.approx(3 * SAY_SECONDS, abs=2 * LOOK_SECONDS)
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
