"""The study `bandwidth`: how fast lines must be for machines to compute for most of the time.

    scripts/simulate bandwidth --json

It computes rounds between two members, with the exact sizes of the codecs (swarm/compression), for the models and step
times of Streaming DiLoCo's table 4 (arXiv 2501.18512). Nothing is random. The figures are in docs/simulation.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from scripts.benches.simulate.study import StudyOptions
from swarm.averaging.agreement.shares import part_sizes
from swarm.compression.codec import contribution_codec, result_codec
from swarm.config import AveragingConfig, load_preset

NUM_MEMBERS = 2
FRAGMENT_LAYERS = 3
"""How many layers a fragment has, in rows where a round averages a fragment."""
FRAGMENT_OVERLAP_STEPS = 1
"""`averaging.overlap_steps` of the rows with fragments."""
UTILISATIONS = (0.5, 0.8, 0.9, 0.95, 0.99)
"""The shares of the time for which a machine is to compute."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """The size of a model, and how fast it is trained."""

    num_layers: int
    num_parameters: float
    """The number of parameters, in equal layers."""
    step_seconds: float
    """The time of one inner step without any waiting."""


TRAININGS: Mapping[str, Training] = {
    "1B": Training(num_layers=24, num_parameters=1e9, step_seconds=0.1),
    "10B": Training(num_layers=48, num_parameters=1e10, step_seconds=0.8),
    "100B": Training(num_layers=108, num_parameters=1e11, step_seconds=4.9),
}


@dataclass(frozen=True, kw_only=True)
class Options(StudyOptions):
    """Options of the study `bandwidth`."""

    round_steps: int = 100
    """Inner steps between two averagings of the same parameter."""
    overlap_steps: int = 5
    """`averaging.overlap_steps` of the rows that average the whole model while they train."""

    def __post_init__(self) -> None:
        most_fragments = max(training.num_layers for training in TRAININGS.values()) // FRAGMENT_LAYERS
        least = most_fragments * (FRAGMENT_OVERLAP_STEPS + 1)
        if self.round_steps < least:
            raise ValueError(
                f"round_steps must be at least {least}, for {most_fragments} fragments in turn, not {self.round_steps}"
            )
        if not 0 <= self.overlap_steps < self.round_steps:
            raise ValueError(f"overlap_steps must be at least 0 and below round_steps, not {self.overlap_steps}")


def run(options: Options) -> dict[str, Any]:
    """The gigabits per second that each utilisation needs, by model and way to average."""
    return {
        "ours": {
            model: {
                row: {f"{wanted:.0%}": gigabits for wanted, gigabits in zip(UTILISATIONS, needed, strict=True)}
                for row, needed in _rows(training, options)
            }
            for model, training in TRAININGS.items()
        }
    }


def _rows(training: Training, options: Options) -> list[tuple[str, list[float]]]:
    rows = []
    for name, averaging in our_codecs().items():
        for label, overlap_steps, num_fragments in (
            ("waiting", 0, 1),
            (f"overlap {options.overlap_steps}", options.overlap_steps, 1),
            ("overlap 1, fragments", FRAGMENT_OVERLAP_STEPS, training.num_layers // FRAGMENT_LAYERS),
        ):
            needed = [
                needed_gigabits_per_second(
                    training,
                    replace(averaging, overlap_steps=overlap_steps),
                    round_steps=options.round_steps,
                    num_fragments=num_fragments,
                    wanted=wanted,
                )
                for wanted in UTILISATIONS
            ]
            rows.append((f"{name}, {label}", needed))
    return rows


def our_codecs() -> dict[str, AveragingConfig]:
    """The codecs of the rows; the sparse ones are those of the presets."""
    return {
        "fp16": AveragingConfig(codec="fp16"),
        "int8": AveragingConfig(codec="int8"),
        "int4": AveragingConfig(codec="int4"),
        "topk (sparseloco)": load_preset("sparseloco").averaging,
        "dct-topk (targon)": load_preset("targon").averaging,
    }


def needed_gigabits_per_second(
    training: Training, averaging: AveragingConfig, *, round_steps: int, num_fragments: int, wanted: float
) -> float:
    """The bandwidth with which a machine computes for the wanted share of its time.

    A round begins when an inner step has ended, and `averaging.overlap_steps` more steps are taken before the machine
    waits for the round's result. So a round may take as long as these steps, and as long as the machine may wait.

    Args:
        num_fragments: into how many equal parts, one for each round, the model is divided; 1 if a round averages all.
    """
    elements = training.num_parameters * (FRAGMENT_LAYERS / training.num_layers if num_fragments > 1 else 1)
    computing_seconds = round_steps * training.step_seconds / num_fragments
    waiting_seconds = computing_seconds * (1 / wanted - 1)
    round_seconds = averaging.overlap_steps * training.step_seconds + waiting_seconds
    return 8e-9 * sent_bytes(averaging, round(elements)) / round_seconds


def sent_bytes(averaging: AveragingConfig, num_elements: int) -> int:
    """The bytes that one of NUM_MEMBERS equal members sends to average a vector, without protocol overhead."""
    codec, result = contribution_codec(averaging), result_codec(averaging)
    if codec.is_sparse and averaging.gather_members >= NUM_MEMBERS:
        return codec.num_bytes(num_elements) * (NUM_MEMBERS - 1)
    own, *others = part_sizes(num_elements, [0.0] * NUM_MEMBERS, tile=codec.tile)
    return sum(map(codec.num_bytes, others)) + result.num_bytes(own) * len(others)
