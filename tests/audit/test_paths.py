"""Runs whose stages have variants: real peers and trainers against one process, and an audit of what they did."""

import asyncio
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, pad

from peers.trainer.held_out_loss import Along, Rerouting, held_out_loss
from swarm.audit.audit import audit
from swarm.config import OptimizerConfig, RunConfig, StagesConfig
from swarm.config.schedule import learning_rate
from swarm.data.microbatches import HeldOut, Microbatches
from swarm.data.path_router import NUM_TOKENS
from swarm.hop.answers import HopListener
from swarm.model.masks import DropoutKey
from swarm.model.stages import build_stage
from swarm.stage.weights import StageWeights
from swarm.training.samples import TOKENS
from swarm.types import Block
from tests.support.chain import DILOCO, SYNCHRONOUS, eventually, tokens
from tests.support.whole_swarm import WholeSwarm, whole_swarm

TWO_PATHS = StagesConfig(num_stages=3, variants=(1, 2, 1))
STEPS = 3
TEXT = range(90, 92)
"""The held-out microbatches of each path."""
EVERY = 6
"""So many targets are a window, of which each may take another path."""


def _two_paths(config: RunConfig) -> RunConfig:
    optimizer = OptimizerConfig(
        name="adamw", learning_rate=0.01, warmup_samples=40, weight_decay=0.0, clip_norm=0.5, schedule="linear",
        total_samples=200,
    )  # fmt: skip
    return dataclasses.replace(config, stages=TWO_PATHS, optimizer=optimizer)


async def _all_committed(swarm: WholeSwarm) -> None:
    """The trainer hears of a round from one holder of each block, and another one may commit it a moment later."""
    holders = [served for peer in swarm.peers for served in peer.servers.values()]
    await eventually(lambda: all(served.stage.round >= STEPS for served in holders))


def _weights(swarm: WholeSwarm) -> dict[Block, StageWeights]:
    return {
        block: served.stage.context.backend.weights for peer in swarm.peers for block, served in peer.servers.items()
    }  # fmt: skip


def _reference(config: RunConfig, steps: int) -> dict[Block, dict[str, torch.Tensor]]:
    """The parameters of every block after so many steps of one process. It knows nothing of rounds: each block steps by
    the mean gradient over the targets that its own microbatches have, and all are clipped by one norm."""
    modules = {block: build_stage(config, block, device="cpu") for block in config.blocks}
    wanted = config.gradient_step
    adamw = {
        block: torch.optim.AdamW(
            module.parameters(), betas=(wanted.beta1, wanted.beta2), eps=wanted.epsilon, weight_decay=0.0
        )
        for block, module in modules.items()
    }
    for step in range(steps):
        num_targets = dict.fromkeys(config.blocks, 0)
        for index in range(step * config.microbatches_per_round, (step + 1) * config.microbatches_per_round):
            batch = tokens(config, index).long()
            travels = batch[:, :-1]
            for block in config.blocks_of(index % 2):
                travels = modules[block](travels, dropout_key=None)
                num_targets[block] += batch[:, 1:].numel()
            torch.autograd.backward(cross_entropy(travels.transpose(1, 2), batch[:, 1:], reduction="sum"))
        gradients = {
            block: [p.grad.div_(num_targets[block]) for p in module.parameters() if p.grad is not None]
            for block, module in modules.items()
        }
        norm = torch.stack([g.double().norm() for own in gradients.values() for g in own]).norm()
        for block, own in gradients.items():
            for gradient in own:
                gradient.mul_(min(1.0, config.optimizer.clip_norm / float(norm)))
            adamw[block].param_groups[0]["lr"] = learning_rate(wanted, step * config.rounds.round_samples)
            adamw[block].step()
            adamw[block].zero_grad()
    return {block: dict(module.named_parameters()) for block, module in modules.items()}


