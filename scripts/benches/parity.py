"""Does a swarm in the synchronous setting follow the trajectory of one process, and of peft's layers with --lora?

Two further references are wrong on purpose: a microbatch is left out, or counted twice. They show that the comparison
would notice such a fault.
"""

import asyncio
import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from peers.local.supervisor import Supervisor
from peers.shared.stage_choice import StageChoice, StagesOrAuto
from scripts.benches.shared.common import (
    BenchOptions,
    compute_like_peers,
    largest_of,
    require_at_least,
    run_of,
    say,
    with_corpus,
    workplace,
    write_config,
)
from scripts.benches.shared.swarm import SwarmProcesses, mixed_spans
from scripts.benches.sides.reference import Reference, model_of_paths, parameter_name
from swarm.averaging.state_transfer import StateTransfer, Wanted
from swarm.averaging.wire.transport import Transport
from swarm.config import LoraConfig, RunConfig, StagesConfig
from swarm.credentials import identity
from swarm.errors import PeerUnavailable
from swarm.interchange import run_folder
from swarm.machine.clock import SystemClock
from swarm.machine.waits import Waits
from swarm.rpc.ask import describe
from swarm.rpc.channels import ChannelPool
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.types import PROTOCOLS, PeerRecord

BOUND = 1e-4  # Largest relative difference that passes
CONTROL_BOUND = 1e-3  # Smallest relative difference that each wrong reference must show
CONTROL_MICROBATCH = 19
"""The microbatch that the wrong references leave out or count twice. It is in the middle of the third round."""
MICROBATCHES_PER_ROUND = 8
COMMIT_SECONDS = 30.0
"""Longest wait for a member to commit the last round, which other members may already have committed."""
ANSWER_SECONDS = 10.0


Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Options(BenchOptions):
    """Compare a swarm's training with a single process's."""

    stages: int = 3
    """Stages of the swarm."""
    peers_per_stage: int = 2
    """Peers that serve each stage."""
    steps: int = 20
    """Optimizer steps to train, at least three."""
    lora: int = 0
    """Train adapters of this rank (LoRA) beside a model of transformers, and compare with peft's layers."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """The optimizer of both."""
    spans: bool = False
    """Let processes serve several stages: one all of them, others all but the last one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(
            self, {"stages": 2 if self.spans else 1, "steps": CONTROL_MICROBATCH // MICROBATCHES_PER_ROUND + 1}
        )


@dataclass(frozen=True, kw_only=True)
class Trained:
    losses: Sequence[float]  # Mean loss of each step
    weights: Sequence[Weights]  # The weights of each peer's stage; of a reference, those of the whole model
    committed: Sequence[int] = ()  # Microbatches that the members of each stage have committed together


def run(options: Options) -> dict[str, Any]:
    compute_like_peers()
    with workplace("parity") as (folder, children):
        return (_compare_adapters if options.lora else _compare)(options, children, folder)


def _compare(options: Options, children: Supervisor, folder: Path) -> dict[str, Any]:
    config, data = with_corpus(_config(options))
    steps, num_peers = options.steps, options.peers_per_stage
    references = _references(lambda: Reference(config, data), steps)
    swarm = _train_swarm(config, num_peers, steps, children, folder / "swarm", spans=options.spans)
    uncut = dataclasses.replace(config, stages=StagesConfig(num_stages=1))
    single = _train_swarm(uncut, 1, steps, children, folder / "single")
    tied = dataclasses.replace(config, model=dataclasses.replace(config.model, tied_embeddings=True))
    tied_swarm = _train_swarm(tied, num_peers, steps, children, folder / "tied", spans=options.spans)
    paths = dataclasses.replace(config, stages=_two_paths(options.stages))
    paths_swarm = _train_swarm(paths, num_peers, steps, children, folder / "paths")
    shapes = {
        "one_by_one": differences(single, references["plain"]),
        "tied_embeddings": differences(tied_swarm, train_reference(Reference(tied, data), steps, {})),
        "two_paths": differences(
            paths_swarm, train_reference(Reference(paths, data, model_of_paths(paths)), steps, {})
        ),
    }  # fmt: skip
    others = (single, tied_swarm, paths_swarm)
    return _figures(swarm, references, shapes, committed=[count for other in others for count in other.committed])


def _two_paths(num_stages: int) -> StagesConfig:
    """Two variants of the middle stage."""
    return StagesConfig(
        num_stages=num_stages, variants=tuple(1 + (stage == num_stages // 2) for stage in range(num_stages))
    )


def _compare_adapters(options: Options, children: Supervisor, folder: Path) -> dict[str, Any]:
    # Imported here, because this takes seconds.
    from scripts.benches.sides.peft_model import RUN, peft_model, with_model

    plain = dataclasses.replace(_config(options), lora=LoraConfig(rank=options.lora))
    config, data = with_corpus(with_model(plain, folder))
    write_config(config, folder / RUN / run_folder.CONFIG)
    references = _references(lambda: Reference(config, data, peft_model(config, folder)), options.steps)
    swarm = _train_swarm(
        config, options.peers_per_stage, options.steps, children, folder / "swarm", model=folder / RUN,
        spans=options.spans,
    )  # fmt: skip
    return _figures(swarm, references, {}, committed=[])


def _references(begin: Callable[[], Reference], steps: int) -> dict[str, Trained]:
    say(f"reference: {steps} steps in one process, three times")
    wrong = {"dropped": {CONTROL_MICROBATCH: 0}, "doubled": {CONTROL_MICROBATCH: 2}}
    return {name: train_reference(begin(), steps, counts) for name, counts in {"plain": {}, **wrong}.items()}


def _figures(
    swarm: Trained, references: Mapping[str, Trained], shapes: Mapping[str, Mapping[str, float]], *,
    committed: Sequence[int],
) -> dict[str, Any]:  # fmt: skip
    plain = references["plain"]
    expected, figures = len(plain.losses) * MICROBATCHES_PER_ROUND, differences(swarm, plain)
    controls = {f"{name}_microbatch": _weight_difference(swarm, references[name]) for name in ("dropped", "doubled")}
    exactly_once = {*swarm.committed, *committed} == {expected}
    largest = max(value for found in (figures, *shapes.values()) for value in found.values())
    controls_differ = all(CONTROL_BOUND < value < math.inf for value in controls.values())
    return {
        **figures, **shapes, **controls, "microbatches": expected, "committed_per_stage": list(swarm.committed),
        "exactly_once": exactly_once, "first_loss": plain.losses[0], "final_loss": plain.losses[-1],
        "passed": largest < BOUND and controls_differ and exactly_once,
    }  # fmt: skip


def _config(options: Options) -> RunConfig:
    return run_of(
        "parity", width=64, layers=max(3, options.stages), head_width=16, stages=options.stages, length=64,
        microbatch=4, round_samples=4 * MICROBATCHES_PER_ROUND, dataset=options.dataset,
        data={"max_tokens": 1_000_000},
        optimizer={"name": options.optimizer, "learning_rate": 1e-3, "clip_norm": 1.0},
    )  # fmt: skip


def train_reference(reference: Reference, steps: int, counts: Mapping[int, int]) -> Trained:
    losses = [reference.step(number, counts) for number in range(steps)]
    return Trained(losses=losses, weights=[reference.weights])


def _train_swarm(
    config: RunConfig, peers_per_stage: int, steps: int, children: Supervisor, folder: Path, *,
    model: Path | None = None, spans: bool = False,
) -> Trained:  # fmt: skip
    num_stages = config.stages.num_stages
    peers: list[int | StagesOrAuto] = [*range(num_stages)] * peers_per_stage
    if len(config.paths) > 1:
        peers = [*(StageChoice(block.stage, block.stage, block.variant) for block in config.blocks)] * peers_per_stage
    if spans:
        peers = mixed_spans(num_stages, peers_per_stage)
    say(f"swarm: peers of the stages {', '.join(map(str, peers))} start")
    swarm = SwarmProcesses(config, children, folder, model=model)
    swarm.start_peers(peers)
    say(f"swarm: {steps} steps")
    swarm.train("trainer", steps)
    trained = trained_by(swarm, steps)
    swarm.stop()
    return trained


def trained_by(swarm: SwarmProcesses, steps: int) -> Trained:
    """What a swarm has come to whose trainer, named `trainer`, has taken this many steps."""
    say("swarm: the weights are downloaded")
    weights, committed = asyncio.run(
        _inspect(swarm.config, [record for peer in swarm.peers for record in peer.records], steps)
    )
    return Trained(losses=[row["train/loss"] for row in swarm.steps("trainer")], weights=weights, committed=committed)


async def _inspect(
    config: RunConfig, records: Sequence[PeerRecord], steps: int
) -> tuple[list[dict[str, torch.Tensor]], list[int]]:
    """Every peer's weights after `steps` rounds, and the number of microbatches that each stage has committed."""
    weights = []
    committed = [0] * config.stages.num_stages
    channels = ChannelPool()
    for record in records:
        downloaded = await _download_weights(config, record, steps, channels)
        weights.append({parameter_name(name, record.block): tensor for name, tensor in downloaded.items()})
        request = pb.DescribeRequest(run_id=config.run_id, stage=record.stage, variant=record.variant)
        reply = await describe(channels.channel(record), request, seconds=ANSWER_SECONDS)
        committed[record.stage] += reply.counters.committed
    await channels.close()
    return weights, committed


async def _download_weights(
    config: RunConfig, record: PeerRecord, steps: int, channels: ChannelPool
) -> dict[str, torch.Tensor]:
    deadline = time.monotonic() + COMMIT_SECONDS
    address = pb.Address(
        run_id=config.run_id, protocol_version=PROTOCOLS.newest, stage=record.stage, variant=record.variant
    )
    own_id = identity.generate().peer_id
    transfer = StateTransfer(
        Transport(channels), address, own_id, Waits(), SystemClock(), silence_seconds=ANSWER_SECONDS
    )
    while True:
        try:
            wanted = Wanted(max_bytes=1 << 30, is_useful=lambda standing: standing.round == steps)
            fetched = await transfer.fetch(await transfer.begin([record], wanted))
        except PeerUnavailable:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.5)
            continue
        prefix = "anchor/"
        return {name.removeprefix(prefix): t for name, t in fetched.snapshot.tensors.items() if name.startswith(prefix)}


def differences(trained: Trained, reference: Trained) -> dict[str, float]:
    assert len(trained.losses) == len(reference.losses), "a loss for every step"
    return {
        "max_loss_rel_diff": largest_of(
            abs(ours - theirs) / theirs for ours, theirs in zip(trained.losses, reference.losses, strict=True)
        ),
        "max_weight_rel_diff": _weight_difference(trained, reference),
    }


def _weight_difference(trained: Trained, reference: Trained) -> float:
    """The relative error of the worst tensor at any peer: the norm of the difference over the norm of the reference."""
    (expected,) = reference.weights
    assert {name for weights in trained.weights for name in weights} == expected.keys(), "the stages make up the model"
    return largest_of(
        float(torch.linalg.vector_norm(tensor - expected[name]) / torch.linalg.vector_norm(expected[name]))
        for weights in trained.weights
        for name, tensor in weights.items()
    )
