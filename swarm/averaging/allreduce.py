"""Butterfly all-reduce: every member owns one part of the vector, sums it for all, and hands it back.

Used by averaging/participant. An owner encodes its reduced part once and everybody, the owner included,
applies the decoded bytes: so all members end with the same bits. Knows nothing of rounds or of gRPC. Work on
whole vectors runs in threads, never on the event loop.

Shapes: D elements of the vector, P of a part.
"""

import asyncio
import hashlib
import itertools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from swarm.compression.codec import Buffer, Codec
from swarm.errors import MalformedMessage, Retryable, SwarmError
from swarm.rounds import Tensors

OWNER_PATIENCE = 0.8
"""Share of an exchange's time after which an owner names the member it still waits for; before the others,
who wait for the owner, would name the owner."""


class MemberFailed(Retryable):
    """The exchange cannot be completed, and one member seems to be the cause."""

    def __init__(self, peer_id: str, reason: str) -> None:
        super().__init__(reason)
        self.peer_id = peer_id


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A member and the samples behind its contribution; with none it sends nothing and receives all the same."""

    peer_id: str
    num_samples: int


@dataclass(frozen=True, kw_only=True)
class ReducedPart:
    """One part's average as it travels."""

    encoded: Buffer
    squared_norm: float


@dataclass(frozen=True, kw_only=True)
class Average:
    """What all members end with; all but the byte counts are the same bits everywhere."""

    vector_D: torch.Tensor
    digest: str
    squared_norm: float
    num_samples: int
    bytes_sent: int
    bytes_received: int
    compression_ratio: float


class AllReduceTransport(Protocol):
    """How a member reaches the owner of a part."""

    async def exchange(self, owner_id: str, part: Buffer, reply_bytes: int) -> ReducedPart:
        """Send a contribution (or nothing) and wait for the average, `reply_bytes` long.

        Raises:
            MemberFailed: the owner says that another member failed.
            SwarmError: the owner itself failed, or refused.
        """
        ...


def flatten(tensors: Tensors) -> torch.Tensor:
    """One float32 vector of all tensors in the order of their names."""
    return torch.cat([tensors[name].detach().float().flatten() for name in sorted(tensors)])


def unflatten(vector_D: torch.Tensor, like: Tensors) -> dict[str, torch.Tensor]:
    """The inverse of `flatten`: views of the vector, with the shapes of `like`."""
    tensors, start = {}, 0
    for name in sorted(like):
        end = start + like[name].numel()
        tensors[name] = vector_D[start:end].view(like[name].shape)
        start = end
    return tensors


def split(num_elements: int, num_parts: int) -> list[slice]:
    """Parts as equal as possible, the longer ones first."""
    size, longer = divmod(num_elements, num_parts)
    starts = [i * size + min(i, longer) for i in range(num_parts + 1)]
    return [slice(start, end) for start, end in itertools.pairwise(starts)]


@dataclass(eq=False)
class Reduction:
    """The owner's side: collects one part from every member with samples, and averages it once."""

    weights: Sequence[Weight]
    num_elements: int
    codec: Codec
    _parts: dict[str, torch.Tensor] = field(default_factory=dict)
    _result: "asyncio.Future[ReducedPart]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def missing(self) -> list[str]:
        """Members whose part has not come."""
        return [w.peer_id for w in self.weights if w.num_samples and w.peer_id not in self._parts]

    def num_bytes_from(self, peer_id: str) -> int:
        """Bytes a member has to send. Raises MalformedMessage for one that is no member."""
        for weight in self.weights:
            if weight.peer_id == peer_id:
                return self.codec.num_bytes(self.num_elements) if weight.num_samples else 0
        raise MalformedMessage(f"{peer_id} is no member of this exchange")

    async def add(self, peer_id: str, encoded: Buffer) -> None:
        """Take a member's part; the last one starts the sum.

        A part that is malformed or not finite ends the exchange for everybody, and names its sender.
        """
        if peer_id not in self.missing:
            raise MalformedMessage(f"{peer_id} has sent its part already")
        try:
            part_P = await asyncio.to_thread(self.codec.decode, encoded, self.num_elements)
        except MalformedMessage as error:
            self.fail(MemberFailed(peer_id, f"its contribution is refused: {error}"))
            return
        self._parts[peer_id] = part_P
        if not self.missing and not self._result.done():
            # Not awaited here: a caller that hangs up must not stop what the others wait for.
            work = asyncio.get_running_loop().run_in_executor(None, self._reduce)
            work.add_done_callback(self._finish)

    async def result(self) -> ReducedPart:
        """Wait for the average. Raises MemberFailed if there will be none."""
        return await asyncio.shield(self._result)

    def fail(self, error: SwarmError) -> None:
        """End the wait of everybody who waits."""
        if not self._result.done():
            self._result.set_exception(error)
            self._result.exception()  # Retrieved: it may be that nobody waits.

    def _reduce(self) -> ReducedPart:
        total = sum(weight.num_samples for weight in self.weights)
        sum_P: torch.Tensor | None = None
        for weight in self.weights:
            if weight.num_samples:
                part_P, share = self._parts[weight.peer_id], weight.num_samples / total
                sum_P = part_P * share if sum_P is None else sum_P.add_(part_P, alpha=share)
        assert sum_P is not None, "a round without samples is never averaged"
        encoded = self.codec.encode(sum_P)
        decoded_P = self.codec.decode(encoded, self.num_elements)
        return ReducedPart(encoded=encoded, squared_norm=float(torch.linalg.vector_norm(decoded_P.double())) ** 2)

    def _finish(self, work: "asyncio.Future[ReducedPart]") -> None:
        self._parts.clear()
        if work.cancelled() or self._result.done():
            return
        error = work.exception()
        if error is None:
            self._result.set_result(work.result())
        else:
            self._result.set_exception(error)


