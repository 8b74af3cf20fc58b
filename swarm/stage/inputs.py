"""A microbatch's inputs at a stage: checked on the CPU, where they arrive, and brought to the stage's device.

Used by stage/backend on the compute thread. Keeps nothing of any microbatch.

Shapes: B samples of a microbatch, T tokens, D numbers a token that travel.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from swarm.config import RunConfig
from swarm.model.loss import NO_TARGET
from swarm.rpc.wire import require_in_range
from swarm.stage.boundary import HIDDEN, TOKENS, Boundary
from swarm.stage.staging import Staging, staging_of
from swarm.training import samples
from swarm.training.samples import TARGETS

WireInputs = Mapping[str, torch.Tensor]
"""A microbatch's tensors by name, as they arrived."""


@dataclass(frozen=True, kw_only=True)
class StageInputs:
    """The inputs of one stage."""

    config: RunConfig
    stage: int
    boundary: Boundary
    staging: Staging

    @property
    def is_last(self) -> bool:
        """Whether the stage computes the loss."""
        return self.stage == self.config.stages.num_stages - 1

    def check(self, wire_inputs: WireInputs) -> None:
        """Raise MalformedMessage if numbers are out of range, or a token is unknown."""
        # On the CPU, where the check waits for nothing. If a GPU looks up an unknown token, this process cannot use it
        # any more.
        samples.require_sound(wire_inputs, self.config.model.vocab_size)
        if self.stage:
            require_in_range(HIDDEN, wire_inputs[HIDDEN])

    def made_up(self, number: int) -> tuple[WireInputs, torch.Tensor]:
        """Random inputs of the run's shape, as they would arrive, and such a gradient of the stage's output."""
        data, generator = self.config.data, torch.Generator().manual_seed(number)
        size, length = data.microbatch_size, data.sequence_length
        tensor_BTR = torch.randn(size, length, self.boundary.width, generator=generator)
        wire = self.boundary.encode(tensor_BTR, staging_of(tensor_BTR.device)).wait()
        shape = (size, length + 1)
        # Every token is a target, and each row one document.
        made: dict[str, torch.Tensor] = {name: torch.zeros(shape, dtype=torch.int32) for name in samples.names(data)}
        made[TOKENS] = torch.randint(self.config.model.vocab_size, shape, generator=generator, dtype=torch.int32)
        if TARGETS in made:
            made[TARGETS] += 1
        return {**made, HIDDEN: wire} if self.stage else made, wire

    def are_of_the_run(self, wire_inputs: WireInputs) -> bool:
        """Whether the microbatch has the run's shape."""
        data = self.config.data
        return wire_inputs[TOKENS].shape == (data.microbatch_size, data.sequence_length + 1)

    def arguments(self, wire_inputs: WireInputs) -> Mapping[str, torch.Tensor]:
        """The tensors that the module takes, by name, on the device.

        `inputs` are tokens [B, T] at stage 0, and the hidden state [B, T, D] at any other. The last stage has
        `targets_BT` as well: the next tokens, or NO_TARGET.
        """
        tokens = self._tokens(wire_inputs) if not self.stage or self.config.model.bottleneck_dim else None
        hidden = self.decode(wire_inputs[HIDDEN], wire_inputs).detach() if self.stage else None
        documents_BT = samples.documents(wire_inputs)
        found = {
            "inputs": tokens if hidden is None else hidden,
            "tokens_BT": None if hidden is None else tokens,
            "documents_BT": None if documents_BT is None else self.staging.upload(documents_BT),
            "targets_BT": self._targets(wire_inputs) if self.is_last else None,
        }
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def decode(self, wire: torch.Tensor, wire_inputs: WireInputs) -> torch.Tensor:
        """Decode a hidden state of the microbatch, or its gradient. Raises MalformedMessage if `wire` is neither."""
        num_samples, num_tokens = wire_inputs[TOKENS].shape
        return self.boundary.decode(wire, num_samples, num_tokens - 1, self.staging)

    def _targets(self, wire_inputs: WireInputs) -> torch.Tensor:
        return samples.targets(
            {name: self.staging.upload(tensor) for name, tensor in samples.of(wire_inputs).items()}, NO_TARGET
        )

    def _tokens(self, wire_inputs: WireInputs) -> torch.Tensor:
        return self.staging.upload(wire_inputs[TOKENS])[:, :-1].long()
