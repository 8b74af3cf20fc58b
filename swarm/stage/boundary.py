"""The tensors that travel between two stages: hidden states and gradients, in the encoding of their round, and which
tensors a receiver expects.

Encoding rounds the same way every time: a microbatch that is computed again with the same weights gives the same bytes,
and the same bytes give the same numbers.

Shapes: B samples of a microbatch, T tokens, R numbers a token that travel.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from swarm.compression.activations import ENCODINGS
from swarm.config import RunConfig
from swarm.rpc import wire
from swarm.rpc.wire import TensorSpec
from swarm.stage.staging import Download, Staging
from swarm.training import samples

TOKENS = samples.TOKENS
HIDDEN, GRADIENT = wire.HIDDEN, wire.GRADIENT
OUTPUT, OUTPUT_GRADIENT = "output", "output_gradient"
"""What a stage sends on and gets back, in spot checks; the next stage calls them HIDDEN and GRADIENT."""


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """The encoding of hidden states and gradients between the stages of a run: `width` numbers a token, in
    `encoding`."""

    encoding: str
    width: int

    @property
    def encodings(self) -> Mapping[str, str]:
        """The encodings of the tensors that it is about, by their names."""
        return dict.fromkeys((HIDDEN, GRADIENT, OUTPUT, OUTPUT_GRADIENT), self.encoding)

    def spec(self, num_samples: int, length: int) -> TensorSpec:
        """The encoding and shape of the tensor that travels."""
        sizes = (num_samples, length, self.width)
        return TensorSpec(shape=ENCODINGS[self.encoding].shape(sizes), encoding=self.encoding)

    def encode(self, tensor_BTR: torch.Tensor, staging: Staging) -> Download:
        """Encode a tensor, and begin to bring it to the CPU. Float32 on the CPU is not copied."""
        encoding = ENCODINGS[self.encoding]
        return staging.download(encoding.prepared(tensor_BTR), encoding.converts)

    def decode(self, wire: torch.Tensor, num_samples: int, length: int, staging: Staging) -> torch.Tensor:
        """The inverse of `encode`: float32 (B, T, R) on the device. Raises MalformedMessage if `wire` is not valid."""
        return ENCODINGS[self.encoding].decode(wire, (num_samples, length, self.width), staging.upload)


def boundary_of(config: RunConfig) -> Boundary:
    """`config` is that of the round to which the tensors belong."""
    assert config.wire.dtype != "auto", "the peer that begins a run fills it in"
    return Boundary(encoding=config.wire.dtype, width=config.model.hidden_width)


def request_specs(
    config: RunConfig, stage: int, num_samples: int | None = None, sequence_length: int | None = None
) -> dict[str, TensorSpec]:
    """The tensors that a stage receives with a microbatch: its samples, and from stage 1 on the hidden state."""
    size = config.data.microbatch_size if num_samples is None else num_samples
    length = config.data.sequence_length if sequence_length is None else sequence_length
    specs = {name: TensorSpec(shape=(size, length + 1), encoding="int32") for name in samples.names(config.data)}
    if stage > 0:
        specs[HIDDEN] = boundary_of(config).spec(size, length)
    return specs


def reply_specs(config: RunConfig, stage: int) -> dict[str, TensorSpec]:
    """The tensors that a stage sends back: the gradient of its hidden input. Stage 0 sends none."""
    if stage <= 0:
        return {}
    return {GRADIENT: request_specs(config, stage)[HIDDEN]}
