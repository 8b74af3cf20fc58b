"""A swarm that trains adapters. Its peers average, write to checkpoints and give to joiners only the adapters."""

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from peers.shared.named_model import OwnModel
from swarm.checkpoint import file
from swarm.config import AveragingConfig, DataConfig, LoraConfig, OptimizerConfig, RoundsConfig, RunConfig
from swarm.interchange.run_folder import ImportOptions, import_model, open_weights
from swarm.interchange.source import Source
from swarm.machine.clock import SystemClock
from swarm.model.adapters import trained_parameters
from swarm.model.stages import build_stage, parameter_shapes, trained_shapes
from tests.interchange.small_models import save
from tests.peers.stage_peer.movers import LocalPeer, train_all
from tests.support.chain import DILOCO, LORA, assert_close, eventually
from tests.support.memory_store import MemoryStore
from tests.support.whole_swarm import whole_swarm

pytestmark = pytest.mark.usefixtures("quick")

STEPS = 2
_DILOCO = dataclasses.replace(DILOCO, lora=LORA.lora)


@pytest.mark.parametrize(
    "config", [pytest.param(LORA, id="synchronous"), pytest.param(_DILOCO, id="diloco", marks=pytest.mark.slow)]
)
async def test_adapters_are_all_that_is_averaged_and_downloaded(config: RunConfig, tmp_path: Path) -> None:
    config = dataclasses.replace(config, averaging=AveragingConfig(codec="fp32"))
    module = build_stage(config, 1, device="cpu")
    num_trained = sum(parameter.numel() for parameter in trained_parameters(module).values())
    num_frozen = sum(shape.numel() for shape in parameter_shapes(config, 1).values())
    async with whole_swarm(config, tmp_path / "events", num_peers=(1, 2, 1)) as swarm:
        await swarm.train(STEPS)
        members = [peer.server.member for peer in swarm.peers if peer.stage == 1 and peer.server is not None]
        rounds = [report for member in members for report in member.reports if report.num_members == 2]
        assert rounds
        for report in rounds:
            # Half of the contribution goes to the other member, and half of the result.
            assert 0 < report.bytes_sent < 1.2 * 4 * num_trained < 4 * num_frozen
        joiner = await swarm.start(1)
        assert joiner.server is not None
        snapshot = await joiner.server.member.snapshot()
        assert snapshot.round >= STEPS
        assert {name.split("/")[1] for name in snapshot.tensors} == trained_parameters(module).keys()
        assert (await members[0].snapshot()).digest == snapshot.digest


class Tuned:
    """A run in two stages that trains adapters of a model with tied embeddings, whose weights lie in a folder."""

    def __init__(self, folder: Path) -> None:
        save("llama-3", folder / "model")
        config = import_model(Source(folder / "model"), folder / "run", ImportOptions(num_stages=2))
        self.config = dataclasses.replace(
            config,
            data=DataConfig(sequence_length=16, microbatch_size=2),
            rounds=RoundsConfig(setting="synchronous", round_samples=8),
            optimizer=OptimizerConfig(learning_rate=1e-2),
            averaging=AveragingConfig(codec="fp32"),
            lora=LoraConfig(rank=4, dropout=0.1),
        ).begun()
        self.store = MemoryStore(SystemClock())
        self._folder = folder
        self._num_peers = 0

    def peer(
        self, *, has_model: bool = False, resume: Path | None = None, checkpoints: Path | None = None
    ) -> LocalPeer:
        """A peer that has fetched nothing yet."""
        self._num_peers += 1
        own = self._folder / f"peer {self._num_peers}"
        own.mkdir()
        model = OwnModel(self._folder / "run", source=None) if has_model else None
        return LocalPeer(
            self.config, self.store, resume=resume or own, checkpoints=checkpoints, model=model, cache=own / "cache"
        )

    @asynccontextmanager
    async def pair(
        self, *, resume: Path | None = None, checkpoints: Path | None = None
    ) -> AsyncIterator[tuple[LocalPeer, LocalPeer]]:
        """A peer of each stage; only the first one has the model."""
        first = self.peer(has_model=True, resume=resume, checkpoints=checkpoints)
        second = self.peer(resume=resume, checkpoints=checkpoints)
        async with first.running(0), second.running(1):
            yield first, second

    async def train(self, rounds: range, *peers: LocalPeer) -> list[float]:
        """Train whole rounds through the first of these peers, until all have committed them; gives the losses."""
        losses, count = list[float](), self.config.microbatches_per_round
        for number in rounds:
            losses += await train_all(self.config, peers[:1], range(number * count, (number + 1) * count))
            await eventually(lambda: {_round(peer) for peer in peers} == {number + 1})  # noqa: B023 - at once
        return losses

    def frozen(self, stage: int) -> dict[str, torch.Tensor]:
        return open_weights(self._folder / "run", self.config).load(parameter_shapes(self.config, stage))


def _round(peer: LocalPeer) -> int:
    assert peer.server is not None
    return peer.server.stage.round


@pytest.fixture
def tuned(tmp_path: Path) -> Tuned:
    return Tuned(tmp_path)


def _assert_holds(peer: LocalPeer, frozen: dict[str, torch.Tensor]) -> None:
    assert peer.server is not None
    module = peer.server.stage.context.backend.module
    for name, tensor in frozen.items():
        assert torch.equal(module.get_parameter(name), tensor), name


async def test_a_run_that_stopped_goes_on_from_checkpoints_of_its_adapters(tuned: Tuned, tmp_path: Path) -> None:
    """A peer that comes back without its cache gets the frozen weights from others again."""
    async with tuned.pair() as (first, second):
        losses = await tuned.train(range(2), first, second)
        whole = [(await peer.state())[1] for peer in (first, second)]
    tuned.store = MemoryStore(SystemClock())
    written = tmp_path / "written"
    async with tuned.pair(checkpoints=written) as peers:
        assert await tuned.train(range(1), *peers) == pytest.approx(losses[:4], abs=1e-4)
    for name in file.names(written):
        assert file.parameters(written / str(name)) == trained_shapes(tuned.config, name.stage).keys()
    tuned.store = MemoryStore(SystemClock())
    async with tuned.pair(resume=written) as (first, second):
        assert (_round(first), _round(second)) == (1, 1)
        _assert_holds(second, tuned.frozen(1))
        assert await tuned.train(range(1, 2), first, second) == pytest.approx(losses[4:], abs=1e-4)
        for peer, expected in zip((first, second), whole, strict=True):
            assert_close((await peer.state())[1], expected, 1e-4)
