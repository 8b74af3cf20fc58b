"""The terms of an exchange, and what both ways to exchange share: calls to all members, what comes out, its digest, and
bounds for what others send.

Shapes: D elements of the vector, P of a part, N of either.
"""

import asyncio
import math
import struct
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from blake3 import blake3

from swarm.averaging.agreement.messages import MemberFailed
from swarm.averaging.agreement.shares import Share, Shares
from swarm.averaging.wire.transport import Payload
from swarm.compression.codec import Buffer, Codec, simple_codec
from swarm.compression.feedback import Residual
from swarm.errors import MalformedMessage, SwarmError
from swarm.honesty.comparison import Deviation
from swarm.training.scaling import squared_norm_of_vector
from swarm.training.sketches import Stated
from swarm.training.tally import Given

LARGEST_CONTRIBUTION = 1e15
"""The largest magnitude that is accepted from another member: neither its square nor a sum of many such squares
overflows."""
Compare = Callable[[Mapping[str, torch.Tensor], Mapping[str, Stated]], Sequence[Deviation]]
"""Compares the members' contributions to a part, by their ids, with each other and with what they state of them, and
returns those that are out of line."""


def no_deviations(parts: Mapping[str, torch.Tensor], stated: Mapping[str, Stated]) -> Sequence[Deviation]:
    """Compare nothing."""
    return ()


@dataclass(frozen=True, kw_only=True)
class Average:
    """The result of an exchange. The vector and the digest are the same at every member.

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


class Answer:
    """What a member answers the others in an exchange, once it is known."""

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

    async def with_all(self, fetches: Mapping[str, Callable[[], Coroutine[Any, Any, None]]], side: Answer) -> None:
        """Run all fetches at once. If one fails, the others are cancelled, and members that wait for this one get the
        reason."""

        # Failures are collected here, because an exception that left the task group would keep the group, and all
        # frames with their vectors, in a reference cycle.
        failures: list[MemberFailed] = []

        async def one(peer_id: str) -> None:
            try:
                await fetches[peer_id]()
            except MemberFailed as error:
                failures.append(error.anew())
            except SwarmError as error:
                failures.append(MemberFailed(peer_id, str(error), noticed_by=self.own_id))
            if failures:
                for other in running:
                    other.cancel()

        running: list[asyncio.Task[None]] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                running += [tasks.create_task(one(peer_id)) for peer_id in fetches]
        except BaseException as error:
            side.fail(MemberFailed(self.own_id, "the exchange was given up", noticed_by=self.own_id))
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

    def late(self, peer_id: str, seconds: float) -> MemberFailed:
        return MemberFailed(peer_id, f"its contribution did not come within {seconds:.1f} s", noticed_by=self.own_id)

    def digest_of(self, payloads: dict[str, Payload], *, with_norms: bool) -> str:
        """BLAKE3 digest of the members and the bytes that they apply, in hexadecimal."""
        digest = blake3(self.shares.digest.encode())
        for share in self.shares.members:
            if (payload := payloads.get(share.peer_id)) is not None:
                digest.update(payload.encoded)
                if with_norms:
                    digest.update(struct.pack("<d", payload.squared_norm))
        return digest.hexdigest()

    def sent(self, *, gathers: bool) -> tuple[int, float]:
        """The bytes that this member sends, and the compression ratio; see Average."""
        sent = sent_bytes(self.shares, self.own, self.codec, self.result_codec, gathers=gathers)
        fp32 = simple_codec("fp32")
        return sent, sent_bytes(self.shares, self.own, fp32, fp32, gathers=False) / sent if sent else 1.0


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
