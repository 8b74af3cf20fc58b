import asyncio
from collections.abc import Collection
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.averaging.agreement.messages import MemberFailed
from swarm.averaging.agreement.shares import Shares, divide
from swarm.averaging.vectors.allreduce import Butterfly, HandOut, Reduction, gather
from swarm.averaging.vectors.terms import Average, Terms
from swarm.averaging.wire.transport import Payload
from swarm.compression.codec import Buffer, Codec, contribution_codec, result_codec, simple_codec
from swarm.config import AveragingConfig
from swarm.errors import MalformedMessage
from swarm.machine.memory import Recycler
from swarm.rpc.v1 import averaging_pb2 as pb
from tests.averaging.hall import Door, Hall
from tests.support.virtual_time import in_virtual_time, run

FP32 = simple_codec("fp32")


def shares_of(samples: list[int], num_elements: int, tile: int = 1, owners: Collection[str] | None = None) -> Shares:
    begun = {
        str(i): pb.BeginReply(num_samples=n, num_targets=n, round_samples=n, norm=1.0) for i, n in enumerate(samples)
    }
    return divide(begun, num_elements=num_elements, tile=tile, clip_to_median=0.0, owners=owners)


async def average(
    vectors: list[torch.Tensor],
    samples: list[int],
    codec: Codec = FP32,
    of_results: Codec | None = None,
    *,
    silent: int | None = None,
    gathers: bool = False,
    owners: Collection[str] | None = None,
) -> list[Any]:
    """Run an exchange, and return each member's average, or its error."""
    of_results = of_results or codec
    shares = shares_of(samples, vectors[0].numel(), codec.tile, owners)
    names = [str(i) for i in range(len(vectors))]
    if gathers:
        sides: dict[str, Any] = {name: HandOut(shares) for name in names}
    else:
        sides = {name: Reduction(shares, name, codec=codec, result_codec=of_results) for name in names}
    hall = Hall(sides, set() if silent is None else {str(silent)})

    async def member(name: str) -> Average | MemberFailed:
        vector_D, transport = vectors[int(name)], Door(hall, name)
        try:
            terms = Terms(
                own_id=name, shares=shares, codec=codec, result_codec=of_results, transport=transport,
                timeout_seconds=2.0,
            )  # fmt: skip
            if gathers:
                return await gather(vector_D, sides[name], terms)
            return await Butterfly(vector_D, sides[name], terms, Recycler()).run()
        except MemberFailed as failed:
            return failed

    return list(await asyncio.gather(*(member(name) for name in names if name != str(silent))))


def random_vectors(size: int, num_elements: int) -> list[torch.Tensor]:
    return [torch.randn(num_elements, generator=torch.Generator().manual_seed(i)) for i in range(size)]


@settings(max_examples=25)
@given(
    st.integers(1, 6), st.integers(1, 50), st.lists(st.integers(0, 9), min_size=6, max_size=6),
    st.sampled_from(["fp32", "fp16"]), st.booleans(),
)  # fmt: skip
def test_all_end_with_the_same_weighted_mean(
    size: int, num_elements: int, samples: list[int], codec: str, gathers: bool
) -> None:
    """Holds for any number of members and elements, also with members that have no samples."""
    samples = [max(1, samples[0]), *samples[1:size]]
    vectors = random_vectors(size, num_elements)
    results = run(average(vectors, samples, simple_codec(codec), gathers=gathers))
    expected = np.average(torch.stack(vectors).double().numpy(), axis=0, weights=samples)
    for result in results:
        np.testing.assert_allclose(result.vector_D.numpy(), expected, atol=1e-6 if codec == "fp32" else 4e-3)
        assert torch.equal(result.vector_D, results[0].vector_D)
        assert (result.digest, result.squared_norm) == (results[0].digest, results[0].squared_norm)
        # If the vectors cancel out, their mean is small, but their rounding errors are not.
        assert result.squared_norm == pytest.approx(float(np.sum(expected**2)), rel=1e-2, abs=2e-3)


