"""The content of a run that a stage peer has and gives to others: its initial weights, and its tokenizer."""

import asyncio
import logging
from contextlib import suppress
from pathlib import Path

from peers.shared.named_model import OwnModel, kept_weights
from peers.shared.network import LOOK_SECONDS, Membership
from peers.shared.tokenizer import have_tokenizer
from swarm.content.service import Kind, Shelves, nothing
from swarm.content.weights import WeightsCache
from swarm.data import tokenizer_files
from swarm.data.tokenizer_files import TokenizerFiles
from swarm.errors import PeerUnavailable, SwarmError
from swarm.interchange.origin import TOKENIZER_FOLDER
from swarm.interchange.weights import Weights
from swarm.model.stages import parameter_shapes
from swarm.training.run_rounds import RunRounds
from swarm.types import Block

logger = logging.getLogger(__name__)

RETRY_SECONDS = 30.0
WAIT_SECONDS = 20.0
"""How long a peer looks for another peer that has its stage's weights. The run's first peer may have just started, or
may be starting again after it died."""


class Contents:
    def __init__(self, member: Membership, model: OwnModel | None, cache: Path, *, checkpoints: Path | None) -> None:
        """The tokenizer is put beside the `checkpoints`, too. Raises IntegrityError if the weights in the model's run
        folder are not the run's."""
        self._member = member
        self._cache = cache
        self._checkpoints = checkpoints
        self._tokenizer: TokenizerFiles | None = None
        config = member.config
        own = model.weights(config) if model is not None else None
        self._weights: WeightsCache | None = None
        if digest := config.model.weights:
            source = model.source if model is not None else None
            folder, fetcher = kept_weights(cache, digest), member.fetcher(Kind.WEIGHTS)
            self._weights = WeightsCache(folder, digest, fetcher, member.waits, own=own, source=source)

    @property
    def shelves(self) -> Shelves:
        weights = nothing if self._weights is None else self._weights.content
        return Shelves(weights=weights, tokenizer=self._tokenizer_content)

    async def keep_tokenizer(self) -> None:
        """Fetch the run's tokenizer, and go on trying until it is here, so that others can get it when the peers that
        had it have left. The peer itself does not need it."""
        has_said = False
        while self._member.config.data.tokenizer_files:
            try:
                folder = Path(await have_tokenizer(self._member, self._cache))
                files = await asyncio.to_thread(tokenizer_files.read, folder)
                if self._checkpoints is not None:
                    await asyncio.to_thread(files.keep, self._checkpoints / TOKENIZER_FOLDER)
            except (SwarmError, OSError, ValueError) as error:
                if not has_said:
                    logger.warning("the run's tokenizer is not here for others: %s", error)
                    has_said = True
                await self._member.clock.sleep(RETRY_SECONDS)
            else:
                self._tokenizer = files
                return

    def _tokenizer_content(self, sha256: str) -> bytes | None:
        return None if self._tokenizer is None else self._tokenizer.content(sha256)

    async def initial_weights(self, block: Block, *, resumes: bool) -> Weights | None:
        """The weights with which a block begins: the ones on this machine, or else weights fetched from peers. None if
        they are drawn from the seed, if no peer that answers has them, or if they are not needed, because the block
        `resumes` from checkpoints here.

        With LoRA they are always needed, because the state that is downloaded from a stage's peers has no frozen
        weights. Raises Fatal if they cannot be written to this machine, or the user's model is another one.
        """
        if self._weights is None:
            return None
        member, shapes = self._member, parameter_shapes(self._member.config, block.stage)
        is_always_needed = member.config.lora.is_on
        if (here := self._weights.here(shapes)) is not None or (resumes and not is_always_needed):
            return here
        until, num_fetched = member.clock.monotonic() + WAIT_SECONDS, self._weights.num_fetched
        # While the stage is at round 0 there is no state to download, so the weights are needed; peers at round 0 have
        # them.
        with member.waits.on(f"a peer that has the weights with which stage {block} begins"):
            while is_always_needed or not await self._has_gone_on(block):
                try:
                    return await self._weights.of(shapes)
                except PeerUnavailable as error:
                    if self._weights.num_fetched > num_fetched:
                        # A peer sent some of the weights and is gone, so the search for another peer begins anew.
                        until, num_fetched = member.clock.monotonic() + WAIT_SECONDS, self._weights.num_fetched
                    if member.clock.monotonic() >= until:
                        return None
                    logger.debug("the weights of stage %s are not to be had yet: %s", block, error)
                await member.clock.sleep(LOOK_SECONDS)
                with suppress(PeerUnavailable):
                    await member.known.look(member.directory, member.blocks)
        return None

    async def _has_gone_on(self, block: Block) -> bool:
        replies = await self._member.poll().replies(self._member.known.others(block))
        return RunRounds.of({block: [reply.round for reply in replies]}).middle > 0
