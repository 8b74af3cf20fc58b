"""The exchange of sparse codecs in small groups: every member gets all contributions as they are and sums them itself.

All sum in the same order and with the same roundings, so they end with the same bits.

Shapes: D elements of the vector.
"""

import asyncio
import math
from collections.abc import Sequence
from functools import partial

import torch

from swarm.averaging.agreement.messages import MemberFailed
from swarm.averaging.agreement.shares import Shares
from swarm.averaging.agreement.timing import OWNER_PATIENCE
from swarm.averaging.vectors.terms import Answer, Average, Compare, Terms, decode_bounded, no_deviations
from swarm.averaging.wire.transport import Payload
from swarm.compression.feedback import Residual
from swarm.honesty.comparison import Deviation
from swarm.training.scaling import squared_norm_of_vector


class HandOut(Answer):
    """A member's side in a gather (sparse codecs, small groups): it sends its whole contribution to all others."""

    missing: Sequence[str] = ()
    """Always empty, because no member sends anything."""

    def __init__(self, shares: Shares, compare: Compare = no_deviations) -> None:
        super().__init__()
        self.compare = compare
        self._shares = shares

    def num_bytes_from(self, peer_id: str) -> int:
        """Bytes that a member has to send: none. Raises MalformedMessage for a peer that is no member."""
        self._shares.of(peer_id)
        return 0

    def offer(self, payload: Payload) -> None:
        if not self._result.done():
            self._result.set_result(payload)


async def gather(vector_D: torch.Tensor, hand_out: HandOut, terms: Terms) -> Average:
    """Get every member's contribution and sum them here. `hand_out` gives this member's contribution to the others.
    Raises and is cancelled like allreduce.butterfly."""
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
                raise terms.late(peer_id, seconds) from None
            decoded[peer_id] = await asyncio.to_thread(decode_bounded, codec, payload.encoded, num_elements)
        payloads[peer_id] = payload

    def add_up() -> tuple[torch.Tensor, Residual, float, Sequence[Deviation]]:
        deviations = hand_out.compare(decoded, {})
        sum_D = torch.zeros(num_elements)
        for share in shares.senders:
            # Multiplied and added in two operations, because a fused one gives other bits on some processors.
            sum_D += decoded[share.peer_id] * share.weight
        residual_D = None
        if codec.needs_feedback and own.contributes:
            residual_D = torch.sub(vector_D, decoded[own_id])
        return sum_D, Residual(contribution_D=residual_D), squared_norm_of_vector(sum_D), deviations

    await terms.with_all({share.peer_id: partial(fetch, share.peer_id) for share in shares.senders}, hand_out)
    sum_D, residual, norm, deviations = await asyncio.to_thread(add_up)
    if not math.isfinite(norm):
        # The other contributions are bounded, so the cause can only be this member's own.
        raise MemberFailed(own_id, "the average is not finite", noticed_by=own_id)
    size = codec.num_bytes(num_elements)
    sent, ratio = terms.sent(gathers=True)
    return Average(
        vector_D=sum_D, digest=await asyncio.to_thread(terms.digest_of, payloads, with_norms=False),
        squared_norm=norm, bytes_sent=sent,
        bytes_received=size * sum(share.peer_id != own_id for share in shares.senders),
        compression_ratio=ratio, residual=residual, upload_bytes_per_second=0.0,
        deviations={share.peer_id: deviations for share in shares.members},
    )  # fmt: skip
