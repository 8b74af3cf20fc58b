import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from swarm.machine.memory import Recycler, in_file


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
