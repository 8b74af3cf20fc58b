"""Computes the memory of a stage peer from the configuration, with the formulas of docs/performance.md.

Used by the memory bench, which compares the results with the memory of a process. The formulas hold for float32 on the
CPU and for the built-in model without dropout, bottleneck or checkpointed layers. The stage has no embedding, and
adapters at all of its matrices or at none; with adapters it also has no head. Never measures anything.
"""

from swarm.compression.codec import contribution_codec, result_codec
from swarm.config import RunConfig
from swarm.model.stages import layer_ranges
from swarm.stage.boundary import HIDDEN, TOKENS, request_specs

FLOAT_BYTES, FROZEN_BYTES = 4, 2


def num_parameters(config: RunConfig, stage: int) -> int:
    """Parameters of a stage that are trained: all of its own, or those of its adapters."""
    if not config.lora.is_on:
        return num_own_parameters(config, stage)
    matrices = _matrices(config)
    sides = sum(sum(matrices[name]) for group in config.lora.groups(config.model) for name in group)
    return len(layer_ranges(config)[stage]) * config.lora.rank * sides


def num_moments(config: RunConfig, stage: int) -> int:
    """Numbers in the optimizer's state. AdamW has two for each parameter; Muon has one for each parameter in a layer's
    matrices."""
    twice = 2 * num_parameters(config, stage)
    if config.gradient_step.name == "adamw":
        return twice
    if config.lora.is_on:
        return twice // 2
    matrices = sum(inputs * outputs for inputs, outputs in _matrices(config).values())
    return twice - len(layer_ranges(config)[stage]) * matrices


