"""What is computed from the answers of the peers that are watched."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peers.local.supervisor import Supervisor
from scripts.benches.shared import probe
from scripts.benches.shared.probe import Watched, rate_between_commits, watch
from scripts.benches.shared.swarm import ServingPeer, SwarmProcesses
from swarm.config import RunConfig
from swarm.errors import DeadlineExceeded
from swarm.rpc.v1 import stage_pb2 as pb
from tests.support.virtual_time import in_virtual_time


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


@pytest.fixture
def swarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SwarmProcesses:
    """A swarm of one peer that was never started, with short intervals for watching."""
    monkeypatch.setattr(probe, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(probe, "START_SECONDS", 1.0)
    record = SimpleNamespace(stage=0, endpoint="host:1", certificate_pem="")
    peer = ServingPeer(child=cast(Any, SimpleNamespace(name="peer-0")), record=cast(Any, record), dht_address="")
    made = SwarmProcesses(RunConfig(), Supervisor(tmp_path), tmp_path)
    made.peers.append(peer)

    class Channel:
        async def close(self) -> None: ...

    monkeypatch.setattr(probe, "_channel", lambda peer, own: Channel())
    return made


def _answers(monkeypatch: pytest.MonkeyPatch, *committed: int) -> None:
    """Let the peer answer each poll with the next of these numbers, and then slowly with the last one."""
    left = list(committed)

    async def describe(channel: object, request: pb.DescribeRequest, *, seconds: float) -> pb.DescribeReply:
        if len(left) > 1:
            return pb.DescribeReply(counters=pb.StageCounters(committed=left.pop(0)))
        await asyncio.sleep(0.2)
        return pb.DescribeReply(counters=pb.StageCounters(committed=left[0]))

    monkeypatch.setattr(probe, "describe", describe)


@in_virtual_time
async def test_only_what_was_committed_while_it_was_watched_counts(
    swarm: SwarmProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    _answers(monkeypatch, 0, 3, 4, 5, 7, 9, 9)
    (watched,) = await watch(swarm, warm_up_seconds=0.015, seconds=0.1)
    assert [number for _, number in watched.committed] == [7, 9, 9]
    assert watched.num_committed == 2


@in_virtual_time
async def test_a_swarm_that_commits_nothing_is_given_up(swarm: SwarmProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    _answers(monkeypatch, 2)
    with pytest.raises(DeadlineExceeded, match="no microbatch in"):
        await watch(swarm, warm_up_seconds=0.0, seconds=0.1)


@in_virtual_time
async def test_a_peer_that_stops_answering_is_named(swarm: SwarmProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    _answers(monkeypatch, 0, 1, 1)
    with pytest.raises(DeadlineExceeded, match="peer-0 hardly answered"):
        await watch(swarm, warm_up_seconds=0.0, seconds=0.1)
