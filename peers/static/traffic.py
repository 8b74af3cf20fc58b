"""Bytes that a worker sends in a step, by arithmetic: what ring exchanges of torch's methods take. Used by the report.

What a codec makes of gradients is counted instead, in compressed.py.
"""

from peers.static.options import StaticOptions
from peers.static.workers import Shape
from swarm.config import RunConfig
from swarm.model.shards import spans
from swarm.model.stages import layer_ranges

FLOAT_BYTES = 4


def bytes_sent(
    config: RunConfig, options: StaticOptions, shape: Shape, *, num_parameters: int, num_microbatches: int
) -> int:  # fmt: skip
    """Of one worker, as a mean over its pipeline's stages.

    Args:
        num_parameters: of this worker's stage, as far as tensor parallelism has left them here.
        num_microbatches: that it computes.
    """
    weights, data = FLOAT_BYTES * num_parameters, config.data
    hidden = FLOAT_BYTES * data.tokens_per_microbatch * config.model.hidden_width
    # A ring of N workers sends (N - 1) / N of a vector to gather or to scatter it, and twice that to sum it.
    dp, tp = (shape.dp - 1) / shape.dp, (shape.tp - 1) / shape.tp
    if options.fsdp is not None:
        gathers = 2 if options.fsdp == "zero3" else 1
        gradients = num_microbatches * (gathers + 1) * dp * weights
    else:
        gradients = 2 * dp * weights
    within_layers = num_microbatches * _sums(config) / shape.pp * 2 * tp * hidden
    # Every stage but the last sends activations, and every one but the first gradients.
    between_stages = num_microbatches * 2 * hidden * (shape.pp - 1) / shape.pp
    return round(gradients + within_layers + between_stages)


def _sums(config: RunConfig) -> int:
    """Over the workers of the axis tp, for a microbatch, in all stages."""
    if config.model.block_types:
        return 2 * sum(len(spans(config.model, layers)) for layers in layer_ranges(config))
    # Two sums forward and two backward; forward once more where layers are computed again.
    return config.model.num_layers * (6 if config.model.gradient_checkpointing else 4)
