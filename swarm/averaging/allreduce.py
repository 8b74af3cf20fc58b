"""All-reduce: the members' vectors become one weighted sum, the same bits at every member.

Two ways. Butterfly: every member owns one part of the vector, sums it for all, and hands it back; the owner encodes
the sum once, and everybody applies those bytes. Gather, for sparse codecs in small groups: every member gets all
contributions as they are and sums them itself, in the same order and with the same roundings. Used by
averaging/participant. Knows nothing of rounds or of gRPC. Work on whole vectors runs in threads, never on the event
loop.

Shapes: D elements of the vector, P of a part.
"""

import asyncio
import math
import statistics
import struct
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from blake3 import blake3

from swarm.averaging.feedback import Residual
from swarm.averaging.reduction import Exchanged, HandOut, MemberFailed, Payload, Reduction, decode_bounded, squared_norm
from swarm.averaging.shares import Share, Shares
from swarm.compression.codec import Buffer, Codec
from swarm.errors import MalformedMessage, SwarmError
from swarm.machine.memory import Recycler

OWNER_PATIENCE = 0.8
"""Share of an exchange's time after which an owner names the member it still waits for; before the others,
who wait for the owner, would name the owner. In a gather everybody does so."""


@dataclass(frozen=True, kw_only=True)
class Average:
    """What all members end with: the vector, the digest and the samples are the same everywhere.

    Attributes:
        squared_norm: of the vector; with Gather it may differ in the last bits between kinds of processors.
        compression_ratio: bytes that this member would have sent in a butterfly of float32 among the same members, over
            `bytes_sent`; 1 where it sent nothing.
        residual: what error feedback is to keep if this is committed.
        upload_bytes_per_second: what this member's line carried away; 0 if it sent nothing that could tell.
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
        """Send a part (or nothing) and wait for what comes back, `reply_bytes` long.

        Args:
            waits: whether the peer itself has to wait for other members before it can answer. One that has not may
                not be silent for long.

        Raises:
            MemberFailed: the peer says that another member failed.
            SwarmError: the peer itself failed, or refused.
        """
        ...


async def butterfly(
    vector_D: torch.Tensor, *, own_id: str, shares: Shares, reduction: Reduction, codec: Codec, result_codec: Codec,
    transport: AllReduceTransport, timeout_seconds: float, memory: Recycler,
) -> Average:  # fmt: skip
    """Sum the members' vectors, part by part at the parts' owners.

    Args:
        vector_D: this member's contribution; finite.
        reduction: this member's own part, which other members may be adding to already.
        codec: of the contributions.
        result_codec: of the sums.
        memory: for the result.

    Raises:
        MemberFailed: the exchange failed. Then, as on cancellation, those who wait for this member's part
            are told.
    """
    own = shares.of(own_id)
    keeps_residual = codec.needs_feedback and own.num_samples > 0
    residual_D = await asyncio.to_thread(torch.zeros_like, vector_D) if keeps_residual else None
    payloads: dict[str, Payload] = {}
    owners = {
        share.peer_id: part for share, part in zip(shares.members, shares.parts, strict=True) if share.num_elements
    }
    # The sum of a member that owns all of the vector is the result as it is.
    result_D = vector_D if owners.keys() == {own_id} else memory.vector(vector_D.numel())

    def encode(part: slice) -> Buffer:
        encoded = codec.encode(vector_D[part])
        if residual_D is not None:
            torch.sub(vector_D[part], codec.decode(encoded, part.stop - part.start), out=residual_D[part])
        return encoded

    def decode(payload: Payload, part: slice) -> None:
        length = part.stop - part.start
        result_D[part] = decode_bounded(result_codec, payload.encoded, length, payload.squared_norm)

    async def fetch(owner_id: str, part: slice) -> None:
        nonlocal result_D
        num_elements = part.stop - part.start
        if owner_id == own_id:
            payload = await _reduce_own(vector_D[part], own_id, reduction, OWNER_PATIENCE * timeout_seconds)
            assert reduction.sum_P is not None
            if len(owners) == 1:
                result_D = reduction.sum_P
            else:
                await asyncio.to_thread(result_D[part].copy_, reduction.sum_P)
        else:
            encoded: Buffer = await asyncio.to_thread(encode, part) if own.num_samples else b""
            payload = await transport.exchange(owner_id, encoded, result_codec.num_bytes(num_elements))
            if not (math.isfinite(payload.squared_norm) and payload.squared_norm >= 0):
                raise MalformedMessage("the norm of an averaged part is not a finite number")
            await asyncio.to_thread(decode, payload, part)
        payloads[owner_id] = payload

    await _with_all({owner: partial(fetch, owner, part) for owner, part in owners.items()}, own_id, reduction)

    lengths = {owner: part.stop - part.start for owner, part in owners.items()}
    elsewhere = [lengths[owner] for owner in owners if owner != own_id]
    num_senders = sum(share.peer_id != own_id for share in shares.senders)
    sent = sum(map(codec.num_bytes, elsewhere)) if own.num_samples else 0
    sent += result_codec.num_bytes(own.num_elements) * (len(shares.members) - 1)
    return Average(
        vector_D=result_D,
        digest=await asyncio.to_thread(_digest, shares, payloads, with_norms=True),
        squared_norm=sum(payloads[owner].squared_norm for owner in owners),
        num_samples=shares.round_samples,
        bytes_sent=sent,
        bytes_received=sum(map(result_codec.num_bytes, elsewhere)) + codec.num_bytes(own.num_elements) * num_senders,
        compression_ratio=_ratio(shares, own, sent),
        residual=Residual(contribution_D=residual_D, part=owners.get(own_id, slice(0, 0)), sum_P=reduction.residual_P),
        upload_bytes_per_second=_upload_rate(payloads, {o: codec.num_bytes(n) for o, n in lengths.items()}),
    )


async def gather(
    vector_D: torch.Tensor, *, own_id: str, shares: Shares, hand_out: HandOut, codec: Codec,
    transport: AllReduceTransport, timeout_seconds: float,
) -> Average:  # fmt: skip
    """Get every member's contribution and sum them here; as `butterfly` otherwise.

    Args:
        hand_out: what gives this member's contribution to the others.
    """
    own, num_elements = shares.of(own_id), vector_D.numel()
    payloads: dict[str, Payload] = {}
    decoded: dict[str, torch.Tensor] = {}

    def encode() -> Payload:
        encoded = codec.encode(vector_D)
        decoded[own_id] = codec.decode(encoded, num_elements)
        return Payload(encoded=encoded, squared_norm=0.0)

    async def fetch(peer_id: str) -> None:
        if peer_id == own_id:
            payload = await asyncio.to_thread(encode)
            hand_out.offer(payload)
        else:
            # Before the attempt is given up here, for then nobody would know because of whom.
            seconds = OWNER_PATIENCE * timeout_seconds
            try:
                async with asyncio.timeout(seconds):
                    payload = await transport.exchange(peer_id, b"", codec.num_bytes(num_elements), waits=False)
            except TimeoutError:
                raise _late(peer_id, seconds, own_id) from None
            decoded[peer_id] = await asyncio.to_thread(decode_bounded, codec, payload.encoded, num_elements)
        payloads[peer_id] = payload

    def add_up() -> tuple[torch.Tensor, Residual, float]:
        sum_D = torch.zeros(num_elements)
        for share in shares.senders:
            # Two roundings, not a fused one: only these are the same on every processor.
            sum_D += decoded[share.peer_id] * share.weight
        residual_D = None
        if codec.needs_feedback and own.num_samples:
            residual_D = torch.sub(vector_D, decoded[own_id])
        residual = Residual(contribution_D=residual_D, part=slice(0, 0), sum_P=None)
        return sum_D, residual, squared_norm(sum_D)

    await _with_all({share.peer_id: partial(fetch, share.peer_id) for share in shares.senders}, own_id, hand_out)
    sum_D, residual, norm = await asyncio.to_thread(add_up)
    if not math.isfinite(norm):
        # What the others sent is bounded: it can only be its own.
        raise MemberFailed(own_id, "the average is not finite", noticed_by=own_id)
    size = codec.num_bytes(num_elements)
    sent = size * (len(shares.members) - 1) if own.num_samples else 0
    return Average(
        vector_D=sum_D, digest=await asyncio.to_thread(_digest, shares, payloads, with_norms=False),
        squared_norm=norm, num_samples=shares.round_samples,
        bytes_sent=sent,
        bytes_received=size * sum(share.peer_id != own_id for share in shares.senders),
        compression_ratio=_ratio(shares, own, sent), residual=residual, upload_bytes_per_second=0.0,
    )  # fmt: skip


async def _with_all(
    fetches: Mapping[str, Callable[[], Coroutine[Any, Any, None]]], own_id: str, exchanged: Exchanged
) -> None:
    """Do all at once. If one fails, the others end, and whoever waits for this member is told why."""

    # An exception that left the task group would hold the group, and all frames with their vectors, in a cycle.
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
        exchanged.fail(MemberFailed(own_id, "the exchange was given up", noticed_by=own_id))
        # A cancellation does leave it. Of its two cycles one is through the group's frame, which keeps the error and is
        # in its traceback, the other through the group, which keeps the task that the error ends.
        error.__traceback__ = None
        raise
    finally:
        running.clear()
        del tasks
    if failures:
        exchanged.fail(failures[0])
        raise failures[0].anew()


async def _reduce_own(own_P: torch.Tensor, own_id: str, reduction: Reduction, timeout_seconds: float) -> Payload:
    if own_id in reduction.missing:
        reduction.add_decoded(own_id, own_P)
    try:
        async with asyncio.timeout(timeout_seconds):
            return await reduction.result()
    except TimeoutError:
        blamed = reduction.missing[0] if reduction.missing else own_id
        raise _late(blamed, timeout_seconds, own_id) from None


def _late(peer_id: str, seconds: float, own_id: str) -> MemberFailed:
    return MemberFailed(peer_id, f"its contribution did not come within {seconds:.1f} s", noticed_by=own_id)


def _digest(shares: Shares, payloads: dict[str, Payload], *, with_norms: bool) -> str:
    digest = blake3(shares.digest.encode())
    for share in shares.members:
        if (payload := payloads.get(share.peer_id)) is not None:
            digest.update(payload.encoded)
            if with_norms:
                digest.update(struct.pack("<d", payload.squared_norm))
    return digest.hexdigest()


def _ratio(shares: Shares, own: Share, bytes_sent: int) -> float:
    """See `Average`. A butterfly's member sends its contribution to the other owners, and its sum to all others."""
    contributed = shares.num_elements - own.num_elements if own.num_samples else 0
    handed_back = own.num_elements * (len(shares.members) - 1)
    return torch.float32.itemsize * (contributed + handed_back) / bytes_sent if bytes_sent else 1.0


def _upload_rate(payloads: dict[str, Payload], sent_bytes: dict[str, int]) -> float:
    """The line's rate: what the median stream carried, times their number; one slow receiver does not count."""
    rates = [sent_bytes[peer] / p.upload_seconds for peer, p in payloads.items() if p.upload_seconds > 0]
    return len(rates) * statistics.median(rates) if rates else 0.0
