import gc
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from scripts.benches.shared.proc import held_bytes
from swarm.machine.memory import Recycler, in_file


def test_a_vector_is_made_of_one_that_is_gone() -> None:
    memory = Recycler()
    first = memory.vector(1000)
    address = first.data_ptr()
    del first
    assert memory.vector(1000).data_ptr() == address


def test_no_vector_has_the_memory_of_one_that_a_view_still_shows() -> None:
    memory = Recycler()
    vector = memory.vector(1000).fill_(1.0)
    view = vector.view(10, 100)[3:5].detach().requires_grad_()
    del vector
    assert memory.vector(1000).fill_(2.0).sum() == 2000.0
    exported = view.detach().numpy()
    del view
    assert memory.vector(1000).fill_(3.0).sum() == 3000.0
    assert (exported == 1.0).all()


def test_lengths_do_not_mix() -> None:
    memory = Recycler()
    short, long = memory.vector(10), memory.vector(20)
    addresses = {short.data_ptr(): 10, long.data_ptr(): 20}
    del short, long
    for length in (20, 10):
        again = memory.vector(length)
        assert again.shape == (length,)
        assert addresses[again.data_ptr()] == length


@pytest.mark.parametrize("length", [0, 1, 17, 100_000])
def test_a_vector_begins_with_a_cache_line(length: int) -> None:
    assert Recycler().vector(length).data_ptr() % 64 == 0


def test_copies_are_equal_and_share_no_memory() -> None:
    originals = {
        "weight": torch.randn(30, 20, requires_grad=True), "transposed": torch.randn(4, 6).T,
        "counter": torch.tensor(3), "half": torch.randn(5).bfloat16(),
    }  # fmt: skip
    copies = Recycler().copies(originals)
    assert list(copies) == list(originals)
    for name, original in originals.items():
        assert torch.equal(copies[name], original)
        assert copies[name].dtype == original.dtype
        assert not copies[name].requires_grad
        copies[name].zero_()
    assert originals["weight"].any()


def test_the_memory_outlives_the_recycler() -> None:
    vector = Recycler().vector(1000)
    vector.fill_(1.0)
    assert Recycler().vector(1000).fill_(2.0).data_ptr() != vector.data_ptr()
    assert vector.sum() == 1000.0


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
@pytest.mark.parametrize("user_decides", [True, False])
def test_memory_goes_back_only_where_the_user_has_it_so(user_decides: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    if user_decides:
        monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    memory = Recycler()
    vector = memory.vector(1 << 26).fill_(1.0)
    before = held_bytes("VmRSS")
    del vector
    assert (before - held_bytes("VmRSS") > 1 << 27) == user_decides
    del memory


def test_threads_never_get_the_same_vector() -> None:
    memory, wrong = Recycler(), []

    def work(number: int) -> None:
        for _ in range(300):
            vector = memory.vector(500).fill_(number)
            if not torch.equal(vector, torch.full((500,), float(number))):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("num_elements", [0, 1, 5000])
def test_an_array_holds_what_is_written_and_leaves_no_file(num_elements: int, tmp_path: Path) -> None:
    array = in_file(tmp_path, num_elements)
    array[:] = np.arange(num_elements)
    assert array.dtype == np.float32
    assert array.shape == (num_elements,)
    assert (array == np.arange(num_elements)).all()
    assert not list(tmp_path.iterdir()), "nothing would be left of it, were the process killed now"


def test_there_is_room_or_a_line_that_says_where_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=f"4 bytes cannot be had in {tmp_path}/none: No such file or directory"):
        in_file(tmp_path / "none", 1)
    with pytest.raises(OSError, match=f"4611686018427387904 bytes cannot be had in {tmp_path}: "):
        in_file(tmp_path, 1 << 60)


def test_vectors_are_made_there_and_again_in_the_same_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[int]()

    def allocate(num_elements: int) -> np.ndarray:
        asked.append(num_elements)
        return in_file(tmp_path, num_elements)

    memory = Recycler(allocate)
    copies = memory.copies({"weight": torch.ones(3, 4)})
    assert torch.equal(copies["weight"], torch.ones(3, 4))
    del copies
    gc.collect()
    assert memory.vector(12).shape == (12,)
    assert asked == [12]
    # A user who decides about freed memory still gets it from the disk.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    assert Recycler(partial(in_file, tmp_path)).vector(3).fill_(2.0).sum() == 6.0
