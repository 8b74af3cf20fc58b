"""A process that serves one stage of the model as an expert of hivemind.moe.

    python -m scripts.benches.sides.moe_stage CONFIG STAGE READY_FILE [ADDRESS]

The bench `peers` compares a swarm with this and moe_trainer. Stage, loss and optimizer are the swarm's own. The last
stage returns the loss of each sample. As in a swarm, gradients are summed over a round's samples before the optimizer
takes a step. Writes its DHT addresses to READY_FILE once it serves, and goes on until killed.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from hivemind.moe import ModuleBackend
from hivemind.utils.tensor_descr import BatchTensorDescriptor
from torch import Tensor, nn

from scripts.benches.sides.moe_server import serve
from scripts.benches.sides.reference import BareStage, torch_adamw
from swarm import config as configs
from swarm.config import RunConfig

NUM_HANDLERS = 2


class LastStage(nn.Module):
    """The last stage, followed by the loss."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, hidden_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        """Each sample's mean loss, shape (B, 1)."""
        losses_BT = F.cross_entropy(self.stage(hidden_BTD).transpose(1, 2), targets_BT, reduction="none")
        return losses_BT.mean(dim=1, keepdim=True)


class RoundBackend(ModuleBackend):  # type: ignore[misc]  # hivemind has no annotations
    """A module whose optimizer takes a step for each round."""

    def __init__(self, name: str, module: nn.Module, *, round_samples: int, **kwargs: Any) -> None:
        super().__init__(name, module, **kwargs)
        self._round_samples = round_samples
        self._num_samples = 0

    def on_backward(self, batch_size: int) -> None:
        self._num_samples += batch_size
        if self._num_samples >= self._round_samples:
            self._num_samples = 0
            super().on_backward(batch_size)


def expert_name(stage: int) -> str:
    """The name of a stage in the DHT."""
    return f"stage.{stage}"


def build_backend(config: RunConfig, stage: int) -> RoundBackend:
    """A stage of the model as an expert."""
    module = BareStage(config, stage)
    length = config.data.sequence_length
    tokens = BatchTensorDescriptor(length, dtype=torch.int64)
    hidden = BatchTensorDescriptor(length, config.model.d_model)
    is_last = stage == config.stages.num_stages - 1
    return RoundBackend(
        expert_name(stage),
        LastStage(module) if is_last else module,
        round_samples=config.rounds.round_samples,
        optimizer=torch_adamw(module, config.gradient_step),
        args_schema=(hidden, tokens) if is_last else (tokens,),
        outputs_schema=BatchTensorDescriptor(1) if is_last else hidden,
        max_batch_size=4 * config.data.microbatch_size,
    )


def main(config_path: Path, stage: int, ready_file: Path, initial_peers: list[str]) -> None:
    """Serve, until killed."""
    serve(build_backend(configs.load(config_path), stage), ready_file, initial_peers, NUM_HANDLERS)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
