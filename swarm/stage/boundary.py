"""The tensors that travel between two stages: how hidden states and gradients are encoded, and which tensors a receiver
expects.

Floating-point types are converted, and fp16 scaled, where the stage computes; blocks are made and read on the CPU.
Encoding rounds the same way every time: a microbatch that is computed again with the same weights gives the same bytes,
and the same bytes give the same numbers.

Shapes: B samples of a microbatch, T tokens, R numbers a token that travel, N all numbers of a tensor.
"""

from dataclasses import dataclass

import torch

from swarm.compression.codec import simple_codec
from swarm.compression.quantize import ScaledHalf
from swarm.config import RunConfig
from swarm.rpc import wire as encodings
from swarm.rpc.wire import DTYPES, NAMES, TensorSpec
from swarm.stage.staging import Download, Staging
from swarm.training import samples

TOKENS = samples.TOKENS
HIDDEN, GRADIENT = encodings.HIDDEN, encodings.GRADIENT

_FP16 = ScaledHalf()


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """The encoding of hidden states and gradients between the stages of a run: `width` numbers a token, in
    `encoding`."""

    encoding: str
    width: int

    def spec(self, num_samples: int, length: int) -> TensorSpec:
        """The type and shape of the encoded tensor: one row of numbers with fp16, bytes with a codec."""
        num_numbers = num_samples * length * self.width
        if self.encoding == _FP16.name:
            return TensorSpec(shape=(_FP16.num_elements(num_numbers),), encoding=self.encoding)
        if self.encoding not in DTYPES:
            return TensorSpec(shape=(simple_codec(self.encoding).num_bytes(num_numbers),), encoding=self.encoding)
        return TensorSpec(shape=(num_samples, length, self.width), encoding=self.encoding)

    def encode(self, tensor_BTR: torch.Tensor, staging: Staging) -> Download:
        """Encode a tensor, and begin to bring it to the CPU. Float32 on the CPU is not copied."""
        if self.encoding == _FP16.name:
            return staging.download(_FP16.encode(tensor_BTR))
        if self.encoding in DTYPES:
            return staging.download(tensor_BTR.detach().to(DTYPES[self.encoding]))
        encode = simple_codec(self.encoding).encode
        return staging.download(
            tensor_BTR.detach().float(), lambda host: torch.frombuffer(encode(host.reshape(-1)), dtype=torch.uint8)
        )

    def decode(self, wire: torch.Tensor, num_samples: int, length: int, staging: Staging) -> torch.Tensor:
        """The inverse of `encode`, in any encoding: float32 (B, T, R) on the device. Raises MalformedMessage if `wire`
        is not a valid one."""
        shape, encoding = (num_samples, length, self.width), NAMES[wire.dtype]
        if encoding == _FP16.name:
            return staging.upload(wire[1:]).float().mul_(_FP16.scale(wire)).view(shape)
        if encoding not in DTYPES:
            wire = simple_codec(encoding).decode(wire.numpy().data, num_samples * length * self.width).view(shape)
        return staging.upload(wire).float()


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
