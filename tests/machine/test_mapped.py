"""Arrays in files without names."""

import gc
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from swarm.machine import mapped
from swarm.machine.memory import Recycler


@pytest.mark.parametrize("num_elements", [0, 1, 5000])
def test_an_array_holds_what_is_written_and_leaves_no_file(num_elements: int, tmp_path: Path) -> None:
    array = mapped.floats(tmp_path, num_elements)
    array[:] = np.arange(num_elements)
    assert array.dtype == np.float32
    assert array.shape == (num_elements,)
    assert (array == np.arange(num_elements)).all()
    assert not list(tmp_path.iterdir()), "nothing would be left of it, were the process killed now"


def test_there_is_room_or_a_line_that_says_where_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=f"4 bytes cannot be had in {tmp_path}/none: No such file or directory"):
        mapped.floats(tmp_path / "none", 1)
    with pytest.raises(OSError, match=f"4611686018427387904 bytes cannot be had in {tmp_path}: "):
        mapped.floats(tmp_path, 1 << 60)


def test_vectors_are_made_there_and_again_in_the_same_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()

    def allocate(num_elements: int) -> np.ndarray:
        asked.append(num_elements)
        return mapped.floats(tmp_path, num_elements)

    memory = Recycler(allocate)
    copies = memory.copies({"weight": torch.ones(3, 4)})
    assert torch.equal(copies["weight"], torch.ones(3, 4))
    del copies
    gc.collect()
    assert memory.vector(12).shape == (12,)
    assert asked == [12]
    # A user who decides about freed memory still gets it from the disk.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    assert Recycler(partial(mapped.floats, tmp_path)).vector(3).fill_(2.0).sum() == 6.0
