"""A process in its run: the configuration that it agrees on, the peers that it knows, and what its parts share."""

import asyncio
import heapq
import logging
import os
import random
import socket
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Self, TypeVar

from swarm import config as configs
from swarm.config import RunConfig, Timeline
from swarm.content.service import Fetcher, Kind, Line
from swarm.credentials.authority import Authority
from swarm.credentials.identity import Identity
from swarm.dht import keys
from swarm.dht.directory import Directory
from swarm.dht.discovery import discover_config
from swarm.dht.known_records import RecordStore
from swarm.dht.node import DhtNode
from swarm.errors import PeerUnavailable
from swarm.machine.clock import Clock
from swarm.machine.waits import Waits, patiently
from swarm.routing.poll import Poll
from swarm.routing.router import Router
from swarm.rpc.channels import ChannelPool
from swarm.rpc.entry import Entry, direct
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.training.run_rounds import RunRounds
from swarm.types import MOST_BANS, Ban, Block, PeerId, PeerRecord, PeerState

logger = logging.getLogger(__name__)

Item = TypeVar("Item")

REFRESH_SECONDS = 2.0
"""Time between two readings of the DHT in the background."""
LOOK_SECONDS = 0.5
"""Time between two readings of the DHT while this process waits for a peer to appear there."""
AMENDMENTS_SECONDS = 5.0
"""How often amendments are looked for in the DHT, and renewed there."""
RETURN_SECONDS = 12.0
"""A peer that comes back at its old address is found again within this time; see RECONNECT_SECONDS in
swarm/dht/node.py."""


@dataclass
class KnownPeers:
    """The stage peers as the DHT last showed them; passes them to the router. If the DHT is gone, they stay known."""

    router: Router
    own_id: str = ""
    records: dict[Block, Sequence[PeerRecord]] = field(default_factory=dict)
    _hopped_to: Collection[Block] = ()

    def hop_within(self, blocks: Collection[Block]) -> None:
        """From the next update on, this process's own records of these blocks are passed to the router too: it hands
        microbatches to itself there."""
        self._hopped_to = blocks

    def update(self, block: Block, records: Sequence[PeerRecord]) -> None:
        self.records[block] = records
        left_out = "" if block in self._hopped_to else self.own_id
        self.router.update(block, [record for record in records if record.peer_id != left_out])

    async def look(self, directory: Directory, blocks: Sequence[Block]) -> None:
        """Sample the records of every block once, all at the same time. Raises PeerUnavailable."""
        for block, records in zip(blocks, await asyncio.gather(*map(directory.sample, blocks)), strict=True):
            self.update(block, records)

    async def look_first(
        self, directory: Directory, blocks: Sequence[Block], clock: Clock, *, returns: bool = False
    ) -> None:
        """Read the records of every block once, and try again if that fails: a busy node of the DHT may not answer.
        `returns` says whether this process was in the run before and knows no peer to ask. Others may still know its
        address, so this waits for them to connect. Raises PeerUnavailable if the DHT does not answer."""
        await patiently(lambda: self.look(directory, blocks), clock, "the run's peers in the DHT")
        if returns and not any(map(self.others, blocks)):
            logger.info(
                "this peer was here before: looking for others that may still be in the run, for %.0f s", RETURN_SECONDS
            )
            deadline = clock.monotonic() + RETURN_SECONDS
            while not any(map(self.others, blocks)) and clock.monotonic() < deadline:
                await clock.sleep(LOOK_SECONDS)
                with suppress(PeerUnavailable):
                    await self.look(directory, blocks)
            # The last reading may have missed peers that appeared after their block had been read, so read once more.
            await patiently(lambda: self.look(directory, blocks), clock, "the run's peers in the DHT")

    def peers(self, block: Block) -> Sequence[PeerRecord]:
        """The records of a block that have not expired, this process's own included."""
        return self.records.get(block, ())

    @property
    def round(self) -> int:
        return RunRounds.of(
            {
                block: [record.round for record in row if record.state is not PeerState.JOINING]
                for block, row in self.records.items()
            }
        ).latest

    def others(self, block: Block) -> list[PeerRecord]:
        return self._others(block, PeerState.SERVING)

    def everyone(self) -> list[PeerRecord]:
        return [record for block in sorted(self.records) for record in self.others(block)]

    def leaving(self, block: Block) -> list[PeerRecord]:
        return self._others(block, PeerState.LEAVING)

    def _others(self, block: Block, state: PeerState) -> list[PeerRecord]:
        return [r for r in self.peers(block) if r.state is state and r.peer_id != self.own_id]

    def bans(self, blocks: Iterable[Block], clock: Clock) -> tuple[Ban, ...]:
        """The peers of blocks that this process has banned because they failed, the longest bans first."""
        offset = clock.time() - clock.monotonic()
        banned = [each for block in blocks for each in self.router.left_alone(block) if not each.is_busy]
        longest = heapq.nlargest(MOST_BANS, banned, key=lambda each: each.until)
        return tuple(
            Ban(peer_id=each.record.peer_id, reason=each.reason, until=offset + each.until) for each in longest
        )

    def entries(self, limit: int) -> list[Entry]:
        """Up to `limit` other serving peers that are reached directly, spread over the blocks."""
        return entries_of(map(self.others, sorted(self.records)))[:limit]

    def dht_addresses(self, limit: int) -> list[str]:
        spread = in_turns(records for _, records in sorted(self.records.items()))
        enterable = list(dict.fromkeys(record.dht_addresses for record in spread if record.dht_addresses))[:limit]
        return list(dict.fromkeys(address for addresses in enterable for address in addresses))


