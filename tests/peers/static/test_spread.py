"""What one of several workers holds of the model."""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
import torch

from peers.static.options import StaticOptions
from peers.static.spread import Spread
from peers.static.workers import Shape
from swarm.config import LoraConfig, RunConfig
from swarm.interchange.weights import Index, Weights
from swarm.model import shards
from swarm.model.stages import build_stage, parameter_shapes
from tests.peers.static.pretended import CONFIG, CUTS, SOME_CUTS, Memory, pretended

ADAPTERS = dataclasses.replace(CONFIG, lora=LoraConfig(rank=4, targets=("all-linear",)))
PLACE = 1
"""The rank of the worker that is looked at."""


def options(shape: Shape) -> StaticOptions:
    return StaticOptions(preset="tiny", dp=shape.dp, tp=shape.tp, fsdp="zero3" if shape.dp > 1 else None)


def given_weights() -> tuple[Weights, list[set[str]]]:
    """Weights that a run begins with, and the names that are asked for at a time."""
    generator, asked = torch.Generator().manual_seed(1), list[set[str]]()
    tensors = {
        name: torch.randn(shape, generator=generator).to(torch.bfloat16)
        for name, shape in parameter_shapes(CONFIG, 0).items()
    }

    def read(names: set[str]) -> Iterable[tuple[str, torch.Tensor]]:
        asked.append(names)
        return [(name, tensors[name]) for name in names]

    return Weights(Index.of(tensors.items()), read, place=Path("given")), asked


def expected_part(name: str, whole: torch.Tensor, shape: Shape) -> torch.Tensor:
    dp, tp = divmod(PLACE, shape.tp)
    rows = shards.part_of(name, whole, tp, shape.tp).chunk(shape.dp) if shape.tp > 1 else whole.chunk(shape.dp)
    return rows[dp] if dp < len(rows) else whole[:0]


def num_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize(("config", "is_given"), [(CONFIG, False), (ADAPTERS, True)], ids=["drawn", "given"])
@SOME_CUTS
def test_a_worker_begins_with_its_part_and_never_holds_much_more(
    shape: Shape, config: RunConfig, is_given: bool
) -> None:
    given, asked = given_weights() if is_given else (None, [])
    weights = None if given is None else given.load(parameter_shapes(config, 0))
    asked.clear()
    whole = dict(build_stage(config, 0, device="cpu", weights=weights).named_parameters())
    with pretended(shape, PLACE) as workers, Memory() as memory:
        model = Spread(config, options(shape), workers, given)
        held = model.local_parameters
        for name, part in held.items():
            torch.testing.assert_close(part, expected_part(name, whole[name].detach(), shape), rtol=0, atol=0)
        frozen = num_bytes(whole) - num_bytes({name: whole[name] for name in held})
        own, largest = num_bytes(held) + frozen / 4, 4 * max(tensor.numel() for tensor in whole.values())
        # Numbers are drawn beside the tensor that they are for. Small vectors that tp does not cut are everywhere.
        assert memory.most < 1.1 * own + 3 * largest < 0.8 * num_bytes(whole)
    assert model.shapes == {name: whole[name].shape for name in held}
    assert all(len(names) == 1 for names in asked)


def test_the_columns_that_a_bottleneck_leaves_out_are_everywhere() -> None:
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, bottleneck_dim=16))
    with pretended(CUTS["fsdp"], PLACE) as workers:
        found = dict(Spread(config, options(CUTS["fsdp"]), workers, None).module.named_buffers())
    expected = dict(build_stage(config, 0, device="cpu").named_buffers())
    assert found.keys() == {f"stage.{name}" for name in expected} != set()
    for name, value in expected.items():
        torch.testing.assert_close(found[f"stage.{name}"], value, rtol=0, atol=0)
