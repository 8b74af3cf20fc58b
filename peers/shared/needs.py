"""What a stage takes of a machine and of its line, by the formulas of docs/operations.md and docs/performance.md. Pure.

The formulas are for the built-in model, without dropout, bottleneck and compiled layers. What the weights and graphs of
a `model.custom_class` take is measured instead, and needs a configuration with one class for all blocks (`of_class`).
"""

import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial

from torch import Size

from swarm.compression.codec import contribution_codec, result_codec
from swarm.config import DataConfig, LoraConfig, ModelConfig, RunConfig, StagesConfig
from swarm.model import nf4
from swarm.model.custom_class import Measured, measured
from swarm.model.loss import loss_bytes
from swarm.model.stages import layer_ranges, parameter_shapes, trained_shapes
from swarm.stage.boundary import HIDDEN, TOKENS, request_specs
from swarm.training.optimizers import gradient_optimizer
from swarm.types import Block

PROGRAM_BYTES = 512 << 20
"""Python, PyTorch and the DHT."""
_FLOAT_BYTES, _HALF_BYTES = 4, 2
_TOKENIZER_BYTES = 32 << 20
"""The largest tokenizer that a run may have."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What one peer needs for a stage, or for several that it serves together, in bytes.

    Attributes:
        weights: memory of the device for those that are trained, with the copies that microbatches compute with.
        frozen: the same for the model's own weights beside adapters.
        optimizer: the same for its state.
        other: the same for sums of gradients and anchors; if the device is the CPU, for all that is `ram` on a GPU too.
        turns: the same for what only one stage at a time takes, or all have in common: one microbatch's gradient, the
            loss, a layer that is computed again, and on the CPU the program.
        graphs: the same for the microbatches in flight.
        fewest: `graphs`, if all forwards but one are computed again.
        in_flight: how many microbatches these are.
        ram: memory of the machine, besides a GPU's own; 0 if the device is the CPU.
        cache: disk for what is fetched before the stage begins.
        checkpoint: disk for one checkpoint.
    """

    weights: int
    frozen: int
    optimizer: int
    other: int
    turns: int
    graphs: int
    fewest: int
    in_flight: int
    ram: int
    cache: int
    checkpoint: int

    @classmethod
    def of(
        cls, config: RunConfig, stage: int, *, on_gpu: bool, num_peers: int = 1, anchors_on_disk: bool = False
    ) -> "Needs":
        """The needs for one stage, or a variant of it, which has so many peers. What a peer keeps by --anchors is not
        counted."""
        config = computing_on(config, on_gpu=on_gpu)
        held, shapes = state_bytes(config, stage), _shapes(config, stage)[1]
        size = held["parameters"]
        # In float32, even if moments are held in 8 bits.
        in_full = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, moments="fp32"))
        checkpoint = size + (optimizer_bytes(in_full, shapes) if config.rounds.synchronous else size)
        weights = held.pop("parameters") + held.pop("version") + held.pop("casts", 0)
        frozen, optimizer = held.pop("frozen", 0), held.pop("optimizer")
        # With DiLoCo the outer step is taken on the CPU.
        outer = 0 if config.rounds.synchronous else held.pop("anchors") + held.pop("outer_momentum", 0)
        share = -(-most_microbatches(config, stage) // num_peers)
        # Parts are computed for two members at least: a peer that is alone now may get company.
        averaging = averaging_bytes(config, stage, num_members=max(2, num_peers))
        outer = 0 if anchors_on_disk else outer
        ram = outer + averaging + residual_bytes(config, stage) + share * settled_bytes(config, stage)
        gradient, is_last = version_bytes(config, shapes), stage == config.stages.num_stages - 1
        turns = gradient + (loss_bytes(config.model, config.data.tokens_per_microbatch, fused=on_gpu) if is_last else 0)
        if config.model.gradient_checkpointing and not config.model.custom_class:
            turns += layer_graph_bytes(config, fused=on_gpu)
        # The last stage goes backward at once.
        in_flight = 1 if is_last else min(config.stages.num_stages + 2, share)
        kept, light = (in_flight_bytes(config, stage, is_kept=kept, fused=on_gpu) for kept in (True, False))
        return cls(
            weights=weights, frozen=frozen, optimizer=optimizer, checkpoint=checkpoint,
            other=sum(held.values()) + passing_bytes(config, stage) - gradient + (0 if on_gpu else ram),
            turns=turns + (0 if on_gpu else PROGRAM_BYTES),
            graphs=in_flight * kept, fewest=kept + (in_flight - 1) * light, in_flight=in_flight,
            ram=ram + PROGRAM_BYTES if on_gpu else 0,
            cache=_TOKENIZER_BYTES + _FLOAT_BYTES * (num_own_parameters(config, stage) if config.model.weights else 0),
        )  # fmt: skip

    def __add__(self, more: "Needs") -> "Needs":
        values = {name: value + getattr(more, name) for name, value in vars(self).items()}
        ram = values["ram"] - (PROGRAM_BYTES if self.ram and more.ram else 0)
        cache = values["cache"] - _TOKENIZER_BYTES
        return Needs(**values | {"turns": max(self.turns, more.turns), "ram": ram, "cache": cache})

    def or_more(self, other: "Needs") -> "Needs":
        """Of each figure the larger one."""
        return Needs(**{name: max(value, getattr(other, name)) for name, value in vars(self).items()})

    @property
    def device(self) -> int:
        """Memory of the device besides microbatches in flight; if that is the CPU, all such memory."""
        return self.weights + self.frozen + self.optimizer + self.other + self.turns

    @property
    def whole(self) -> int:
        """Memory of the device with the microbatches in flight."""
        return self.device + self.graphs

    @property
    def least(self) -> int:
        """`whole`, if all forwards but one are computed again."""
        return self.device + self.fewest


def of_stages(
    config: RunConfig, *, on_gpu: bool, num_peers: int = 1, anchors_on_disk: bool = False,
    blocks: Collection[Block] | None = None,
) -> dict[int, Needs]:  # fmt: skip
    """The needs for each stage of these blocks, or of the run: of variants with classes of their own, each figure of
    the one that needs most. Empty if the size of a class cannot be measured. Raises what `measured` raises."""
    of = partial(Needs.of, on_gpu=on_gpu, num_peers=num_peers, anchors_on_disk=anchors_on_disk)
    ranges, found, needs = layer_ranges(config), dict[tuple[object, ...], Needs](), dict[int, Needs]()
    for block in config.blocks if blocks is None else blocks:
        stage, name = block.stage, config.classes[block]
        is_end = stage == 0, stage == len(ranges) - 1
        shape = (len(ranges[stage]), *is_end, most_microbatches(config, stage), name and (name, stage))
        if shape not in found:
            own = of_class(config, block)
            if name and _measured(own, stage) is None:
                return {}
            found[shape] = of(own, stage)
        needs[stage] = found[shape].or_more(needs.get(stage, found[shape]))
    return needs


def of_class(config: RunConfig, block: Block) -> RunConfig:
    """The configuration as if all blocks were made by the class of this one."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, custom_class=config.classes[block]))


def _measured(config: RunConfig, stage: int) -> Measured | None:
    return measured(config, Block(stage), layer_ranges(config)[stage])


def most_microbatches(config: RunConfig, stage: int) -> int:
    """The microbatches of a round at a stage, of variants at that through which most paths lead."""
    samples = max(config.round_samples_of(block) for block in config.blocks if block.stage == stage)
    return samples // config.data.microbatch_size


def computing_on(config: RunConfig, *, on_gpu: bool) -> RunConfig:
    """The configuration with what model.autocast `auto` means on a GPU, or on a CPU."""
    if config.model.autocast != "auto":
        return config
    return dataclasses.replace(config, model=dataclasses.replace(config.model, autocast="bf16" if on_gpu else "off"))


def _shapes(config: RunConfig, stage: int) -> tuple[dict[str, Size], dict[str, Size]]:
    """The shapes of a stage's parameters, and of those that are trained. They take a while to find out."""
    if config.model.custom_class:
        trained = {} if (found := _measured(config, stage)) is None else found.trained
        return trained, trained
    model = dataclasses.replace(config.model, autocast="off", gradient_checkpointing=False)
    # All variants of a stage have the same shapes.
    return _known_shapes(model, config.lora, dataclasses.replace(config.stages, variants=(), paths=()), stage)


@lru_cache
def _known_shapes(
    model: ModelConfig, lora: LoraConfig, stages: StagesConfig, stage: int
) -> tuple[dict[str, Size], dict[str, Size]]:
    config = RunConfig(model=model, lora=lora, stages=stages, data=DataConfig(sequence_length=1))
    return parameter_shapes(config, stage), trained_shapes(config, stage)


def num_parameters(config: RunConfig, stage: int) -> int:
    """Parameters of a stage that are trained: all of its own, or those of its adapters."""
    return sum(map(math.prod, _shapes(config, stage)[1].values()))


def num_own_parameters(config: RunConfig, stage: int) -> int:
    """Parameters of a stage without adapters."""
    return sum(map(math.prod, _shapes(config, stage)[0].values()))


def state_bytes(config: RunConfig, stage: int) -> dict[str, int]:
    """Bytes that a stage always holds while it trains, by what they are for. Microbatches in flight, the second bucket
    and their gradients are not included."""
    _, shapes = _shapes(config, stage)
    size, version = _FLOAT_BYTES * num_parameters(config, stage), version_bytes(config, shapes)
    held = {
        "parameters": size,
        "optimizer": optimizer_bytes(config, shapes),
        "version": version,
        "gradient_bucket": size,
        # In the synchronous setting the round's anchor is the present version itself.
        "anchors": version if config.rounds.synchronous else 2 * size,
    }
    if not config.rounds.synchronous and config.outer_step.momentum:
        held["outer_momentum"] = size
    if config.lora.is_on:
        held["frozen"] = sum(_frozen_bytes(config, *named) for named in _shapes(config, stage)[0].items())
    elif config.model.autocast not in ("off", config.model.versions):
        held["casts"] = _HALF_BYTES * sum(math.prod(shape) for shape in shapes.values() if len(shape) > 1)
    if config.model.custom_class and (found := _measured(config, stage)) is not None:
        held["frozen"] = found.frozen_bytes
    return held


def _frozen_bytes(config: RunConfig, name: str, shape: Size) -> int:
    """Bytes of a parameter of the model itself: in float32 those of a vector, in 4 bits those of a layer's matrix if
    lora.base says so, and in 16 bits those of another matrix."""
    if len(shape) == 1:
        return _FLOAT_BYTES * shape.numel()
    is_nf4 = config.lora.base == "nf4" and name.startswith("layers.")
    return nf4.num_bytes(shape.numel()) if is_nf4 else _HALF_BYTES * shape.numel()


def optimizer_bytes(config: RunConfig, shapes: Mapping[str, Size]) -> int:
    """Bytes of the state with which parameters of these shapes are stepped."""
    optimizer = gradient_optimizer(config, same_bits=False)
    return sum(optimizer.num_bytes(name, shape) for name, shape in shapes.items())


def version_bytes(config: RunConfig, shapes: Mapping[str, Size]) -> int:
    """Bytes of a version of weights of these shapes, and of one gradient by it: with model.versions `bf16` two for each
    number of a matrix."""
    matrix_bytes = _FLOAT_BYTES if config.model.versions == "fp32" else _HALF_BYTES
    return sum(math.prod(s) * (matrix_bytes if len(s) > 1 else _FLOAT_BYTES) for s in shapes.values())


def first_step_bytes(config: RunConfig, shapes: Mapping[str, Size]) -> int:
    """Bytes that the first step takes of the device beside weights of these shapes: the optimizer's state, a second sum
    of gradients, and another copy of the weights."""
    sums = _FLOAT_BYTES * sum(map(math.prod, shapes.values()))
    return optimizer_bytes(config, shapes) + sums + version_bytes(config, shapes)


def passing_bytes(config: RunConfig, stage: int) -> int:
    """Bytes that are held only for a moment: one microbatch's gradient of the weights, and with DiLoCo also a third
    version of the weights right after a round."""
    return (1 if config.rounds.synchronous else 2) * version_bytes(config, _shapes(config, stage)[1])


def graph_bytes(config: RunConfig, stage: int, *, fused: bool = False) -> int:
    """Bytes that autograd keeps of one microbatch's layers, including the stage's input. `fused` says whether the stage
    computes as on a GPU."""
    if config.model.custom_class:
        return 0 if (found := _measured(config, stage)) is None else found.graph_bytes
    model, num_layers = config.model, len(layer_ranges(config)[stage])
    # On a GPU the tables of rotary positions are as wide as a head, twice.
    tables = (1 + fused) * config.data.sequence_length * model.width_of_heads * model.is_rotary
    is_computed_again = model.gradient_checkpointing
    layer = _FLOAT_BYTES * config.data.tokens_per_microbatch * model.d_model
    return num_layers * (layer if is_computed_again else layer_graph_bytes(config, fused=fused)) + _FLOAT_BYTES * tables


def layer_graph_bytes(config: RunConfig, *, fused: bool = False) -> int:
    """Bytes that autograd keeps of one microbatch in one layer whose graph is kept."""
    model, tokens = config.model, config.data.tokens_per_microbatch
    query_width, kv_width = (heads * model.width_of_heads for heads in (model.num_heads, model.kv_heads))
    # Kept are the inputs of both norms, and of products: the outputs of both norms; queries, keys, values, and the
    # output of attention; the gate before its activation, the values that it gates, and their product (on a GPU the
    # activation too), or the values before and after GELU. There is one number for each head and each norm.
    wide = 2 * model.d_model
    products = 2 * model.d_model + 2 * (query_width + kv_width)
    products += (3 + fused if model.is_gated else 2) * model.feed_forward_width
    if config.lora.is_on:
        # The output of each adapter's first matrix.
        products += config.lora.rank * sum(map(len, config.lora.groups(model)))
    single = model.num_heads + 2 * (2 if model.norm == "layer" else 1)
    if model.qk_norm:
        wide += query_width + kv_width
        single += model.num_heads + model.kv_heads
    if model.autocast != "off" and not fused:
        # Each matrix has what it reads cast for itself.
        products += (2 + model.is_gated) * model.d_model
    product_bytes = _FLOAT_BYTES if model.autocast == "off" else _HALF_BYTES
    # Norms keep their weight and bias. If these are trained, they are counted with the parameters.
    vectors = (4 if model.norm == "layer" else 2) * model.d_model + 2 * model.width_of_heads * model.qk_norm
    vectors *= config.lora.is_on
    return tokens * (_FLOAT_BYTES * (wide + single) + product_bytes * products) + _FLOAT_BYTES * vectors


def wire_bytes(config: RunConfig, stage: int) -> dict[str, int]:
    """Bytes of one microbatch that came in over the wire, and that go out; gradients have as many, the other way."""
    specs, is_last = request_specs(config, stage), stage == config.stages.num_stages - 1
    hidden = 0 if is_last and stage == 0 else request_specs(config, max(1, stage))[HIDDEN].num_bytes
    return {"tokens": specs[TOKENS].num_bytes, "input": hidden if stage else 0, "output": 0 if is_last else hidden}


def in_flight_bytes(config: RunConfig, stage: int, *, is_kept: bool, fused: bool = False) -> int:
    """Bytes of one microbatch between its forward and its gradient, with or without its graph."""
    wire = wire_bytes(config, stage)
    if not is_kept:
        return sum(wire.values())
    return graph_bytes(config, stage, fused=fused) + wire["tokens"] + wire["output"]


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
    size, share = _FLOAT_BYTES * num_parameters(config, stage), 1 / num_members
    answered = result_codec(config.averaging).num_bytes(num_parameters(config, stage))
    # The contribution, the same contribution as one vector, and the result; in groups also the group's average, and the
    # last round's result, which is kept for members that it did not reach.
    whole = (5 if config.averaging.group_size else 3) * size
    # For the part that the member sums: the decoded parts of the others, the sum, and the sum encoded and decoded.
    own = (1 - share) * size + share * (2 * size + answered)
    # For the parts that others sum: the member's encoded contribution, which goes out, and the encoded sums, which come
    # back.
    return round(whole + own + exchanged_bytes(config, stage, num_members=num_members))


def residual_bytes(config: RunConfig, stage: int) -> int:
    """Bytes of what the codec dropped of contributions and sums, which are kept from round to round; as many are new
    until the next round commits. With two members a sum is half of the parameters."""
    codec = contribution_codec(config.averaging)
    keeps = codec.needs_feedback and config.averaging.feedback_decay > 0
    return keeps * 2 * 3 * _FLOAT_BYTES // 2 * num_parameters(config, stage)


def exchanged_bytes(config: RunConfig, stage: int, *, num_members: int) -> int:
    """Bytes that a member sends for a round's average; it receives as many."""
    codecs = contribution_codec(config.averaging), result_codec(config.averaging)
    encoded = sum(codec.num_bytes(num_parameters(config, stage)) for codec in codecs)
    return round((1 - 1 / num_members) * encoded)
