"""Views of runs: what is announced, read through one of their peers or from the DHT as a client, and what each peer
says.

It announces nothing and changes nothing. Through a peer it needs neither torch nor hivemind.
"""

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import lru_cache
from itertools import chain
from typing import TypeVar

from peers.shared.entrance import Entrance
from peers.shared.network import agree_on_config, entries_of
from peers.shared.token_option import admitted
from peers.status.answer import Answer, LastPeer
from peers.status.contributions import Tallies
from peers.status.peer_row import PeerRow
from peers.status.view import Joining, StageRow, SwarmView, TrainerRow
from swarm.config import RunConfig, Timeline
from swarm.credentials.identity import Identity, generate
from swarm.dht import keys
from swarm.dht import node as dht_node
from swarm.dht.directory import Directory
from swarm.dht.discovery import discover_runs
from swarm.dht.node import DhtNode
from swarm.errors import SwarmError
from swarm.machine.clock import SystemClock
from swarm.machine.waits import patiently
from swarm.routing.poll import Poll
from swarm.rpc.channels import ChannelPool
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.types import Block, ClaimRecord, ClaimState, PeerRecord, PeerState, TrainerRecord

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 5.0
"""Longest wait for an answer. The first call to a peer also connects: four round trips, and TLS on a busy machine."""
MOST_ASKED = 64
"""Of a block with more peers so many are asked, those with the lowest ids, of which one leads it."""
MOST_TOLD = 5
"""Of a block so many peers are asked for its tally, which all of them have."""
MOST_RUNS = 16
"""The most runs of one DHT that are shown, the invite's own run first. Anybody in a DHT can announce runs."""


async def observe(
    run_id: str, announced: Mapping[Block, Sequence[PeerRecord]], trainers: Sequence[TrainerRecord],
    channels: ChannelPool, events: Sequence[str] = (), claims: Sequence[ClaimRecord] = (), *, asks_all: bool = True,
) -> SwarmView:  # fmt: skip
    """Ask all peers at once, or unless `asks_all`, MOST_ASKED of each block. A peer that does not answer in time is
    shown as unreachable, unless it leaves or moves. `run_id` is the peers' run; empty if it is not known, so that
    answers of peers of any run are taken."""
    blocks = sorted(announced)
    poll = Poll(run_id, channels, seconds=ANSWER_SECONDS)
    ordered = [sorted(announced[block], key=lambda record: record.peer_id) for block in blocks]
    replies = await asyncio.gather(*(_replies(poll, row if asks_all else row[:MOST_ASKED]) for row in ordered))
    rows = [_stage_row(*of_block) for of_block in zip(blocks, ordered, replies, strict=True)]
    told = [Answer.of(reply).last_peers for row in replies for reply in row if reply is not None]
    return SwarmView(
        run=run_id,
        stages=with_last_peers(with_moves(rows, announced, claims), announced, told),
        trainers=tuple(map(TrainerRow.of, trainers)),
        events=tuple(events),
    )


def with_moves(
    rows: Sequence[StageRow], announced: Mapping[Block, Sequence[PeerRecord]], claims: Sequence[ClaimRecord]
) -> tuple[StageRow, ...]:
    """Mark each peer that moves. It is listed at the blocks that it leaves until it has left them, and then at its new
    blocks. A peer that has announced that it leaves, and no longer answers, has left; it is not shown as
    unreachable."""
    states = {(record.peer_id, record.block): record.state for row in announced.values() for record in row}
    serving = {place for place, state in states.items() if state is PeerState.SERVING}
    serving_ids = {peer_id for peer_id, _ in serving}
    under_way = {
        claim.peer_id: claim
        for claim in claims
        if claim.state is ClaimState.CONFIRMED and any((claim.peer_id, block) not in serving for block in claim.span)
    }
    shown: dict[Block, list[PeerRow]] = {row.block: [] for row in rows}
    leaves = set[str]()
    for row in rows:
        for peer in row.peers:
            if peer.state == "unreachable" and states.get((peer.peer_id, row.block)) is PeerState.LEAVING:
                if peer.peer_id in under_way or peer.peer_id in serving_ids:
                    continue
                peer = dataclasses.replace(peer, state="leaving")
            claim = under_way.get(peer.peer_id)
            if claim is not None and row.block in claim.from_span and row.block not in claim.span:
                leaves.add(peer.peer_id)
                waiting_for = peer.waiting_for or claim.waiting_for
                peer = dataclasses.replace(peer, state="moving", moving_to=_label(claim.span), waiting_for=waiting_for)
            shown[row.block].append(peer)
    for claim in under_way.values():
        arriving = PeerRow(
            name=claim.name, peer_id=claim.peer_id, state="moving" if claim.from_span else "joining",
            moving_from=_label(claim.from_span), waiting_for=claim.waiting_for,
        )  # fmt: skip
        for block in claim.span if claim.peer_id not in leaves else ():
            if block not in claim.from_span and (claim.peer_id, block) not in serving:
                shown.setdefault(block, []).append(arriving)
    num_asked = {row.block: row.num_asked for row in rows}
    return tuple(
        StageRow(stage=block.stage, variant=block.variant, peers=tuple(peers), num_asked=num_asked.get(block))
        for block, peers in sorted(shown.items())
    )


