"""Gather, one way of all-reduce: each member gets all contributions as they are, and sums them itself.

Used by exchanging/exchange, for sparse codecs in small groups. Work on whole vectors runs in threads, never on the
event loop.

Shapes: D elements of the vector.
"""

import asyncio
import math
from functools import partial

import torch

from swarm.averaging.exchanging.allreduce import (
    OWNER_PATIENCE,
    Average,
    Terms,
    compression_ratio,
    digest_of,
    late,
    with_all,
)
from swarm.averaging.exchanging.feedback import Residual
from swarm.averaging.exchanging.reduction import HandOut, MemberFailed, Payload, decode_bounded, squared_norm


async def gather(vector_D: torch.Tensor, hand_out: HandOut, terms: Terms) -> Average:
    """Get every member's contribution and sum them here. Raises and is cancelled like `butterfly`.

    Args:
        hand_out: gives this member's contribution to the others.
    """
    own_id, shares, codec, num_elements = terms.own_id, terms.shares, terms.codec, vector_D.numel()
    own = terms.own
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
            # This ends before the attempt is given up, so that the late member can be blamed.
            seconds = OWNER_PATIENCE * terms.timeout_seconds
            try:
                async with asyncio.timeout(seconds):
                    payload = await terms.transport.exchange(peer_id, b"", codec.num_bytes(num_elements), waits=False)
            except TimeoutError:
                raise late(peer_id, seconds, own_id) from None
            decoded[peer_id] = await asyncio.to_thread(decode_bounded, codec, payload.encoded, num_elements)
        payloads[peer_id] = payload

    def add_up() -> tuple[torch.Tensor, Residual, float]:
        sum_D = torch.zeros(num_elements)
        for share in shares.senders:
            # Multiplied and added in two operations, because a fused one gives other bits on some processors.
            sum_D += decoded[share.peer_id] * share.weight
        residual_D = None
        if codec.needs_feedback and own.contributes:
            residual_D = torch.sub(vector_D, decoded[own_id])
        residual = Residual(contribution_D=residual_D, part=slice(0, 0), sum_P=None)
        return sum_D, residual, squared_norm(sum_D)

    await with_all({share.peer_id: partial(fetch, share.peer_id) for share in shares.senders}, own_id, hand_out)
    sum_D, residual, norm = await asyncio.to_thread(add_up)
    if not math.isfinite(norm):
        # The other contributions are bounded, so the cause can only be this member's own.
        raise MemberFailed(own_id, "the average is not finite", noticed_by=own_id)
    size = codec.num_bytes(num_elements)
    sent = size * (len(shares.members) - 1) if own.contributes else 0
    return Average(
        vector_D=sum_D,
        digest=await asyncio.to_thread(digest_of, shares, payloads, with_norms=False),
        squared_norm=norm,
        num_samples=shares.round_samples,
        bytes_sent=sent,
        bytes_received=size * sum(share.peer_id != own_id for share in shares.senders),
        compression_ratio=compression_ratio(shares, own, sent),
        residual=residual,
        upload_bytes_per_second=0.0,
    )
