"""A snapshot on its way: the tensors it is written into, and which of its segments are here.

Used by catching_up/state_transfer, whose workers take segments from here. Never holds a byte twice, and forgets no
segment that came.
"""

import asyncio
from collections import deque

from swarm.averaging.catching_up.tensor_bytes import TensorBytes, allocate
from swarm.errors import MalformedMessage
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.training.round_member import Snapshot
from swarm.types import PeerRecord


class PartialSnapshot:
    """A snapshot of which not every segment is here yet."""

    def __init__(self, header: pb.SnapshotHeader, snapshot_id: bytes, max_bytes: int) -> None:
        """Raises MalformedMessage for a header that makes no sense."""
        num_bytes = sum(tensor.num_bytes for tensor in header.tensors)
        if not header.segment_bytes or len(header.segment_digests) != -(-num_bytes // header.segment_bytes):
            raise MalformedMessage(f"{num_bytes} bytes do not come in {len(header.segment_digests)} segments")
        self.header = header
        self.snapshot_id = snapshot_id
        self.tensors = allocate(header.tensors, max_bytes)
        self.content = TensorBytes(self.tensors.values())
        self.sources: list[PeerRecord] = []
        self.num_segments = self.num_missing = len(header.segment_digests)
        self._queue = deque(range(self.num_segments))
        self._flying: set[int] = set()
        self._changed = asyncio.Event()

    def span(self, index: int) -> tuple[int, int]:
        """Where a segment lies."""
        start = index * self.header.segment_bytes
        return start, min(self.content.num_bytes, start + self.header.segment_bytes)

    @property
    def snapshot(self) -> Snapshot:
        """What it is, or will be when nothing is missing."""
        standing = self.header.standing
        return Snapshot(
            round=standing.round,
            run_samples=standing.run_samples,
            lineage=standing.lineage,
            tensors=self.tensors,
            digest=self.header.state_digest,
        )

    async def take(self) -> int | None:
        """A segment that this caller alone fetches; None when all are here. A segment that others fail to fetch comes
        back."""
        while not self._queue and self._flying:
            self._changed.clear()
            await self._changed.wait()
        if not self._queue:
            return None
        index = self._queue.popleft()
        self._flying.add(index)
        return index

    def finish(self, index: int) -> None:
        """A segment is here."""
        self._flying.discard(index)
        self.num_missing -= 1
        self._changed.set()

    def give_back(self, index: int) -> None:
        """The worker that took a segment is done with it. If it is not here, another one may take it."""
        if index in self._flying:
            self._flying.discard(index)
            self._queue.appendleft(index)
            self._changed.set()
