"""Sketches of gradients: a few numbers that tie what a member contributes to what it has answered.

A stage peer sketches each microbatch's gradient as it joins the sum, and signs the sketch for the sender. A sketch is
linear in the gradient, so the sketches of a contribution's microbatches add up to its own. Whoever gets a part of a
contribution can check it by those that its member states, and these by what the member has signed.

The elements of all parameters, one after the other, are cut between rows into buckets of about the same length. A
bucket's number is the sum of its elements with random signs: a count sketch without hashing (Charikar, Chen and
Farach-Colton, "Finding frequent items in data streams", 2002), so that each number belongs to one place of the vector.
Over the signs, its square is in the mean the squared norm of the bucket. An element's sign is the product of one for
its row and one for its column: so a sketch takes one product of each matrix with a vector. The signs are known to all.

Shapes: N buckets, R rows of all parameters, C columns of the widest, K microbatches, P elements of a part.
"""

import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from blake3 import blake3

from swarm.credentials import certificates
from swarm.errors import IntegrityError
from swarm.training.samples import Amount
from swarm.training.tally import Sign

NUM_BUCKETS = 128
MOST_SKETCHED = 4096
"""A round of more microbatches is not sketched: what members state would be too much for one message."""
LONGEST_STATEMENT = 1024
"""The most bytes of a statement in a message: its sketch has 4 * NUM_BUCKETS, and its point and signature 140."""
RESTATED_TOLERANCE = 0.02
"""The largest difference of two sketches of one microbatch, as a share of the larger norm, by one peer. Whatever is
allowed here a liar may use for each of its microbatches, always in the same direction."""
SIGNED_TOLERANCE = 0.1
"""The largest difference of two sketches of one microbatch, as a share of the larger norm, that kinds of hardware make.
"""
LEAST_ELEMENT = 2.0**-22
"""Elements below this may be lost on the way, since float16 has no smaller ones that are exact."""


