"""What a stage computes of a microbatch: its hidden state or its loss, by torch's operations or by recordings of them.

Used by stage/backend on the compute thread. Never waits for the device, and knows no sums of gradients.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from swarm.config import RunConfig
from swarm.errors import in_one_line
from swarm.machine.recording import Recorder
from swarm.model.masks import DropoutKey
from swarm.model.stage_module import StageModule, cast_types, stage_loss, with_shared_casts
from swarm.stage.buckets import Version
from swarm.stage.captured import Arguments, CapturedStage, Example
from swarm.stage.graphs import Graph, GraphBudget
from swarm.stage.inputs import StageInputs, WireInputs

logger = logging.getLogger(__name__)


@dataclass
class StageFunction:
    """The function of one stage."""

    config: RunConfig
    module: nn.Module
    inputs: StageInputs
    budget: GraphBudget
    _captured: CapturedStage | None = field(init=False, default=None)

    @property
    def num_recorded(self) -> int:
        """The microbatches that recordings can compute at once; 0 without recordings."""
        return 0 if self._captured is None else self._captured.num_places

    def has_room(self) -> bool:
        """Whether the graph of one more microbatch would be kept. May be asked from another thread."""
        if (captured := self._captured) is None:
            return self.budget.has_room()
        return self.inputs.is_last or captured.has_room()

    def record(self, recorder: Recorder, version: Version) -> None:
        """Record the function for microbatches of the run's shape, if the stage can be recorded."""
        model, inputs = self.config.model, self.inputs
        has_dropout = model.dropout or self.config.lora.dropout
        # The factor by which float16 scales gradients changes, and would be a constant of the recording.
        if not isinstance(self.module, StageModule) or has_dropout or model.autocast == "fp16":
            return

        def made_up(number: int) -> Example:
            wire_inputs, wire_gradient = inputs.made_up(number)
            return Example(
                inputs.arguments(wire_inputs), None if inputs.is_last else inputs.decode(wire_gradient, wire_inputs)
            )

        try:
            self._captured = CapturedStage(
                recorder, self._call, lambda arguments: self._live(version, arguments), made_up, version,
                cast_types=cast_types(self.module), limit_bytes=self.budget.limit_bytes,
            )  # fmt: skip
            self.budget.recorded_bytes = self._captured.num_bytes
        except Exception as error:  # noqa: BLE001 - torch raises errors of many kinds, and the stage can do without
            reason = in_one_line(error)
            logger.warning("stage %d goes on without CUDA graphs, and so slower: %s", inputs.stage, reason)

    def forward(
        self, microbatch: int, version: Version, wire_inputs: WireInputs, *, has_backward: bool
    ) -> tuple[torch.Tensor, Graph | None]:
        """Compute the outputs. A backward comes later, if at all. Also returns the graph, if there is room for it."""
        captured, arguments = self._recordings(wire_inputs), self.inputs.arguments(wire_inputs)
        keeps = has_backward and (self.budget if captured is None else captured).has_room()
        if captured is not None:
            graph: Graph = captured.forward(version, arguments, keeps=keeps)
        elif keeps:
            graph = self._live(version, arguments, microbatch)
        else:
            with torch.no_grad():
                return self._apply(version, arguments, microbatch), None
        return graph.outputs, graph if keeps else None

    def graph(
        self, microbatch: int, version: Version, wire_inputs: WireInputs, scale: float = 1.0, *, records: bool = True
    ) -> Graph:
        """Compute a forward whose backward follows at once.

        Args:
            scale: at the last stage, all gradients become those of the loss times this.
            records: whether recordings may compute it.
        """
        captured, arguments = self._recordings(wire_inputs), self.inputs.arguments(wire_inputs)
        if captured is not None and records:
            return captured.forward(version, arguments, keeps=False)
        return self._live(version, arguments, microbatch, scale)

    def evaluate(self, parameters: Mapping[str, torch.Tensor], wire_inputs: WireInputs) -> torch.Tensor:
        """Compute the outputs without dropout, with the given weights."""
        with torch.no_grad():
            return self._call(parameters, self.inputs.arguments(wire_inputs))

    def _recordings(self, wire_inputs: WireInputs) -> CapturedStage | None:
        """The recordings that can compute a microbatch, if there are any."""
        if self._captured is not None and self.budget.recorded_bytes > self.budget.limit_bytes:
            logger.warning("stage %d goes on without CUDA graphs: their memory is needed", self.inputs.stage)
            self._captured, self.budget.recorded_bytes = None, 0
        return self._captured if self.inputs.are_of_the_run(wire_inputs) else None

    def _live(self, version: Version, arguments: Arguments, microbatch: int = 0, scale: float = 1.0) -> Graph:
        inputs = arguments["inputs"]
        if self.inputs.stage:
            inputs.requires_grad_()
        with torch.enable_grad():
            outputs = self.budget.build(lambda: self._apply(version, arguments, microbatch, scale), version)
        return Graph(inputs, outputs, list(version.parameters.values()))

    def _apply(self, version: Version, arguments: Arguments, microbatch: int, scale: float = 1.0) -> torch.Tensor:
        parameters = with_shared_casts(self.module, version.parameters, version.casts)
        return self._call(parameters, arguments, DropoutKey(seed=self.config.data.seed, microbatch=microbatch), scale)

    def _call(
        self,
        parameters: Mapping[str, torch.Tensor],
        arguments: Arguments,
        key: DropoutKey | None = None,
        scale: float = 1.0,
    ) -> torch.Tensor:
        """The hidden state; at the last stage the loss in nats, summed over the targets."""
        options: dict[str, Any] = {"dropout_key": key, **arguments}
        inputs = options.pop("inputs")
        if self.inputs.is_last:
            return stage_loss(self.module, parameters, inputs, gradient_scale=scale, **options)
        outputs: torch.Tensor = torch.func.functional_call(self.module, dict(parameters), (inputs,), options)
        return outputs
