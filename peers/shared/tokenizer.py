"""Fetches the run's tokenizer from the run's peers into the user's cache.

Used by the programs that make text of tokens, or tokens of text.
"""

import logging
from contextlib import suppress
from pathlib import Path

from peers.shared.cache import kept_tokenizer
from peers.shared.membership import Membership
from peers.shared.network import LOOK_SECONDS
from swarm.content import tokenizer
from swarm.content.line import Kind
from swarm.data.tokenizers import ByteTokenizer
from swarm.errors import PeerUnavailable

logger = logging.getLogger(__name__)

WAIT_SECONDS = 20.0
"""How long to look for a peer that has the tokenizer: the run's first peer may have started just now."""


async def have_tokenizer(member: Membership, cache: Path) -> str:
    """The run's tokenizer on this machine: `bytes`, or a folder, into which it is fetched if it is not there.

    Raises:
        ValueError: the run does not say which tokenizer it has.
        PeerUnavailable: no peer that answers has it; the message says what to do.
        Fatal: it cannot be written to the cache.
    """
    data, clock = member.config.data, member.clock
    if data.tokenizer_identity == ByteTokenizer.identity:
        return ByteTokenizer.identity
    if not data.tokenizer_files:
        # If we took the name alone, the run's first peer could have us read any file of this machine.
        raise ValueError("this run does not say which tokenizer it has: name yours with --tokenizer")
    folder = kept_tokenizer(cache, data.tokenizer_files)
    fetcher = member.fetcher(Kind.TOKENIZER)
    until, has_said = clock.monotonic() + WAIT_SECONDS, False
    while True:
        try:
            await tokenizer.have(data.tokenizer_files, folder, fetcher)
            return str(folder)
        except PeerUnavailable as error:
            if not has_said:
                has_said = True
                logger.info("looking for a peer that has the run's tokenizer, %.0f s at most: %s", WAIT_SECONDS, error)
            if clock.monotonic() >= until:
                raise PeerUnavailable(
                    f"the run's tokenizer cannot be had from its peers ({error}); name a copy with --tokenizer"
                ) from None
        await clock.sleep(LOOK_SECONDS)
        with suppress(PeerUnavailable):
            await member.known.look(member.directory, member.stages)
