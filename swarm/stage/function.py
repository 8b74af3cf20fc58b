"""What a stage computes of a microbatch: its hidden state or its loss, by torch's operations or by recordings of them.

Inputs are checked on the CPU, where they arrive, and brought to the stage's device. Never waits for the device.

Shapes: B samples of a microbatch, T tokens, D numbers a token that travel.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from swarm.config import RunConfig
from swarm.errors import in_one_line
from swarm.machine.recording import Recorder
from swarm.model.masks import DropoutKey
from swarm.model.stage_module import StageModule, cast_types, stage_loss, with_shared_casts
from swarm.rpc.bounds import CHUNK_BYTES
from swarm.rpc.wire import require_in_range
from swarm.stage.boundary import HIDDEN, TOKENS, Boundary
from swarm.stage.buckets import Inputs, Version
from swarm.stage.graphs import Arguments, CapturedStage, Example, Graph, GraphBudget, Weights
from swarm.stage.staging import Staging, staging_of
from swarm.training import samples
from swarm.training.samples import NO_TARGET, TARGETS

logger = logging.getLogger(__name__)

WireInputs = Mapping[str, torch.Tensor]
"""A microbatch's tensors by name, as they arrived."""


@dataclass
class StageFunction:
    config: RunConfig
    stage: int
    module: nn.Module
    boundary: Boundary
    staging: Staging
    budget: GraphBudget
    _captured: CapturedStage | None = field(init=False, default=None)

    @property
    def is_last(self) -> bool:
        return self.stage == self.config.stages.num_stages - 1

    @property
    def num_recorded(self) -> int:
        """The microbatches that recordings can compute at once; 0 without recordings."""
        return 0 if self._captured is None else self._captured.num_places

    def has_room(self) -> bool:
        if (captured := self._captured) is None:
            return self.budget.has_room()
        return self.is_last or captured.has_room()

    def check(self, wire_inputs: WireInputs, boundary: Boundary) -> None:
        """Raise MalformedMessage if numbers are out of range, or a token is unknown. Here and below `boundary` is that
        of the inputs' round."""
        # On the CPU, where the check waits for nothing. If a GPU looks up an unknown token, this process cannot use it
        # any more.
        samples.require_sound(wire_inputs, self.config.model.vocab_size)
        if self.stage:
            require_in_range(HIDDEN, wire_inputs[HIDDEN], boundary.encoding)

    async def checked(self, wire_inputs: WireInputs, boundary: Boundary) -> None:
        """`check`, for the event loop: what takes long is done in a thread of its own, because a GPU would wait for the
        compute thread."""
        if self.stage and wire_inputs[HIDDEN].nbytes > CHUNK_BYTES:
            await asyncio.to_thread(self.check, wire_inputs, boundary)
        else:
            self.check(wire_inputs, boundary)

    def made_up(self, number: int) -> tuple[WireInputs, torch.Tensor]:
        """Random inputs of the run's shape, as they would arrive, and such a gradient of the stage's output."""
        data, shape, generator = self.config.data, self._shape, torch.Generator().manual_seed(number)
        tensor_BTR = torch.randn(shape[0], shape[1] - 1, self.boundary.width, generator=generator)
        wire = self.boundary.encode(tensor_BTR, staging_of(tensor_BTR.device)).wait()
        # Every token is a target, and each row one document.
        made: dict[str, torch.Tensor] = {name: torch.zeros(shape, dtype=torch.int32) for name in samples.names(data)}
        made[TOKENS] = torch.randint(self.config.model.vocab_size, shape, generator=generator, dtype=torch.int32)
        if TARGETS in made:
            made[TARGETS] += 1
        return {**made, HIDDEN: wire} if self.stage else made, wire

    def decode(self, wire: torch.Tensor, wire_inputs: WireInputs, boundary: Boundary) -> torch.Tensor:
        """Decode a hidden state of the microbatch, or its gradient. Raises MalformedMessage if `wire` is neither."""
        num_samples, num_tokens = wire_inputs[TOKENS].shape
        return boundary.decode(wire, num_samples, num_tokens - 1, self.staging)

    def record(self, recorder: Recorder, version: Version) -> None:
        """Record the function for microbatches of the run's shape, if the stage can be recorded."""
        has_dropout = self.config.model.dropout or self.config.lora.dropout
        if not isinstance(self.module, StageModule) or has_dropout:
            return

        def made_up(number: int) -> Example:
            wire_inputs, wire_gradient = self.made_up(number)
            gradient_BTR = None if self.is_last else self.decode(wire_gradient, wire_inputs, self.boundary)
            return Example(self._arguments(wire_inputs, self.boundary), gradient_BTR)

        try:
            self._captured = CapturedStage(
                recorder, self._call, lambda arguments: self._live(version, arguments), made_up, version,
                cast_types=cast_types(self.module), limit_bytes=self.budget.most_bytes,
            )  # fmt: skip
            self.budget.recorded_bytes = self._captured.num_bytes
        except Exception as error:  # noqa: BLE001 - torch raises errors of many kinds, and the stage can do without
            reason = in_one_line(error)
            logger.warning("stage %d goes on without CUDA graphs, and so slower: %s", self.stage, reason)

    def forward(self, inputs: Inputs, *, has_backward: bool) -> tuple[torch.Tensor, Graph | None]:
        """Compute the outputs. A backward comes later, if at all. Also returns the graph, if there is room for it."""
        captured, version = self._recordings(inputs.wire_inputs), inputs.version
        arguments = self._arguments(inputs.wire_inputs, inputs.boundary)
        keeps = has_backward and (self.budget if captured is None else captured).has_room()
        if captured is not None:
            graph: Graph = captured.forward(version, arguments, keeps=keeps)
        elif keeps:
            graph = self._live(version, arguments, inputs.microbatch)
        else:
            with torch.no_grad():
                parameters = with_shared_casts(self.module, version.parameters, version.casts)
            return self._without_gradient(parameters, arguments, self._key(inputs.microbatch)), None
        return graph.outputs, graph if keeps else None

    def graph(self, inputs: Inputs, scale: float, *, records: bool = True) -> Graph:
        """Compute a forward whose backward follows at once. At the last stage all gradients become those of the loss
        times `scale`, which is 1 but in float16. `records` says whether recordings may compute it."""
        captured = self._recordings(inputs.wire_inputs)
        arguments = self._arguments(inputs.wire_inputs, inputs.boundary, scale)
        if captured is not None and records:
            return captured.forward(inputs.version, arguments, keeps=False)
        return self._live(inputs.version, arguments, inputs.microbatch)

    def evaluate(self, parameters: Weights, wire_inputs: WireInputs, boundary: Boundary) -> torch.Tensor:
        """The outputs, without dropout. A batch may be shorter than the run's. For compiled layers it is made as long,
        because they would be compiled anew for another shape, while training waits."""
        arguments, (num_samples, length) = self._arguments(wire_inputs, boundary), wire_inputs[TOKENS].shape
        is_whole = wire_inputs[TOKENS].shape == self._shape
        if not is_whole and isinstance(self.module, StageModule) and self.module.compiles:
            arguments = {name: self._lengthened(name, tensor) for name, tensor in arguments.items()}
        outputs = self._without_gradient(parameters, arguments)
        return outputs if self.is_last else outputs[:num_samples, : length - 1].contiguous()

    def _lengthened(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """An argument with as many samples and tokens as the run's. What is added has no targets, and comes after the
        others, which do not attend to it."""
        if tensor.ndim == 0:
            return tensor
        num_samples, length = self._shape
        added = (0, length - 1 - tensor.shape[1], 0, num_samples - len(tensor))
        value = NO_TARGET if name == "targets_BT" else 0
        return F.pad(tensor, (0, 0) * (tensor.ndim - 2) + added, value=value)

    @property
    def _shape(self) -> tuple[int, int]:
        """That of the tokens of the run's microbatches."""
        return self.config.data.microbatch_size, self.config.data.sequence_length + 1

    def _arguments(self, wire_inputs: WireInputs, boundary: Boundary, scale: float = 1.0) -> Mapping[str, torch.Tensor]:
        """The tensors that the module takes, by name, on the device.

        `inputs` are tokens [B, T] at stage 0, and the hidden state [B, T, D] at any other. The last stage has
        `targets_BT` as well: the next tokens, or NO_TARGET. In float16 it has `gradient_scale` too, as a tensor,
        because a number of Python would be a constant of recordings.
        """
        tokens = None
        if not self.stage or self.config.model.bottleneck_dim:
            tokens = self.staging.upload(wire_inputs[TOKENS])[:, :-1].long()
        hidden = self.decode(wire_inputs[HIDDEN], wire_inputs, boundary).detach() if self.stage else None
        documents_BT = samples.documents(wire_inputs)
        found = {
            "inputs": tokens if hidden is None else hidden,
            "tokens_BT": None if hidden is None else tokens,
            "documents_BT": None if documents_BT is None else self.staging.upload(documents_BT),
        }
        if self.is_last:
            whole = {name: self.staging.upload(tensor) for name, tensor in samples.of(wire_inputs).items()}
            targets_BT = found["targets_BT"] = samples.targets(whole)
            if self.config.model.autocast == "fp16":
                found["gradient_scale"] = torch.full((), scale, device=targets_BT.device)
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def _recordings(self, wire_inputs: WireInputs) -> CapturedStage | None:
        """The recordings that can compute a microbatch, if there are any."""
        if self._captured is not None and self.budget.recorded_bytes > self.budget.most_bytes:
            logger.warning("stage %d goes on without CUDA graphs: their memory is needed", self.stage)
            self._captured, self.budget.recorded_bytes = None, 0
        return self._captured if wire_inputs[TOKENS].shape == self._shape else None

    def _live(self, version: Version, arguments: Arguments, microbatch: int = 0) -> Graph:
        inputs = arguments["inputs"]
        if self.stage:
            inputs.requires_grad_()
        with torch.enable_grad():
            outputs = self.budget.build(lambda: self._apply(version, arguments, microbatch), version)
        return Graph(inputs, outputs, list(version.parameters.values()))

    def _apply(self, version: Version, arguments: Arguments, microbatch: int) -> torch.Tensor:
        parameters = with_shared_casts(self.module, version.parameters, version.casts)
        return self._call(parameters, arguments, self._key(microbatch))

    def _key(self, microbatch: int) -> DropoutKey:
        return DropoutKey(seed=self.config.data.seed, microbatch=microbatch)

    @torch.no_grad()
    def _without_gradient(
        self, parameters: Weights, arguments: Arguments, key: DropoutKey | None = None
    ) -> torch.Tensor:
        # Those that require a gradient, as some anchors do, would have compiled code of their own.
        return self._call({name: parameter.detach() for name, parameter in parameters.items()}, arguments, key)

    def _call(self, parameters: Weights, arguments: Arguments, key: DropoutKey | None = None) -> torch.Tensor:
        """The hidden state; at the last stage the loss in nats, summed over the targets."""
        options: dict[str, Any] = {"dropout_key": key, **arguments}
        inputs = options.pop("inputs")
        if self.is_last:
            return stage_loss(self.module, parameters, inputs, **options)
        outputs: torch.Tensor = torch.func.functional_call(self.module, dict(parameters), (inputs,), options)
        return outputs
