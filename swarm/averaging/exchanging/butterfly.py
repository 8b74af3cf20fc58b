"""Butterfly, one way of all-reduce: each member sums the part of the vector that it owns, and sends the sum to all.

Used by exchanging/exchange. Work on whole vectors runs in threads, never on the event loop.

Shapes: D elements of the vector, P of a part.
"""

import asyncio
import math
import statistics
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
from swarm.averaging.exchanging.reduction import Payload, Reduction, decode_bounded
from swarm.compression.codec import Buffer
from swarm.errors import MalformedMessage
from swarm.machine.memory import Recycler


async def butterfly(vector_D: torch.Tensor, reduction: Reduction, terms: Terms, memory: Recycler) -> Average:
    """Sum the members' vectors, part by part at the parts' owners.

    Args:
        vector_D: this member's contribution; finite.
        reduction: this member's own part, which other members may be adding to already.
        memory: supplies the memory for the result.

    Raises:
        MemberFailed: the exchange failed. Members that wait for this one's part get the error too, as they do when the
            call is cancelled.
    """
    return await _Butterfly(vector_D, reduction, terms, memory).run()


class _Butterfly:
    def __init__(self, vector_D: torch.Tensor, reduction: Reduction, terms: Terms, memory: Recycler) -> None:
        members = zip(terms.shares.members, terms.shares.parts, strict=True)
        self._vector_D = vector_D
        self._reduction = reduction
        self._terms = terms
        self._owners = {share.peer_id: part for share, part in members if share.num_elements}
        self._payloads: dict[str, Payload] = {}
        self._residual_D: torch.Tensor | None = None
        # If this member owns the whole vector, its sum is the result, and needs no memory of its own.
        is_only_owner = self._owners.keys() == {terms.own_id}
        self._result_D = vector_D if is_only_owner else memory.vector(vector_D.numel())

    async def run(self) -> Average:
        terms = self._terms
        if terms.codec.needs_feedback and terms.own.contributes:
            self._residual_D = await asyncio.to_thread(torch.zeros_like, self._vector_D)
        fetches = {owner: partial(self._fetch, owner, part) for owner, part in self._owners.items()}
        await with_all(fetches, terms.own_id, self._reduction)
        digest = await asyncio.to_thread(digest_of, terms.shares, self._payloads, with_norms=True)
        return self._average(digest)

    async def _fetch(self, owner_id: str, part: slice) -> None:
        terms = self._terms
        if owner_id == terms.own_id:
            own_P = self._vector_D[part]
            payload = await _reduce_own(own_P, terms.own_id, self._reduction, OWNER_PATIENCE * terms.timeout_seconds)
            assert self._reduction.sum_P is not None
            if len(self._owners) == 1:
                self._result_D = self._reduction.sum_P
            else:
                await asyncio.to_thread(self._result_D[part].copy_, self._reduction.sum_P)
        else:
            encoded: Buffer = await asyncio.to_thread(self._encode, part) if terms.own.contributes else b""
            reply_bytes = terms.result_codec.num_bytes(part.stop - part.start)
            payload = await terms.transport.exchange(owner_id, encoded, reply_bytes)
            if not (math.isfinite(payload.squared_norm) and payload.squared_norm >= 0):
                raise MalformedMessage("the norm of an averaged part is not a finite number")
            await asyncio.to_thread(self._decode, payload, part)
        self._payloads[owner_id] = payload

    def _encode(self, part: slice) -> Buffer:
        codec, part_P = self._terms.codec, self._vector_D[part]
        encoded = codec.encode(part_P)
        if self._residual_D is not None:
            torch.sub(part_P, codec.decode(encoded, part_P.numel()), out=self._residual_D[part])
        return encoded

    def _decode(self, payload: Payload, part: slice) -> None:
        self._result_D[part] = decode_bounded(
            self._terms.result_codec, payload.encoded, part.stop - part.start, payload.squared_norm
        )

    def _average(self, digest: str) -> Average:
        codec, result_codec = self._terms.codec, self._terms.result_codec
        shares, own = self._terms.shares, self._terms.own
        lengths = {owner: part.stop - part.start for owner, part in self._owners.items()}
        elsewhere = [length for owner, length in lengths.items() if owner != own.peer_id]
        num_senders = sum(share.peer_id != own.peer_id for share in shares.senders)
        sent = sum(map(codec.num_bytes, elsewhere)) if own.contributes else 0
        sent += result_codec.num_bytes(own.num_elements) * (len(shares.members) - 1)
        received = sum(map(result_codec.num_bytes, elsewhere)) + codec.num_bytes(own.num_elements) * num_senders
        own_part = self._owners.get(own.peer_id, slice(0, 0))
        return Average(
            vector_D=self._result_D,
            digest=digest,
            squared_norm=sum(self._payloads[owner].squared_norm for owner in self._owners),
            num_samples=shares.round_samples,
            bytes_sent=sent,
            bytes_received=received,
            compression_ratio=compression_ratio(shares, own, sent),
            residual=Residual(contribution_D=self._residual_D, part=own_part, sum_P=self._reduction.residual_P),
            upload_bytes_per_second=_upload_rate(self._payloads, {o: codec.num_bytes(n) for o, n in lengths.items()}),
        )


async def _reduce_own(own_P: torch.Tensor, own_id: str, reduction: Reduction, timeout_seconds: float) -> Payload:
    if own_id in reduction.missing:
        reduction.add_decoded(own_id, own_P)
    try:
        async with asyncio.timeout(timeout_seconds):
            return await reduction.result()
    except TimeoutError:
        blamed = reduction.missing[0] if reduction.missing else own_id
        raise late(blamed, timeout_seconds, own_id) from None


def _upload_rate(payloads: dict[str, Payload], sent_bytes: dict[str, int]) -> float:
    """The line's rate: the median of the streams' rates times their number, so that one slow receiver does not
    count."""
    rates = [sent_bytes[peer] / p.upload_seconds for peer, p in payloads.items() if p.upload_seconds > 0]
    return len(rates) * statistics.median(rates) if rates else 0.0
