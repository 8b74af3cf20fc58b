"""Sketches: they are linear, cheap to compare, and tell what a contribution is made of."""

import itertools
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch

from swarm.credentials import identity
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.training.samples import Amount
from swarm.training.sketches import (
    LONGEST_STATEMENT,
    NUM_BUCKETS,
    Sketch,
    Sketched,
    Stated,
    Statement,
    share_of_difference,
)

SHAPES = {"head.weight": (300, 48), "layers.0.a": (64, 96), "layers.0.b": (96,), "norm": (48,), "conv": (8, 3, 5)}
NUM_ELEMENTS = sum(int(np.prod(shape)) for shape in SHAPES.values())
ANN, BOB = identity.generate(), identity.generate()


def gradient(seed: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def vector(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensors[name].reshape(-1) for name in sorted(tensors)])


SKETCH = Sketch(gradient(0), "seed")


def test_a_sketch_is_linear_and_its_square_is_about_the_norm() -> None:
    one, other = gradient(1), gradient(2)
    both = {name: 3.0 * one[name] - other[name] for name in one}
    assert torch.allclose(SKETCH.of(both), 3.0 * SKETCH.of(one) - SKETCH.of(other), atol=1e-3)
    assert SKETCH.of(one).shape == (NUM_BUCKETS,)
    squares = [float(Sketch(one, str(seed)).of(one).square().sum()) for seed in range(20)]
    assert np.mean(squares) == pytest.approx(float(vector(one).square().sum()), rel=0.1)


def test_each_number_is_of_one_place_of_the_vector() -> None:
    zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    whole = slice(0, NUM_ELEMENTS)
    found = set[int]()
    for place in range(0, NUM_ELEMENTS, 97):
        vector_D = torch.zeros(NUM_ELEMENTS)
        vector_D[place] = 2.0
        numbers_N, norm = SKETCH.of_part(vector_D, whole)
        (bucket,) = numbers_N.nonzero().flatten().tolist()
        assert abs(float(numbers_N[bucket])) == norm == 2.0
        found.add(bucket)
    assert sorted(found) == list(range(min(found), max(found) + 1)), "buckets follow each other"
    assert not SKETCH.of(zeros).any()


@pytest.mark.parametrize("edges", [(0, NUM_ELEMENTS), (0, 5000, 20000, NUM_ELEMENTS), (0, 1, 7001, 7002, NUM_ELEMENTS)])
def test_owners_of_parts_find_the_numbers_that_lie_in_their_part(edges: tuple[int, ...]) -> None:
    one = gradient(1)
    whole_N, vector_D, num_found = SKETCH.of(one), vector(one), 0
    for start, stop in itertools.pairwise(edges):
        buckets = SKETCH.buckets(slice(start, stop))
        if buckets.stop > buckets.start:
            numbers_N, _ = SKETCH.of_part(vector_D[start:stop], slice(start, stop))
            assert torch.allclose(numbers_N, whole_N[buckets], atol=1e-4)
            num_found += len(numbers_N)
    assert num_found >= NUM_BUCKETS - (len(edges) - 2)


def test_numbers_in_bfloat16_are_sketched_as_they_are() -> None:
    rounded = {name: tensor.bfloat16() for name, tensor in gradient(1).items()}
    assert torch.equal(SKETCH.of(rounded), SKETCH.of({name: each.float() for name, each in rounded.items()}))


def test_all_machines_and_releases_have_the_same_signs() -> None:
    numbers_N = Sketch({"a": torch.zeros(4, 8)}, "signs").of({"a": torch.arange(32.0).view(4, 8)})
    assert numbers_N.tolist() == [18.0, -66.0, -114.0, -162.0]


# -- what is signed ----------------------------------------------------------------------------------------------------


PLACE = ("run", "1", "lineage")


def test_a_statement_holds_for_what_it_says_alone() -> None:
    made = Statement.signed(ANN.sign_with_point, PLACE, 17, 2, SKETCH.of(gradient(1)))
    assert made.signer(PLACE) == ANN.peer_id
    assert torch.equal(made.sketch_N, SKETCH.of(gradient(1)))
    assert pb.Statement(**made._replace(microbatch=1 << 48, round=1 << 48)._asdict()).ByteSize() < LONGEST_STATEMENT
    others = [("another", "1", "lineage"), ("run", "2", "lineage"), ("run", "1", "another")]
    changed = [
        made._replace(microbatch=18), made._replace(round=3), made._replace(sketch=made.sketch[4:]),
        made._replace(point=BOB.sign_with_point(b"")[0]), made._replace(signature=b"x"), made._replace(point=b"x"),
    ]  # fmt: skip
    assert {made.signer(place) for place in others} == {""}
    assert {each.signer(PLACE) for each in changed} == {""}
    with pytest.raises(ValueError, match="multiple"):
        assert made._replace(sketch=b"abc").sketch_N is None


# -- what is contributed -----------------------------------------------------------------------------------------------

