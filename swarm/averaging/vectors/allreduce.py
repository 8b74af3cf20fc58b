"""All-reduce: the members' vectors become one weighted sum, the same bits at every member.

It is a butterfly: every member owns one part of the vector and sums that part for all. It encodes the sum once and
sends it to all members, which apply the same bytes. A part has one owner throughout the attempt: nobody takes it over.
If the owner fails, so does the exchange, and with it the attempt (agreement/blame.py), or in the first exchanges its
group alone.

With sparse codecs it is a gather while the group is small: every member gets all contributions as they are and sums
them itself. All sum in the same order and with the same roundings, so they end with the same bits.

Rounds and gRPC are not known here. Work on whole vectors runs in threads, never on the event loop.

Shapes: D elements of the vector, P of a part.
"""

import asyncio
import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch

from swarm.averaging.agreement.messages import MemberFailed
from swarm.averaging.agreement.shares import Shares
from swarm.averaging.agreement.timing import OWNER_PATIENCE
from swarm.averaging.vectors.terms import Answer, Average, Compare, Terms, decode_bounded, no_deviations
from swarm.averaging.wire.transport import Payload
from swarm.compression.buffers import slices
from swarm.compression.codec import Buffer, Codec
from swarm.compression.feedback import Owed, Residual
from swarm.errors import MalformedMessage
from swarm.honesty.comparison import Deviation
from swarm.machine.memory import Recycler
from swarm.training.scaling import squared_norm_of_vector
from swarm.training.sketches import NOTHING_STATED, Stated

CACHED_ELEMENTS = 1 << 17
"""How many elements are summed at a time, so that the sum stays in the processor's cache."""


class Reduction(Answer):
    """The owner's side in a butterfly: it collects one part from every member with samples, and sums them once, by
    weight.

    The owner encodes the sum, and all members apply the decoded bytes, the owner too. Its own contribution goes into
    the sum as it is, because it does not travel.
    """

    def __init__(
        self, shares: Shares, own_id: str, *, codec: Codec, result_codec: Codec,
        owed: Callable[[], torch.Tensor | None] = lambda: None, compare: Compare = no_deviations,
    ) -> None:  # fmt: skip
        """`codec` is that of the contributions, and `result_codec` that of the sum. `owed` gives the debt of earlier
        sums, to be added to this one; it is called on the thread that sums."""
        super().__init__()
        part = shares.part_of[own_id]
        self.num_elements = part.stop - part.start
        self.residual_P: torch.Tensor | None = None
        """What was dropped when the sum was encoded; None before there is a result, or without error feedback."""
        self.sum_P: torch.Tensor | None = None
        """The sum, decoded from its encoded bytes; None before there is a result."""
        self._shares = shares
        self._own_id = own_id
        self._codec = codec
        self._result_codec = result_codec
        self._owed = owed
        self._compare = compare
        self._parts: dict[str, torch.Tensor] = {}
        self._stated: dict[str, Stated] = {}
        self._arrived: set[str] = set()

    @property
    def missing(self) -> Sequence[str]:
        return [share.peer_id for share in self._shares.senders if share.peer_id not in self._arrived]

    def num_bytes_from(self, peer_id: str) -> int:
        """Bytes that a member has to send. Raises MalformedMessage for a peer that is no member."""
        return self._codec.num_bytes(self.num_elements) if self._shares.of(peer_id).contributes else 0

    async def add(self, peer_id: str, encoded: Buffer, stated: Stated = NOTHING_STATED) -> None:
        """Take a member's part, and what it states of it; the last one starts the sum.

        A part that is malformed or out of range ends the exchange for all members, and names its sender.

        Raises MalformedMessage for a part that is there already.
        """
        self._require_missing(peer_id)
        try:
            part_P = await asyncio.to_thread(decode_bounded, self._codec, encoded, self.num_elements)
        except MalformedMessage as error:
            self.fail(MemberFailed(peer_id, f"its contribution is refused: {error}", noticed_by=self._own_id))
            return
        self._require_missing(peer_id)  # Again: the same part may have come twice at once.
        self._stated[peer_id] = stated
        self.add_decoded(peer_id, part_P)

    def _require_missing(self, peer_id: str) -> None:
        if peer_id not in self.missing:
            raise MalformedMessage(f"{peer_id} has sent its part already")

    def add_decoded(self, peer_id: str, part_P: torch.Tensor) -> None:
        """Take a part that needs no decoding: the owner's own."""
        self._parts[peer_id] = part_P
        self._arrived.add(peer_id)
        if not self.missing and not self._result.done():
            # Not awaited here, because a caller that hangs up must not stop the sum for the others.
            work = asyncio.get_running_loop().run_in_executor(None, self._reduce)
            work.add_done_callback(self._finish)

    def _reduce(self) -> Payload:
        deviations = self._compare(self._parts, self._stated)
        weighted = [(self._parts.pop(share.peer_id), share.weight) for share in self._shares.senders]
        sum_P = self._sum(weighted)
        encoded = self._result_codec.encode(sum_P)
        self.sum_P = self._result_codec.decode(encoded, self.num_elements)
        if self._result_codec.needs_feedback:
            self.residual_P = sum_P.sub_(self.sum_P)
        return Payload(encoded=encoded, squared_norm=squared_norm_of_vector(self.sum_P), deviations=deviations)

    def _sum(self, weighted: list[tuple[torch.Tensor, float]]) -> torch.Tensor:
        """The weighted sum of the parts. A single part of weight 1 is returned as it is, if nothing is owed or
        dropped."""
        owed_P = self._owed()
        adds_nothing = owed_P is None and [weight for _, weight in weighted] == [1.0]
        if adds_nothing and not self._result_codec.needs_feedback:
            return weighted[0][0]
        sum_P = torch.empty(self.num_elements) if owed_P is None else owed_P
        for rows in slices(self.num_elements, CACHED_ELEMENTS):
            if owed_P is None:
                sum_P[rows] = 0.0
            for part_P, weight in weighted:
                sum_P[rows].add_(part_P[rows], alpha=weight)
        return sum_P

    def _finish(self, work: "asyncio.Future[Payload]") -> None:
        self._parts.clear()
        if work.cancelled() or self._result.done():
            return
        error = work.exception()
        if error is None:
            self._result.set_result(work.result())
        else:
            self._result.set_exception(error)


