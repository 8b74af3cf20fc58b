"""Fetches the run's tokenizer from the run's peers into the user's cache."""

import asyncio
from contextlib import suppress
from functools import partial
from pathlib import Path

from peers.shared.network import Membership
from peers.shared.process import kept_tokenizer
from swarm.content.service import Fetcher, Kind, Piece
from swarm.data import tokenizer_files
from swarm.data.own_tokenizer import trusted
from swarm.data.tokenizer_files import MOST_BYTES, MOST_LIST_BYTES, TokenizerFiles
from swarm.data.tokenizers import ByteTokenizer
from swarm.errors import Fatal, PeerUnavailable
from swarm.machine.waits import patiently


async def have_tokenizer(member: Membership, cache: Path) -> str:
    """The run's tokenizer on this machine: `bytes`, or a folder, into which it is fetched if it is not there. Raises
    ValueError if the run does not say which tokenizer it has, or it is a class, which only the user may name;
    PeerUnavailable, which says what to do, if no peer that answers has it; Fatal if it cannot be written to the
    cache."""
    data = member.config.data
    if data.tokenizer_identity == ByteTokenizer.identity:
        return ByteTokenizer.identity
    trusted(None, data.tokenizer)
    if not data.tokenizer_files:
        # A name without a digest is refused: with it the run's first peer could make this machine read any of its
        # files.
        raise ValueError("this run does not say which tokenizer it has: name yours with --tokenizer")
    folder = kept_tokenizer(cache, data.tokenizer_files)
    fetcher = member.fetcher(Kind.TOKENIZER)

    async def fetch() -> None:
        try:
            await have(data.tokenizer_files, folder, fetcher)
        except PeerUnavailable:
            # The run's first peer may have started just now.
            with suppress(PeerUnavailable):
                await member.known.look(member.directory, member.blocks)
            raise

    try:
        await patiently(fetch, member.clock, "a peer that has the run's tokenizer")
    except PeerUnavailable as error:
        raise PeerUnavailable(
            f"the run's tokenizer cannot be had from its peers ({error}); name a copy with --tokenizer"
        ) from None
    return str(folder)


def folder_of(tokenizer: str) -> list[Path]:
    """The folder in which a tokenizer is, perhaps with a chat template beside it; none if it has no files."""
    return [tokenizer_files.located(tokenizer).parent] if tokenizer_files.has_files(tokenizer) else []


async def have(digest: str, folder: Path, fetcher: Fetcher) -> None:
    """Fetch a tokenizer's files into a folder, unless they are there. If this is cancelled, the folder stays as it was.
    Raises PeerUnavailable if no peer that answers has them, and Fatal if they are too large, or cannot be kept."""
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
