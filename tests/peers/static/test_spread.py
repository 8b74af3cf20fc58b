"""What one of several workers holds of the model. The others are pretended: torch's fake group exchanges nothing."""

import contextlib
import dataclasses
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from peers.static.options import StaticOptions
from peers.static.spread import Spread
from peers.static.workers import Shape, Workers
from swarm.config import DataConfig, LoraConfig, ModelConfig, OptimizerConfig, RoundsConfig, RunConfig, StagesConfig
from swarm.interchange.weights import Index, Weights
from swarm.model import shards
from swarm.model.stages import build_stage, parameter_shapes

CONFIG = RunConfig(
    run="spread",
    model=ModelConfig(num_layers=8, d_model=64, num_heads=4, vocab_size=300),
    stages=StagesConfig(num_stages=1),
    data=DataConfig(sequence_length=16, microbatch_size=2),
    rounds=RoundsConfig(setting="synchronous", round_samples=4),
    optimizer=OptimizerConfig(name="adamw", schedule="constant", warmup_samples=0),
)
ADAPTERS = dataclasses.replace(CONFIG, lora=LoraConfig(rank=4, targets=("all-linear",)))
DP, TP, BOTH = Shape(dp=4, tp=1, pp=1), Shape(dp=1, tp=4, pp=1), Shape(dp=2, tp=2, pp=1)
PLACE = 1
"""The rank of the worker that is looked at."""


class Memory(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not annotate it
    """Counts the bytes of the tensors that are made inside its block.

    Attributes:
        most: the most bytes that there were at a time.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(made):
            # Views have the memory of an argument.
            if storage._cdata not in given:
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._free, storage.nbytes())
        return made

    def _free(self, num_bytes: int) -> None:
        self.now -= num_bytes


def _storages(values: object) -> list[torch.UntypedStorage]:
    """The memory of plain tensors. A DTensor has none of its own."""
    tensors = [each for each in tree_leaves(values) if isinstance(each, torch.Tensor) and not isinstance(each, DTensor)]
    return [tensor.untyped_storage() for tensor in tensors if not tensor.is_meta]


@contextlib.contextmanager
def pretended(shape: Shape) -> Iterator[Workers]:
    """One worker of such a mesh."""
    dist.init_process_group("fake", rank=PLACE, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (shape.pp, shape.dp, shape.tp), mesh_dim_names=("pp", "dp", "tp"))
        yield Workers(shape=shape, device=torch.device("cpu"), mesh=mesh, is_first_here=False)
    finally:
        dist.destroy_process_group()


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


@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize("config", [CONFIG, ADAPTERS], ids=["whole", "adapters"])
@pytest.mark.parametrize("shape", [DP, TP, BOTH], ids=["fsdp", "tp", "both"])
def test_a_worker_begins_with_its_part_and_never_holds_much_more(
    shape: Shape, config: RunConfig, is_given: bool
) -> None:
    given, asked = given_weights() if is_given else (None, [])
    weights = None if given is None else given.load(parameter_shapes(config, 0))
    asked.clear()
    whole = dict(build_stage(config, 0, device="cpu", weights=weights).named_parameters())
    with pretended(shape) as workers, Memory() as memory:
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
    with pretended(DP) as workers:
        found = dict(Spread(config, options(DP), workers, None).module.named_buffers())
    expected = dict(build_stage(config, 0, device="cpu").named_buffers())
    assert found.keys() == {f"stage.{name}" for name in expected} != set()
    for name, value in expected.items():
        torch.testing.assert_close(found[f"stage.{name}"], value, rtol=0, atol=0)
