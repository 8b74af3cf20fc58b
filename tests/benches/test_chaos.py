"""What chaos computes from event logs, and that its faults end."""

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc.aio import _utils
from grpc_health.v1._async import HealthServicer
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub, add_HealthServicer_to_server

from peers.local.supervisor import Supervisor
from peers.shared.option_types import StageChoice
from scripts.benches.chaos import faults, figures
from scripts.benches.chaos.cast import Cast, Usage
from scripts.benches.chaos.faults import KINDS, fault
from scripts.benches.chaos.program import set_clock, wind
from scripts.benches.shared.throttle import Throttle


def _begin(number: int, lineage: str, attempt: int = 1) -> dict[str, Any]:
    return {"event": "begin", "round": number, "lineage": lineage, "attempt": attempt, "leader": "a"}


def _commit(number: int, parent: str, lineage: str, at: float, *members: str) -> dict[str, Any]:
    return {
        "event": "commit", "round": number, "parent": parent, "lineage": lineage, "monotonic": at, "samples": 8,
        "members": members or ("a", "b"),
    }  # fmt: skip


def test_the_rounds_of_abandoned_branches_are_left_out_and_those_before_a_checkpoint_count() -> None:
    one = [_begin(0, "0"), _commit(0, "0", "1", 10.0), _commit(1, "1", "2", 20.0), _commit(2, "2", "3", 30.0)]
    other = [_begin(0, "0", 2), _commit(0, "0", "1", 10.5), _commit(1, "1", "lost", 19.0, "b")]
    chain = figures.chain([one, other])
    assert [(c.lineage, c.at, c.attempts) for c in chain] == [("1", 10.0, 2), ("2", 20.0, 0), ("3", 30.0, 0)]
    gone_back = figures.chain([[_commit(0, "0", "1", 10.0), _commit(3, "again at 3", "4", 40.0)]])
    assert [committed.round for committed in gone_back] == [0, 3]


def test_throughput_counts_from_commit_to_commit_and_a_stall_counts() -> None:
    events = [_commit(0, "0", "1", 10.0), _commit(1, "1", "2", 25.0), _commit(2, "2", "3", 30.0)]
    chain = figures.chain([events])
    samples = chain[0].samples
    assert figures.throughput(chain, (12.0, 27.0)) == 2 * samples / 20.0
    assert figures.throughput(chain, (5.0, 28.0)) == 2 * samples / 20.0, "none was committed before"
    assert figures.throughput([], (0.0, 40.0)) == figures.throughput(chain, (0.0, 5.0)) == 0.0
    stalled = figures.chain([[*events, _commit(3, "3", "4", 150.0)]])
    assert figures.throughput(stalled, (10.0, 60.0)) == 3 * samples / 140.0, "up to the commit that ended it"
    assert figures.throughput(chain, (10.0, 90.0)) == 2 * samples / 80.0, "there is none after it"


def test_a_swarm_that_has_stopped_for_good_does_not_pass() -> None:
    honest = figures.chain([[_commit(number, str(number), str(number + 1), 10.0 * number) for number in range(20)]])
    stopped, last = honest[:11], (140.0, 180.0)
    assert figures.goes_on({0: honest, 1: honest}, last)
    assert not figures.goes_on({0: honest, 1: stopped}, last)
    storm, calm = (60.0, 120.0), [(0.0, 40.0), last]
    rates = [figures.throughput(stopped, storm)], [figures.throughput(stopped, window) for window in calm]
    assert figures.share_of_possible(*rates, [1.0]) > 1.0, "what it is held against has fallen as well"
    passes = {**figures.GOALS, "duplicates": 0, "violations": [], "trainer_exits": 0, "missing": 0, "goes_on": True}
    assert figures.passed(passes)
    assert not figures.passed({**passes, "goes_on": False})


def test_growth_is_that_of_processes_which_lived_through_the_second_half() -> None:
    def used(at: float, name: str, resident: int) -> Usage:
        return Usage(at=at, name=name, pid=1, resident_bytes=resident, num_descriptors=5, num_threads=3, num_tasks=7)

    usage = [used(float(at), "old", 100 + at // 10) for at in range(0, 1001, 5)]
    usage += [used(float(at), "young", 10**9) for at in range(900, 1001, 5)]
    found = figures.growth(usage, (0.0, 1000.0))
    assert (found["processes"], found["num_threads"]["largest_growth"]) == (1, 0)
    assert found["resident_bytes"]["largest_growth"] == pytest.approx(44, abs=2)


@pytest.fixture
def cast(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cast]:
    """Two stages of two peers each, or other peers, none of them started."""
    (tmp_path / "disk").mkdir()
    with Throttle() as throttle:
        cast = Cast(
            folder=tmp_path, config=tmp_path / "run.toml", children=Supervisor(tmp_path / "logs"), throttle=throttle,
            checkpoint_every=1, disk=tmp_path / "disk",
        )  # fmt: skip
        cast.add(2, getattr(request, "param", [0, 1, 0, 1]), trainers=1)
        yield cast


spans = pytest.mark.parametrize("cast", [[StageChoice(), 0, 1, 1]], indirect=True)


@pytest.mark.parametrize("cast", [[0, 1, 0, 1], [StageChoice(), 0, 1, 1]], indirect=True)
@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.hits == "network"])
def test_a_fault_of_the_network_ends_and_leaves_no_obstacle(cast: Cast, name: str) -> None:
    for seed in range(20):
        with fault(KINDS[name], cast, random.Random(seed)) as victims:
            assert victims
            assert cast.throttle.num_obstacles > 0
        assert cast.throttle.num_obstacles == 0


def _let_live(cast: Cast) -> None:
    for role in cast.peers():
        role.child, role.ready = cast.children.start(role.name, ["sleep", "60"]), True


@spans
def test_each_block_keeps_a_live_process(cast: Cast, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "DOWN_SECONDS", (1000.0, 2000.0))
    with cast.children:
        num_killed = 0
        for seed in range(5):
            _let_live(cast)
            random_ = random.Random(seed)
            while victims := KINDS["kill-peer"].begin(cast, random_, ExitStack()):
                num_killed += len(victims)
                assert all(any(role.alive for role in cast.peers(stage)) for stage in (0, 1))
        assert num_killed >= 10


@spans
def test_what_lives_at_the_scarcest_stage_is_the_capacity_and_a_span_is_a_part_of_one_at_each(cast: Cast) -> None:
    with cast.children:
        _let_live(cast)
        cast.tick()
        cast.kill9(cast.peers()[0], 1000.0)
        cast.tick()
        cast.kill9(cast.peers(1)[-1], 1000.0)
        cast.tick()
    assert [share for _, share in cast.capacity] == pytest.approx([1.0, 1 / 1.5, 1 / 1.5])


async def test_calls_have_their_time_though_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It behaves like a machine whose clock was set, where gRPC's core and Python read the same clock."""
    monkeypatch.setattr(time, "time", right := time.time)
    monkeypatch.setattr(_utils, "time", time)
    set_clock(tmp_path / "clock", -1000.0)
    wind(tmp_path / "clock")
    assert right() - time.time() > 900.0
    server = grpc.aio.server()
    add_HealthServicer_to_server(HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            health: Any = HealthStub(channel)
            await health.Check(HealthCheckRequest(), timeout=10.0)
    finally:
        await server.stop(None)
