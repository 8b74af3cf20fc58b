"""The study `utilisation`: how much of their time the peers of a pipeline compute over slow lines.

    scripts/simulate utilisation --json

It begins with SWARM's table on the square-cube law (arXiv 2301.11913): the wider a layer, the less its transfers weigh.
Then it computes, for the same layers and lines, the utilisation of this project's peers, which hand on directly, and of
peers that hand on by way of the trainer. Nothing is random. The figures are in docs/simulation.md.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from scripts.benches.simulate.study import StudyOptions
from swarm.compression.codec import simple_codec
from swarm.pipeline.window import MOST_IN_FLIGHT
from swarm.rpc.wire import DTYPES
from swarm.stage.slots import LARGEST_NUM_SLOTS

ROUND_TRIPS_MS = (0, 10, 50, 100, 200)
"""The round-trip times of the rows of SWARM's table."""
GPU_UTILISATION: Mapping[str, tuple[float, ...]] = {
    "base": (18.0, 11.8, 4.88, 2.78, 1.53),
    "xxlarge": (32.1, 28.9, 20.1, 14.9, 10.1),
    "GPT-3": (82.1, 79.3, 70.3, 60.2, 48.5),
    "Ours": (89.5, 87.2, 79.5, 71.5, 59.2),
}
"""The table's columns as printed: per cent of a V100's time, by kind of layers. "Ours" is the paper's own model."""
LINK_MEGABITS_PER_SECOND = 500.0
"""The rate of the lines in that table."""
BYTES_PER_MEGABIT = 125_000
ELEMENT_BYTES = {"base": 2, "xxlarge": 2, "GPT-3": 2, "Ours": 1}
"""Bytes of an activation in the columns: 16 bits, except for the paper's own model, which it ran with 8."""
KNOWN_WIDTHS = {"base": 768, "GPT-3": 12288}
"""The widths of those layers whose models are known."""
WIRE_DTYPES = ("fp32", "bf16", "int8")


