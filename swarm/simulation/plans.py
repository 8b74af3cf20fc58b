"""What each way to train sends, and when: the methods of Streaming DiLoCo's table, and ours.

Used by studies/bandwidth.py, which asks swarm/simulation/reductions.py what it takes. Pure. The sizes of ours are
those of the codecs that run (swarm/compression), between as many members as the published table has.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from swarm.averaging.shares import part_sizes
from swarm.compression.codec import contribution_codec, result_codec
from swarm.config import AveragingConfig
from swarm.simulation.reductions import FORWARD, Piece, Plan

NUM_MEMBERS = 2
"""Who reduce with each other. A ring of M sends 2 (M - 1) / M times what is reduced: of two, exactly once."""
BF16_BITS = 16
"""Bits of a parameter that is reduced as it is computed."""
FP4_BITS = 4
"""Bits of a parameter in Streaming DiLoCo's own format."""
FRAGMENT_LAYERS = 3
"""Layers that are reduced together; a fragment takes every n-th layer, n being the number of fragments."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained, on how fast a machine."""

    num_layers: int
    num_parameters: float
    """In equal layers."""
    step_seconds: float
    """One inner step with nothing to wait for."""
    steps_between: int = 100
    """Inner steps between two reductions of the same parameter (H)."""


def data_parallel(training: Training) -> Plan:
    """All gradients, every step, each layer's as soon as its backward is done."""
    return Plan(num_steps=1, delay_steps=0, pieces=tuple(_by_layer(training, 0, range(training.num_layers), BF16_BITS)))


def diloco(training: Training) -> Plan:
    """All outer gradients in the last step of a round, each layer's as soon as its backward is done."""
    last = training.steps_between - 1
    pieces = _by_layer(training, last, range(training.num_layers), BF16_BITS)
    return Plan(num_steps=training.steps_between, delay_steps=0, pieces=tuple(pieces))


def streaming(training: Training, *, delay_steps: int = 0, bits: int = BF16_BITS) -> Plan:
    """One fragment after the other, at equal distances."""
    pieces = [
        piece
        for step, layers in zip(_fragment_steps(training), _fragments(training), strict=True)
        for piece in _by_layer(training, step, layers, bits)
    ]
    return Plan(num_steps=training.steps_between, delay_steps=delay_steps, pieces=tuple(pieces))


def ours(training: Training, averaging: AveragingConfig, *, in_fragments: bool) -> Plan:
    """Ours: a round begins when an inner step has ended, and its result is needed `overlap_steps` steps later.

    Args:
        in_fragments: each round averages one fragment, as in `streaming`; else all parameters.
    """
    if in_fragments:
        steps, num_layers = _fragment_steps(training), FRAGMENT_LAYERS
    else:
        steps, num_layers = [training.steps_between - 1], training.num_layers
    gaps = [
        after - before for before, after in zip(steps, [*steps[1:], steps[0] + training.steps_between], strict=True)
    ]
    assert averaging.overlap_steps < min(gaps), "a round ends before the next one begins"
    num_bytes = sent_bytes(averaging, round(training.num_parameters * num_layers / training.num_layers))
    return Plan(
        num_steps=training.steps_between,
        delay_steps=averaging.overlap_steps,
        pieces=tuple(Piece(step=step, ready=1.0, due=0.0, num_bytes=num_bytes) for step in steps),
    )


def sent_bytes(averaging: AveragingConfig, num_elements: int) -> int:
    """What one of NUM_MEMBERS equal members sends to average a vector, without the frames around it."""
    codec, result = contribution_codec(averaging), result_codec(averaging)
    if codec.is_sparse and averaging.gather_members >= NUM_MEMBERS:
        return codec.num_bytes(num_elements) * (NUM_MEMBERS - 1)
    own, *others = part_sizes(num_elements, [0.0] * NUM_MEMBERS, tile=codec.tile)
    return sum(map(codec.num_bytes, others)) + result.num_bytes(own) * len(others)


def _by_layer(training: Training, step: int, layers: Sequence[int], bits: int) -> list[Piece]:
    num_layers = training.num_layers
    num_bytes = training.num_parameters / num_layers * bits / 8 * 2 * (NUM_MEMBERS - 1) / NUM_MEMBERS
    return [
        Piece(
            step=step,
            ready=min(1.0, FORWARD + (1 - FORWARD) * (num_layers - layer) / num_layers),
            due=FORWARD * layer / num_layers,
            num_bytes=num_bytes,
        )
        for layer in layers
    ]


def _fragments(training: Training) -> list[range]:
    num_fragments = training.num_layers // FRAGMENT_LAYERS
    return [range(first, training.num_layers, num_fragments) for first in range(num_fragments)]


def _fragment_steps(training: Training) -> list[int]:
    num_fragments = training.num_layers // FRAGMENT_LAYERS
    return [index * training.steps_between // num_fragments for index in range(num_fragments)]
