"""The study `utilisation`: how much of their time the peers of a pipeline compute over slow lines.

First SWARM's table on the square-cube law (arXiv 2301.11913): the wider a layer, the less its transfers weigh. Then
ours on the same layers and lines, with direct hand-off and with hand-off by way of the trainer. Run by
scripts/simulate; docs/simulation.md tells the figures. Nothing is drawn by chance.
"""

from dataclasses import asdict, dataclass
from typing import Any

from swarm.compression.codec import simple_codec
from swarm.rpc.wire import DTYPES
from swarm.simulation import published
from swarm.simulation.hand_off import Pipeline, Way, play
from swarm.simulation.study import StudyOptions

BYTES_PER_MEGABIT = 125_000
ELEMENT_BYTES = {"base": 2, "xxlarge": 2, "GPT-3": 2, "Ours": 1}
"""Bytes of an activation behind the columns: 16 bits, but for the paper's own model, which it ran with 8."""
KNOWN_WIDTHS = {"base": 768, "GPT-3": 12288}
"""Of the layers that are known by name."""
WIRE_DTYPES = ("fp32", "bf16", "int8")


@dataclass(frozen=True, kw_only=True)
class Options(StudyOptions):
    """Options of the study `utilisation`."""

    num_stages: int = 4
    """Of our rows."""
    peers_per_stage: int = 1
    """Of our rows: peers that share one trainer's line."""
    peer_megabits_per_second: float = published.LINK_MEGABITS_PER_SECOND
    """Of our rows: a peer's line, either way."""
    trainer_megabits_per_second: float = published.LINK_MEGABITS_PER_SECOND
    """Of our rows: the trainer's line, either way."""

    def __post_init__(self) -> None:
        for name, least in (("num_stages", 2), ("peers_per_stage", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        for name in ("peer_megabits_per_second", "trainer_megabits_per_second"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class Layers:
    """What a column of the paper's table says of its layers."""

    compute_seconds: float
    """Forward and backward of a microbatch."""
    transfer_seconds: float
    """Its activations to the next stage and their gradient back, over the table's line."""

    @property
    def tensor_bytes(self) -> float:
        """Of one of the two tensors."""
        return self.transfer_seconds / 2 * published.LINK_MEGABITS_PER_SECOND * BYTES_PER_MEGABIT


def run(options: Options) -> dict[str, Any]:
    """Per cent of the time, by layers and round trip in milliseconds."""
    layers = {name: read_off(row) for name, row in published.GPU_UTILISATION.items()}
    paper = {
        name: {
            f"{milliseconds} ms": {"ours": ours, "paper": printed, "distance_points": ours - printed}
            for milliseconds, printed, ours in zip(
                published.ROUND_TRIPS_MS, row, _one_after_the_other(layers[name]), strict=True
            )
        }
        for name, row in published.GPU_UTILISATION.items()
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
                for milliseconds in published.ROUND_TRIPS_MS
            }
            for name, column in layers.items()
        },
    }


def read_off(row: tuple[float, ...]) -> Layers:
    """A column's layers, from its first and its last cell alone.

    Without overlap a machine computes for C of every C + T + R seconds, of which T go to transfers and R are a round
    trip: half of it on the way to the next stage, half on the way back.
    """
    none, longest = 100 / row[0], 100 / row[-1]
    compute_seconds = (published.ROUND_TRIPS_MS[-1] - published.ROUND_TRIPS_MS[0]) / 1000 / (longest - none)
    return Layers(compute_seconds=compute_seconds, transfer_seconds=compute_seconds * (none - 1))


def _one_after_the_other(layers: Layers) -> list[float]:
    busy, moving = layers.compute_seconds, layers.transfer_seconds
    return [100 * busy / (busy + moving + milliseconds / 1000) for milliseconds in published.ROUND_TRIPS_MS]


def _square_cube(layers: dict[str, Layers]) -> dict[str, dict[str, float]]:
    """Compute grows with a width's square and transfers with the width, so their ratio, too, tells the width."""
    ratios = {name: column.compute_seconds / column.transfer_seconds for name, column in layers.items()}
    reference, width = "base", KNOWN_WIDTHS["base"]
    return {
        name: {
            "compute_over_transfer": ratio,
            # Of layers in a row at one stage: the sum of their widths.
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
    outcomes = {way.value: play(pipeline, way) for way in Way}
    return {name: 100 * outcome.utilisation for name, outcome in outcomes.items()} | {
        "in_flight": outcomes[Way.DIRECT.value].num_in_flight
    }
