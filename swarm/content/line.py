"""Asks one peer for content by its digest: the client side of ContentService.

Used by fetcher.py. Every answer is checked. Never retries.
"""

import asyncio
import hashlib
from contextlib import aclosing
from enum import StrEnum
from typing import Any

from swarm.errors import IntegrityError, MalformedMessage
from swarm.rpc.channels import ChannelPool
from swarm.rpc.download import download
from swarm.rpc.v1 import content_pb2 as pb
from swarm.rpc.v1.content_pb2_grpc import ContentServiceStub
from swarm.types import PeerRecord

SILENCE_SECONDS = 20.0
"""Longest wait for a peer's next piece: four times as long as the peer holds a piece back for an exchange."""


class Kind(StrEnum):
    """The kind of content: the method of ContentService."""

    WEIGHTS = "Weights"
    TOKENIZER = "Tokenizer"


class Line:
    """Makes calls to other peers, on the connections for bulk transfers."""

    def __init__(self, run_id: str, channels: ChannelPool, *, own_id: str) -> None:
        self._run_id = run_id
        self._own_id = own_id
        self._channels = channels

    async def ask(self, peer: PeerRecord, kind: Kind, sha256: str, *, max_bytes: int) -> bytes:
        """Get the content that has this digest.

        Raises:
            NotReady: the peer does not have it.
            Overloaded: the peer serves others first.
            IntegrityError, MalformedMessage: the peer sent something else.
            PeerUnavailable, DeadlineExceeded: the peer is gone, or was silent.
        """
        stub = ContentServiceStub(self._channels.channel(peer, bulk=True))
        request = pb.ContentRequest(run_id=self._run_id, sha256=bytes.fromhex(sha256), peer_id=self._own_id)
        call: Any = getattr(stub, kind.value)(request)
        content = bytearray()
        async with aclosing(download(call, peer.peer_id, silence_seconds=SILENCE_SECONDS)) as pieces:
            async for piece in pieces:
                if not 0 < len(piece.data) <= max_bytes - len(content):
                    raise MalformedMessage(f"{peer.peer_id} sends more than {max_bytes} bytes, or nothing")
                content += piece.data
        # In a thread, because it takes milliseconds.
        if (await asyncio.to_thread(hashlib.sha256, content)).hexdigest() != sha256:
            raise IntegrityError(f"what {peer.peer_id} sent does not match its digest")
        return bytes(content)
