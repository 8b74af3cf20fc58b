"""Reading the DHT through a peer: both ends of DirectoryService.

swarm-status uses the reader in place of a DHT node: the reader opens two connections instead of starting libp2p and
importing hivemind. Records pass through unchanged and signed, and their reader checks them.
"""

import asyncio
import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from swarm.credentials.identity import Identity
from swarm.dht.addresses import is_node
from swarm.dht.keys import is_of_a_run, whole_of
from swarm.dht.known_records import NoOtherNode, RecordStore
from swarm.errors import DeadlineExceeded, Fatal, NotServed, PeerUnavailable, SwarmError, WrongRun
from swarm.machine.clock import Clock
from swarm.rpc.ask import ask
from swarm.rpc.channels import ChannelPool
from swarm.rpc.entry import Entry
from swarm.rpc.failures import answers_errors
from swarm.rpc.probe import LONG_SECONDS, SHORT_ALONE, passes_long
from swarm.rpc.v1 import directory_pb2 as pb
from swarm.rpc.v1.directory_pb2_grpc import DirectoryServiceServicer, DirectoryServiceStub
from swarm.types import MOST_DHT_ADDRESSES, PeerRecord

logger = logging.getLogger(__name__)

FRESH_SECONDS = 1.0
"""One answer serves all callers for this long. So any number of callers cost the DHT one lookup of each key a
second."""
MAX_REPLY_BYTES = 4 << 20
"""The largest size of all records in a reply. Further records are left out and counted."""
ANSWER_SECONDS = 12.0
"""Deadline of a request, including the time to connect. The peer's own lookup may take ten seconds of it."""
NEXT_SECONDS = 1.5
"""After so many seconds without an answer the next peer is asked too. Otherwise a joiner would wait for ANSWER_SECONDS
if the first peer of its invite has died, or has an address that no packet reaches."""
MOST_ANSWERS = 256
"""If there are answers for more keys, those that were given are forgotten: a node of all runs is asked for any key."""
MAX_OTHERS = 8
"""The most peers that are remembered in addition to those that the user named."""

Source = Entry | PeerRecord
"""A peer that can be asked: one that the user named, or one whose announcement was read."""


@dataclass
class _Answer:
    """A lookup of a key, which ends with a reply or an error; and the time when it ended, if it has."""

    lookup: asyncio.Task[pb.ReadReply | SwarmError]
    found_at: float | None = None


@answers_errors
class DirectoryServicer(DirectoryServiceServicer):
    def __init__(
        self, *, store: RecordStore, keys: Collection[str] | None, clock: Clock,
        dht_addresses: Callable[[], Sequence[str]] = tuple,
    ) -> None:  # fmt: skip
        """`keys` are those of this peer's run, and only they and their parts are looked up; None for the keys of all
        runs."""
        self._store = store
        self._clock = clock
        self._keys = keys
        self._dht_addresses = dht_addresses
        self._answers: dict[str, _Answer] = {}

    async def Read(self, request: pb.ReadRequest, context: Any) -> pb.ReadReply:
        if not (is_of_a_run(request.key) if self._keys is None else whole_of(request.key) in self._keys):
            raise WrongRun(f"{request.key[:80]!r} is no key of the run that this peer serves")
        # Several callers may wait for the same lookup, so it goes on if one of them gives up.
        outcome = await asyncio.shield(self._lookup(request.key))
        if isinstance(outcome, SwarmError):
            raise outcome
        return outcome

    def _lookup(self, key: str) -> "asyncio.Task[pb.ReadReply | SwarmError]":
        if len(self._answers) > MOST_ANSWERS:
            self._answers = {key: each for key, each in self._answers.items() if each.found_at is None}
        answer = self._answers.get(key)
        if answer is None or (
            answer.found_at is not None and self._clock.monotonic() > answer.found_at + FRESH_SECONDS
        ):
            answer = self._answers[key] = _Answer(asyncio.create_task(self._look_up(key)))
        return answer.lookup

    async def _look_up(self, key: str) -> pb.ReadReply | SwarmError:
        try:
            return self._reply(await self._store.get(key))
        except NoOtherNode as alone:
            reply = self._reply(alone.found)
            reply.is_alone = True
            return reply
        except PeerUnavailable as error:
            return error
        finally:
            self._answers[key].found_at = self._clock.monotonic()

    def _reply(self, found: Mapping[str, tuple[bytes, float]]) -> pb.ReadReply:
        reply, num_bytes = pb.ReadReply(dht_addresses=self._dht_addresses()), 0
        for subkey, (value, expiration) in found.items():
            num_bytes += len(subkey) + len(value) + 32
            if num_bytes > MAX_REPLY_BYTES:
                reply.num_left_out = len(found) - len(reply.records)
                break
            reply.records.add(subkey=subkey, value=value, expiration=expiration)
        return reply


def _found(reply: pb.ReadReply, key: str) -> dict[str, tuple[bytes, float]]:
    if reply.num_left_out:
        logger.warning("%d more entries under %s are not shown", reply.num_left_out, key)
    return {record.subkey: (record.value, record.expiration) for record in reply.records}


