"""A snapshot that is being downloaded: the tensors that it is written into, and which segments have come.

Used by catching_up/state_transfer, whose workers take segments from here. Never holds a byte twice, and forgets no
segment that came.
"""

from collections import Counter

from swarm.averaging.catching_up.tensor_bytes import TensorBytes, allocate
from swarm.errors import MalformedMessage
from swarm.rpc.segments import Segments
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.training.round_member import Snapshot
from swarm.types import PeerRecord


class PartialSnapshot:
    """A snapshot of which some segments may still be missing."""

    def __init__(self, header: pb.SnapshotHeader, snapshot_id: bytes, max_bytes: int, *, only: str = "") -> None:
        """
        Args:
            only: fetch only the segments of tensors with this prefix in their names.

        Raises:
            MalformedMessage: the header makes no sense.
        """
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
        """Whether less than half of the snapshot has come."""
        return 2 * self.segments.num_missing > self.num_segments

    @property
    def fastest_first(self) -> list[PeerRecord]:
        """The sources, beginning with the one that most segments came from."""
        return sorted(self.sources, key=lambda donor: -self._num_sent[donor.peer_id])

    def arrived(self, index: int, donor: PeerRecord) -> None:
        """Note that a segment has come from a donor."""
        self._num_sent[donor.peer_id] += 1
        self.segments.finish(index)

    def span(self, index: int) -> tuple[int, int]:
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
            round=standing.round,
            run_samples=standing.run_samples,
            lineage=standing.lineage,
            tensors={name: tensor for name, tensor in self.tensors.items() if name.startswith(self._only)},
            digest=self.header.state_digest,
        )