async def all_reduce(
    vector_D: torch.Tensor, *, own_id: str, weights: Sequence[Weight], reduction: Reduction,
    transport: AllReduceTransport, timeout_seconds: float,
) -> Average:  # fmt: skip
    """Average the members' vectors, weighted by their samples.

    Args:
        vector_D: this member's contribution; finite.
        weights: all members, in the order that is the same everywhere.
        reduction: this member's own part, which other members may be adding to already.

    Raises:
        MemberFailed: the exchange failed. Then, as on cancellation, those who wait for this member's part
            are told.
    """
    codec = reduction.codec
    own_samples = next(weight.num_samples for weight in weights if weight.peer_id == own_id)
    parts = split(vector_D.numel(), len(weights))
    reduced: list[tuple[ReducedPart, torch.Tensor] | None] = [None] * len(weights)

    async def fetch(index: int) -> None:
        owner_id, num_elements = weights[index].peer_id, parts[index].stop - parts[index].start
        encoded: Buffer = await asyncio.to_thread(codec.encode, vector_D[parts[index]]) if own_samples else b""
        try:
            if owner_id == own_id:
                part = await _reduce_own(encoded, own_id, reduction, OWNER_PATIENCE * timeout_seconds)
            else:
                part = await transport.exchange(owner_id, encoded, codec.num_bytes(num_elements))
            if not (math.isfinite(part.squared_norm) and part.squared_norm >= 0):
                raise MalformedMessage("the norm of an averaged part is not a finite number")
            reduced[index] = part, await asyncio.to_thread(codec.decode, part.encoded, num_elements)
        except MemberFailed:
            raise
        except SwarmError as error:
            raise MemberFailed(owner_id, str(error)) from None

    failures: list[BaseException] = []
    try:
        async with asyncio.TaskGroup() as tasks:
            for index in range(len(weights)):
                tasks.create_task(fetch(index))
    except* MemberFailed as group:
        failures.extend(group.exceptions)
    finally:
        if any(part is None for part in reduced):
            first = failures[0] if failures else MemberFailed(own_id, "the exchange was given up")
            assert isinstance(first, MemberFailed)
            reduction.fail(first)
    if failures:
        raise failures[0]
    return await asyncio.to_thread(_assemble, [part for part in reduced if part is not None], weights, own_id, codec)


async def _reduce_own(encoded: Buffer, own_id: str, reduction: Reduction, timeout_seconds: float) -> ReducedPart:
    if own_id in reduction.missing:
        await reduction.add(own_id, encoded)
    try:
        async with asyncio.timeout(timeout_seconds):
            return await reduction.result()
    except TimeoutError:
        blamed = reduction.missing[0] if reduction.missing else own_id
        raise MemberFailed(blamed, f"its contribution did not come within {timeout_seconds:.1f} s") from None


def _assemble(
    reduced: Sequence[tuple[ReducedPart, torch.Tensor]], weights: Sequence[Weight], own_id: str, codec: Codec
) -> Average:
    digest = hashlib.sha256(shares_digest(weights, codec).encode())
    squared_norm, sent, received, own_bytes, wire_bytes = 0.0, 0, 0, 0, 0
    has_samples = any(weight.peer_id == own_id and weight.num_samples for weight in weights)
    num_senders = sum(weight.num_samples > 0 and weight.peer_id != own_id for weight in weights)
    for (part, _), weight in zip(reduced, weights, strict=True):
        digest.update(part.encoded)
        digest.update(struct.pack("<d", part.squared_norm))
        squared_norm += part.squared_norm
        wire_bytes += len(part.encoded)
        if weight.peer_id == own_id:
            own_bytes = len(part.encoded)
        else:
            received += len(part.encoded)
            sent += len(part.encoded) if has_samples else 0
    sent += own_bytes * (len(weights) - 1)
    received += own_bytes * num_senders
    vector_D = torch.cat([part_P for _, part_P in reduced])
    return Average(
        vector_D=vector_D, digest=digest.hexdigest(), squared_norm=squared_norm,
        num_samples=sum(weight.num_samples for weight in weights), bytes_sent=sent, bytes_received=received,
        compression_ratio=4 * vector_D.numel() / max(1, wire_bytes),
    )  # fmt: skip


def shares_digest(weights: Sequence[Weight], codec: Codec) -> str:
    """SHA-256 over who averages, with which weights, in which order and with which codec."""
    lines = [codec.name, *(f"{weight.peer_id} {weight.num_samples}" for weight in weights)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
