"""The tied parameter, which two stages hold: both apply the sum of their averages.

Within a stage a round's average is a mean over that stage's peers. A parameter with a role at two stages (tied
embeddings: the first stage looks vectors up, the last one scores with them) has a gradient that is the sum over its
roles. So once the stages that share it have decided their averages of a round, each member fetches that of the other
one, adds both in the order of the stages, and commits the sum: the holders stay equal to the last bit. A stage's
result is committed by a digest that ends with that of the bytes which others fetch. So whoever answers for a stage
gives all members the same bytes, or none.

Shapes: S elements of the tied parameter.
"""

import asyncio
import logging
import math
from collections.abc import Iterable, Mapping

import torch
from blake3 import blake3

from swarm.averaging.vectors.terms import decode_bounded
from swarm.averaging.wire.context import Context
from swarm.averaging.wire.transport import record_of
from swarm.compression.codec import Buffer, Codec, contribution_codec, simple_codec
from swarm.errors import IntegrityError, MalformedMessage, NotReady, PeerUnavailable, SwarmError
from swarm.model.stages import TIED, tied_stages
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.training.scaling import squared_norm_of_vector
from swarm.types import Block

logger = logging.getLogger(__name__)

KEPT_AVERAGES = 4
"""The number of rounds whose averages others may still fetch."""


