"""The cuda bench: how a side is driven, on the CPU, and what is said where there is no GPU."""

import pytest
import torch

from scripts.benches import cuda
from swarm.stage.staging import Staging


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(ValueError, match="needs a GPU"):
        cuda.run(cuda.Options())


def test_a_side_computes_all_its_microbatches() -> None:
    config = cuda.config_of(cuda.Options(d_model=64, layers=1, wire="int8"))
    side = cuda.Side(config, torch.device("cpu"), Staging())
    assert side.tokens_per_second(2) > 0
    bucket = side.backend.weights.buckets.open()
    assert (bucket.num_samples, bucket.num_tentative, side.backend.budget.num_kept) == (16, 0, 0)
