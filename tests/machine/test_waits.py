"""What a process waits for, in its log and for status requests."""

import itertools

import pytest

from swarm.machine.arriving import Arriving
from swarm.machine.waits import FIRST_SECONDS, LONGEST_GAP_SECONDS, Waits


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
