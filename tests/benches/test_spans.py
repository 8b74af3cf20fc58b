"""What the bench `spans` computes of its peers, and how its stages are paced."""

import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from peers.local.supervisor import Child, Supervisor
from scripts.benches.shared.common import run_of
from scripts.benches.shared.swarm import SwarmProcesses
from scripts.benches.sides.paced_stage import Owed
from scripts.benches.spans import MICROBATCH, Options, Peer, Peers, least_moved
from swarm.types import Block

LIKE = (1.0,) * 4


def _span(first: int, last: int) -> tuple[Block, ...]:
    return tuple(map(Block, range(first, last + 1)))


@pytest.mark.parametrize(
    ("room", "capacities", "before", "least"),
    [
        (4, [1, 4, 16, 4], [_span(0, 3)] * 3 + [None], 0),
        (2, [1, 4], [_span(2, 3), _span(2, 3)], 2),
        (4, [16, 4], [_span(0, 1), _span(2, 3)], 4),
        (4, [16, 4, 4], [_span(0, 1), _span(2, 3), None], 2),
    ],
)  # fmt: skip
def test_no_fewer_blocks_bring_a_swarm_back(
    room: int, capacities: Sequence[float], before: Sequence[tuple[Block, ...] | None], least: int
) -> None:
    assert least_moved(LIKE, room, capacities, before) == least


def test_the_share_is_that_of_what_the_peers_that_are_there_can_do_at_best(tmp_path: Path) -> None:
    config = run_of("spans", width=32, layers=4, head_width=16, stages=4, length=16, microbatch=MICROBATCH)
    with Supervisor(tmp_path / "logs") as children:
        swarm = SwarmProcesses(config, children, tmp_path, logs_events=True)
        peers = Peers(swarm, children, options := Options(seconds_per_sample=0.25), memory_bytes=None)
        sleeping: Child = children.start("sleep", ["sleep", "60"])
        peers.there = [Peer(capacity, sleeping, _span(0, 3)) for capacity in (4.0, 16.0)]
        # All stages together cost four times what one costs in the mean.
        every = MICROBATCH * options.seconds_per_sample * 4 / 20
        swarm.events.mkdir()
        lines = [{"event": "ack", "monotonic": every * number} for number in range(1, 51)]
        log = "\n".join(map(json.dumps, [{"event": "start", "monotonic": 0.0}, *lines]))
        (swarm.events / "trainer.jsonl").write_text(log)
        assert peers.shares([0.0, 9.0], 4.0) == pytest.approx([1.0, 0.25])


@pytest.mark.parametrize(
    "options", [{"kill": (2,)}, {"kill": (1, 1)}, {"room": 1}, {"room": 5}, {"room": 2, "kill": (1, 4, 16)}]
)
def test_a_swarm_that_could_not_be_whole_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"--kill|--room"):
        Options(**options)  # type: ignore[arg-type]


def test_what_a_paced_stage_computes_is_part_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept, owed = [0.0], list[float](), Owed()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", sleep)

    def task(samples_seconds: float, computed_seconds: float) -> None:
        owed.add(samples_seconds)
        now[0] += computed_seconds

    for of_task in ((2.0, 0.5), (0.0, 0.25), (2.0, 0.5), (1.0, 9.0), (3.0, 1.0)):
        owed.pay(partial(task, *of_task))
    assert slept == pytest.approx([1.5, 1.25, 1.0]), "what is behind is caught up with, but not all of it"
