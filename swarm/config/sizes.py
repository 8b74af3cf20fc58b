"""Sizes that fit a run: those of `[data]` and `[rounds]` that were left out, chosen by its model, stages and text.

All machines choose alike, because nothing here is measured. A run whose text is small gets small batches, so that it
takes more than a few steps in an epoch, and a large model gets small microbatches.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarm.config.checks import require
from swarm.config.rounds import RoundsConfig

if TYPE_CHECKING:
    from swarm.config.run import RunConfig

_SIZES = (
    ("data", "sequence_length"),
    ("data", "microbatch_size"),
    ("rounds", "round_samples"),
    ("rounds", "inner_batch_samples"),
)
LONGEST_SAMPLE, SHORTEST_SAMPLE = 1024, 64
"""Tokens of a sample: the most, even if the model takes longer sequences, and the fewest."""
FEWEST_SAMPLES = 32
"""Samples are shorter if a text would have fewer than this."""
STEPS_PER_EPOCH = 16
"""A step is of fewer samples if an epoch would have fewer steps than this."""
LARGEST_BATCH, LARGEST_ROUND_BATCH, SMALLEST_BATCH = 16, 32, 4
"""Samples of an inner step, and of a synchronous round, which is one step: the most of each, and the fewest of both."""
LONGEST_ROUND, FEWEST_INNER_STEPS, ROUNDS_PER_EPOCH = 256, 4, 4
"""DiLoCo: samples of a round, at most, and its inner steps, at least, as far as an epoch has some rounds."""
LARGEST_MICROBATCH, MICROBATCH_TOKENS = 8, 4096
"""Samples and tokens of a microbatch, at most."""
MICROBATCH_BYTES = 2 << 30
"""What a stage keeps of a microbatch for its backward, at most, in float32: half of it with products of 16 bits."""


@dataclass(frozen=True, kw_only=True)
class TextSize:
    """The text of an epoch. `longest` is how many tokens the longest document needs; 0 for texts, which may be cut
    anywhere."""

    samples: int
    sample_tokens: int
    longest: int = 0


PLENTY = TextSize(samples=1 << 40, sample_tokens=1)


def sizes_of(config: "RunConfig") -> tuple[tuple[str, str], ...]:
    """Section and field of each size that a run has. A false value leaves it out."""
    return (*_SIZES, ("model", "bottleneck_layers")) if config.model.learns_bottlenecks else _SIZES


def sized(config: "RunConfig", text: TextSize) -> "RunConfig":
    """The configuration with all sizes. Those that are given stay as they are, and the others fit them. Raises
    ValueError if there is only one stage, or one without layers, and it is not said where bottlenecks are."""
    model, data = config.model, config.data
    length = data.sequence_length or _sample_tokens(config, text)
    num_samples = max(1, text.samples * text.sample_tokens // length)
    rounds = _batches(config, num_samples)
    batch = rounds.round_samples if rounds.synchronous else rounds.inner_batch_samples
    fitting = min(
        LARGEST_MICROBATCH,
        num_samples,
        min(MICROBATCH_TOKENS, MICROBATCH_BYTES // _token_bytes(config)) // length,
        # While the last stage computes one microbatch of a step, the others have another one.
        batch // (2 * config.stages.num_stages),
    )
    common = math.gcd(batch, rounds.round_samples)
    size = data.microbatch_size or math.gcd(_power(fitting), common)
    if not data.microbatch_size and _token_bytes(config) * length > MICROBATCH_BYTES:
        model = dataclasses.replace(model, gradient_checkpointing=True)
    if not rounds.round_samples:
        num_steps = max(FEWEST_INNER_STEPS, min(LONGEST_ROUND, num_samples // ROUNDS_PER_EPOCH) // batch)
        rounds = dataclasses.replace(rounds, round_samples=batch * _power(num_steps))
    if model.learns_bottlenecks and not model.bottleneck_layers:
        require(
            len(config.stage_ends) > 0,
            f"model.bottleneck = {model.bottleneck!r} has bottlenecks where stages end, and there is one stage: give "
            "model.bottleneck_layers",
        )
        model = dataclasses.replace(model, bottleneck_layers=config.stage_ends)
    data = dataclasses.replace(data, sequence_length=length, microbatch_size=size)
    return dataclasses.replace(config, model=model, data=data, rounds=rounds)


def _batches(config: "RunConfig", num_samples: int) -> RoundsConfig:
    """The samples of each optimizer step. The round of DiLoCo may still be open."""
    rounds, size = config.rounds, max(1, config.data.microbatch_size)
    most = LARGEST_ROUND_BATCH if rounds.synchronous else min(LARGEST_BATCH, rounds.round_samples or LARGEST_BATCH)
    batch = size * _power(min(most, max(SMALLEST_BATCH, num_samples // STEPS_PER_EPOCH)) // size)
    if rounds.synchronous:
        inner = rounds.inner_batch_samples or max(LARGEST_BATCH, size)
        return dataclasses.replace(rounds, round_samples=rounds.round_samples or batch, inner_batch_samples=inner)
    return dataclasses.replace(rounds, inner_batch_samples=rounds.inner_batch_samples or batch)


def _sample_tokens(config: "RunConfig", text: TextSize) -> int:
    length = min(LONGEST_SAMPLE, config.model.max_positions or LONGEST_SAMPLE)
    if text.longest and not config.data.is_packed:
        return min(length, text.longest)
    num_tokens = text.samples * text.sample_tokens
    while length >= 2 * max(SHORTEST_SAMPLE, text.longest) and num_tokens < FEWEST_SAMPLES * length:
        length //= 2
    return length


def _token_bytes(config: "RunConfig") -> int:
    """About what a stage keeps of each token for its backward (peers/shared/needs.py has more exact figures)."""
    model, stages = config.model, config.stages
    heads = (model.num_heads + model.kv_heads) * model.width_of_heads
    layer = 4 * model.d_model + 2 * heads + 3 * model.feed_forward_width
    num_layers = max(stages.layers_per_stage, default=-(-model.num_layers // stages.num_stages))
    return 4 * (num_layers * model.d_model + layer if model.gradient_checkpointing else num_layers * layer)


def _power(number: int) -> int:
    """The largest power of two up to a number, and 1 below that."""
    return 1 << (max(1, number).bit_length() - 1)