def _label(span: Sequence[Block]) -> int | str | None:
    """A span as views show it: the label of its block, or the first and the last one's; None if it is empty."""
    return (span[0].label if len(span) == 1 else f"{span[0]}-{span[-1]}") if span else None


def with_last_peers(
    rows: Sequence[StageRow], records: Mapping[Block, Sequence[PeerRecord]], told: Sequence[Mapping[Block, LastPeer]]
) -> tuple[StageRow, ...]:
    """For each block that no peer serves, add the peer that served it last. `told` has from each peer that answered the
    last peers that it knows of, by block. They are used for blocks at which no peer is announced any more."""

    def last_of(block: Block) -> LastPeer | None:
        announced = _last_announced(records.get(block, ()))
        return announced or _as_told([each[block] for each in told if block in each])

    return tuple(row if row.is_served else dataclasses.replace(row, last_peer=last_of(row.block)) for row in rows)


def _last_announced(records: Sequence[PeerRecord]) -> LastPeer | None:
    last = max(records, key=lambda record: record.announced_at, default=None)
    if last is None:
        return None
    name, has_left = last.display_name, last.state is PeerState.LEAVING
    return LastPeer(name=name, last_at=last.announced_at, has_left=has_left)


def _as_told(told: Sequence[LastPeer]) -> LastPeer | None:
    """The median, by time, of what peers say. So one peer that makes something up does not hide what the others
    know."""
    return sorted(told, key=lambda last: last.last_at)[(len(told) - 1) // 2] if told else None


async def _replies(poll: Poll, records: Sequence[PeerRecord]) -> list[pb.DescribeReply | None]:
    heard = await poll.ask(records)
    for one in heard:
        if not one.was_asked:
            warn_once(str(one.fault))
    known = list(PeerState)
    return [one.reply if one.reply is not None and one.reply.state in known else None for one in heard]


def _stage_row(block: Block, records: Sequence[PeerRecord], replies: Sequence[pb.DescribeReply | None]) -> StageRow:
    """The row of a block, of whose records the first ones' peers were asked, and gave these replies."""
    num_asked = len(replies)
    asked = [PeerRow.of(record, reply) for record, reply in zip(records, replies, strict=False)]
    others = [PeerRow.of(record, None, was_asked=False) for record in records[num_asked:]]
    peers = [row for rows in (asked, others) for row in sorted(rows, key=lambda row: (row.name, row.peer_id))]
    return StageRow(
        stage=block.stage, variant=block.variant, peers=tuple(peers), num_asked=num_asked if others else None
    )


@lru_cache(maxsize=64)
def warn_once(text: str) -> None:
    """Log a warning, but only once: each view would log it again."""
    logger.warning("%s", text)


Outcome = TypeVar("Outcome")


class Lookout:
    def __init__(
        self, config: RunConfig, directory: Directory, channels: ChannelPool,
        on_peers: Callable[[Sequence[PeerRecord]], None] = lambda records: None, *, asks_all: bool = False,
    ) -> None:  # fmt: skip
        """`on_peers` is called with the records of the peers that serve, after each reading of the directory.
        `asks_all`: also of a large block every peer is asked."""
        self.config = config
        self.timeline = Timeline(config)
        """The amendments that were heard of, if somebody asked for them."""
        self._directory = directory
        self._channels = channels
        self._on_peers = on_peers
        self._asks_all = asks_all
        self.joining = Joining()
        """The commands with which others join the run, when the last view was taken."""

    async def view(self) -> SwarmView:
        """Take a view of the run now: read the directory, and ask the peers. Raises what RecordStore.get raises."""
        blocks = self.config.blocks
        rows, trainers, claims = await asyncio.gather(
            asyncio.gather(*map(self._directory.peers, blocks)), self._directory.trainers(), self._directory.claims()
        )
        self._on_peers([record for row in rows for record in row if record.state is PeerState.SERVING])
        announced = dict(zip(blocks, rows, strict=True))
        view = await observe(
            self.config.run_id, announced, trainers, self._channels, claims=claims, asks_all=self._asks_all
        )
        self.joining = Joining.at(self.config, entries_of(rows), insecure=self._channels.is_insecure)
        paths = self.config.paths if len(self.config.paths) > 1 else ()
        return dataclasses.replace(view, join_command=self.joining.peer, paths=paths)

    async def hear_amendments(self) -> None:
        """Take in the run's amendments. An open run has none. Raises what RecordStore.get raises."""
        for record in await self._directory.amendments() if self.config.owner else ():
            self.timeline.hear(record.amendments, record.peer_id)

    async def tallies(self) -> Tallies:
        """The tally of each block, as its peers give it now: the one that most of them have signed. Raises what
        RecordStore.get raises."""
        poll, found = Poll(self.config.run_id, self._channels, seconds=ANSWER_SECONDS), Tallies(self.config.run_id)
        for block in self.config.blocks:
            records = await self._directory.peers(block)
            announced = {record.peer_id: record.display_name for record in records}
            found.names.update(announced)
            asked = [record for record in records if record.state is PeerState.SERVING][:MOST_TOLD]
            heard = await poll.ask(asked, tally=True)
            found.add(block, [one.reply.tally for one in heard if one.reply is not None], announced)
        return found


async def views(lookouts: Sequence[Lookout]) -> list[SwarmView]:
    """Take views of all runs now, and leave out runs that cannot be seen. If none can be seen, raise what Lookout.view
    raises."""
    seen = await asyncio.gather(*(lookout.view() for lookout in lookouts), return_exceptions=True)
    return _what_came(seen, [lookout.config.run_id for lookout in lookouts])


@asynccontextmanager
async def lookouts_on(
    entrances: Sequence[Entrance], *, all_runs: bool = False, asks_all: bool = False
) -> AsyncIterator[list[Lookout]]:
    """Open a lookout for each run that is found, for as long as the block runs. A run that is found at several
    entrances gets one. `all_runs`: also for all runs that are announced in the same DHT. `asks_all` is as in Lookout.

    Raises what Entrance.dht_addresses, dht_node.as_client, discover_config, PeerStore.get and agree_on_config raise, if
    no run is found.
    """
    async with AsyncExitStack() as stack:
        opened = [
            stack.enter_async_context(_lookouts_at(entrance, all_runs=all_runs, asks_all=asks_all))
            for entrance in entrances
        ]
        found = await asyncio.gather(*opened, return_exceptions=True)
        lookouts = _what_came(found, [entrance.where for entrance in entrances])
        by_run: dict[str, Lookout] = {}
        for lookout in chain.from_iterable(lookouts):
            by_run.setdefault(lookout.config.run_id, lookout)
        yield list(by_run.values())


def _what_came(outcomes: Sequence[Outcome | BaseException], names: Sequence[str]) -> list[Outcome]:
    """The outcomes that are no errors. Each error is logged with its name. If all outcomes are errors, one is
    raised."""
    found = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
    for name, outcome in zip(names, outcomes, strict=True):
        if isinstance(outcome, BaseException):
            if not (found and isinstance(outcome, SwarmError | ValueError)):
                raise outcome
            warn_once(f"what is at {name} is not shown: {outcome}")
    return found


@asynccontextmanager
async def _lookouts_at(entrance: Entrance, *, all_runs: bool, asks_all: bool) -> AsyncIterator[list[Lookout]]:
    clock = SystemClock()
    if entrance.entries and not all_runs:
        async with entrance.asking(clock) as (member, store):
            yield [Lookout(member.config, member.directory, member.channels, store.learn, asks_all=asks_all)]
        return
    identity = admitted(generate(), entrance.token)
    channels = ChannelPool(insecure=entrance.insecure, identity=identity, clock=clock)
    try:
        async with dht_node.as_client(clock, await entrance.dht_addresses(clock)) as node:
            yield [
                Lookout(one, Directory(node, identity, one.run_id, clock), channels, asks_all=asks_all)
                for one in await _configs(entrance, node, identity, all_runs=all_runs)
            ]
    finally:
        await channels.close()


async def _configs(entrance: Entrance, node: DhtNode, identity: Identity, *, all_runs: bool) -> list[RunConfig]:
    """The configurations of the runs to show. From now on the node reads the records of these runs. A client stores
    nothing for others, so it may belong to several runs."""
    clock, authority = SystemClock(), identity.authority
    if not all_runs:
        return [await agree_on_config(node, None, entrance.addresses, clock, authority)]
    found = await patiently(
        lambda: discover_runs(node, clock, address=entrance.where, authority=authority, run=entrance.run),
        clock,
        f"the runs at {entrance.where}",
    )
    if len(found) > MOST_RUNS:
        logger.warning(
            "%d more runs are announced at %s and not shown: name yours by its invite",
            len(found) - MOST_RUNS,
            entrance.where,
        )
    shown = found[:MOST_RUNS]
    node.belong_to([key for one in shown for key in keys.of_run(one.run_id, one.blocks)], authority)
    return shown
