"""The side of an exchange that serves the other members: sum the part that this member owns, or hand out its
contribution.

Rounds and gRPC are not known here. Work on tensors runs in threads, never on the event loop.

Shapes: P elements of the part.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence

import torch

from swarm.averaging.agreement.messages import MemberFailed
from swarm.averaging.agreement.shares import Shares
from swarm.averaging.wire.transport import Payload
from swarm.compression.buffers import slices
from swarm.compression.codec import Buffer, Codec
from swarm.errors import MalformedMessage
from swarm.honesty.comparison import Deviation
from swarm.training.scaling import squared_norm_of_vector
from swarm.training.sketches import NOTHING_STATED, Stated

CACHED_ELEMENTS = 1 << 17
"""How many elements are summed at a time, so that the sum stays in the processor's cache."""
LARGEST_CONTRIBUTION = 1e15
"""The largest magnitude that is accepted from another member: neither its square nor a sum of many such squares
overflows."""


Compare = Callable[[Mapping[str, torch.Tensor], Mapping[str, Stated]], Sequence[Deviation]]
"""Compares the members' contributions to a part, by their ids, with each other and with what they state of them, and
returns those that are out of line."""


def no_deviations(parts: Mapping[str, torch.Tensor], stated: Mapping[str, Stated]) -> Sequence[Deviation]:
    """Compare nothing."""
    return ()


class _Answer:
    def __init__(self) -> None:
        self._result: asyncio.Future[Payload | MemberFailed] = asyncio.get_running_loop().create_future()

    async def result(self) -> Payload:
        """Wait for the answer. Raises MemberFailed if there will be none."""
        outcome = await asyncio.shield(self._result)
        if isinstance(outcome, MemberFailed):
            raise outcome.anew()
        return outcome

    def fail(self, error: MemberFailed) -> None:
        if not self._result.done():
            self._result.set_result(error.anew())


class HandOut(_Answer):
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


class Reduction(_Answer):
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


Side = Reduction | HandOut
"""One member's side of an exchange, as the others see it."""


def decode_bounded(codec: Codec, encoded: Buffer, num_elements: int, norm: float | None = None) -> torch.Tensor:
    """Decode another member's part or contribution, within bounds. `norm` is the squared norm that its sender claims,
    if any. Raises MalformedMessage if the bytes do not decode, or hold numbers beyond LARGEST_CONTRIBUTION, or have
    another norm."""
    decoded_N = codec.decode(encoded, num_elements)
    if num_elements and not all(abs(float(extreme)) <= LARGEST_CONTRIBUTION for extreme in torch.aminmax(decoded_N)):
        raise MalformedMessage(f"numbers beyond {LARGEST_CONTRIBUTION:.0e}")
    if norm is not None and not math.isclose(squared_norm_of_vector(decoded_N), norm, rel_tol=1e-3, abs_tol=1e-30):
        raise MalformedMessage("its norm is not what it says")
    return decoded_N