class TiedParameters:
    """One member's view of the parameter that its stage and another one hold; there may be none."""

    def __init__(self, context: Context) -> None:
        config, self._block = context.config, context.own.block
        self._context = context
        self._num_fragments = config.averaging.num_fragments
        sharing = [Block(stage) for stage in tied_stages(config)]
        self._holders = sharing if self._block in sharing else []
        self._counting = sharing[:1]
        self._shape = (config.model.vocab_size, config.model.d_model)
        self._num_elements = math.prod(self._shape)
        self._averages: dict[tuple[int, Block, str], Buffer] = {}
        """The averages of the tied parameter, encoded, by round, block and digest."""

    def is_due(self, round_number: int) -> bool:
        """Whether this round averages the tied parameter. Without fragments every round does. With fragments only the
        first round of each turn through all fragments does."""
        return bool(self._holders) and round_number % self._num_fragments == 0

    def partners(self, round_number: int) -> set[Block]:
        return set(self._holders) - {self._block} if self.is_due(round_number) else set()

    def counts_norm(self, block: Block, round_number: int) -> bool:
        """Whether a stage is the one that counts the tied parameter in the whole model's norm."""
        return block in self._counting and round_number % self._num_fragments == 0

    def squared_norm_of_rest(self, tensors: Mapping[str, torch.Tensor]) -> float:
        return sum(
            squared_norm_of_vector(tensor) for name, tensor in tensors.items() if name != TIED or not self._holders
        )

    async def offer(self, round_number: int, digest: str, tensors: Mapping[str, torch.Tensor], amended: str) -> str:
        """Keep this stage's average for peers of other stages that ask for it. `amended` is the digest of the newest
        amendment that is in force in the round, here and below.

        Returns the digest that the result has from now on: if the round averages these parameters, theirs is appended.
        """
        if not self.is_due(round_number):
            return digest
        # In float32 the bytes are the vector's own memory, and they are kept longer than the round's result.
        codec, average = self._codec(amended), tensors[TIED]
        encoded = await asyncio.to_thread(lambda: codec.encode(average.flatten().clone()))
        digest = f"{digest}.{await asyncio.to_thread(_digest_of, encoded)}"
        self._keep((round_number, self._block, digest), encoded)
        return digest

    def answer(self, request: pb.SharedRequest) -> Buffer:
        """The average that another holder asks for. Raises NotReady if it is not here, or not any more."""
        encoded = self._averages.get((request.round, self._block, request.digest))
        if encoded is None:
            raise NotReady(f"the average of round {request.round} is not here")
        return encoded

    async def sum(self, round_number: int, holders: Iterable[pb.Partner], amended: str) -> dict[str, torch.Tensor]:
        """Add up the averages of the stages that hold the parameters. Returns the sum of each parameter. `holders` are
        a peer of each stage that holds them, this one included. Raises PeerUnavailable if no peer gives some stage's
        average."""
        by_block = {_block_of(holder): holder for holder in holders}
        if sorted(by_block) != self._holders:
            raise MalformedMessage(
                f"tied parameters are held by the stages {_named(self._holders)}, not {_named(sorted(by_block))}"
            )
        sum_S = await asyncio.to_thread(torch.zeros, self._num_elements)
        for _, holder in sorted(by_block.items()):
            await asyncio.to_thread(sum_S.add_, await self._average_of(round_number, holder, self._codec(amended)))
        return {TIED: sum_S.view(self._shape)}

    async def squared_norm_of_sum(self, round_number: int, holders: Iterable[pb.Partner], amended: str) -> float:
        """The squared norm of the result of `sum`."""
        summed = (await self.sum(round_number, holders, amended)).values()
        return await asyncio.to_thread(lambda: sum(map(squared_norm_of_vector, summed)))

    async def _average_of(self, round_number: int, holder: pb.Partner, codec: Codec) -> torch.Tensor:
        block = _block_of(holder)
        key = (round_number, block, holder.digest)
        clock, timing = self._context.clock, self._context.timing
        deadline, turn = clock.monotonic() + timing.shared_seconds, 0
        while key not in self._averages:
            try:
                encoded = await self._fetch(round_number, holder, turn, codec.num_bytes(self._num_elements))
                if await asyncio.to_thread(_digest_of, encoded) != holder.digest.partition(".")[2]:
                    raise IntegrityError("a peer sent other bytes than its stage has averaged")
                average_S = await self._decode(encoded, codec)
                self._keep(key, encoded)
                return average_S
            except SwarmError as error:
                logger.debug("stage %s: %s", block, error)
                if clock.monotonic() > deadline:
                    raise PeerUnavailable(
                        f"no peer at stage {block} has its average of round {round_number}: {error}"
                    ) from None
                turn += 1
                await clock.sleep(timing.retry_seconds)
        return await self._decode(self._averages[key], codec)

    async def _fetch(self, round_number: int, holder: pb.Partner, turn: int, num_bytes: int) -> Buffer:
        """Ask one of the peers that may have a stage's average; each turn asks a different one."""
        context, block = self._context, _block_of(holder)
        others = sorted(context.peers(block), key=lambda record: record.peer_id)
        candidates = [record_of(holder.contact, block), *others]
        own = context.own_block(block)
        if own is None:
            candidates = [record for record in candidates if record.peer_id != context.own_id]
        if not candidates:
            raise PeerUnavailable("no other peer there is known")
        request = pb.SharedRequest(
            address=context.address_of(block), peer_id=context.own_id, round=round_number, digest=holder.digest
        )
        chosen = candidates[turn % len(candidates)]
        if own is not None and chosen.peer_id == context.own_id:
            return await own.shared(request)
        seconds = context.timing.exchange_seconds(num_bytes)
        return await context.transport.shared(chosen, request, reply_bytes=num_bytes, timeout_seconds=seconds)

    async def _decode(self, encoded: Buffer, codec: Codec) -> torch.Tensor:
        return await asyncio.to_thread(decode_bounded, codec, encoded, self._num_elements)

    def _codec(self, amended: str) -> Codec:
        """The codec of averages: the same as for contributions. If that one is sparse it is float16, because an average
        is not sparse."""
        codec = contribution_codec(self._context.timeline.under(amended).averaging)
        return simple_codec("fp16") if codec.is_sparse or codec.tile > 1024 else codec

    def _keep(self, key: tuple[int, Block, str], encoded: Buffer) -> None:
        self._averages[key] = encoded
        rounds = sorted({round_number for round_number, _, _ in self._averages})
        for stale in [key for key in self._averages if key[0] not in rounds[-KEPT_AVERAGES:]]:
            del self._averages[stale]


def _digest_of(encoded: Buffer) -> str:
    return blake3(encoded).hexdigest()


def _block_of(holder: pb.Partner) -> Block:
    return Block(holder.stage, holder.variant)


def _named(blocks: Iterable[Block]) -> str:
    return ", ".join(map(str, blocks))