async def agree_on_config(
    node: DhtNode, own: RunConfig | None, initial_peers: Sequence[str], clock: Clock, authority: Authority | None,
    *, run: str = "",
) -> RunConfig:  # fmt: skip
    """The run's configuration: the one that others published, or our own if we are the first.

    From now on the node stores records of this run only, and of a locked run only its members'.

    Args:
        run: the digest with which the run's id ends, as an invite has it; empty if any run will do.

    Raises:
        ValueError: the run is locked and there is no token, or the token or the invite is another run's; several runs
            share the DHT.
        IncompatibleVersion: the run speaks no protocol that this release speaks.
        ConfigMismatch: ours differs from the run's, naming the field.
        PeerUnavailable: no peer has published one.
    """
    if not initial_peers:
        assert own is not None, "the first peer brings a configuration"
        published = own
    else:
        address = initial_peers[0]
        published = await patiently(
            lambda: discover_config(node, clock, address=address, authority=authority, run=run),
            clock,
            f"a run at {address}",
        )
        if own is not None:
            configs.check_same(own, published)
    node.belong_to(keys.of_run(published.run_id, published.blocks), authority)
    return published


def entries_of(rows: Iterable[Sequence[PeerRecord]]) -> list[Entry]:
    """The peers that serve and are reached directly: one of each block, then a second of each, and so on. Their order
    does not depend on that of the records, so that two readings of a run give the same invite."""
    ordered = [sorted(row, key=lambda record: record.peer_id) for row in rows]
    spread = in_turns([record for record in row if record.state is PeerState.SERVING] for row in ordered)
    return [Entry(PeerId(r.peer_id), ends[0]) for r in spread if (ends := direct(r.endpoints))]


def in_turns(rows: Iterable[Sequence[Item]]) -> list[Item]:
    """The first of each row, then the second of each, and so on."""
    return [item for column in zip_longest(*rows) for item in column if item is not None]


def say_who_may_join(authority: Authority | None) -> None:
    if authority is None:
        logger.info("this run is open: whoever reaches one of its peers can join")
    else:
        logger.info("this run is locked by owner %s", authority.fingerprint[:16])


def newest_round(replies: Sequence[pb.DescribeReply]) -> int:
    """The newest round of the run, by what its peers say."""
    said: dict[Block, list[int]] = {}
    for reply in replies:
        said.setdefault(Block(reply.stage, reply.variant), []).append(reply.round)
    return RunRounds.of(said).latest


def default_name() -> str:
    return f"{socket.gethostname()[:40]}-{os.getpid()}"


@dataclass(frozen=True, kw_only=True)
class Membership:
    """The run, the amendments that this process and its blocks know, this process's identity in the run, the peers that
    it knows, and its channels to them."""

    config: RunConfig
    timeline: Timeline
    identity: Identity
    directory: Directory
    known: KnownPeers
    channels: ChannelPool
    clock: Clock
    waits: Waits = field(default_factory=Waits)

    async def require_own_token(self) -> None:
        """Look for the run's amendments, and raise NotAllowed if this process's own token is revoked. For programs that
        join, before they do anything else in the run."""
        await self.hear_amendments(partly=False)
        if self.identity.authority is not None:
            self.identity.authority.member(self.identity.certificate_pem, self.clock.time())

    @classmethod
    def enter(
        cls, config: RunConfig, store: RecordStore, identity: Identity, clock: Clock, *, insecure: bool,
        channels: ChannelPool | None = None,
    ) -> Self:  # fmt: skip
        """Enter a run whose records are in `store`, with the channels that are there. No peer is known yet, and nothing
        is announced."""
        router = Router(clock, random.Random(identity.peer_id), PeerId(identity.peer_id))
        return cls(
            config=config, timeline=Timeline(config), identity=identity, clock=clock,
            directory=Directory(store, identity, config.run_id, clock),
            known=KnownPeers(router, own_id=identity.peer_id),
            channels=channels or ChannelPool(insecure=insecure, identity=identity, clock=clock, run_id=config.run_id),
        )  # fmt: skip

    @property
    def peer_id(self) -> str:
        return self.identity.peer_id

    async def hear_amendments(self, *, partly: bool = True) -> None:
        """Take in the amendments that the DHT has now, if it answers. From then on no bearer of a token that one of
        them revokes is a member in this process. An open run has no amendments. `partly` is as in Directory.sample."""
        if self.config.owner:
            with suppress(PeerUnavailable):
                for record in await self.directory.amendments(partly=partly):
                    self.timeline.hear(record.amendments, record.peer_id)
        if self.identity.authority is not None:
            self.identity.authority.revoke(self.timeline.revoked)

    async def follow_amendments(self) -> None:
        """Hear amendments again and again, until cancelled. An open run has none, and this returns at once."""
        while self.config.owner:
            await self.hear_amendments()
            await self.clock.sleep(AMENDMENTS_SECONDS)

    def fetcher(self, kind: Kind) -> Fetcher:
        """Make a fetcher of content (what the run's configuration names by digest) from the run's peers."""
        line, rng = Line(self.config.run_id, self.channels, own_id=self.peer_id), random.Random(self.peer_id)
        return Fetcher(line, kind, self.known.everyone, self.clock, rng)

    def poll(self) -> Poll:
        return Poll(self.config.run_id, self.channels)

    @property
    def blocks(self) -> tuple[Block, ...]:
        return self.config.blocks