@pytest.mark.parametrize("gathers", [True, False])
@pytest.mark.parametrize("name", ["int4", "topk", "dct-topk", "dct-lowpass"])
@in_virtual_time
async def test_nothing_is_lost_but_what_the_residuals_keep(name: str, gathers: bool) -> None:
    """What the sum lacks is exactly the members' residuals times their weights, plus the owners' residuals."""
    config = AveragingConfig(codec=name)  # type: ignore[arg-type]  # names of codecs
    codec, of_results = contribution_codec(config), result_codec(config)
    samples = [1, 3, 4]
    vectors = random_vectors(3, 5 * 4096 + 17)
    results = await average(vectors, samples, codec, of_results, gathers=gathers)
    found = results[0].vector_D.double()
    for result, count in zip(results, samples, strict=True):
        assert torch.equal(result.vector_D, results[0].vector_D)
        residual = result.residual
        found += residual.contribution_D.double() * count / sum(samples)
        for owed in residual.owed:
            found[owed.part] += owed.sum_P.double()
    expected = np.average(torch.stack(vectors).double().numpy(), axis=0, weights=samples)
    np.testing.assert_allclose(found.numpy(), expected, atol=2e-6)


@in_virtual_time
async def test_bytes_are_counted_at_both_ends() -> None:
    results = await average([torch.ones(12)] * 3, [1, 1, 0], simple_codec("fp16"))
    # Parts of 4 elements, 8 bytes: two members send two parts each, and each owner answers two members.
    assert [result.bytes_sent for result in results] == [32, 32, 16]
    assert [result.bytes_received for result in results] == [24, 24, 32]
    assert [result.compression_ratio for result in results] == [2.0, 2.0, 2.0]
    gathered = await average([torch.ones(12)] * 3, [1, 1, 0], simple_codec("fp16"), gathers=True)
    assert [result.bytes_sent for result in gathered] == [48, 48, 0]
    assert [result.bytes_received for result in gathered] == [24, 24, 48]
    # Two members would have sent 64 bytes each in a butterfly of float32.
    assert [result.compression_ratio for result in gathered] == pytest.approx([64 / 48, 64 / 48, 1.0])


@in_virtual_time
async def test_one_member_may_sum_everything_and_the_others_need_no_line_between_them() -> None:
    vectors, samples, codec = random_vectors(3, 50), [1, 0, 3], simple_codec("fp16")
    results = await average(vectors, samples, codec, owners={"1"})
    expected = np.average(torch.stack(vectors).double().numpy(), axis=0, weights=samples)
    for result in results:
        np.testing.assert_allclose(result.vector_D.numpy(), expected, atol=4e-3)
        assert (result.digest, result.squared_norm) == (results[0].digest, results[0].squared_norm)
    # The owner has two contributions of 100 bytes, and answers both members.
    assert [(result.bytes_sent, result.bytes_received) for result in results] == [(100, 100), (200, 200), (100, 100)]


@pytest.mark.parametrize("samples", [[5], [5, 0]])
@in_virtual_time
async def test_nothing_is_computed_where_there_is_nothing_to_add(samples: list[int]) -> None:
    """The only contribution is the average, bit for bit. If there is a single member, it is not even copied."""
    vectors = [torch.tensor([1.0, -0.0, 1e-40, -3e14]) for _ in samples]
    results = await average(vectors, samples)
    for result in results:
        assert torch.equal(result.vector_D.view(torch.int32), vectors[0].view(torch.int32))
    assert (results[0].vector_D.data_ptr() == vectors[0].data_ptr()) == (len(samples) == 1)


@in_virtual_time
async def test_weights_are_part_of_the_digest() -> None:
    one, other = [(await average([torch.ones(4)] * 2, samples))[0] for samples in ([1, 1], [2, 2])]
    assert torch.equal(one.vector_D, other.vector_D)
    assert one.digest != other.digest


