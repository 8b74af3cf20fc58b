"""A process that trains a stage of torch.distributed.pipelining (1F1B over gloo), in turns, for the bench `peers`."""

import itertools
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from scripts.benches.shared.common import compute_like_peers, with_corpus
from scripts.benches.shared.paired import take_turns
from scripts.benches.sides.reference import BareStage, torch_adamw
from swarm import config as configs
from swarm.config import RunConfig
from swarm.data.microbatches import Microbatches


class StaticStage:
    def __init__(self, config: RunConfig, data: Microbatches, rank: int) -> None:
        self._config, self._data = config, data
        self._module = BareStage(config, rank)
        self._adamw = torch_adamw(self._module, config.gradient_step)
        self._is_first, self._is_last = rank == 0, rank == config.stages.num_stages - 1
        stage = PipelineStage(self._module, rank, config.stages.num_stages, torch.device("cpu"))
        self._schedule = Schedule1F1B(stage, config.microbatches_per_round, loss_fn=_mean_loss)
        self._numbers = itertools.count()

    def step(self) -> None:
        tokens_BT1 = self._tokens(next(self._numbers))
        # Older versions of torch refuse inputs with gaps between their rows.
        inputs = (tokens_BT1[:, :-1].contiguous(),) if self._is_first else ()
        self._schedule.step(*inputs, target=tokens_BT1[:, 1:] if self._is_last else None)
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)

    def _tokens(self, number: int) -> Tensor:
        size = self._config.microbatches_per_round
        microbatches = [torch.from_numpy(self._data.tokens(number * size + index)) for index in range(size)]
        return torch.cat(microbatches).long()


def _mean_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def main(config_path: Path, results: Path, rank: int, port: int) -> None:
    compute_like_peers()
    config, data = with_corpus(configs.load(config_path))
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=config.stages.num_stages)
    stage = StaticStage(config, data, rank)
    stage.step()
    take_turns(results, stage.step)