MICROBATCHES, SAMPLES, TARGETS = [4, 5, 9], 2, 32
PART = slice(3000, 15000)
GRADIENTS = {index: gradient(index) for index in MICROBATCHES}
OWN = {index: SKETCH.of(each) for index, each in GRADIENTS.items()}


def sketched(signed: Mapping[int, torch.Tensor] | None = None) -> Sketched:
    return stating(OWN, signed or {})


def stating(own: Mapping[int, torch.Tensor], signed: Mapping[int, torch.Tensor] | None = None) -> Sketched:
    return Sketched(
        sketch=SKETCH, own=own, signed={"ann": signed or {}}, microbatches=range(4, 12), samples_each=SAMPLES
    )  # fmt: skip


def contribution(change: Callable[[torch.Tensor], torch.Tensor] = lambda mean: mean) -> torch.Tensor:
    mean = (
        vector({name: sum((each[name] for each in GRADIENTS.values()), torch.zeros(())) for name in SHAPES}) / TARGETS
    )
    return change(mean)[PART]


def fault(owner: Sketched, part_P: torch.Tensor, stated: Stated, tolerance: float = 0.02) -> str:
    amount = Amount(SAMPLES * len(MICROBATCHES), TARGETS)
    return owner.fault("ann", part_P, PART, stated, amount, tolerance) or owner.contradiction("ann", PART, stated)


def test_a_contribution_that_is_the_sum_of_its_answers_has_no_fault() -> None:
    told = sketched().stated(PART)
    assert fault(sketched(), contribution(), told) == ""
    assert fault(sketched(OWN), contribution(), told) == ""
    assert fault(sketched({4: 1.01 * OWN[4], 7: OWN[5]}), contribution(), told) == "", (
        "rounding, and one that was dropped"
    )
    assert fault(sketched(), contribution(lambda mean: mean.bfloat16().float()), told, 0.05) == ""
    # A tiny gradient may be lost in float16.
    tiny = stating({index: 1e-7 * each for index, each in OWN.items()})
    assert fault(tiny, torch.zeros(PART.stop - PART.start), tiny.stated(PART)) == ""


@pytest.mark.parametrize(
    "change",
    [torch.zeros_like, torch.neg, lambda mean: 1.2 * mean, lambda mean: mean.roll(4096), lambda mean: mean + 1e15],
    ids=["zeros", "flipped", "scaled", "another's", "large"],
)
def test_a_contribution_that_is_something_else_is_found(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    why = fault(sketched(), contribution(change), sketched().stated(PART))
    assert why.startswith("its contribution differs by ")
    assert why.endswith("% from the sum of its answers' gradients")


def test_sketches_that_are_stated_to_fit_are_others_than_were_signed() -> None:
    forged = stating({index: -each for index, each in OWN.items()}).stated(PART)
    assert fault(sketched(), contribution(torch.neg), forged) == ""
    why = "its gradient of microbatch 5 is another one than it has signed"
    assert fault(sketched({5: OWN[5]}), contribution(torch.neg), forged) == why
    assert fault(sketched({5: OWN[5][:7]}), contribution(), sketched().stated(PART)) == why


def test_nothing_is_asked_of_those_that_sign_nothing() -> None:
    assert fault(sketched(), contribution(torch.neg), Stated()) == ""
    why = "it does not say of which of its answers its contribution is the sum"
    assert fault(sketched(OWN), contribution(), Stated()) == why
    nowhere = slice(100, 101)
    assert sketched(OWN).fault("ann", torch.zeros(1), nowhere, Stated(), Amount(), 0.02) == ""


@pytest.mark.parametrize("microbatches", [[4], [4, 5], [4, 5, 12], [4, 5, 5], [3, 4, 5, 9]])
def test_other_microbatches_than_are_counted_are_a_fault(microbatches: list[int]) -> None:
    """Of these a liar could state whatever makes the sum right."""
    (_, sketches), num_bytes = sketched().stated(PART), len(sketched().stated(PART).sketches) // len(MICROBATCHES)
    told = Stated(microbatches, (sketches + sketches)[: num_bytes * len(microbatches)])
    assert fault(sketched(), contribution(), told) == "it states the gradients of other microbatches than it counts"


@pytest.mark.parametrize("data", [b"", b"abc", b"\0" * 4])
def test_what_is_no_sketch_is_a_fault(data: bytes) -> None:
    assert fault(sketched(), contribution(), Stated(MICROBATCHES, data)) == "it states sketches of another size"


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf, 3e38])
def test_what_is_no_number_is_a_fault(number: float) -> None:
    told = sketched().stated(PART)
    told = told._replace(sketches=np.full(len(told.sketches) // 4, number, dtype="<f4").tobytes())
    assert fault(sketched(OWN), contribution(), told) != ""
    assert fault(sketched(), contribution(), told) != ""
    assert fault(sketched(), contribution(torch.zeros_like), told) != ""
    assert share_of_difference(torch.full((4,), number), torch.zeros(4)) >= 1.0
