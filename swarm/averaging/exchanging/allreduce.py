"""All-reduce: the members' vectors become one weighted sum, the same bits at every member.

There are two ways. Butterfly (exchanging/butterfly): every member owns one part of the vector and sums that part for
all. It encodes the sum once and sends it to all members, which apply the same bytes. Gather (exchanging/gather), for
sparse codecs in small groups: every member gets all contributions as they are and sums them itself, in the same order
and with the same roundings. This file holds what both have in common. Used by exchanging/exchange. Rounds and gRPC are
not known here. Work on whole vectors runs in threads, never on the event loop.

Shapes: D elements of the vector.
"""

import asyncio
import struct
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from blake3 import blake3

from swarm.averaging.exchanging.feedback import Residual
from swarm.averaging.exchanging.reduction import MemberFailed, Payload, Side
from swarm.averaging.exchanging.shares import Share, Shares
from swarm.compression.codec import Buffer, Codec
from swarm.errors import SwarmError

OWNER_PATIENCE = 0.8
"""The share of an exchange's time after which an owner blames the member that it still waits for. It must come before
the end, because the others wait for the owner and then blame the owner. In a gather every member is like an owner."""


@dataclass(frozen=True, kw_only=True)
class Average:
    """The result of an exchange. The vector, the digest and the samples are the same at every member.

    Attributes:
        squared_norm: of the vector. In a gather its last bits may differ between kinds of processors.
        compression_ratio: the bytes that this member would have sent in a float32 butterfly among the same members,
            divided by `bytes_sent`; 1 if it sent nothing.
        residual: what error feedback is to keep if this average is committed.
        upload_bytes_per_second: the rate at which this member sent; 0 if that was not measured.
    """

    vector_D: torch.Tensor
    digest: str
    squared_norm: float
    num_samples: int
    bytes_sent: int
    bytes_received: int
    compression_ratio: float
    residual: Residual
    upload_bytes_per_second: float


class AllReduceTransport(Protocol):
    """How a member reaches another one."""

    async def exchange(self, peer_id: str, part: Buffer, reply_bytes: int, *, waits: bool = True) -> Payload:
        """Send a part (or nothing) and wait for the answer, which is `reply_bytes` long.

        Args:
            waits: whether the peer itself has to wait for other members before it can answer. If False, a long silence
                counts as a failure.

        Raises:
            MemberFailed: the peer says that another member failed.
            SwarmError: the peer itself failed, or refused.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The terms of one member's exchange.

    Attributes:
        codec: of the contributions.
        result_codec: of the sums; in a gather no sum travels.
        timeout_seconds: for the whole exchange.
    """

    own_id: str
    shares: Shares
    codec: Codec
    result_codec: Codec
    transport: AllReduceTransport
    timeout_seconds: float

    @property
    def own(self) -> Share:
        """This member's share."""
        return self.shares.of(self.own_id)


async def with_all(fetches: Mapping[str, Callable[[], Coroutine[Any, Any, None]]], own_id: str, side: Side) -> None:
    """Run all fetches at once. If one fails, the others are cancelled, and members that wait for this one get the
    reason."""

    # Failures are collected here, because an exception that left the task group would keep the group, and all frames
    # with their vectors, in a reference cycle.
    failures: list[MemberFailed] = []

    async def one(peer_id: str) -> None:
        try:
            await fetches[peer_id]()
        except MemberFailed as error:
            failures.append(error.anew())
        except SwarmError as error:
            failures.append(MemberFailed(peer_id, str(error), noticed_by=own_id))
        if failures:
            for other in running:
                other.cancel()

    running: list[asyncio.Task[None]] = []
    try:
        async with asyncio.TaskGroup() as tasks:
            running += [tasks.create_task(one(peer_id)) for peer_id in fetches]
    except BaseException as error:
        side.fail(MemberFailed(own_id, "the exchange was given up", noticed_by=own_id))
        # A cancellation leaves the group, and would make two reference cycles. The error's traceback refers to the
        # group's frame, which refers to the error. And the group refers to the task that ends with the error.
        error.__traceback__ = None
        raise
    finally:
        running.clear()
        del tasks
    if failures:
        side.fail(failures[0])
        raise failures[0].anew()


def late(peer_id: str, seconds: float, own_id: str) -> MemberFailed:
    """Make the error for a member whose contribution did not come in time."""
    return MemberFailed(peer_id, f"its contribution did not come within {seconds:.1f} s", noticed_by=own_id)


def digest_of(shares: Shares, payloads: dict[str, Payload], *, with_norms: bool) -> str:
    """BLAKE3 digest of the members and the bytes that they apply, in hexadecimal."""
    digest = blake3(shares.digest.encode())
    for share in shares.members:
        if (payload := payloads.get(share.peer_id)) is not None:
            digest.update(payload.encoded)
            if with_norms:
                digest.update(struct.pack("<d", payload.squared_norm))
    return digest.hexdigest()


def compression_ratio(shares: Shares, own: Share, bytes_sent: int) -> float:
    """The figure of that name in `Average`. In a butterfly a member sends its contribution to the other owners, and its
    sum to all others."""
    contributed = shares.num_elements - own.num_elements if own.contributes else 0
    handed_back = own.num_elements * (len(shares.members) - 1)
    return torch.float32.itemsize * (contributed + handed_back) / bytes_sent if bytes_sent else 1.0
