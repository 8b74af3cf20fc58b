"""The whole model in one process. A swarm's training is compared with it.

Used by tests and benches, and by users who load a run's weights. It is the stage module of a run cut into one stage, so
its parameters are exactly the stages' parameters under any cut.

Shape suffixes: B samples, T positions, V vocabulary.
"""

import dataclasses

import torch
from torch import Tensor

from swarm.config import RunConfig, StagesConfig
from swarm.model.loss import NO_TARGET
from swarm.model.masks import DropoutKey
from swarm.model.shards import Shards, spans
from swarm.model.stage_module import StageModule
from swarm.model.stages import filled, initialise, layer_ranges
from swarm.training import samples
from swarm.training.samples import TOKENS, Samples


class Transformer(StageModule):
    """All layers, with the embedding and the head; adapters are added by `build_transformer`.

    It maps tokens_BT to logits_BTV, or with targets to the sum of their losses (float32).
    Shards that meet only at the ends of stages meet here where the run's stages end.
    """

    def __init__(self, config: RunConfig, shards: Shards | None = None, *, fused: bool = False) -> None:
        """
        Args:
            shards, fused: as in StageModule.
        """
        uncut = dataclasses.replace(config, stages=StagesConfig(num_stages=1))
        super().__init__(uncut, 0, range(config.model.num_layers), shards, fused=fused)
        if self.shards is not None:
            self.spans = [span for layers in layer_ranges(config) for span in spans(config.model, layers)]

    def loss(self, tokens_BT1: Tensor, dropout_key: DropoutKey | None = None) -> Tensor:
        """The mean loss in nats per token, for T + 1 columns of tokens, of which each predicts the next."""
        return self.summed_loss({TOKENS: tokens_BT1}, dropout_key) / tokens_BT1[:, 1:].numel()

    def summed_loss(self, batch: Samples, dropout_key: DropoutKey | None = None) -> Tensor:
        """The loss in nats, summed over all targets."""
        loss: Tensor = self(
            batch[TOKENS][:, :-1].long(),
            dropout_key=dropout_key,
            documents_BT=samples.documents(batch),
            targets_BT=samples.targets(batch, NO_TARGET),
        )
        return loss


def build_transformer(config: RunConfig, *, device: torch.device | str) -> Transformer:
    """Make the built-in model with the initial weights that the stages of a swarm start from.

    Raises:
        ValueError: the run has a `model.custom_class`; to compare with that, build it as a single stage.
    """
    if config.model.custom_class:
        raise ValueError(
            "there is no built-in reference for model.custom_class: use stages.num_stages = 1 and build_stage"
        )
    if config.lora.is_on:
        return filled(lambda: Transformer(config), config, None).to(device)
    model = Transformer(config)
    initialise(model, config)
    return model.to(device)
