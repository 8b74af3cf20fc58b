"""What a stage takes of a machine, computed with the formulas of docs/operations.md. Pure.

Microbatches in flight are not counted: their graphs and activations take what is left, up to the peer's limits.
"""

import math
from dataclasses import dataclass

from swarm.config import RunConfig
from swarm.model.loss import loss_bytes
from swarm.model.stages import parameter_shapes, trained_shapes
from swarm.training.optimizers import gradient_optimizer

PROGRAM_BYTES = 512 << 20
"""Python, PyTorch and the DHT."""
_FLOAT_BYTES, _FROZEN_BYTES = 4, 2
_TOKENIZER_BYTES = 32 << 20
"""The largest tokenizer that a run may have."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What one stage needs, in bytes.

    Attributes:
        device: memory of the device; if that is the CPU, all memory.
        ram: memory of the machine, besides a GPU's own; 0 if the device is the CPU.
        cache: disk for what is fetched before the stage begins.
        checkpoint: disk for one checkpoint.
    """

    device: int
    ram: int
    cache: int
    checkpoint: int

    @classmethod
    def of(cls, config: RunConfig, stage: int, *, on_gpu: bool) -> "Needs":
        """The needs of a stage by the run's configuration, for a model that is built in."""
        own = sum(map(math.prod, parameter_shapes(config, stage).values()))
        shapes = trained_shapes(config, stage)
        trained = sum(map(math.prod, shapes.values()))
        optimizer = gradient_optimizer(config, same_bits=False)
        moments = sum(
            math.prod(moment)
            for name, shape in shapes.items()
            for moment in optimizer.state_shapes(name, shape).values()
            if moment == shape  # leaves out counters
        )
        frozen = _FROZEN_BYTES * own if config.lora.is_on else 0
        is_last = stage == config.stages.num_stages - 1
        loss = loss_bytes(config.model, config.data.tokens_per_microbatch) if is_last else 0
        # Float32 numbers per trained parameter. The device holds weights, their copy, gradients, and the weights with
        # which the round before began; for a moment also one microbatch's gradient. Averaging takes the six.
        held, once_a_round = 4 + 1, 6
        if not config.rounds.synchronous:
            # The device holds weights, their copy and gradients; for a moment also a gradient and a second version of
            # the weights. Beside averaging, RAM holds the weights with which two rounds began, and outer momentum.
            held, once_a_round = 3 + 2, 3 + 6
        device = _FLOAT_BYTES * (held * trained + moments) + frozen + loss
        ram = _FLOAT_BYTES * once_a_round * trained + PROGRAM_BYTES
        return cls(
            device=device if on_gpu else device + ram,
            ram=ram if on_gpu else 0,
            cache=_TOKENIZER_BYTES + (_FLOAT_BYTES * own if config.model.weights else 0),
            checkpoint=_FLOAT_BYTES * (trained + (moments if config.rounds.synchronous else trained)),
        )
