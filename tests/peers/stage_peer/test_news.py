"""What a stage peer's user reads while it serves."""

import dataclasses
from typing import Any

import pytest

from peers.stage_peer.news import (
    ACCUSED_SECONDS,
    EVERY_SECONDS,
    IDLE_LOOKS,
    QUIET_SECONDS,
    Around,
    StageNews,
    fitting_bottleneck,
)
from peers.stage_peer.own_process import carried
from swarm.config import DataConfig, ModelConfig, RunConfig, WireConfig
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.types import Block
from tests.support.manual_clock import ManualClock


def report(number: int) -> pb.RoundReport:
    """Make the report of a round."""
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


def around(**changes: Any) -> Around:
    """What a peer sees around it while nothing is wrong."""
    usual = Around(
        endpoint="192.0.2.1:5001", num_calls=7, num_others=2, has_trainer=True, empty_blocks=(), left_alone_by={}
    )
    return dataclasses.replace(usual, **changes)


def test_that_nothing_comes_is_said_once_each_time(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    news = StageNews(clock)
    with caplog.at_level("INFO"):
        for num_tasks in (0, 1):
            news.look(num_tasks, around())
            clock.advance(QUIET_SECONDS - 1)
            news.look(num_tasks, around())
            assert len(caplog.messages) == num_tasks
            for _ in range(3):
                clock.advance(1)
                news.look(num_tasks, around())
    assert caplog.messages == ["no microbatch for 30 s: the trainers send none to this peer"] * 2


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (around(num_calls=0), "no connection has reached this peer yet, though 2 others would use it: see that they "),
        (around(empty_blocks=[Block(1)]), "stage 1 without a peer"),
        (around(has_trainer=False), "no trainer is in the run"),
    ],
)
def test_others_are_blamed_for_what_is_seen_of_them_alone(
    seen: Around, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    news = StageNews(clock)
    clock.advance(QUIET_SECONDS)
    with caplog.at_level("INFO"):
        news.look(0, seen)
    assert caplog.messages[0].startswith(f"no microbatch for 30 s: {why}")


def test_a_peer_that_others_leave_alone_is_told_once_by_whom_and_why(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    news = StageNews(clock)
    one, five = {"gpu-0": "no answer"}, {f"gpu-{number}": "no answer" for number in range(5)}
    for accusers in ({}, one, one, {}, one):
        news.look(0, around(left_alone_by=accusers))
        clock.advance(1.0)
    (line,) = caplog.messages
    assert line == (
        "this peer is left alone for a while by 1 of its callers, as they say: gpu-0 (no answer). If that goes on, see "
        "that others can reach it at 192.0.2.1:5001"
    )
    clock.advance(ACCUSED_SECONDS)
    news.look(0, around(left_alone_by=five))
    news.look(0, around(left_alone_by=five))
    assert len(caplog.messages) == 2
    assert "this peer is left alone for a while by 5 of its callers, as they say: gpu-0 (no answer), " in caplog.text
    assert "and 2 more. If" in caplog.text


def _run(**model: Any) -> RunConfig:
    """Of 4 samples of 128 tokens a microbatch, with 512 numbers a token in bfloat16: 131 kB a sample."""
    return RunConfig(
        model=ModelConfig(num_heads=4, **({"d_model": 512} | model)), wire=WireConfig(dtype="bf16"),
        data=DataConfig(sequence_length=128, microbatch_size=4),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("config", "line_bytes_per_second", "round_trip_seconds", "expected"),
    [
        (
            _run(),
            2.5e6,
            0.02,
            "; 2.5 MB/s arrive at the next stage, and this peer computes for 13.1 MB/s: 97 of the 512",
        ),
        (
            _run(bottleneck_dim=64, bottleneck="learned"),
            1e6,
            0.0,
            "; 1 MB/s arrive at the next stage, and this peer computes for 1.64 MB/s: 39 of the 64 numbers a token",
        ),
        (_run(), 14e6, 0.0, ""),
        # Most of the time a microbatch is on its way because the next stage is far.
        (_run(), 2.5e6, 0.2, ""),
    ],
)
def test_a_line_that_is_slower_than_computing_is_told_what_would_fit_it(
    config: RunConfig, line_bytes_per_second: float, round_trip_seconds: float, expected: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    advice = fitting_bottleneck(config, 100.0, carried(config, line_bytes_per_second, round_trip_seconds))
    assert advice[: len(expected)] == expected
    assert bool(advice) == bool(expected)
    news = StageNews(ManualClock())
    with caplog.at_level("INFO"):
        for _ in range(IDLE_LOOKS):
            news.look_at(pb.TimeShares(computing=0.1, waiting_for_room=0.9), around(fitting_bottleneck=advice))
    (message,) = caplog.messages
    assert message.endswith(f"or a faster line{advice}")