class PeerStore:
    """Reads the DHT through a peer: a RecordStore for a directory that announces nothing.

    It asks the peer that answered last, then those that the user named, then others of the run. After NEXT_SECONDS
    without an answer it asks the next one too. It passes over a peer that does not answer. It also passes over a peer
    that is alone in the DHT, if there is another one that is not.
    """

    def __init__(self, entries: Sequence[Entry], channels: ChannelPool, own: Identity, *, insecure: bool) -> None:
        self._entries = entries
        self._channels = channels
        self._own = own
        self._insecure = insecure
        self._opened: dict[Entry, grpc.aio.Channel] = {}
        self._opening: defaultdict[Entry, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._others: list[PeerRecord] = []
        self._last: list[Source] = []
        self.dht_addresses: tuple[str, ...] = ()
        """Where the DHT is entered at the peers that have answered, as they say."""

    def learn(self, records: Iterable[PeerRecord]) -> None:
        self._others = list(records)[:MAX_OTHERS]

    async def get(self, key: str, *, partly: bool = False) -> dict[str, tuple[bytes, float]]:
        """All unexpired records under a key; `partly` makes no difference here. Cancellation ends the request.

        Raises: PeerUnavailable if no peer answers, with the reason of the first one that was asked; ValueError if the
        run is locked, and there is no token; NotServed or Fatal if the peer that was asked refused, for example with
        WrongRun or NotAllowed.
        """
        sources = list(dict.fromkeys([*self._last, *self._entries, *self._others]))
        faults: dict[Source, SwarmError] = {}
        lonely: pb.ReadReply | None = None
        asked: dict[asyncio.Task[pb.ReadReply | SwarmError], Source] = {}
        try:
            for number in itertools.count():
                if number < len(sources):
                    asked[asyncio.create_task(self._reply(sources[number], key))] = sources[number]
                if not asked:
                    break
                patience = NEXT_SECONDS if number + 1 < len(sources) else None
                done, _ = await asyncio.wait(asked, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in asked if task in done]:
                    source, reply = asked.pop(task), task.result()
                    if isinstance(reply, SwarmError):
                        logger.debug("%s does not answer: %s", source, reply)
                        faults[source] = reply
                    elif reply.is_alone:
                        lonely = lonely or reply
                    else:
                        self._last = [source]
                        told = filter(is_node, reply.dht_addresses[:MOST_DHT_ADDRESSES])
                        self.dht_addresses = tuple(dict.fromkeys([*told, *self.dht_addresses]))[:MAX_OTHERS]
                        return _found(reply, key)
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        if lonely is not None:
            return _found(lonely, key)
        raise PeerUnavailable(f"no peer of the run answers: {next(faults[s] for s in sources if s in faults)}")

    async def store(self, key: str, subkey: str, value: bytes, expiration: float) -> bool:
        """Refuse: a peer stores nothing for others."""
        return False

    def remember(self, addresses: Sequence[str]) -> None:
        """There is no DHT to enter again."""

    async def close(self) -> None:
        for channel in self._opened.values():
            await channel.close()
        self._opened.clear()

    async def _reply(self, source: Source, key: str) -> pb.ReadReply | SwarmError:
        """The peer's answer, or the reason why none came. Raises Fatal, NotServed and ValueError as `get` does."""
        is_connected = False
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                channel = await self._channel(source)
                is_connected = True
                stub: Any = DirectoryServiceStub(channel)
                reply: pb.ReadReply = await ask(stub.Read, pb.ReadRequest(key=key), seconds=ANSWER_SECONDS)
                return reply
        except (Fatal, NotServed):
            raise
        except SwarmError as error:
            fault = error
        except TimeoutError:
            fault = DeadlineExceeded(f"no answer within {ANSWER_SECONDS:.0f} s")
        if is_connected and not await self._passes_long(source):
            return PeerUnavailable(f"{source.endpoint}: {SHORT_ALONE}")
        return fault

    async def _passes_long(self, source: Source) -> bool:
        """Whether messages of several packets reach a peer and come back. True also if that cannot be found out."""
        try:
            # Asked over a new connection: on the failed one it would wait behind the lost packets.
            if isinstance(source, PeerRecord):
                return await passes_long(self._channels.channel(source, bulk=True))
            async with asyncio.timeout(LONG_SECONDS):
                channel = await source.connect(self._own, insecure=self._insecure)
            try:
                return await passes_long(channel, "" if self._insecure else source.endpoint)
            finally:
                await channel.close()
        except (SwarmError, TimeoutError, ValueError) as error:
            logger.debug("why %s does not answer is not known: %s", source, error)
            return True

    async def _channel(self, source: Source) -> grpc.aio.Channel:
        if isinstance(source, PeerRecord):
            return self._channels.channel(source)
        # Several keys may be read at the same time, and one connection is enough for all.
        async with self._opening[source]:
            if source not in self._opened:
                self._opened[source] = await source.connect(self._own, insecure=self._insecure)
            return self._opened[source]
