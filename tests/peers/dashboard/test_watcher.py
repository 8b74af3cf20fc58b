"""One view serves all viewers, a failure is shown, and the page has all figures of swarm-status."""

import asyncio
import json
from typing import cast

import pytest

from peers.dashboard.history import History
from peers.dashboard.watcher import Watcher
from peers.status.contributions import Tallies
from peers.status.lookout import Lookout
from peers.status.view import Joining, SwarmView
from swarm import config as configs
from swarm.config import Timeline
from swarm.errors import PeerUnavailable
from swarm.training.tally import EMPTY, Given
from swarm.types import Block
from tests.support import virtual_time
from tests.support.views import peer, peer_id, view

CONFIG = configs.load_preset("tiny")


class _Place:
    """A lookout that returns the test's views, one after another, and then always the last one."""

    def __init__(self, *outcomes: SwarmView | Exception) -> None:
        self.timeline = Timeline(CONFIG)
        self.joining = Joining(peer="swarm-peer swarm://1...")
        self._outcomes = list(outcomes)
        self.num_looks = self.num_tallies = 0

    async def view(self) -> SwarmView:
        self.num_looks += 1
        outcome = self._outcomes.pop(0) if len(self._outcomes) > 1 else self._outcomes[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def tallies(self) -> Tallies:
        self.num_tallies += 1
        tally = EMPTY.after(0, parent="", result="", given={peer_id("ann"): Given(self.num_tallies, 1, 1, 1)})
        return Tallies("run", {Block(0): tally})

    async def hear_amendments(self) -> None:
        pass


def _watcher(place: _Place, interval_seconds: float = 2.0) -> Watcher:
    history, clock = History(run=CONFIG.run_id), virtual_time.LoopClock()
    return Watcher(cast(Lookout, place), history, clock=clock, interval_seconds=interval_seconds)


async def test_the_page_has_what_status_has_of_everybody() -> None:
    """Names are the same, too: a figure that is added to status is on the page."""
    seen = view([peer("ann", round=3, samples_per_second=4.25, loop_lag_seconds=0.5)], [peer("bob", state="joining")])
    watcher = _watcher(_Place(seen))
    await watcher.look()
    shown, told = json.loads(json.dumps(watcher.state)), json.loads(seen.to_json())
    for row in told["stages"]:
        for status_row in row["peers"]:
            page_row = shown["peers"][f"{row['stage']}/{status_row['peer_id']}"]
            assert {name: page_row[name] for name in status_row} == status_row
            assert status_row.keys() <= shown["figures"]["peer"].keys()
    for page_row, status_row in zip(shown["trainers"], told["trainers"], strict=True):
        assert {name: page_row[name] for name in status_row} == status_row
        assert status_row.keys() <= shown["figures"]["trainer"].keys()
    assert shown["empty_stages"] == told["empty_stages"] == []
    assert shown["peers"][f"0/{peer_id('ann')}"]["cells"]["loop_lag_seconds"] == "0.5 s"
    assert shown["join"]["Give a machine to the run"] == "swarm-peer swarm://1..."
    assert (shown["figures_now"]["loss"], shown["figures_now"]["peers"]) == (2.5, 1)


async def test_a_look_that_fails_is_told_and_what_was_seen_stays() -> None:
    watcher = _watcher(_Place(view([peer("ann")]), PeerUnavailable("nobody answers"), view([peer("ann")])))
    faults, texts = [], []
    for _ in range(3):
        await watcher.look()
        faults.append(watcher.state["fault"])
        texts = [event.text for event in watcher.history.events]
        assert len(watcher.state["peers"]) == 1
    assert faults == ["", "nobody answers", ""]
    assert texts[-2:] == ["the run cannot be seen: nobody answers", "the run can be seen again"]


@pytest.mark.parametrize(("num_peers", "num_looks"), [(1, 30), (1000, 6)])
def test_many_peers_are_looked_at_less_often(num_peers: int, num_looks: int) -> None:
    place = _Place(view([peer(f"peer {number}") for number in range(num_peers)]))
    published = 0

    def publish() -> None:
        nonlocal published
        published += 1

    async def watch() -> None:
        try:
            async with asyncio.timeout(59.0):
                await _watcher(place).watch(publish)
        except TimeoutError:
            pass

    virtual_time.run(watch())
    assert place.num_looks == published == num_looks
