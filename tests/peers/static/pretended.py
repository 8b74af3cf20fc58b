"""One worker of several, of which the others are pretended, and the memory that it takes.

torch's fake group exchanges nothing: what the others would send is what this worker sends.
"""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from peers.static.workers import Shape, Workers
from swarm.config import DataConfig, ModelConfig, OptimizerConfig, RoundsConfig, RunConfig, StagesConfig

CONFIG = RunConfig(
    run="spread",
    model=ModelConfig(num_layers=8, d_model=64, num_heads=4, vocab_size=300),
    stages=StagesConfig(num_stages=1),
    data=DataConfig(sequence_length=16, microbatch_size=2),
    rounds=RoundsConfig(setting="synchronous", round_samples=4),
    optimizer=OptimizerConfig(name="adamw", schedule="constant", warmup_samples=0),
)
CUTS = {"fsdp": Shape(dp=4, tp=1, pp=1), "tp": Shape(dp=1, tp=4, pp=1), "both": Shape(dp=2, tp=2, pp=1)}
"""Ways in which four workers cut the model."""
SOME_CUTS = pytest.mark.parametrize(
    "shape",
    [pytest.param(shape, id=name, marks=[pytest.mark.slow] if name != "both" else []) for name, shape in CUTS.items()],
)
"""Cuts in both ways. One way at a time is slow, since it has nothing that both ways together do not have."""


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
        given = {storage.data_ptr() for storage in _storages((args, kwargs))}
        for storage in _storages(made):
            # Views have the memory of an argument.
            if storage.data_ptr() not in given:
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._free, storage.nbytes())
        return made

    def _free(self, num_bytes: int) -> None:
        self.now -= num_bytes


def _storages(values: object) -> list[torch.UntypedStorage]:
    """The memory of plain tensors. Others, such as DTensors, have none of their own."""
    tensors = [each for each in tree_leaves(values) if type(each) in (torch.Tensor, torch.nn.Parameter)]
    return [tensor.untyped_storage() for tensor in tensors if not tensor.is_meta]


@contextlib.contextmanager
def pretended(shape: Shape, rank: int) -> Iterator[Workers]:
    """One of four workers."""
    dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (shape.pp, shape.dp, shape.tp), mesh_dim_names=("pp", "dp", "tp"))
        yield Workers(shape=shape, device=torch.device("cpu"), mesh=mesh, is_first_here=False)
    finally:
        dist.destroy_process_group()
        # torch would look for this world's groups in the next one.
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