def num_own_parameters(config: RunConfig, stage: int) -> int:
    """Parameters of a stage without adapters."""
    matrices = sum(inputs * outputs for inputs, outputs in _matrices(config).values())
    layers = len(layer_ranges(config)[stage]) * (matrices + 2 * config.model.d_model)
    is_last = stage == config.stages.num_stages - 1
    return layers + (config.model.d_model + head_bytes(config) // FLOAT_BYTES if is_last else 0)


def head_bytes(config: RunConfig) -> int:
    """Bytes of the matrix that makes logits at the last stage. Its gradient has as many."""
    return FLOAT_BYTES * config.model.vocab_size * config.model.d_model


def frozen_bytes(config: RunConfig, stage: int) -> int:
    """Bytes of the model's own weights beside adapters: matrices in 16 bits, and the vectors of norms."""
    if not config.lora.is_on:
        return 0
    vectors = len(layer_ranges(config)[stage]) * 2 * config.model.d_model
    return FROZEN_BYTES * (num_own_parameters(config, stage) - vectors) + FLOAT_BYTES * vectors


def state_bytes(config: RunConfig, stage: int) -> dict[str, int]:
    """Bytes that a stage always holds while it trains, by what they are for. Microbatches in flight, the second bucket
    and their gradients are not included."""
    size = FLOAT_BYTES * num_parameters(config, stage)
    held = {
        "parameters": size,
        "optimizer": FLOAT_BYTES * num_moments(config, stage),
        "version": size,
        "gradient_bucket": size,
        # In the synchronous setting the round's anchor is the present version itself.
        "anchors": size if config.rounds.synchronous else 2 * size,
    }
    if not config.rounds.synchronous and config.outer_step.momentum:
        held["outer_momentum"] = size
    if config.lora.is_on:
        held["frozen"] = frozen_bytes(config, stage)
    return held


def delayed_bytes(config: RunConfig, stage: int) -> int:
    """Bytes of the weights before an inner step, which microbatches in flight still use."""
    return 0 if config.rounds.synchronous else FLOAT_BYTES * num_parameters(config, stage)


def passing_bytes(config: RunConfig, stage: int) -> int:
    """Bytes that are held only for a moment: one microbatch's gradient of the weights, and with DiLoCo also a third
    version of the weights right after a round."""
    return FLOAT_BYTES * num_parameters(config, stage) + delayed_bytes(config, stage)


def graph_bytes(config: RunConfig, stage: int) -> int:
    """Bytes that autograd keeps of one microbatch's layers, including the stage's input."""
    model = config.model
    # Kept are the input and output of each norm; queries, keys, values, and the output of attention; the gate before
    # its activation, the values that it gates, and their product. In addition there is one number for each head and
    # each norm.
    floats = 6 * model.d_model + 2 * _kv_width(config) + 3 * model.feed_forward_width + model.num_heads + 2
    if config.lora.is_on:
        # The output of each adapter's first matrix.
        floats += config.lora.rank * sum(map(len, config.lora.groups(model)))
    rotary = config.data.sequence_length * model.d_model // model.num_heads
    # Norms keep their weight. If it is trained, it is counted with the parameters.
    vectors = 2 * model.d_model if config.lora.is_on else 0
    num_layers = len(layer_ranges(config)[stage])
    return FLOAT_BYTES * (num_layers * (config.data.tokens_per_microbatch * floats + vectors) + rotary)


def wire_bytes(config: RunConfig, stage: int) -> dict[str, int]:
    """Bytes of one microbatch that came in over the wire, and that go out."""
    specs = request_specs(config, stage)
    return {"tokens": specs[TOKENS].num_bytes, "input": specs[HIDDEN].num_bytes, "output": specs[HIDDEN].num_bytes}


def in_flight_bytes(config: RunConfig, stage: int, *, is_kept: bool) -> int:
    """Bytes of one microbatch between its forward and its gradient, with or without its graph."""
    wire = wire_bytes(config, stage)
    if not is_kept:
        return sum(wire.values())
    return graph_bytes(config, stage) + wire["tokens"] + wire["output"]


def settled_bytes(config: RunConfig, stage: int) -> int:
    """Bytes that are kept of one microbatch that counts, until its round commits. They are needed to take it out again,
    and for replays."""
    if not config.rounds.synchronous:
        return 0
    wire = wire_bytes(config, stage)
    # The input, the gradient that came back, the output, and the gradient in the answer.
    return wire["tokens"] + 2 * wire["input"] + 2 * wire["output"]


def averaging_bytes(config: RunConfig, stage: int, *, num_members: int) -> int:
    """Additional bytes during a round's exchange, if all of the stage is one fragment."""
    size, share = FLOAT_BYTES * num_parameters(config, stage), 1 / num_members
    sent = contribution_codec(config.averaging).num_bytes(num_parameters(config, stage))
    answered = result_codec(config.averaging).num_bytes(num_parameters(config, stage))
    # The contribution, the same contribution as one vector, and the result.
    whole = 3 * size
    # For the part that the member sums: the decoded parts of the others, the sum, and the sum encoded and decoded.
    own = (1 - share) * size + share * (2 * size + answered)
    # For the parts that others sum: the member's encoded contribution, which goes out, and the encoded sums, which come
    # back.
    others = (1 - share) * (sent + answered)
    return round(whole + own + others)


def snapshot_bytes(config: RunConfig, stage: int) -> int:
    """Bytes of a copy of the anchor and the outer state, for a joiner or a checkpoint."""
    return (3 if config.rounds.synchronous else 2) * FLOAT_BYTES * num_parameters(config, stage)


def _matrices(config: RunConfig) -> dict[str, tuple[int, int]]:
    """The number of inputs and outputs of each matrix in a layer."""
    d_model, wide, kv_width = config.model.d_model, config.model.feed_forward_width, _kv_width(config)
    return {
        "attention.q": (d_model, d_model),
        "attention.k": (d_model, kv_width),
        "attention.v": (d_model, kv_width),
        "attention.output": (d_model, d_model),
        "feed_forward.gate": (d_model, wide),
        "feed_forward.up": (d_model, wide),
        "feed_forward.down": (wide, d_model),
    }


def _kv_width(config: RunConfig) -> int:
    return config.model.kv_heads * (config.model.d_model // config.model.num_heads)
