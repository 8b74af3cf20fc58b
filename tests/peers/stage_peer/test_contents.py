"""A stage's initial weights, from peers that come and go."""

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from peers.shared.network import Membership
from peers.stage_peer.contents import WAIT_SECONDS, Contents
from swarm.config import RunConfig
from swarm.content.service import Fetcher, Kind
from swarm.credentials.identity import generate
from swarm.errors import PeerUnavailable
from swarm.interchange.run_folder import ImportOptions, import_model, open_weights
from swarm.interchange.source import Source
from swarm.interchange.weights import Weights, part_of
from swarm.model.stages import parameter_shapes
from swarm.types import Block, PeerRecord
from tests.content.lines import FakeLine, after
from tests.interchange.small_models import save
from tests.support.memory_store import MemoryStore
from tests.support.virtual_time import LoopClock, in_virtual_time

STAGE = 1
SEND_SECONDS = 10.0


class SlowLine(FakeLine):
    async def ask(self, peer: PeerRecord, kind: Kind, sha256: str, *, max_bytes: int) -> bytes:
        await LoopClock().sleep(SEND_SECONDS)
        return await super().ask(peer, kind, sha256, max_bytes=max_bytes)


@dataclass(frozen=True)
class Newcomer:
    """A peer that has only the digest of the run's model."""

    config: RunConfig
    full: Weights
    line: SlowLine
    clock: LoopClock
    cache: Path

    def start(self) -> Contents:
        """Make the peer's Contents, as its process does at the start."""
        member = Membership.enter(self.config, MemoryStore(self.clock), generate(), self.clock, insecure=True)
        return Contents(member, None, self.cache, checkpoints=None)

    async def wait_for(self, num_sent: int) -> None:
        """Wait until the first donor has sent this many answers."""
        while self.line.num_sent["first"] < num_sent:
            await self.clock.sleep(1.0)


@pytest.fixture
def newcomer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Newcomer:
    save("llama-2", tmp_path / "model")
    config = import_model(Source(tmp_path / "model"), tmp_path / "run", ImportOptions(num_stages=2))
    full, clock = open_weights(tmp_path / "run", config), LoopClock()
    line = SlowLine(first=full.content)

    def fetcher(_: Membership, kind: Kind) -> Fetcher:
        return Fetcher(line, kind, line.donors, clock, random.Random(0))

    monkeypatch.setattr(Membership, "fetcher", fetcher)
    return Newcomer(config, full, line, clock, tmp_path / "cache")


@in_virtual_time
async def test_where_the_only_donor_dies_another_is_looked_for_however_long_it_had_sent(newcomer: Newcomer) -> None:
    newcomer.line.faults["first"] = after(7, PeerUnavailable("it hung up"))
    starting = asyncio.create_task(newcomer.start().initial_weights(Block(STAGE), resumes=False))
    await newcomer.wait_for(7)
    assert newcomer.clock.monotonic() > 2 * WAIT_SECONDS
    await newcomer.clock.sleep(WAIT_SECONDS - SEND_SECONDS)
    newcomer.line.shelves["second"] = newcomer.full.content
    found, shapes = await starting, parameter_shapes(newcomer.config, STAGE)
    assert found is not None
    expected, got = newcomer.full.load(shapes), found.load(shapes)
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


@in_virtual_time
async def test_where_no_other_comes_what_is_whole_is_kept_for_the_next_start(newcomer: Newcomer) -> None:
    shapes = parameter_shapes(newcomer.config, STAGE)
    num_in_head = len([name for name in shapes if part_of(name) == "head"])
    # The donor sends the index, and the head, which comes first.
    newcomer.line.faults["first"] = after(1 + num_in_head, PeerUnavailable("it hung up"))
    assert await newcomer.start().initial_weights(Block(STAGE), resumes=False) is None
    assert newcomer.line.num_asked["first"] > 2 + num_in_head, "it was looked for again"
    newcomer.line.shelves = {"second": newcomer.full.content}
    assert await newcomer.start().initial_weights(Block(STAGE), resumes=False) is not None
    assert newcomer.line.num_sent["second"] == len(shapes) - num_in_head > 0
