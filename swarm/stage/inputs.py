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

WireInputs = Mapping[str, torch.Tensor]
"""A microbatch's tensors by name, as they arrived."""


@dataclass(frozen=True, kw_only=True)
class StageInputs:
    """The inputs of one stage."""

    config: RunConfig
    stage: int
    boundary: Boundary
    staging: Staging

    def check(self, wire_inputs: WireInputs) -> None:
        """Raise MalformedMessage if numbers are out of range, or a token is unknown."""
        # On the CPU, where the check waits for nothing. If a GPU looks up an unknown token, this process cannot use it
        # any more.
        samples.require_sound(wire_inputs, self.config.model.vocab_size)
        if self.stage:
            require_in_range(HIDDEN, wire_inputs[HIDDEN])

    def made_up(self) -> tuple[WireInputs, torch.Tensor]:
        """Inputs of the run's shapes, all zeros, as they would arrive, and such a gradient of the stage's output."""
        data = self.config.data
        size, length = data.microbatch_size, data.sequence_length
        zeros_BTR = torch.zeros(size, length, self.boundary.width)
        wire = self.boundary.encode(zeros_BTR, staging_of(zeros_BTR.device)).wait()
        tokens = {name: torch.zeros(size, length + 1, dtype=torch.int32) for name in samples.names(data)}
        return {**tokens, HIDDEN: wire} if self.stage else tokens, wire

    def hidden_or_tokens(self, wire_inputs: WireInputs) -> torch.Tensor:
        """What the module takes: tokens [B, T] at stage 0, at any other the hidden state [B, T, D]."""
        if not self.stage:
            return self._tokens(wire_inputs)
        return self.decode(wire_inputs[HIDDEN], wire_inputs).detach()

    def context(self, wire_inputs: WireInputs) -> dict[str, torch.Tensor]:
        """The module's other arguments, by name."""
        wanted = {}
        if self.config.model.bottleneck_dim and self.stage:
            wanted["tokens_BT"] = self._tokens(wire_inputs)
        documents_BT = samples.documents(wire_inputs)
        if documents_BT is not None:
            wanted["documents_BT"] = self.staging.upload(documents_BT)
        return wanted

    def targets(self, wire_inputs: WireInputs) -> torch.Tensor:
        """The next tokens [B, T], or NO_TARGET."""
        return samples.targets(
            {name: self.staging.upload(tensor) for name, tensor in samples.of(wire_inputs).items()}, NO_TARGET
        )

    def decode(self, wire: torch.Tensor, wire_inputs: WireInputs) -> torch.Tensor:
        """Decode a hidden state of the microbatch, or its gradient. Raises MalformedMessage if `wire` is neither."""
        num_samples, num_tokens = wire_inputs[TOKENS].shape
        return self.boundary.decode(wire, num_samples, num_tokens - 1, self.staging)

    def _tokens(self, wire_inputs: WireInputs) -> torch.Tensor:
        return self.staging.upload(wire_inputs[TOKENS])[:, :-1].long()
