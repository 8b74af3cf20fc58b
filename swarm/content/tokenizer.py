"""The run's tokenizer, fetched from peers into a cache.

Used by swarm-trainer, swarm-generate, swarm-model, and by stage peers, which serve it to others.
"""

import asyncio
from functools import partial
from pathlib import Path

from swarm.content.fetcher import Fetcher, Piece
from swarm.data import tokenizer_files
from swarm.data.tokenizer_files import MOST_BYTES, MOST_LIST_BYTES, TokenizerFiles
from swarm.errors import Fatal


async def have(digest: str, folder: Path, fetcher: Fetcher) -> None:
    """Fetch a tokenizer's files into a folder, unless they are there. If this is cancelled, the folder stays as it was.

    Raises:
        PeerUnavailable: no peer that answers has them.
        Fatal: they are too large, or cannot be kept.
    """
    if await asyncio.to_thread(tokenizer_files.is_at, folder, digest):
        return
    lists = list[bytes]()
    await fetcher.fetch([Piece(sha256=digest, max_bytes=MOST_LIST_BYTES, keep=lists.append)])
    contents: dict[str, bytes] = {}
    for name, sha256 in tokenizer_files.digests_of(lists[0]).items():
        # One after the other, so that one bound holds for all files together.
        left = MOST_BYTES - sum(map(len, contents.values()))
        await fetcher.fetch([Piece(sha256=sha256, max_bytes=left, keep=partial(contents.__setitem__, name))])
    try:
        await asyncio.to_thread(TokenizerFiles(contents).keep, folder)
    except OSError as error:
        raise Fatal(f"the run's tokenizer cannot be kept in {folder}: {error.strerror or error}") from None