class _HeldOut:
    def held_out_by_source(self, num_samples: int) -> list[HeldOut]:
        batches = [{TOKENS: tokens(SYNCHRONOUS, index)} for index in TEXT]
        return [HeldOut(name=str(path), batches=batches, share=1.0, paths=(path,)) for path in range(2)]


def _choose(beginning: Sequence[int]) -> int:
    return sum(beginning) % 2


@torch.no_grad()
def _rerouted_loss(config: RunConfig, trained: Mapping[Block, Mapping[str, torch.Tensor]], every: int) -> float:
    """Each path's losses of all targets of the held-out samples, and of each window those along its own path."""
    modules = {block: build_stage(config, block.stage, device="cpu") for block in config.blocks}
    for block, module in modules.items():
        module.load_state_dict(trained[block])
    found = list[torch.Tensor]()
    for first, index in itertools.product(range(2), TEXT):
        tokens_BT1 = tokens(SYNCHRONOUS, index).long()
        losses_PBT = list[torch.Tensor]()
        for path in range(2):
            travels = tokens_BT1[:, :-1]
            for block in config.blocks_of(path):
                travels = modules[block](travels)
            losses_PBT.append(cross_entropy(travels.transpose(1, 2), tokens_BT1[:, 1:], reduction="none"))
        for row, tokens_T1 in enumerate(tokens_BT1.tolist()):
            for begin in range(0, len(tokens_T1) - 1, every):
                path = _choose(tokens_T1[: begin + 1][-NUM_TOKENS:]) if begin else first
                found.append(losses_PBT[path][row, begin : begin + every])
    return float(torch.cat(found).mean())


async def test_two_paths_train_and_are_evaluated_as_one_process_does(tmp_path: Path) -> None:
    config = _two_paths(SYNCHRONOUS)
    async with whole_swarm(config, tmp_path / "events", num_peers=(2, 0, 1)) as swarm:
        await swarm.start(1, path=0)
        await swarm.start(1)
        steps = await swarm.train(STEPS)
        await _all_committed(swarm)
        async with swarm.hop() as hop:
            rerouted = await held_out_loss(
                [Along(path, hop, HopListener()) for path in range(2)], cast(Microbatches, _HeldOut()),
                round_number=STEPS, num_samples=len(TEXT), rerouting=Rerouting(_choose, EVERY),
            )  # fmt: skip
        trained = {
            block: {name: master.detach().clone() for name, master in weights.masters.items()}
            for block, weights in _weights(swarm).items()
        }
    expected = _reference(config, STEPS)
    assert trained.keys() == expected.keys()
    for block, own in expected.items():
        for name, parameter in own.items():
            torch.testing.assert_close(trained[block][name], parameter.detach(), rtol=0.0, atol=1e-4)
    assert rerouted.mean == pytest.approx(_rerouted_loss(config, trained, EVERY), rel=1e-5)
    assert rerouted.mean != pytest.approx(_rerouted_loss(config, trained, 1000), rel=1e-4)
    moved = [float((trained[Block(1)][n] - trained[Block(1, 1)][n]).abs().max()) for n in trained[Block(1)]]
    assert max(moved) > 1e-3, "the variants have learnt from different text"
    assert all(step.report is not None for step in steps)
    report = audit(swarm.logs)
    assert report.findings.violations == []
    assert (report.findings.duplicates, report.findings.missing, report.findings.digests_differing) == (0, 0, 0)
    assert report.rounds_committed >= STEPS


class Mixing(nn.Module):
    """Mixes each position with those before it."""

    def __init__(self, config: RunConfig, stage: int, layer_range: range) -> None:
        super().__init__()
        width, vocab_size = config.model.d_model, config.model.vocab_size
        self.embedding = nn.Embedding(vocab_size, width) if stage == 0 else None
        self.layers = nn.ModuleDict({str(layer): nn.Linear(width, width) for layer in layer_range})
        self.head = nn.Linear(width, vocab_size) if stage == config.stages.num_stages - 1 else None

    def forward(self, inputs: torch.Tensor, *, dropout_key: DropoutKey | None) -> torch.Tensor:
        hidden = inputs if self.embedding is None else self.embedding(inputs)
        for layer in self.layers.values():
            hidden = hidden + layer(hidden).cumsum(dim=1) / hidden.shape[1]
        return hidden if self.head is None else self.head(hidden)


