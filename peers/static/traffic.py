"""Bytes that a worker sends in a step, by arithmetic: what ring exchanges of torch's methods take. Used by the report.

What a codec makes of gradients is counted instead, in compressed.py.
"""

from peers.static.options import StaticOptions
from peers.static.run_config import in_shards
from peers.static.workers import Shape
from swarm.config import RunConfig
from swarm.model.shards import spans
from swarm.model.stages import layer_ranges

FLOAT_BYTES = 4


def bytes_sent(config: RunConfig, options: StaticOptions, shape: Shape, *, num_parameters: int) -> int:
    """The bytes that one worker sends, as a mean over its pipeline's stages.

    Args:
        num_parameters: of this worker's stage, as far as tensor parallelism has left them here.
    """
    weights, data = FLOAT_BYTES * num_parameters, config.data
    hidden = FLOAT_BYTES * data.tokens_per_microbatch * config.model.hidden_width
    num_microbatches = config.microbatches_per_round / shape.dp
    # A ring of N workers sends (N - 1) / N of a vector to gather or to scatter it, and twice that to sum it.
    dp, tp = (shape.dp - 1) / shape.dp, (shape.tp - 1) / shape.tp
    num_gathers = {"zero3": 2, "zero2": 1}
    gradients = 2 * dp * weights
    if options.fsdp is not None:
        gradients = num_microbatches * (num_gathers[options.fsdp] + 1) * dp * weights
    model = in_shards(config.model, shape.tp)
    num_sums = 2 * sum(len(spans(model, layers)) for layers in layer_ranges(config)) if shape.tp > 1 else 0
    within_layers = num_microbatches * num_sums / shape.pp * 2 * tp * hidden
    # Every stage but the last sends activations, and every one but the first gradients.
    between_stages = num_microbatches * 2 * hidden * (shape.pp - 1) / shape.pp
    return round(gradients + within_layers + between_stages)
