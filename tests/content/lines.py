"""A line to peers with some content. They may lie, refuse, be busy or die."""

import hashlib
from collections import Counter
from collections.abc import Callable

from swarm.content.service import Kind, Line, Shelf
from swarm.errors import IntegrityError, NotReady, SwarmError
from swarm.types import PeerRecord, PeerState


def digest_of(content: bytes) -> str:
    """The digest that names a content."""
    return hashlib.sha256(content).hexdigest()


def record(name: str, endpoint: str = "memory:1", *, stage: int = 0) -> PeerRecord:
    """A serving peer's announcement."""
    peer_id = hashlib.sha1(name.encode()).hexdigest()
    return PeerRecord(
        peer_id=peer_id, name=name, stage=stage, endpoint=endpoint, state=PeerState.SERVING, announced_at=0.0
    )


class FakeLine(Line):
    """Peers by name, and what each has sent.

    Attributes:
        faults: by peer; each is called with the number of answers that the peer has given before, and may raise.
    """

    def __init__(self, **shelves: Shelf) -> None:
        self.shelves = shelves
        self.num_sent: Counter[str] = Counter()
        self.num_asked: Counter[str] = Counter()
        self.faults: dict[str, Callable[[int], None]] = {}

    def donors(self) -> list[PeerRecord]:
        """All peers."""
        return [record(name) for name in self.shelves]

    async def ask(self, peer: PeerRecord, kind: Kind, sha256: str, *, max_bytes: int) -> bytes:
        self.num_asked[peer.name] += 1
        if peer.name in self.faults:
            self.faults[peer.name](self.num_sent[peer.name])
        content = self.shelves[peer.name](sha256)
        if content is None:
            raise NotReady("it is not here")
        self.num_sent[peer.name] += 1
        if digest_of(content) != sha256:
            raise IntegrityError("it does not match its digest")
        assert len(content) <= max_bytes
        return content


def shelf_of(*contents: bytes) -> Shelf:
    """The shelf of a peer that has these contents."""
    return {digest_of(content): content for content in contents}.get


def after(num_sent: int, error: SwarmError) -> Callable[[int], None]:
    """The fault of a peer that fails once it has sent this many."""

    def fail(num_before: int) -> None:
        if num_before >= num_sent:
            raise error

    return fail
