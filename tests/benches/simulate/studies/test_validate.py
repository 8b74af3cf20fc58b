"""The simulated side of `validate`, what it compares, and what is computed from the answers of real peers."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from peers.local.supervisor import Supervisor
from scripts.benches.shared.swarm import ServingPeer, SwarmProcesses
from scripts.benches.simulate.studies import validate
from scripts.benches.simulate.studies.validate import (
    ALONE,
    SETTINGS,
    Setting,
    Watched,
    handing_on_seconds,
    largest_difference_points,
    rate_between_commits,
    shares,
    simulate,
)
from swarm.config import RunConfig
from swarm.errors import DeadlineExceeded
from swarm.rpc.v1 import stage_pb2 as pb
from tests.support.virtual_time import in_virtual_time

LINK_SECONDS = 0.02


def test_half_of_the_settings_are_short_of_what_the_peers_can_compute() -> None:
    rates = [
        simulate(setting, 0, link_seconds=LINK_SECONDS, warm_up_seconds=10.0, seconds=50.0)[0] / setting.limit
        for setting in SETTINGS.values()
    ]
    assert sum(rate > 0.95 for rate in rates) == len(rates) / 2
    assert sum(rate < 0.75 for rate in rates) == len(rates) / 2


def test_one_microbatch_in_flight_takes_its_computing_and_its_way() -> None:
    """Peers that know their caller take a microbatch unasked: it goes there and back once for each stage."""
    setting = Setting(paces=((0.05,), (0.05,)), max_in_flight=1, round_trip_seconds=0.1)
    rate, work = simulate(setting, 0, link_seconds=LINK_SECONDS, warm_up_seconds=10.0, seconds=50.0)
    assert 1 / rate == pytest.approx(2 * 4 * 0.05 + 2 * (0.1 + LINK_SECONDS), rel=0.03)
    assert work == ((1.0,), (1.0,))


def test_what_is_left_of_a_lone_microbatch_is_the_handing_on() -> None:
    assert handing_on_seconds([4.0, 1 / 0.22, 5.0]) == pytest.approx(0.02)
    rate, _ = simulate(ALONE, 0, link_seconds=0.02, warm_up_seconds=10.0, seconds=100.0)
    assert handing_on_seconds([rate]) == pytest.approx(0.02, abs=0.001)


def test_work_is_compared_by_shares_of_a_stage() -> None:
    assert shares([[1, 3], [8]]) == ((0.25, 0.75), (1.0,))
    assert largest_difference_points(shares([[1, 3], [8]]), shares([[2, 2], [5]])) == pytest.approx(25.0)


def _watched(*committed: tuple[float, int]) -> Watched:
    return Watched(stage=0, committed=list(committed))


def test_a_rate_is_from_commit_to_commit_of_all_together_not_from_poll_to_poll() -> None:
    """There is a commit every second, and it does not matter when the polls begin and end."""
    steady = _watched((0.9, 0), (1.0, 1), (1.5, 1), (2.0, 2), (3.0, 3), (3.9, 3))
    assert rate_between_commits([steady]) == pytest.approx(1.0)
    one = _watched((0.0, 5), (1.0, 6), (3.0, 8))
    other = _watched((0.0, 1), (2.0, 2), (5.0, 3))
    assert rate_between_commits([one, other]) == pytest.approx(4 / 4.0)


@pytest.mark.parametrize("committed", [[], [(0.0, 1)], [(0.0, 1), (1.0, 1)], [(0.0, 1), (1.0, 2)]])
def test_hardly_a_commit_is_no_rate(committed: list[tuple[float, int]]) -> None:
    with pytest.raises(DeadlineExceeded, match="measure for longer"):
        rate_between_commits([_watched(*committed)])


@in_virtual_time
@pytest.mark.parametrize(
    ("answers", "outcome"),
    [((0, 3, 4, 5, 7, 9, 9), [7, 9, 9]), ((2,), "no microbatch in"), ((0, 1, 1), "peer-0 hardly answered")],
)
async def test_only_what_was_committed_while_it_was_watched_counts_and_silence_is_told(
    answers: tuple[int, ...], outcome: list[int] | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer answers each poll with the next of these numbers, and then slowly with the last one."""
    left = list(answers)

    async def describe(channel: object, request: pb.DescribeRequest, *, seconds: float) -> pb.DescribeReply:
        if len(left) > 1:
            return pb.DescribeReply(counters=pb.StageCounters(committed=left.pop(0)))
        await asyncio.sleep(0.2)
        return pb.DescribeReply(counters=pb.StageCounters(committed=left[0]))

    class Channel:
        async def close(self) -> None: ...

    monkeypatch.setattr(validate, "describe", describe)
    monkeypatch.setattr(validate, "_channel", lambda peer, swarm: Channel())
    monkeypatch.setattr(validate, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(validate, "START_SECONDS", 1.0)
    peer = SimpleNamespace(child=SimpleNamespace(name="peer-0"), record=SimpleNamespace(stage=0))
    swarm = SwarmProcesses(RunConfig(), Supervisor(tmp_path), tmp_path, peers=[cast(ServingPeer, peer)])
    if isinstance(outcome, str):
        with pytest.raises(DeadlineExceeded, match=outcome):
            await validate.watch(swarm, warm_up_seconds=0.0, seconds=0.1)
        return
    (watched,) = await validate.watch(swarm, warm_up_seconds=0.015, seconds=0.1)
    assert [number for _, number in watched.committed] == outcome
