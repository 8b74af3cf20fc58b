"""Computes the bytes that a worker sends in a step with torch's own methods, which exchange in rings. Used by the
report.

With a codec, compressed.py counts the bytes of the gradients instead.
"""

from collections.abc import Mapping

import torch

from peers.static.batches import microbatches_a_worker
from peers.static.options import StaticOptions
from peers.static.run_config import in_shards
from peers.static.workers import Shape
from swarm.config import RunConfig
from swarm.model.shards import cut_axis, spans
from swarm.model.stages import layer_ranges
from swarm.training.muon import is_hidden_matrix
from swarm.training.optimizers import steps_whole_matrices

FLOAT_BYTES = 4
EXCHANGES = {"zero3": 3, "zero2": 2}
"""The number of times that FSDP exchanges a weight for a microbatch: it gathers weights and scatters gradients."""


def bytes_sent(
    config: RunConfig, options: StaticOptions, shape: Shape, parameters: Mapping[str, torch.Tensor]
) -> float:
    """The bytes that one worker sends, as a mean over its pipeline's stages.

    Args:
        parameters: the parameters of this worker's stage, cut by tensor parallelism but not by FSDP.
    """
    # A ring of N workers sends (N - 1) / N of a vector to gather or to scatter it, and twice that to sum it.
    dp, tp = (shape.dp - 1) / shape.dp, (shape.tp - 1) / shape.tp
    num_microbatches, model = microbatches_a_worker(config, shape), in_shards(config.model, shape.tp)
    num_sent = (num_microbatches * EXCHANGES[options.fsdp] if options.fsdp else 2) * dp * _size(parameters)
    hidden = FLOAT_BYTES * config.data.tokens_per_microbatch * config.model.hidden_width
    if shape.tp > 1:
        num_sums = 2 * sum(len(spans(model, layers)) for layers in layer_ranges(config)) / shape.pp
        num_sent += num_microbatches * num_sums * 2 * tp * hidden
    if steps_whole_matrices(config):
        # Matrices that are cut are gathered for the step.
        matrices = {name: value for name, value in parameters.items() if is_hidden_matrix(name, value.shape)}
        num_sent += dp * _size(matrices) if options.fsdp else 0.0
        num_sent += (shape.tp - 1) * _size({name: matrices[name] for name in matrices if cut_axis(name) is not None})
    # Every stage except the last sends activations, and every stage except the first sends gradients.
    return num_sent + num_microbatches * 2 * hidden * (shape.pp - 1) / shape.pp


def _size(tensors: Mapping[str, torch.Tensor]) -> int:
    return FLOAT_BYTES * sum(tensor.numel() for tensor in tensors.values())
