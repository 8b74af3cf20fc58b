"""Snapshots: how a peer that is behind becomes the group's last committed state.

The donor's side cuts a snapshot into messages, the receiver's side checks and assembles them. Used by
averaging/averager. A snapshot is held for as long as it is being sent, whatever the donor commits meanwhile.
"""

import hashlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence

import torch

from swarm.averaging import messages
from swarm.averaging.transport import Transport
from swarm.errors import IntegrityError, MalformedMessage, NotReady, PeerUnavailable, SwarmError
from swarm.rounds import Snapshot
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.rpc.v1.stage_pb2 import Address
from swarm.rpc.v1.tensor_pb2 import TensorChunk
from swarm.rpc.wire import DTYPES, TensorReader, TensorSpec, chunks
from swarm.types import PeerRecord

logger = logging.getLogger(__name__)


async def send(snapshot: Snapshot, outcomes: Sequence[pb.Outcome]) -> AsyncIterator[pb.DownloadReply]:
    """The messages that carry a snapshot and how its last rounds were committed."""
    names = sorted(snapshot.tensors)
    header = pb.SnapshotHeader(
        standing=messages.pack_standing(messages.standing_of(snapshot)), state_digest=snapshot.digest,
        tensors=[next(chunks(name, snapshot.tensors[name])).header for name in names],
        outcomes=[outcome for outcome in outcomes if outcome.round < snapshot.round],
    )  # fmt: skip
    digest = hashlib.sha256(header.SerializeToString(deterministic=True))
    yield pb.DownloadReply(header=header)
    for name in names:
        for chunk in chunks(name, snapshot.tensors[name]):
            digest.update(chunk.data)
            yield pb.DownloadReply(chunk=chunk)
    yield pb.DownloadReply(end=pb.SnapshotEnd(sha256=digest.digest()))


async def download(
    transport: Transport, donors: Sequence[PeerRecord], *, address: Address, own_id: str, max_bytes: int,
    wanted: Callable[[messages.Standing], bool], silence_seconds: float,
) -> tuple[Snapshot, list[pb.Outcome]]:  # fmt: skip
    """Fetch a snapshot from the first donor that delivers a sound one.

    Args:
        donors: the best first.
        max_bytes: a larger snapshot is refused.
        wanted: whether a snapshot of that standing is of any use.
        silence_seconds: longest wait for a donor's next piece.

    Raises:
        PeerUnavailable: no donor delivered.
    """
    for donor in donors:
        try:
            return await _download_from(
                transport,
                donor,
                address=address,
                own_id=own_id,
                max_bytes=max_bytes,
                wanted=wanted,
                silence_seconds=silence_seconds,
            )
        except SwarmError as error:
            logger.warning("no snapshot from %s: %s", donor.peer_id, error)
    raise PeerUnavailable(f"none of {len(donors)} donors delivered a snapshot")


async def _download_from(
    transport: Transport, donor: PeerRecord, *, address: Address, own_id: str, max_bytes: int,
    wanted: Callable[[messages.Standing], bool], silence_seconds: float,
) -> tuple[Snapshot, list[pb.Outcome]]:  # fmt: skip
    request = pb.DownloadRequest(address=address, peer_id=own_id)
    header: pb.SnapshotHeader | None = None
    reader = TensorReader({})
    digest = hashlib.sha256()
    async for reply in transport.download(donor, request, silence_seconds=silence_seconds):
        match reply.WhichOneof("message"):
            case "header" if header is None:
                header = reply.header
                if not wanted(messages.unpack_standing(header.standing)):
                    raise NotReady("it is not ahead")
                digest.update(header.SerializeToString(deterministic=True))
                reader = TensorReader(_specs(header, max_bytes))
            case "chunk":
                digest.update(reply.chunk.data)
                _feed(reader, reply.chunk)
            case "end" if header is not None:
                if reply.end.sha256 != digest.digest() or not reader.complete:
                    raise IntegrityError("the snapshot does not match its digest")
                return _snapshot(header, reader.tensors), list(header.outcomes)
            case _:
                raise MalformedMessage("the pieces of the snapshot come in the wrong order")
    raise PeerUnavailable("the snapshot ended early")


def _feed(reader: TensorReader, chunk: TensorChunk) -> None:
    try:
        reader.feed(chunk)
    except MalformedMessage as error:
        raise IntegrityError(f"the snapshot contradicts its header: {error}") from None


def _specs(header: pb.SnapshotHeader, max_bytes: int) -> dict[str, TensorSpec]:
    if any(tensor.encoding not in DTYPES for tensor in header.tensors):
        raise MalformedMessage("the snapshot has tensors of an unknown type")
    specs = {t.name: TensorSpec(shape=tuple(t.shape), encoding=t.encoding) for t in header.tensors}
    num_bytes = sum(spec.num_bytes for spec in specs.values())
    if num_bytes > max_bytes:
        raise MalformedMessage(f"the snapshot has {num_bytes} bytes, more than the {max_bytes} that are sensible here")
    return specs


def _snapshot(header: pb.SnapshotHeader, tensors: dict[str, torch.Tensor]) -> Snapshot:
    return Snapshot(
        round=header.standing.round, run_samples=header.standing.run_samples, lineage=header.standing.lineage,
        tensors=tensors, digest=header.state_digest,
    )  # fmt: skip
