"""A stage's state as one string of bytes, which is read, sent and written in segments.

It reads and writes the tensors' own memory, so nothing is held twice. It allocates no more than the caller allows.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import torch

from swarm.errors import IntegrityError, MalformedMessage
from swarm.machine.tensor_file import bytes_of
from swarm.rpc.bounds import CHUNK_BYTES
from swarm.rpc.transfers import Segments
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.rpc.v1.tensor_pb2 import TensorHeader
from swarm.training.round_member import Snapshot
from swarm.training.tally import EMPTY, Tally
from swarm.types import PeerRecord

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int32": torch.int32}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class TensorBytes:
    """CPU tensors laid end to end. `write` needs contiguous tensors: with others it would write to copies."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._spans: list[tuple[int, memoryview]] = []
        self.num_bytes = 0
        for tensor in tensors:
            raw = bytes_of(tensor)
            self._spans.append((self.num_bytes, raw))
            self.num_bytes += raw.nbytes

    def pieces(self, start: int, stop: int) -> Iterator[bytes]:
        """The bytes from `start` to `stop`, cut into messages."""
        for begin in range(start, stop, CHUNK_BYTES):
            yield b"".join(self._views(begin, min(stop, begin + CHUNK_BYTES)))

    def write(self, start: int, data: bytes) -> None:
        """Write bytes at `start`. They must not reach beyond the end."""
        filled = 0
        for view in self._views(start, start + len(data)):
            view[:] = data[filled : filled + view.nbytes]
            filled += view.nbytes
        assert filled == len(data)

    def sha256(self, start: int, stop: int) -> bytes:
        """Digest of the bytes from `start` to `stop`."""
        digest = hashlib.sha256()
        for view in self._views(start, stop):
            digest.update(view)
        return digest.digest()

    def _views(self, start: int, stop: int) -> Iterator[memoryview]:
        for begin, raw in self._spans:
            first, last = max(start, begin) - begin, min(stop, begin + raw.nbytes) - begin
            if first < last:
                yield raw[first:last]


def describe(tensors: Mapping[str, torch.Tensor]) -> list[TensorHeader]:
    """Make the headers from which a receiver can allocate tensors, in the tensors' order. Their types must be among
    _DTYPES."""
    return [
        TensorHeader(name=name, encoding=_NAMES[t.dtype], shape=tuple(t.shape), num_bytes=t.nbytes)
        for name, t in tensors.items()
    ]


def allocate(headers: Iterable[TensorHeader], max_bytes: int) -> dict[str, torch.Tensor]:
    """Allocate memory for the tensors that a peer describes. Raises MalformedMessage for unknown types, names that come
    twice, sizes that contradict themselves, or more than `max_bytes` in all. Nothing was allocated then."""
    described = list(headers)
    if any(header.encoding not in _DTYPES for header in described):
        raise MalformedMessage("tensors of an unknown type are announced")
    if len({header.name for header in described}) != len(described):
        raise MalformedMessage("a tensor is announced twice")
    for header in described:
        # An extent of 0 counts as 1, so that it does not hide another extent that is too large for any machine.
        extents = [max(1, extent) for extent in header.shape]
        if len(extents) > 64 or math.prod(extents) > max_bytes:
            raise MalformedMessage(f"tensor {header.name[:64]!r} is announced with the shape {list(header.shape)[:8]}")
        if header.num_bytes != math.prod(header.shape) * _DTYPES[header.encoding].itemsize:
            raise MalformedMessage(f"tensor {header.name[:64]!r} has a size that contradicts its shape")
    num_bytes = sum(header.num_bytes for header in described)
    if num_bytes > max_bytes:
        raise MalformedMessage(f"{num_bytes} bytes are announced, more than the {max_bytes} that are sensible here")
    return {header.name: torch.empty(tuple(header.shape), dtype=_DTYPES[header.encoding]) for header in described}


def _tally_of(header: pb.SnapshotHeader) -> Tally:
    """The donor's tally; an empty one if it gives none that can be read."""
    try:
        return Tally.read(header.tally)
    except IntegrityError:
        return EMPTY


class PartialSnapshot:
    def __init__(self, header: pb.SnapshotHeader, snapshot_id: bytes, max_bytes: int, *, only: str = "") -> None:
        """With `only`, only the segments of tensors with this prefix in their names are fetched. Raises
        MalformedMessage if the header makes no sense."""
        num_bytes = sum(tensor.num_bytes for tensor in header.tensors)
        if not header.segment_bytes or len(header.segment_digests) != -(-num_bytes // header.segment_bytes):
            raise MalformedMessage(f"{num_bytes} bytes do not come in {len(header.segment_digests)} segments")
        self.header = header
        self.snapshot_id = snapshot_id
        self.tensors = allocate(header.tensors, max_bytes)
        self.content = TensorBytes(self.tensors.values())
        self.sources: list[PeerRecord] = []
        self._num_sent = Counter[str]()
        """Segments that came from each donor."""
        self._only = only
        numbers = self._numbers()
        self.num_segments = len(numbers)
        self.segments = Segments(numbers)

    @property
    def num_missing_bytes(self) -> int:
        """The bytes of the missing segments. The figure may be a little too large, because the last segment may be
        shorter."""
        return min(self.content.num_bytes, self.segments.num_missing * self.header.segment_bytes)

    @property
    def is_young(self) -> bool:
        return 2 * self.segments.num_missing > self.num_segments

    @property
    def fastest_first(self) -> list[PeerRecord]:
        return sorted(self.sources, key=lambda donor: -self._num_sent[donor.peer_id])

    def arrived(self, donor: PeerRecord) -> None:
        self._num_sent[donor.peer_id] += 1

    def edges(self, index: int) -> tuple[int, int]:
        """The first byte of a segment, and the byte after its last, within the whole snapshot."""
        start = index * self.header.segment_bytes
        return start, min(self.content.num_bytes, start + self.header.segment_bytes)

    def _numbers(self) -> list[int]:
        """The segments that hold some of the wanted tensors."""
        numbers, start = set[int](), 0
        for tensor in self.header.tensors:
            stop = start + tensor.num_bytes
            if tensor.name.startswith(self._only) and tensor.num_bytes:
                numbers |= set(range(start // self.header.segment_bytes, -(-stop // self.header.segment_bytes)))
            start = stop
        return sorted(numbers)

    @property
    def snapshot(self) -> Snapshot:
        """The snapshot. Its tensors are complete only once no segment is missing."""
        standing = self.header.standing
        return Snapshot(
            round=standing.round, run_samples=standing.run_samples, lineage=standing.lineage,
            tensors={name: tensor for name, tensor in self.tensors.items() if name.startswith(self._only)},
            digest=self.header.state_digest, tally=_tally_of(self.header),
        )  # fmt: skip
