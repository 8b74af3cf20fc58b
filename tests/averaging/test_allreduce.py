import asyncio
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.averaging.allreduce import (
    Average,
    MemberFailed,
    ReducedPart,
    Reduction,
    Weight,
    all_reduce,
    flatten,
    split,
    unflatten,
)
from swarm.compression.codec import Buffer, get_codec
from swarm.errors import PeerUnavailable


@dataclass
class Hall:
    """All members' reductions in one process."""

    reductions: dict[str, Reduction]
    silent: set[str] = field(default_factory=set)

    async def exchange(self, sender: str, owner_id: str, part: Buffer) -> ReducedPart:
        if owner_id in self.silent:
            raise PeerUnavailable("hung up")
        reduction = self.reductions[owner_id]
        if sender in reduction.missing:
            await reduction.add(sender, bytes(part))
        return await reduction.result()


@dataclass
class Door:
    """One member's way into the hall."""

    hall: Hall
    own_id: str

    async def exchange(self, owner_id: str, part: Buffer, reply_bytes: int) -> ReducedPart:
        return await self.hall.exchange(self.own_id, owner_id, part)


async def average(
    vectors: list[torch.Tensor],
    samples: list[int],
    codec: str = "fp32",
    *,
    silent: int | None = None,
) -> list[Average | MemberFailed]:
    weights = [Weight(peer_id=str(i), num_samples=n) for i, n in enumerate(samples)]
    parts = split(vectors[0].numel(), len(vectors))
    reductions = {
        str(i): Reduction(weights=weights, num_elements=part.stop - part.start, codec=get_codec(codec))
        for i, part in enumerate(parts)
    }
    hall = Hall(reductions, set() if silent is None else {str(silent)})

    async def member(i: int) -> Average | MemberFailed:
        try:
            return await all_reduce(
                vectors[i], own_id=str(i), weights=weights, reduction=reductions[str(i)],
                transport=Door(hall, str(i)), timeout_seconds=2.0,
            )  # fmt: skip
        except MemberFailed as failed:
            return failed

    return list(await asyncio.gather(*(member(i) for i in range(len(vectors)) if i != silent)))


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 6), st.integers(1, 50), st.lists(st.integers(0, 9), min_size=6, max_size=6),
    st.sampled_from(["fp32", "fp16"]),
)  # fmt: skip
def test_all_end_with_the_same_weighted_mean(size: int, num_elements: int, samples: list[int], codec: str) -> None:
    """Any number of members and elements, members without samples included."""
    samples = [max(1, samples[0]), *samples[1:size]]
    vectors = [torch.randn(num_elements, generator=torch.Generator().manual_seed(i)) for i in range(size)]
    results = asyncio.run(average(vectors, samples, codec))
    expected = np.average(torch.stack(vectors).double().numpy(), axis=0, weights=samples)
    for result in results:
        assert isinstance(result, Average)
        np.testing.assert_allclose(result.vector_D.numpy(), expected, atol=1e-6 if codec == "fp32" else 4e-3)
        assert torch.equal(result.vector_D, results[0].vector_D)  # type: ignore[union-attr]
        assert (result.digest, result.squared_norm) == (results[0].digest, results[0].squared_norm)  # type: ignore[union-attr]
        assert result.num_samples == sum(samples)


async def test_bytes_are_counted_at_both_ends() -> None:
    results = await average([torch.ones(12)] * 3, [1, 1, 0], "fp16")
    sent = [result.bytes_sent for result in results if isinstance(result, Average)]
    received = [result.bytes_received for result in results if isinstance(result, Average)]
    # Parts of 4 elements, 8 bytes: two members send two parts each, and each owner answers two members.
    assert sent == [32, 32, 16]
    assert received == [24, 24, 32]
    assert sum(sent) == sum(received)
    assert isinstance(results[0], Average)
    assert results[0].compression_ratio == 2.0


async def test_weights_are_part_of_the_digest() -> None:
    one, other = [(await average([torch.ones(4)] * 2, samples))[0] for samples in ([1, 1], [2, 2])]
    assert isinstance(one, Average)
    assert isinstance(other, Average)
    assert torch.equal(one.vector_D, other.vector_D)
    assert one.digest != other.digest


async def test_non_finite_part_names_its_sender_to_everybody() -> None:
    vectors = [torch.ones(9), torch.ones(9), torch.full((9,), torch.inf)]
    failures = await average(vectors, [1, 1, 1])
    assert [failed.peer_id for failed in failures if isinstance(failed, MemberFailed)] == ["2", "2", "2"]


async def test_dead_owner_is_named() -> None:
    failures = await average([torch.ones(9)] * 3, [1, 1, 1], silent=1)
    assert [failed.peer_id for failed in failures if isinstance(failed, MemberFailed)] == ["1", "1"]


async def test_owner_names_the_member_that_sends_nothing() -> None:
    weights = [Weight(peer_id="0", num_samples=1), Weight(peer_id="1", num_samples=1)]
    reduction = Reduction(weights=weights, num_elements=2, codec=get_codec("fp32"))

    class Patient:
        async def exchange(self, owner_id: str, part: Buffer, reply_bytes: int) -> ReducedPart:
            await asyncio.sleep(10)
            raise AssertionError

    with pytest.raises(MemberFailed) as failed:
        await all_reduce(
            torch.ones(4), own_id="0", weights=weights, reduction=reduction, transport=Patient(), timeout_seconds=0.05
        )
    assert failed.value.peer_id == "1"
    with pytest.raises(MemberFailed):
        await reduction.result()


def test_flatten_goes_by_name_and_back() -> None:
    tensors = {"b": torch.arange(6.0).reshape(2, 3), "a": torch.tensor(7.0)}
    vector_D = flatten(tensors)
    assert vector_D.tolist() == [7, 0, 1, 2, 3, 4, 5]
    back = unflatten(vector_D, tensors)
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())


def test_parts_cover_the_vector_evenly() -> None:
    assert [(part.start, part.stop) for part in split(7, 3)] == [(0, 3), (3, 5), (5, 7)]
    assert [part.stop - part.start for part in split(2, 4)] == [1, 1, 0, 0]
