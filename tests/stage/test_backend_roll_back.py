"""Gradients are taken out of a stage's sum again, with the weights with which they were computed."""

import pytest
import torch

from swarm.config import RunConfig
from swarm.stage.buckets import GradientBucket
from tests.stage.backends import (
    CONFIG,
    DILOCO,
    DROPOUT,
    accumulate_and_settle,
    backend_of,
    chain_of,
    hidden_of,
    inputs_of,
    run_microbatch,
    sums_of,
)
from tests.support.chain import assert_close


@pytest.mark.parametrize("config", [CONFIG, DROPOUT])
def test_rolling_back_brings_the_sum_back(config: RunConfig) -> None:
    chain = chain_of(config)
    run_microbatch(chain, 0)
    before = sums_of(chain)
    _, entries = run_microbatch(chain, 1)
    for backend, entry in zip(chain, entries, strict=True):
        backend.roll_back([entry])
    assert_close(sums_of(chain), before, 1e-6)
    for backend in chain:
        bucket = backend.weights.buckets.open()
        assert (bucket.num_samples, bucket.num_tentative) == (2, 1)


def test_a_bucket_that_loses_all_its_gradients_is_empty_to_the_last_bit() -> None:
    backend = backend_of(CONFIG, 2)
    results = [backend.forward_loss(i, 0, inputs_of(i), accumulate=True) for i in range(3)]
    entries = [entry for _, _, entry in results if entry is not None]
    backend.settle(entries[0])
    bucket = backend.weights.buckets.open()
    backend.roll_back(entries)
    assert (bucket.num_tentative, backend.weights.version.users, bucket.num_samples) == (0, 0, 0)
    assert not any(bool(value.any()) for value in bucket.sums.values())


@pytest.mark.parametrize("num_staying", [1, 2])
def test_where_little_stays_that_is_computed_again(num_staying: int) -> None:
    """If others replayed nearly all microbatches of a member, few of them stay, and only these are computed again."""
    chain = chain_of(DROPOUT)
    for index in range(num_staying):
        run_microbatch(chain, index)
    before = sums_of(chain)
    entries = [run_microbatch(chain, index)[1] for index in range(num_staying, 5)]
    for stage, backend in enumerate(chain):
        seen: list[int] = []
        bucket = backend.weights.buckets.open()

        def look(*_: object, bucket: GradientBucket = bucket, seen: list[int] = seen) -> None:
            seen.append(bucket.num_samples)

        with backend.module.register_forward_pre_hook(look):
            backend.roll_back([leaving[stage] for leaving in entries])
        assert seen == [2 * num_staying] * num_staying, "it never looks empty to another thread"
        assert (bucket.num_samples, bucket.num_tentative) == (2 * num_staying, num_staying)
        assert len(bucket.sources) == num_staying
    after = sums_of(chain)
    assert all(torch.equal(after[name], before[name]) for name in before), "as if the others had never come"


@pytest.mark.parametrize("fused", [False, True])
def test_rolling_back_after_a_step_uses_the_old_weights(fused: bool) -> None:
    backend = backend_of(DILOCO, 1, fused=fused)
    forward = backend.forward(7, 0, inputs_of(7))
    accumulate_and_settle(backend, 1)
    _, entry = backend.backward(forward, hidden_of(8), accumulate=True)
    assert entry is not None
    assert entry.source.version is not backend.weights.version
    first = [value.clone() for value in entry.bucket.sums.values()]
    forward = backend.forward(2, 0, inputs_of(2))
    backend.backward(forward, hidden_of(9), accumulate=True)
    second = [both - one for both, one in zip(entry.bucket.sums.values(), first, strict=True)]
    backend.roll_back([entry])
    for value, expected in zip(entry.bucket.sums.values(), second, strict=True):
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-6)
    assert entry.source.version.users == 0
