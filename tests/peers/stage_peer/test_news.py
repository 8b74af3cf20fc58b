"""What a stage peer's user reads while it serves."""

import pytest

from peers.stage_peer.news import EVERY_SECONDS, QUIET_SECONDS, StageNews
from swarm.machine.clock import ManualClock
from swarm.rpc.v1 import stage_pb2 as pb


def report(number: int) -> pb.RoundReport:
    """Of a round."""
    return pb.RoundReport(round=number, num_samples=512, num_members=2, num_alive=3, aggregate_seconds=0.84)


def test_a_round_is_a_line_but_not_each_of_many(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    news = StageNews(clock)
    with caplog.at_level("INFO"):
        for number in range(12):
            news.committed(report(number), samples_per_second=143.21, is_behind=False)
            clock.advance(EVERY_SECONDS / 10)
    assert caplog.messages == [
        f"round {number} committed: 512 samples, averaged by 2 of 3 peers in 0.8 s; this one manages 143 samples/s"
        for number in (0, 10)
    ]


def test_steps_that_teach_little_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    news, bad = StageNews(ManualClock()), report(0)
    bad.inner_steps.CopyFrom(
        pb.InnerSteps(count=10, samples=160, configured_samples=16, microbatches=20, staleness=50, largest_staleness=4)
    )
    with caplog.at_level("WARNING"):
        for _ in range(3):
            news.committed(bad, samples_per_second=1.0, is_behind=False)
    assert [message.split(":")[0] for message in caplog.messages] == [
        "gradients were 2.5 inner steps late on average, 4 at most, and a run learns less from those"
    ]


def test_of_a_round_that_was_replayed_nothing_is_said_as_if_the_peer_had_been_there(
    caplog: pytest.LogCaptureFixture,
) -> None:
    news = StageNews(ManualClock())
    with caplog.at_level("INFO"):
        news.committed(report(1), samples_per_second=143.21, is_behind=True)
        assert not caplog.messages
        news.committed(report(2), samples_per_second=143.21, is_behind=False)
    assert len(caplog.messages) == 1


def test_that_nothing_comes_is_said_once_each_time(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    news = StageNews(clock)
    with caplog.at_level("INFO"):
        for num_tasks in (0, 1):
            news.look(num_tasks)
            clock.advance(QUIET_SECONDS - 1)
            news.look(num_tasks)
            assert len(caplog.messages) == num_tasks
            for _ in range(3):
                clock.advance(1)
                news.look(num_tasks)
    assert len(caplog.messages) == 2
    assert caplog.messages[0].startswith("no microbatch for 30 s: nobody trains, or another stage has no peer")