@pytest.mark.parametrize("gathers", [True, False])
@pytest.mark.parametrize("bad", [torch.inf, torch.nan, 1e30])
@in_virtual_time
async def test_part_out_of_range_names_its_sender_to_everybody(gathers: bool, bad: float) -> None:
    vectors = [torch.ones(9), torch.ones(9), torch.full((9,), bad)]
    others = (await average(vectors, [1, 1, 1], gathers=gathers))[:2]
    assert [failed.peer_id for failed in others if isinstance(failed, MemberFailed)] == ["2", "2"]


@in_virtual_time
async def test_a_sum_that_is_not_finite_is_no_result() -> None:
    """A leader would go on with such a sum, and its members would refuse to commit it."""
    (failed,) = await average([torch.full((9,), 3e38)], [1], gathers=True)
    assert isinstance(failed, MemberFailed)
    assert failed.peer_id == "0"


@pytest.mark.parametrize("gathers", [True, False])
@in_virtual_time
async def test_dead_owner_is_named(gathers: bool) -> None:
    failures = await average([torch.ones(9)] * 3, [1, 1, 1], silent=1, gathers=gathers)
    assert [failed.peer_id for failed in failures if isinstance(failed, MemberFailed)] == ["1", "1"]


@in_virtual_time
async def test_owner_names_the_member_that_sends_nothing() -> None:
    shares = shares_of([1, 1], 4)
    reduction = Reduction(shares, "0", codec=FP32, result_codec=FP32)

    class Patient:
        async def exchange(self, peer_id: str, part: Buffer, reply_bytes: int, *, waits: bool = True) -> Payload:
            await asyncio.sleep(10)
            raise AssertionError

    terms = Terms(own_id="0", shares=shares, codec=FP32, result_codec=FP32, transport=Patient(), timeout_seconds=0.05)
    with pytest.raises(MemberFailed) as failed:
        await Butterfly(torch.ones(4), reduction, terms, Recycler()).run()
    assert failed.value.peer_id == "1"
    with pytest.raises(MemberFailed):
        await reduction.result()
    # In a gather every member does what an owner does there.
    with pytest.raises(MemberFailed) as failed:
        async with asyncio.timeout(0.05):
            await gather(torch.ones(4), HandOut(shares), terms)
    assert failed.value.peer_id == "1"


@pytest.mark.parametrize(
    ("value", "norm", "reason"), [(1e30, 1.0, r"numbers beyond 1e\+15"), (1.0, 1.0, "not what it says")]
)
@in_virtual_time
async def test_an_owner_that_answers_nonsense_is_named(value: float, norm: float, reason: str) -> None:
    shares = shares_of([1, 1], 8)
    reduction = Reduction(shares, "0", codec=FP32, result_codec=FP32)
    await reduction.add("1", FP32.encode(torch.ones(4)))

    class Malicious:
        async def exchange(self, peer_id: str, part: Buffer, reply_bytes: int, *, waits: bool = True) -> Payload:
            return Payload(encoded=FP32.encode(torch.full((4,), value)), squared_norm=norm)

    terms = Terms(own_id="0", shares=shares, codec=FP32, result_codec=FP32, transport=Malicious(), timeout_seconds=5)
    with pytest.raises(MemberFailed, match=reason) as failed:
        await Butterfly(torch.ones(8), reduction, terms, Recycler()).run()
    assert failed.value.peer_id == "1"


@in_virtual_time
async def test_a_part_that_comes_twice_at_once_counts_once() -> None:
    """The second copy arrives while the first one is decoded."""
    reduction = Reduction(shares_of([1, 1], 4), "0", codec=FP32, result_codec=FP32)
    reduction.add_decoded("0", torch.zeros(2))
    part = FP32.encode(torch.ones(2))
    added = await asyncio.gather(reduction.add("1", part), reduction.add("1", part), return_exceptions=True)
    assert [type(error) for error in added if error is not None] == [MalformedMessage]
    assert FP32.decode((await reduction.result()).encoded, 2).tolist() == [0.5, 0.5]
