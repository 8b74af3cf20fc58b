"""Stages for benches: they take a fixed time for a sample, mostly without using the CPU, as if a GPU computed, or do no
work.

Peers load them by name in `model.custom_class`. `main` runs a program whose built-in model is paced. Shape suffixes:
B samples, T positions, D model width, F feed-forward width.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from peers import commands
from swarm.config import RunConfig
from swarm.model import stages
from swarm.model.masks import DropoutKey
from swarm.model.stage_module import StageModule
from swarm.rebalancing.judgement import costs_of
from swarm.stage.runtime import Runtime
from swarm.types import Block

SECONDS_PER_SAMPLE = 0.033
"""The time for forward and backward together, unless PACE says otherwise. Backward takes twice as long as forward."""
PACE = "SWARM_BENCH_SECONDS_PER_SAMPLE"  # The environment variable that changes the time


MOST_BEHIND_SECONDS = 1.0
"""How far tasks that took longer than their samples shorten later pauses."""


class Owed(threading.local):
    """What the samples of a thread's tasks still have to take."""

    seconds = 0.0

    def add(self, seconds: float) -> None:
        self.seconds += seconds

    def pay(self, work: Callable[[], Any]) -> Any:
        """Run a task, and pause for as long as its samples take beyond that."""
        began_at = time.monotonic()
        try:
            return work()
        finally:
            self.seconds -= time.monotonic() - began_at
            if self.seconds > 0.0:
                began_at = time.monotonic()
                time.sleep(self.seconds)
                self.seconds -= time.monotonic() - began_at
            self.seconds = max(self.seconds, -MOST_BEHIND_SECONDS)


class _Pause(torch.autograd.Function):
    take: Callable[[float], None] = staticmethod(time.sleep)

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, num_samples: float) -> Tensor:
        ctx.seconds = num_samples * float(os.environ.get(PACE, SECONDS_PER_SAMPLE)) / 3
        _Pause.take(ctx.seconds)
        return outputs.view_as(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        _Pause.take(2 * ctx.seconds)
        return gradients[0], None


class Paced(nn.Module):
    """Multiplies its input by the means of its layers. Stage 0 embeds tokens first, and the last stage returns
    logits."""

    def __init__(self, config: RunConfig, stage: int, layer_range: range) -> None:
        super().__init__()
        model = config.model
        is_last = stage == config.stages.num_stages - 1
        self.embedding = nn.Embedding(model.vocab_size, model.d_model) if stage == 0 else None
        self.layers = nn.ParameterDict(
            {str(layer): torch.empty(model.feed_forward_width, model.d_model) for layer in layer_range}
        )
        self.head = nn.Linear(model.d_model, model.vocab_size, bias=False) if is_last else None

    def forward(self, inputs: Tensor, *, dropout_key: DropoutKey | None) -> Tensor:
        """tokens_BT at stage 0, else hidden_BTD; gives hidden_BTD, or logits_BTV at the last stage."""
        hidden_BTD = inputs if self.embedding is None else self.embedding(inputs)
        for layer_FD in self.layers.values():
            hidden_BTD = hidden_BTD * (1.0 + layer_FD.mean())
        hidden_BTD = _pause(hidden_BTD, len(inputs))
        output_BTD: Tensor = hidden_BTD if self.head is None else self.head(hidden_BTD)
        return output_BTD


class PacedTransformer(StageModule):
    """A stage of the transformer with the usual parameters and results, which come after a pause. Where a stage has
    more to compute than others, its pauses are longer too."""

    def __init__(self, config: RunConfig, stage: int, layer_range: range, *shards: Any, **options: Any) -> None:
        super().__init__(config, stage, layer_range, *shards, **options)
        self._cost = costs_of(config)[Block(stage)]

    def forward(self, inputs: Tensor, **options: Any) -> Tensor:
        return _pause(super().forward(inputs, **options), self._cost * len(inputs))


def _pause(outputs: Tensor, num_samples: float) -> Tensor:
    paused: Tensor = _Pause.apply(outputs, num_samples)  # type: ignore[no-untyped-call]  # torch's
    return paused


VOCABULARY = 2


class Identity(nn.Module):
    """Returns its input. The last stage returns the first two channels, as logits of a vocabulary of two."""

    def __init__(self, config: RunConfig, stage: int, layer_range: range) -> None:
        super().__init__()
        self.is_last = stage == config.stages.num_stages - 1
        self.vocab_size = config.model.vocab_size
        # An optimizer needs at least one parameter.
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, inputs: Tensor, *, dropout_key: DropoutKey | None) -> Tensor:
        if self.is_last and not torch.is_grad_enabled():
            # A peer tries a class out before it serves, and expects logits of the run's whole vocabulary.
            return inputs.new_zeros(*inputs.shape[:2], self.vocab_size)
        return inputs[..., :VOCABULARY] if self.is_last else inputs


def main(program: str, *arguments: str) -> None:
    """Run one of the project's programs, where the built-in model is paced.

    Pauses are at the end of a task of the compute thread, and shorter by what it has taken. So a busy machine does not
    make a peer slower, as long as what is computed takes less time than it is to take.
    """
    owed, run = Owed(), Runtime.run

    async def paced(runtime: Runtime, work: Callable[[], Any], **options: Any) -> Any:
        return await run(runtime, lambda: owed.pay(work), **options)

    Runtime.run, _Pause.take = paced, owed.add  # type: ignore[method-assign, assignment]
    stages.StageModule = PacedTransformer  # type: ignore[attr-defined]
    sys.argv = [f"swarm-{program}", *arguments]
    getattr(commands, program)()