@dataclass(frozen=True, kw_only=True)
class Options(StudyOptions):
    """Options of the study `utilisation`."""

    num_stages: int = 4
    """The number of stages in our rows."""
    peers_per_stage: int = 1
    """The number of peers that share one trainer's line, in our rows."""
    peer_megabits_per_second: float = LINK_MEGABITS_PER_SECOND
    """The rate of a peer's line, either way, in our rows."""
    trainer_megabits_per_second: float = LINK_MEGABITS_PER_SECOND
    """The rate of the trainer's line, either way, in our rows."""

    def __post_init__(self) -> None:
        for name, least in (("num_stages", 2), ("peers_per_stage", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        for name in ("peer_megabits_per_second", "trainer_megabits_per_second"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class Layers:
    """What follows about the layers of a column of the paper's table."""

    compute_seconds: float
    """The time of a microbatch's forward and backward."""
    transfer_seconds: float
    """The time for its activations to the next stage and their gradient back, over the table's line."""

    @property
    def tensor_bytes(self) -> float:
        """The bytes of one of the two tensors."""
        return self.transfer_seconds / 2 * LINK_MEGABITS_PER_SECOND * BYTES_PER_MEGABIT


def run(options: Options) -> dict[str, Any]:
    """The study's figures: per cent of the time, by layers and round trip in milliseconds."""
    layers = {name: read_off(row) for name, row in GPU_UTILISATION.items()}
    paper = {
        name: {
            f"{milliseconds} ms": {"ours": ours, "paper": printed, "distance_points": ours - printed}
            for milliseconds, printed, ours in zip(ROUND_TRIPS_MS, row, one_after_the_other(layers[name]), strict=True)
        }
        for name, row in GPU_UTILISATION.items()
    }
    predicted = [cell["distance_points"] for row in paper.values() for cell in list(row.values())[1:-1]]
    return {
        "num_predicted_cells": len(predicted),
        "largest_distance_points": max(predicted, key=abs),
        "paper": paper,
        "layers": {name: asdict(column) for name, column in layers.items()},
        "square_cube": _square_cube(layers),
        "ours": {
            name: {
                f"{milliseconds} ms": {
                    dtype: _ours(column, _num_elements(name, column), dtype, milliseconds / 1000, options)
                    for dtype in WIRE_DTYPES
                }
                for milliseconds in ROUND_TRIPS_MS
            }
            for name, column in layers.items()
        },
    }


def read_off(row: tuple[float, ...]) -> Layers:
    """A column's layers, computed from its first and its last cell alone.

    Without overlap a machine computes for C of every C + T + R seconds. T seconds are transfers, and R is a round trip:
    half of it on the way to the next stage, half on the way back.
    """
    none, longest = 100 / row[0], 100 / row[-1]
    compute_seconds = (ROUND_TRIPS_MS[-1] - ROUND_TRIPS_MS[0]) / 1000 / (longest - none)
    return Layers(compute_seconds=compute_seconds, transfer_seconds=compute_seconds * (none - 1))


def one_after_the_other(layers: Layers) -> list[float]:
    """The per cent of the time for which a machine computes without overlap, by round trip."""
    busy, moving = layers.compute_seconds, layers.transfer_seconds
    return [100 * busy / (busy + moving + milliseconds / 1000) for milliseconds in ROUND_TRIPS_MS]


def _square_cube(layers: dict[str, Layers]) -> dict[str, dict[str, float]]:
    """The width that follows from each column: compute grows with the width's square, and transfers with the width."""
    ratios = {name: column.compute_seconds / column.transfer_seconds for name, column in layers.items()}
    reference, width = "base", KNOWN_WIDTHS["base"]
    return {
        name: {
            "compute_over_transfer": ratio,
            # If a stage has several layers in a row, this is the sum of their widths.
            "implied_width": width * ratio / ratios[reference] * ELEMENT_BYTES[name] / ELEMENT_BYTES[reference],
        }
        | ({"width": KNOWN_WIDTHS[name]} if name in KNOWN_WIDTHS else {})
        for name, ratio in ratios.items()
    }


def _num_elements(name: str, layers: Layers) -> int:
    return round(layers.tensor_bytes / ELEMENT_BYTES[name])


def wire_bytes(dtype: str, num_elements: int) -> int:
    """Size of a tensor on the wire; `int8` is the blockwise codec of swarm/compression."""
    return DTYPES[dtype].itemsize * num_elements if dtype in DTYPES else simple_codec(dtype).num_bytes(num_elements)


def _ours(layers: Layers, num_elements: int, dtype: str, round_trip_seconds: float, options: Options) -> dict[str, Any]:
    pipeline = Pipeline(
        num_stages=options.num_stages,
        peers_per_stage=options.peers_per_stage,
        compute_seconds=layers.compute_seconds,
        tensor_bytes=wire_bytes(dtype, num_elements),
        round_trip_seconds=round_trip_seconds,
        peer_bytes_per_second=options.peer_megabits_per_second * BYTES_PER_MEGABIT,
        trainer_bytes_per_second=options.trainer_megabits_per_second * BYTES_PER_MEGABIT,
    )
    direct, by_trainer = pipeline.direct(), pipeline.by_way_of_the_trainer()
    return {
        "direct": 100 * direct.utilisation,
        "trainer": 100 * by_trainer.utilisation,
        "in_flight": direct.num_in_flight,
    }


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The utilisation of a full pipeline."""

    utilisation: float
    """The share of its time for which a peer computes."""
    num_in_flight: int
    """How many microbatches have to be in flight for that."""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Equal stages, each of equal peers, fed by one trainer.

    A machine computes while its lines carry other microbatches, and a line carries one tensor after the other. So if
    enough microbatches are in flight, the machine or line that each microbatch occupies longest sets the pace. Token
    ids and losses are small, and are not counted.
    """

    num_stages: int
    """The number of stages, at least 2."""
    peers_per_stage: int
    compute_seconds: float
    """The time of one microbatch's forward and backward at one peer."""
    tensor_bytes: float
    """The bytes of a microbatch's activations between two stages; its gradient has as many."""
    round_trip_seconds: float
    """The round-trip time between any two machines."""
    peer_bytes_per_second: float
    """The rate of a peer's line, either way."""
    trainer_bytes_per_second: float
    """The rate of the trainer's line, either way."""

    def direct(self) -> Outcome:
        """The outcome if tensors go from peer to peer, as here; slots and window bound the microbatches in flight."""
        # An inner peer sends an activation to one side and a gradient to the other, and receives as much.
        line_seconds = min(2, self._num_boundaries) * self._peer_seconds
        # At each boundary both tensors pass two lines. Each stage adds a round trip, from the trainer along the chain.
        alone_seconds = 4 * self._num_boundaries * self._peer_seconds + self.num_stages * self.round_trip_seconds
        most_in_flight = min(MOST_IN_FLIGHT, self.peers_per_stage * LARGEST_NUM_SLOTS)
        return self._outcome(self._busiest(line_seconds), alone_seconds, most_in_flight)

    def by_way_of_the_trainer(self) -> Outcome:
        """The outcome if tensors go back to the trainer and from there to the next peer, as in SWARM and Petals.

        The stage's input is sent once more for the backward, because peers there do not keep it. Nothing bounds the
        microbatches in flight.
        """
        # An inner peer receives its input twice, and a gradient.
        line_seconds = min(3, 1 + self._num_boundaries) * self._peer_seconds
        # The trainer sends three tensors for each boundary, and receives two.
        trainer_seconds = self.tensor_bytes / self.trainer_bytes_per_second
        tensors_seconds = 5 * self._num_boundaries * (self._peer_seconds + trainer_seconds)
        alone_seconds = tensors_seconds + 2 * self.num_stages * self.round_trip_seconds
        busiest_seconds = max(self._busiest(line_seconds), 3 * self._num_boundaries * trainer_seconds)
        return self._outcome(busiest_seconds, alone_seconds)

    @property
    def _num_boundaries(self) -> int:
        return self.num_stages - 1

    @property
    def _peer_seconds(self) -> float:
        """The time in which a peer's line carries one tensor."""
        return self.tensor_bytes / self.peer_bytes_per_second

    def _busiest(self, line_seconds: float) -> float:
        """The seconds for each microbatch at a stage's processors, or on its lines if longer; its peers take turns."""
        return max(self.compute_seconds, line_seconds) / self.peers_per_stage

    def _outcome(self, busiest_seconds: float, sent_seconds: float, most_in_flight: float = math.inf) -> Outcome:
        alone_seconds = self.num_stages * self.compute_seconds + sent_seconds
        num_in_flight = int(min(most_in_flight, math.ceil(alone_seconds / busiest_seconds)))
        seconds = max(busiest_seconds, alone_seconds / num_in_flight)
        return Outcome(utilisation=self.compute_seconds / self.peers_per_stage / seconds, num_in_flight=num_in_flight)