class Sketch:
    """The sketch of one round, which everybody makes alike.

    Args:
        like: tensors with the names and shapes of the gradient.
        seed: the signs follow from it.
    """

    def __init__(self, like: Mapping[str, torch.Tensor], seed: str) -> None:
        self._shapes = {name: _rows_and_columns(like[name]) for name in sorted(like)}
        rows, columns = np.array(list(self._shapes.values())).T
        lengths_R = np.repeat(columns, rows)
        ends_R = np.cumsum(lengths_R)
        starts_R = ends_R - lengths_R
        _, firsts_N, buckets_R = np.unique(starts_R * NUM_BUCKETS // ends_R[-1], return_index=True, return_inverse=True)
        self._edges = [*starts_R[firsts_N].tolist(), int(ends_R[-1])]
        """Where each bucket begins in the vector, and the vector's end."""
        self._rows = [*firsts_N.tolist(), len(lengths_R)]
        """The first row of each bucket, and the number of rows."""
        cpu = _signs(f"{seed} rows", len(lengths_R)), _signs(f"{seed} columns", columns.max()), _tensor(buckets_R)
        self._on = {torch.device("cpu"): cpu}
        """The signs of rows and columns, and each row's bucket, on each device where they were needed."""

    @torch.no_grad()
    def of(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The sketch of a gradient, float32 (N,) on its device. Does not wait for the device, but the first time."""
        device = next(iter(tensors.values())).device
        if device not in self._on:
            rows, columns, buckets = self._on[torch.device("cpu")]
            self._on[device] = rows.to(device), columns.to(device), buckets.to(device)
        # Nothing needless is done to a tensor: in a small stage such calls are most of what a sketch costs.
        shaped = ((tensors[name], shape) for name, shape in self._shapes.items())
        matrices = (each if each.ndim <= 2 else each.reshape(shape) for each, shape in shaped)
        return self._added(matrices, slice(0, len(self._edges) - 1), device)

    def buckets(self, part: slice) -> slice:
        """The buckets that lie wholly within a part of the vector."""
        first = bisect_left(self._edges, part.start)
        return slice(first, max(first, bisect_right(self._edges, part.stop) - 1))

    def of_part(self, part_P: torch.Tensor, part: slice) -> tuple[torch.Tensor, float]:
        """The numbers of a part's `buckets`, and the norm of these buckets' elements."""
        buckets = self.buckets(part)
        start, stop = (self._edges[edge] - part.start for edge in (buckets.start, buckets.stop))
        norm = float(torch.linalg.vector_norm(part_P[start:stop], dtype=torch.float64))
        return self._added(self._matrices(part_P, part.start, buckets), buckets, torch.device("cpu")), norm

    def num_elements(self, buckets: slice) -> int:
        return int(self._edges[buckets.stop] - self._edges[buckets.start])

    def _matrices(self, part_P: torch.Tensor, start: int, buckets: slice) -> Iterator[torch.Tensor]:
        """The rows of the buckets, parameter by parameter, of a part that begins at `start`."""
        first, last, row, place = self._rows[buckets.start], self._rows[buckets.stop], 0, 0
        for rows, columns in self._shapes.values():
            begin, end = max(first - row, 0), min(last - row, rows)
            if begin < end:
                at = place - start
                yield part_P[at + begin * columns : at + end * columns].view(-1, columns)
            row, place = row + rows, place + rows * columns

    def _added(self, matrices: Iterable[torch.Tensor], buckets: slice, device: torch.device) -> torch.Tensor:
        signs_R, signs_C, buckets_R = self._on[device]
        all_float = (each if each.dtype is torch.float32 else each.float() for each in matrices)
        sums = [
            each.flatten() if each.ndim < 2 or each.shape[1] == 1 else torch.mv(each, signs_C[: each.shape[1]])
            for each in all_float
        ]  # fmt: skip
        rows = slice(self._rows[buckets.start], self._rows[buckets.stop])
        numbers_N = torch.zeros(buckets.stop - buckets.start, device=device)
        return numbers_N.index_add_(0, buckets_R[rows] - buckets.start, torch.cat(sums) * signs_R[rows])


def _rows_and_columns(tensor: torch.Tensor) -> tuple[int, int]:
    return (tensor.shape[0], tensor[0].numel()) if tensor.ndim > 1 else (tensor.numel(), 1)


def _signs(seed: str, count: int) -> torch.Tensor:
    # Not torch's generator, whose numbers differ between devices, and may between versions.
    random = np.frombuffer(blake3(seed.encode()).digest(length=-(-count // 8)), dtype=np.uint8)
    return _tensor(np.unpackbits(random, count=count)).float() * 2.0 - 1.0


def _tensor(array: Any) -> torch.Tensor:
    return torch.from_numpy(array.reshape(-1))


def share_of_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """The norm of the difference, as a share of the larger norm; infinite if one is shorter, or has NaN or infinity."""
    if one.shape != other.shape:
        return math.inf
    difference, longest = float((one - other).norm()), max(float(one.norm()), float(other.norm()))
    if not math.isfinite(difference):
        return math.inf
    return difference / longest if longest else 0.0


# -- what is signed ----------------------------------------------------------------------------------------------------


class Statement(NamedTuple):
    """A peer's signed word that a microbatch counts at it, with a gradient of this sketch (float32 as bytes)."""

    microbatch: int
    round: int
    sketch: bytes
    point: bytes
    signature: bytes

    @classmethod
    def signed(
        cls, sign: Sign, place: Sequence[str], microbatch: int, round_number: int, sketch_N: torch.Tensor
    ) -> Self:
        """`place` names the run, the block, and the lineage before the round."""
        sketch = _packed(sketch_N)
        point, signature = sign(_words(place, microbatch, round_number, sketch))
        return cls(microbatch, round_number, sketch, point, signature)

    @classmethod
    def read(cls, message: Any) -> Self:
        """A message that has these fields."""
        return cls(*(getattr(message, name) for name in cls._fields))

    def signer(self, place: Sequence[str]) -> str:
        """The id of the peer that has signed it; empty if nobody has."""
        try:
            key, peer_id = _key_at(self.point)
            certificates.verify(key, _words(place, self.microbatch, self.round, self.sketch), self.signature)
        except (ValueError, IntegrityError):
            return ""
        return peer_id

    @property
    def sketch_N(self) -> torch.Tensor:
        """Raises ValueError if the bytes are none."""
        return _unpacked(self.sketch)


@lru_cache(maxsize=256)
def _key_at(point: bytes) -> tuple[Any, str]:
    """A signer's key and id. Remembered, because to read a key takes longer than to verify a signature."""
    key = certificates.key_at(point)
    return key, certificates.fingerprint_of(key)[:40]


def _words(place: Sequence[str], microbatch: int, round_number: int, sketch: bytes) -> bytes:
    return json.dumps(["swarm sketch", *place, microbatch, round_number, sketch.hex()]).encode()


def _packed(sketch: torch.Tensor) -> bytes:
    return sketch.numpy().astype("<f4").tobytes()


def _unpacked(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype="<f4").astype(np.float32))


Sketches = Mapping[int, torch.Tensor]
"""By microbatch."""


# -- what is contributed -----------------------------------------------------------------------------------------------


class Stated(NamedTuple):
    """What a member states to the owner of a part: the numbers of the part's buckets in the sketches of its
    microbatches, which are in ascending order."""

    microbatches: Sequence[int] = ()
    sketches: bytes = b""


NOTHING_STATED = Stated()


@dataclass(frozen=True, kw_only=True)
class Sketched:
    """What a member has to state of its own contribution, and to check others' by.

    Attributes:
        own: of its own microbatches.
        signed: what others have signed, by their ids.
        microbatches: those of the round.
        samples_each: the samples of each of them.
    """

    sketch: Sketch
    own: Sketches
    signed: Mapping[str, Sketches]
    microbatches: Collection[int]
    samples_each: int

    def stated(self, part: slice) -> Stated:
        """What is stated to the owner of a part."""
        return Stated(sorted(self.own), _packed(self._own_KN[:, self.sketch.buckets(part)]))

    @cached_property
    def _own_KN(self) -> torch.Tensor:
        return torch.stack([self.own[microbatch] for microbatch in sorted(self.own)])

    def contradiction(self, peer_id: str, part: slice, stated: Stated) -> str:
        """What a member states otherwise than it has signed, in words; empty if nothing is known. So it looks as well
        if a peer starts again in the middle of a round, and then gets other inputs than before, once."""
        buckets, signed = self.sketch.buckets(part), self.signed.get(peer_id, {})
        for microbatch, stated_N in zip(stated.microbatches, self._read(stated, buckets), strict=False):
            if microbatch in signed:
                share = share_of_difference(stated_N, signed[microbatch][buckets])
                if not share <= RESTATED_TOLERANCE:
                    return f"its gradient of microbatch {microbatch} is another one than it has signed"
        return ""

    def fault(
        self, peer_id: str, part_P: torch.Tensor, part: slice, stated: Stated, amount: Amount, tolerance: float
    ) -> str:
        """What is wrong with a member's contribution to a part, in words; empty if nothing is known to be.

        Args:
            part_P: the mean over its targets.
            amount: what it counts.
            tolerance: the largest error that the codec makes, as a share of the norm.
        """
        buckets, signed = self.sketch.buckets(part), self.signed.get(peer_id, {})
        num_buckets = buckets.stop - buckets.start
        if not num_buckets or not (stated.microbatches or signed):
            return ""  # Peers of the last release state nothing.
        if not stated.microbatches:
            return "it does not say of which of its answers its contribution is the sum"
        if len(stated.sketches) != 4 * num_buckets * len(stated.microbatches):
            return "it states sketches of another size"
        num_of_round = len({*stated.microbatches}.intersection(self.microbatches))
        if not num_of_round * self.samples_each == len(stated.microbatches) * self.samples_each == amount.samples:
            return "it states the gradients of other microbatches than it counts"
        made_N, norm = self.sketch.of_part(part_P, part)
        sum_N, num_targets = self._read(stated, buckets).double().sum(0), max(1, amount.targets)
        if not sum_N.isfinite().all():
            return "it states sketches with numbers that are none"
        difference, longest = float((made_N * num_targets - sum_N).norm()), max(norm * num_targets, float(sum_N.norm()))
        lost = LEAST_ELEMENT * num_targets * self.sketch.num_elements(buckets) ** 0.5
        if not difference <= tolerance * longest + lost:
            return f"its contribution differs by {difference / longest:.0%} from the sum of its answers' gradients"
        return ""

    def _read(self, stated: Stated, buckets: slice) -> torch.Tensor:
        """The sketches that are stated, (K, N); none if they have another size."""
        num_buckets = buckets.stop - buckets.start
        is_whole = len(stated.sketches) == 4 * num_buckets * len(stated.microbatches)
        return _unpacked(stated.sketches if is_whole else b"").view(-1, max(1, num_buckets))
