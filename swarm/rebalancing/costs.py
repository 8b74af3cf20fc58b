"""The work for one sample at each stage, relative to the other stages. It follows from the run's configuration alone.

Used by swarm.rebalancing to guess what throughput a peer would have elsewhere. Reports of a stage's peers are not used:
they say as much about the peers' machines as about the stage, and change all the time. Never asks a peer anything.
"""

import statistics

from swarm.config import RunConfig
from swarm.model.stages import layer_ranges


def stage_costs(config: RunConfig) -> tuple[float, ...]:
    """Relative cost of a sample at each stage, 1 on average: the number of multiplications in a forward pass.

    Of a custom class only the number of layers is known, so they count as equal.
    """
    work = [_work(config, stage, len(layers)) for stage, layers in enumerate(layer_ranges(config))]
    mean = statistics.fmean(work)
    return tuple(stage_work / mean for stage_work in work)


def _work(config: RunConfig, stage: int, num_layers: int) -> float:
    """Multiplications for one token. Never 0, since even a stage without layers handles every sample."""
    model = config.model
    query_width = model.num_heads * model.width_of_heads
    kv_width = model.kv_heads * model.width_of_heads
    projections = model.d_model * (query_width + 2 * kv_width)
    # On average a token attends to half of the sequence, which is multiplied twice: with its query, and as values.
    attention = config.data.sequence_length * query_width
    num_reading = 2 if model.is_gated else 1
    reads = projections + attention + num_reading * model.d_model * model.feed_forward_width
    # These are the multiplications for each column of the residual stream that a layer writes.
    writes = query_width + model.feed_forward_width
    if model.custom_class:
        return max(num_layers, 1) * (reads + model.d_model * writes)
    work = model.d_model + num_layers * (reads + model.hidden_width * writes)
    if stage == config.stages.num_stages - 1:
        # The last layer writes all columns, whatever travels elsewhere.
        work += (model.d_model - model.hidden_width) * writes + model.vocab_size * model.d_model
    return work