class Butterfly:
    """Sums the members' vectors, part by part at the parts' owners."""

    def __init__(self, vector_D: torch.Tensor, reduction: Reduction, terms: Terms, memory: Recycler) -> None:
        """
        Args:
            vector_D: this member's contribution; finite.
            reduction: this member's own part, which other members may be adding to already.
            memory: supplies the memory for the result.
        """
        self._vector_D = vector_D
        self._reduction = reduction
        self._terms = terms
        self._owners = {owner: part for owner, part in terms.shares.part_of.items() if part.stop > part.start}
        self._payloads: dict[str, Payload] = {}
        self._residual_D: torch.Tensor | None = None
        # If this member owns the whole vector, its sum is the result, and needs no memory of its own.
        is_only_owner = self._owners.keys() == {terms.own_id}
        self._result_D = vector_D if is_only_owner else memory.vector(vector_D.numel())

    async def run(self) -> Average:
        """Raises MemberFailed if the exchange failed. Members that wait for this one's part get the error too, as they
        do when the call is cancelled."""
        terms = self._terms
        if terms.codec.needs_feedback and terms.own.contributes:
            self._residual_D = await asyncio.to_thread(torch.zeros_like, self._vector_D)
        fetches = {owner: partial(self._fetch, owner, part) for owner, part in self._owners.items()}
        await terms.with_all(fetches, self._reduction)
        # It covers the shares (members, counts, weights, parts), and the encoded sum and norm of every part.
        digest = await asyncio.to_thread(terms.digest_of, self._payloads, with_norms=True)
        return self._average(digest)

    async def _fetch(self, owner_id: str, part: slice) -> None:
        terms = self._terms
        if owner_id == terms.own_id:
            own_P = self._vector_D[part]
            payload = await _reduce_own(own_P, self._reduction, terms)
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
        sent, ratio = self._terms.sent(gathers=False)
        received = sum(map(result_codec.num_bytes, elsewhere)) + codec.num_bytes(own.num_elements) * num_senders
        dropped_P = self._reduction.residual_P
        owed = () if dropped_P is None else (Owed(shares.part_of[own.peer_id], dropped_P),)
        return Average(
            vector_D=self._result_D,
            digest=digest,
            squared_norm=sum(self._payloads[owner].squared_norm for owner in self._owners),
            bytes_sent=sent,
            bytes_received=received,
            compression_ratio=ratio,
            residual=Residual(contribution_D=self._residual_D, owed=owed),
            upload_bytes_per_second=_upload_rate(self._payloads, {o: codec.num_bytes(n) for o, n in lengths.items()}),
            deviations={owner: payload.deviations for owner, payload in self._payloads.items()},
        )


async def _reduce_own(own_P: torch.Tensor, reduction: Reduction, terms: Terms) -> Payload:
    own_id, timeout_seconds = terms.own_id, OWNER_PATIENCE * terms.timeout_seconds
    if own_id in reduction.missing:
        reduction.add_decoded(own_id, own_P)
    try:
        async with asyncio.timeout(timeout_seconds):
            return await reduction.result()
    except TimeoutError:
        blamed = reduction.missing[0] if reduction.missing else own_id
        raise terms.late(blamed, timeout_seconds) from None


def _upload_rate(payloads: dict[str, Payload], sent_bytes: dict[str, int]) -> float:
    """The line's rate: the median of the streams' rates times their number, so that one slow receiver does not
    count."""
    rates = [sent_bytes[peer] / p.upload_seconds for peer, p in payloads.items() if p.upload_seconds > 0]
    return len(rates) * statistics.median(rates) if rates else 0.0


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
    Raises and is cancelled like Butterfly.run."""
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
