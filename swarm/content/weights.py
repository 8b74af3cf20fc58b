"""One peer's copy of the weights that a run begins with: in a model's folder, or fetched from others into a cache.

Fetched weights are written part by part, in the form that an import writes, so they are there when this peer starts
again, and when others ask for them. Every byte is checked before it is written.
"""

import asyncio
import logging
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from torch import Size, Tensor

from swarm.content.service import Fetcher, Piece
from swarm.errors import Fatal, IntegrityError, PeerUnavailable
from swarm.interchange import weights
from swarm.interchange.source import Source
from swarm.interchange.weights import SEGMENT_BYTES, Index, Weights
from swarm.machine import tensor_file
from swarm.machine.waits import Waits
from swarm.rpc.transfers import Arriving

logger = logging.getLogger(__name__)


class WeightsCache:
    def __init__(
        self, folder: Path, digest: str, fetcher: Fetcher, waits: Waits, *, own: Weights | None = None,
        source: Source | None = None,
    ) -> None:  # fmt: skip
        """`folder` is where to keep what is fetched, made if it is not there, and `digest` the run's `model.weights`.
        The user may have named a run folder, whose weights are `own`, or a model's folder, the `source`."""
        self.num_fetched = 0
        """Segments that other peers have sent."""
        self._folder = folder
        self._digest = digest
        self._own = own
        self._source = source
        self._fetcher = fetcher
        self._waits = waits
        self._kept = _open(folder, digest)
        self._lock = asyncio.Lock()
        self._said_bytes = 0
        """The number of bytes in the last log line about a fetch; 0 once they have come."""

    def here(self, shapes: Mapping[str, Size]) -> Weights | None:
        """The weights on this machine that hold these parameters; None if there are none."""
        return next((place for place in self._places if place.has(shapes)), None)

    async def of(self, shapes: Mapping[str, Size]) -> Weights:
        """Return weights that hold these parameters; those that are not on this machine are fetched first. After a
        cancellation, whole parts are kept, and the next call goes on with them.

        Raises PeerUnavailable if no peer that answers has them all, Fatal if they cannot be written to disk, or are not
        those of this model.
        """
        async with self._lock:
            try:
                if self._source is not None and self._kept is None:
                    await self._have_index(self._source)
                return self.here(shapes) or await self._fetch(shapes)
            except OSError as error:
                raise Fatal(f"the weights cannot be kept in {self._folder}: {error.strerror or error}") from None

    def content(self, sha256: str) -> bytes | None:
        """The content that another peer asks for; see Weights.content."""
        found = (place.content(sha256) for place in self._places)
        return next((content for content in found if content is not None), None)

    @property
    def _places(self) -> list[Weights]:
        places = [place for place in (self._own, self._kept) if place is not None]
        if self._source is not None and self._kept is not None:
            # The index, which usually came from other peers, shows whether the user's model is the run's.
            places.insert(0, Weights(self._kept.index, self._source.tensors, place=self._source.folder))
        return places

    async def _fetch(self, shapes: Mapping[str, Size]) -> Weights:
        kept = self._kept = self._kept or await self._fetch_index()
        index = kept.index
        for name, shape in shapes.items():
            if name not in index.entries or index.entries[name].shape != tuple(shape):
                raise Fatal(f"the weights that the run begins with do not fit its model: {name} is of another size")
        wanted = {weights.part_of(name) for name in shapes}
        parts: dict[str, list[str]] = {}
        for name in index.entries:
            if weights.part_of(name) in wanted and not kept.has({name}):
                parts.setdefault(weights.part_of(name), []).append(name)
        total = sum(index.entries[name].num_bytes for names in parts.values() for name in names)
        if shutil.disk_usage(self._folder).free < total:
            raise Fatal(f"no room in {self._folder} for {total / 1e6:.0f} MB of weights")
        if total != self._said_bytes:
            # Logged only once, because this is tried again and again until a peer that has the weights answers.
            logger.info("fetching %.1f MB of the weights that the run begins with from other peers", total / 1e6)
            self._said_bytes = total
        arriving = Arriving("the weights that the run begins with", total)
        with self._waits.on(arriving.in_words):
            for part, names in parts.items():
                tensors = await self._fetch_tensors(index, names, arriving)
                await asyncio.to_thread(weights.write_part, self._folder, part, tensors)
        self._said_bytes = 0
        return kept

    async def _have_index(self, source: Source) -> None:
        """Fetch the index from a peer. If no peer has it, make it by reading the user's whole model."""
        try:
            self._kept = await self._fetch_index()
        except PeerUnavailable:
            logger.info("no peer has the digests of the weights: reading all of %s", source.folder)
            index = await asyncio.to_thread(Index.of, source.tensors(set(source.shapes)))
            if index.digest != self._digest:
                raise Fatal(f"{source.folder} is another model than the run begins with") from None
            await asyncio.to_thread(weights.write_index, self._folder, index)
            self._kept = weights.open_folder(self._folder)

    async def _fetch_index(self) -> Weights:
        self._folder.mkdir(parents=True, exist_ok=True)
        found = list[bytes]()
        await self._fetcher.fetch([Piece(sha256=self._digest, max_bytes=weights.MOST_INDEX_BYTES, keep=found.append)])
        await asyncio.to_thread(weights.write_index, self._folder, Index(found[0]))
        return weights.open_folder(self._folder)

    async def _fetch_tensors(self, index: Index, names: Sequence[str], arriving: Arriving) -> dict[str, Tensor]:
        tensors = {name: weights.empty(index.entries[name]) for name in names}
        pieces = list[Piece]()
        for name, tensor in tensors.items():
            for number, sha256 in enumerate(index.entries[name].sha256):
                segment = tensor_file.bytes_of(tensor)[number * SEGMENT_BYTES : (number + 1) * SEGMENT_BYTES]
                pieces.append(Piece(sha256=sha256, max_bytes=len(segment), keep=partial(self._take, segment)))
        await self._fetcher.fetch(pieces, arriving)
        return tensors

    def _take(self, segment: memoryview, data: bytes) -> None:
        if len(data) != len(segment):
            raise IntegrityError("the index of the weights names a segment of another size")
        segment[:] = data
        self.num_fetched += 1


def _open(folder: Path, digest: str) -> Weights | None:
    """Open weights that were fetched before. None if there are none, or they have another index."""
    try:
        found = weights.open_folder(folder)
    except IntegrityError:
        return None
    return found if found.index.digest == digest else None
