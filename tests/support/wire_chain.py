"""A pipeline of stages in one process, between which hidden states and gradients still travel as messages.

Stages, weights and messages are the swarm's own code. The network, the compute threads and the
trainer are left out. One microbatch is one synchronous round, so a run has the same result every time.
"""

from collections.abc import Mapping

import torch

from scripts.benches.shared.common import cpu_backend
from swarm.config import RunConfig
from swarm.data.microbatches import Microbatches
from swarm.model.stages import build_stage
from swarm.rpc.wire import TensorReader, TensorSpec
from swarm.stage.backend import Forward, StageBackend
from swarm.stage.boundary import GRADIENT, HIDDEN, TOKENS, request_specs
from tests.support.chunks import pieces
from tests.support.commits import end_rounds

KEPT_BYTES = 1 << 40
"""A budget for graphs that is large enough to keep all of them."""


class WireChain:
    """All stages, from their initial weights, or from `given` ones by name."""

    def __init__(
        self, config: RunConfig, data: Microbatches, *, given: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        self._config, self._given, self._data = config, given, data
        self.stages = [self._stage(stage) for stage in range(config.stages.num_stages)]

    def _stage(self, stage: int) -> StageBackend:
        module = build_stage(self._config, stage, device="cpu", weights=self._given)
        return cpu_backend(self._config, stage, graph_bytes=KEPT_BYTES, module=module)

    def step(self, number: int) -> float:
        inputs = {TOKENS: torch.from_numpy(self._data.tokens(number))}
        forwards: list[Forward] = []
        for stage in self.stages[:-1]:
            forwards.append(stage.forward(number, number, inputs))
            hidden = forwards[-1].wire_hidden
            assert hidden is not None
            specs = request_specs(self._config, stage.stage + 1)
            inputs = self._travel({TOKENS: inputs[TOKENS], HIDDEN: hidden.wait()}, specs)
        last = self.stages[-1]
        loss, gradient, accumulated = last.forward_loss(number, number, inputs, accumulate=True)
        assert accumulated is not None
        last.settle(accumulated)
        for stage, forward in zip(reversed(self.stages[:-1]), reversed(forwards), strict=True):
            assert gradient is not None
            specs = {GRADIENT: request_specs(self._config, stage.stage + 1)[HIDDEN]}
            received = self._travel({GRADIENT: gradient.wait()}, specs)[GRADIENT]
            gradient, accumulated = stage.backward(forward, received, accumulate=True)
            assert accumulated is not None
            stage.settle(accumulated)
        self._commit()
        return loss

    def _travel(self, tensors: Mapping[str, torch.Tensor], specs: Mapping[str, TensorSpec]) -> dict[str, torch.Tensor]:
        reader = TensorReader(specs)
        for name, tensor in tensors.items():
            for piece in pieces(name, tensor):
                reader.feed(piece)
        return reader.tensors

    def _commit(self) -> None:
        samples = self.stages[0].weights.buckets.num_samples
        end_rounds([stage.weights for stage in self.stages], num_samples=samples)
