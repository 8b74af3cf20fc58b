"""Training without a swarm: one optimizer step a round, on the mean over all targets, clipped by its global norm.

The model, the loss and the optimizer are the swarm's own code; nothing else is.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from swarm.config import OptimizerConfig, RunConfig
from swarm.config.schedule import learning_rate
from swarm.data.microbatches import Microbatches
from swarm.model.adapters import trained_parameters
from swarm.model.masks import DropoutKey
from swarm.model.stage_module import stage_loss
from swarm.model.stages import Transformer, build_stage, build_transformer
from swarm.training import optim, samples
from swarm.training.optimizers import gradient_optimizer
from swarm.training.samples import TOKENS, Samples
from swarm.training.scaling import clip, squared_norm_of
from swarm.types import Block


class BareStage(nn.Module):
    """A stage's module with the usual signature of a module: its arguments are tensors only."""

    def __init__(self, config: RunConfig, stage: int) -> None:
        super().__init__()
        self.module = build_stage(config, stage, device="cpu")

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.module(inputs, dropout_key=None)
        return outputs


def torch_adamw(module: nn.Module, config: OptimizerConfig, *, fused: bool = False) -> torch.optim.AdamW:
    matrices = [parameter for parameter in module.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in module.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.epsilon, fused=fused)


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model that is trained: the losses of a microbatch, summed over its targets, and the trained parameters."""

    summed_loss: Callable[[Samples, DropoutKey], torch.Tensor]
    parameters: Mapping[str, nn.Parameter]


def model_of_paths(config: RunConfig) -> Model:
    """All paths of a run as one model: each microbatch goes along its own path, and paths share the parameters of their
    common blocks (see `parameter_name`).

    A block's gradient is the mean over the targets of its own microbatches. These all have as many, so that it is the
    mean over all microbatches, over the block's share of them.
    """
    modules = {block: build_stage(config, block, device="cpu") for block in config.blocks}
    parameters = dict[str, nn.Parameter]()
    for block, module in modules.items():
        share = float(config.share_of(block))
        for name, parameter in module.named_parameters():
            parameters[parameter_name(name, block)] = parameter
            # torch does not annotate it.
            parameter.register_hook(lambda gradient, share=share: gradient / share)  # type: ignore[no-untyped-call]

    def summed_loss(microbatch: Samples, key: DropoutKey) -> torch.Tensor:
        travels = microbatch[TOKENS][:, :-1].long()
        *before, last = config.blocks_of(config.path_of(key.microbatch))
        for block in before:
            travels = modules[block](travels, dropout_key=key)
        targets_BT = samples.targets(microbatch)
        return stage_loss(modules[last], dict(modules[last].named_parameters()), travels, targets_BT, dropout_key=key)

    return Model(summed_loss=summed_loss, parameters=parameters)


def parameter_name(name: str, block: Block) -> str:
    """The name of a block's parameter among those of all blocks, of which variants of one stage have the same names."""
    return f"{name}@{block}" if block.variant else name


class Reference:
    """Trains the whole model, from the same initial weights as the swarm's."""

    def __init__(self, config: RunConfig, data: Microbatches, model: Model | None = None) -> None:
        if model is None:
            ours = build_transformer(config, device="cpu")
            model = Model(summed_loss=ours.summed_loss, parameters=trained_parameters(ours))
        self._config = config
        self._data = data
        self._summed_loss = model.summed_loss
        self._parameters = model.parameters
        self._optimizer = gradient_optimizer(config, same_bits=config.rounds.synchronous)

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self._parameters.items()}

    def warm_up(self) -> None:
        """Train on the first microbatch, so that memory and the optimizer's state are allocated."""
        self.accumulate_mean({0: 1})
        self.update(0)

    def step(self, number: int, counts: Mapping[int, int] | None = None) -> float:
        """Train round `number`, and return its mean loss. Microbatches count once, but for those in `counts`."""
        size = self._config.microbatches_per_round
        indices = range(number * size, (number + 1) * size)
        loss, num_targets = self.accumulate_mean({index: (counts or {}).get(index, 1) for index in indices})
        self.update(number)
        return loss / num_targets

    def accumulate_mean(self, counts: Mapping[int, int]) -> tuple[float, int]:
        """Add the mean gradient over all targets of microbatches, which count so often, to the sum. Return the sum of
        their losses, each counted once, and the number of their targets."""
        num_targets = {index: samples.amount(self._data.samples(index)).targets for index in counts}
        weight = 1 / max(1, sum(counts[index] * num_targets[index] for index in counts))
        losses = [self.accumulate(index, count * weight) for index, count in counts.items()]
        return sum(losses), sum(num_targets.values())

    def accumulate(self, index: int, weight: float) -> float:
        """Add `weight` times the gradient of a microbatch's loss to the sum. Return the loss, summed over its
        targets."""
        key = DropoutKey(seed=self._config.data.seed, microbatch=index)
        loss = self._summed_loss(self._data.samples(index), key)
        (loss * weight).backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
        return float(loss.detach())

    def update(self, number: int) -> None:
        self.update_with(self._optimizer, number * self._config.rounds.round_samples)

    def update_with(self, optimizer: optim.Optimizer, run_samples: int) -> None:
        """Take a step of this optimizer with the sum, at the learning rate after this many samples of the run."""
        gradients = self.take_gradients()
        clip(gradients, squared_norm_of(gradients.values()), self._config.optimizer.clip_norm)
        rate = learning_rate(self._config.gradient_step, run_samples)
        optim.step(optimizer, self._parameters, gradients, rate)

    def take_gradients(self) -> dict[str, torch.Tensor]:
        """The sum of the gradients, which is emptied."""
        gradients = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        for parameter in self._parameters.values():
            parameter.grad = None
        return gradients

    def put_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Let these be the sum of the gradients."""
        for name, parameter in self._parameters.items():
            parameter.grad = gradients[name].clone()

    @torch.no_grad()
    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(weights[name])


NUM_SAMPLES = 2048
NUM_BATCHES = 16


class HeldOut:
    """Measures different weights of one model on the same samples."""

    def __init__(
        self, config: RunConfig, data: Microbatches, model: Transformer | None = None, num_samples: int = NUM_SAMPLES
    ) -> None:
        self._model = model or build_transformer(config, device="cpu")
        batches = data.held_out(num_samples)
        merged = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
        pieces = {name: tensor.chunk(NUM_BATCHES) for name, tensor in merged.items()}
        self._batches = [dict(zip(pieces, each, strict=True)) for each in zip(*pieces.values(), strict=True)]

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return {name: parameter.shape for name, parameter in self._model.named_parameters()}

    @torch.no_grad()
    def loss(self, weights: Mapping[str, torch.Tensor]) -> float:
        self._model.load_state_dict(dict(weights))
        losses = [float(self._model.summed_loss(batch)) for batch in self._batches]
        return sum(losses) / sum(samples.amount(batch).targets for batch in self._batches)


def is_point(number: int, rounds: int, points: int) -> bool:
    """Whether the loss is measured after this round, to have so many points of a curve, the last one at the end."""
    return (number + 1) * points // rounds > number * points // rounds