class Convolving(Mixing):
    """Mixes each position with its predecessor, by parameters of other shapes."""

    def __init__(self, config: RunConfig, stage: int, layer_range: range) -> None:
        super().__init__(config, stage, layer_range)
        width = config.model.d_model
        self.layers = nn.ModuleDict({str(layer): nn.Conv1d(width, width, 2) for layer in layer_range})

    def forward(self, inputs: torch.Tensor, *, dropout_key: DropoutKey | None) -> torch.Tensor:
        hidden = inputs if self.embedding is None else self.embedding(inputs)
        for layer in self.layers.values():
            hidden = hidden + layer(pad(hidden.transpose(1, 2), (1, 0))).transpose(1, 2).tanh()
        return hidden if self.head is None else self.head(hidden)


async def test_two_models_that_share_a_block_train_as_one_process_does(tmp_path: Path) -> None:
    """Each path has a class of its own, and the block in the middle is the built-in one. Each machine serves a path."""
    config = _two_paths(SYNCHRONOUS)
    own = [f"{one.__module__}:{one.__qualname__}" for one in (Mixing, Convolving)]
    config = dataclasses.replace(
        config, stages=StagesConfig(num_stages=3, variants=(2, 1, 2), paths=((0, 0, 0), (1, 0, 1))),
        model=dataclasses.replace(config.model, custom_class=tuple((name, "", name) for name in own)),
    )  # fmt: skip
    async with whole_swarm(config, tmp_path / "events", num_peers=()) as swarm:
        for path in range(2):
            await swarm.start(0, 1, 2, path=path)
        await swarm.train(STEPS)
        trained: dict[Block, list[dict[str, torch.Tensor]]] = {block: [] for block in config.blocks}
        for peer in swarm.peers:
            for block, served in peer.servers.items():
                masters = served.stage.context.backend.weights.masters
                trained[block].append({name: master.detach().clone() for name, master in masters.items()})
    assert [len(holders) for holders in trained.values()] == [1, 1, 2, 1, 1]
    for block, expected in _reference(config, STEPS).items():
        begun = build_stage(config, block, device="cpu").state_dict()
        assert any(float((value.detach() - begun[name]).abs().max()) > 1e-3 for name, value in expected.items())
        for holder in trained[block]:
            assert holder.keys() == expected.keys()
            for name, parameter in expected.items():
                torch.testing.assert_close(holder[name], parameter.detach(), rtol=0.0, atol=1e-4)
    report = audit(swarm.logs)
    assert report.findings.violations == []
    assert (report.findings.duplicates, report.findings.missing, report.findings.digests_differing) == (0, 0, 0)


@pytest.mark.parametrize(
    "config", [pytest.param(SYNCHRONOUS, id="synchronous"), pytest.param(DILOCO, id="diloco", marks=pytest.mark.slow)]
)
async def test_a_block_that_loses_a_peer_goes_on_and_counts_nothing_twice(config: RunConfig, tmp_path: Path) -> None:
    config = _two_paths(config)
    async with whole_swarm(config, tmp_path / "events", num_peers=(1, 0, 1)) as swarm:
        await swarm.start(1, path=0)
        await swarm.start(1, path=1)
        victim = await swarm.start(1, path=1)
        training = asyncio.create_task(swarm.train(STEPS))
        await eventually(lambda: victim.servers[Block(1, 1)].stage.round >= 1)
        await victim.kill()
        await training
    report = audit(swarm.logs)
    assert report.findings.violations == []
    assert (report.findings.duplicates, report.findings.missing, report.findings.digests_differing) == (0, 0, 0)
    assert report.rounds_committed >= STEPS
