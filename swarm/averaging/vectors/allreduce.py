"""All-reduce: the members' vectors become one weighted sum, the same bits at every member.

Butterfly: every member owns one part of the vector and sums that part for all. It encodes the sum once and sends it to
all members, which apply the same bytes. A part has one owner throughout the attempt: nobody takes it over. If the owner
fails, so does the exchange, and with it the attempt (agreement/blame.py), or in the first exchanges its group alone.
Gather, for sparse codecs in small groups: every member gets all contributions as they are and sums them itself, in the
same order and with the same roundings. Rounds and gRPC are not known here. Work on whole vectors runs in threads, never
on the event loop.

Shapes: D elements of the vector.
"""

import asyncio
import math
import statistics
import struct
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from blake3 import blake3

from swarm.averaging.agreement.messages import MemberFailed
from swarm.averaging.agreement.shares import Share, Shares
from swarm.averaging.agreement.timing import OWNER_PATIENCE
from swarm.averaging.vectors.reduction import HandOut, Reduction, Side, decode_bounded
from swarm.averaging.wire.transport import Payload
from swarm.compression.codec import Buffer, Codec, simple_codec
from swarm.compression.feedback import Residual
from swarm.errors import MalformedMessage, SwarmError
from swarm.honesty.comparison import Deviation
from swarm.machine.memory import Recycler
from swarm.training.scaling import squared_norm_of_vector
from swarm.training.tally import Given


@dataclass(frozen=True, kw_only=True)
class Average:
    """The result of an exchange. The vector, the digest and the samples are the same at every member.

    Attributes:
        squared_norm: of the vector. In a gather its last bits may differ between kinds of processors.
        compression_ratio: the bytes that this member would have sent in a float32 butterfly among the same members,
            divided by `bytes_sent`; 1 if it sent nothing.
        residual: what error feedback is to keep if this average is committed.
        upload_bytes_per_second: the rate at which this member sent; 0 if that was not measured.
        deviations: by owner of a part, the members whose contributions to it are out of line. In a gather this member
            knows what all others find, since they have the same bytes.
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
    deviations: Mapping[str, Sequence[Deviation]]


class AllReduceTransport(Protocol):
    """How a member reaches another one."""

    async def exchange(self, peer_id: str, part: Buffer, reply_bytes: int, *, waits: bool = True) -> Payload:
        """Send a part (or nothing) and wait for the answer, which is `reply_bytes` long. `waits` says whether the peer
        itself has to wait for other members before it can answer; if not, a long silence counts as a failure. Raises
        MemberFailed if the peer says that another member failed, and SwarmError if the peer itself failed, or
        refused."""


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


def digest_of_whole(given: Mapping[str, Given], vector_D: torch.Tensor, amended: str = "") -> str:
    """BLAKE3 digest of a result that was averaged in groups, in hexadecimal: the same in whatever parts it came."""
    rows = [" ".join(map(str, [peer_id, *gave])) for peer_id, gave in given.items()]
    digest = blake3("\n".join([*rows, amended]).encode())
    digest.update(vector_D.numpy().data.cast("B"))
    return digest.hexdigest()


def sent_bytes(shares: Shares, own: Share, codec: Codec, result_codec: Codec, *, gathers: bool) -> int:
    """How many bytes a member sends in an exchange: its contribution to all others, or in a butterfly each part of it
    to the part's owner, and its sum to all others."""
    others = [share for share in shares.members if share is not own]
    sizes = [shares.num_elements if gathers else other.num_elements for other in others]
    contributed = sum(map(codec.num_bytes, filter(None, sizes))) if own.contributes else 0
    return contributed + (0 if gathers else result_codec.num_bytes(own.num_elements) * len(others))


def compression_ratio(shares: Shares, own: Share, bytes_sent: int) -> float:
    fp32 = simple_codec("fp32")
    return sent_bytes(shares, own, fp32, fp32, gathers=False) / bytes_sent if bytes_sent else 1.0


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
        sent = sent_bytes(shares, own, codec, result_codec, gathers=False)
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
            deviations={owner: payload.deviations for owner, payload in self._payloads.items()},
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


async def gather(vector_D: torch.Tensor, hand_out: HandOut, terms: Terms) -> Average:
    """Get every member's contribution and sum them here. Raises and is cancelled like `butterfly`. `hand_out` gives
    this member's contribution to the others."""
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

    def add_up() -> tuple[torch.Tensor, Residual, float, Sequence[Deviation]]:
        deviations = hand_out.compare(decoded, {})
        sum_D = torch.zeros(num_elements)
        for share in shares.senders:
            # Multiplied and added in two operations, because a fused one gives other bits on some processors.
            sum_D += decoded[share.peer_id] * share.weight
        residual_D = None
        if codec.needs_feedback and own.contributes:
            residual_D = torch.sub(vector_D, decoded[own_id])
        residual = Residual(contribution_D=residual_D, part=slice(0, 0), sum_P=None)
        return sum_D, residual, squared_norm_of_vector(sum_D), deviations

    await with_all({share.peer_id: partial(fetch, share.peer_id) for share in shares.senders}, own_id, hand_out)
    sum_D, residual, norm, deviations = await asyncio.to_thread(add_up)
    if not math.isfinite(norm):
        # The other contributions are bounded, so the cause can only be this member's own.
        raise MemberFailed(own_id, "the average is not finite", noticed_by=own_id)
    size = codec.num_bytes(num_elements)
    sent = sent_bytes(shares, own, codec, terms.result_codec, gathers=True)
    return Average(
        vector_D=sum_D, digest=await asyncio.to_thread(digest_of, shares, payloads, with_norms=False),
        squared_norm=norm, num_samples=shares.round_samples, bytes_sent=sent,
        bytes_received=size * sum(share.peer_id != own_id for share in shares.senders),
        compression_ratio=compression_ratio(shares, own, sent), residual=residual, upload_bytes_per_second=0.0,
        deviations={share.peer_id: deviations for share in shares.members},
    )  # fmt: skip
