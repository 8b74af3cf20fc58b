"""Views of runs, as seen through one of their peers, or from the DHT as a client.

Used by swarm-status and swarm-dashboard, which take a view again and again. It announces nothing and changes nothing.
Through a peer it needs neither torch nor hivemind.
"""

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from itertools import chain
from typing import NamedTuple, TypeVar

from peers.shared.entrance import Entrance
from peers.shared.network import agree_on_config, entries_of
from peers.shared.token_option import admitted
from peers.status.joining import Joining
from peers.status.observe import observe, warn_once
from peers.status.view import SwarmView
from swarm.config import RunConfig
from swarm.credentials.identity import Identity, generate
from swarm.dht import keys
from swarm.dht import node as dht_node
from swarm.dht.directory import Directory
from swarm.dht.discovery import discover_runs
from swarm.dht.node import DhtNode
from swarm.errors import SwarmError
from swarm.machine.clock import SystemClock, run_loop
from swarm.machine.waits import patiently
from swarm.rpc.channels import ChannelPool
from swarm.types import PeerRecord, PeerState

logger = logging.getLogger(__name__)

Outcome = TypeVar("Outcome")

MOST_RUNS = 16
"""The most runs of one DHT that are shown, the invite's own run first. Anybody in a DHT can announce runs."""


class Lookout:
    """Takes views of one run."""

    def __init__(
        self, config: RunConfig, directory: Directory, channels: ChannelPool,
        on_peers: Callable[[Sequence[PeerRecord]], None] = lambda records: None,
    ) -> None:  # fmt: skip
        """
        Args:
            on_peers: called with the records of the peers that serve, after each reading of the directory.
        """
        self.config = config
        self._directory = directory
        self._channels = channels
        self._on_peers = on_peers
        self.joining = Joining()
        """The commands with which others join the run, when the last view was taken."""

    async def view(self) -> SwarmView:
        """Take a view of the run now: read the directory, and ask every peer. Raises what RecordStore.get raises."""
        numbers = range(self.config.stages.num_stages)
        rows, trainers, claims = await asyncio.gather(
            asyncio.gather(*map(self._directory.peers, numbers)), self._directory.trainers(), self._directory.claims()
        )
        self._on_peers([record for row in rows for record in row if record.state is PeerState.SERVING])
        stages = dict(zip(numbers, rows, strict=True))
        view = await observe(self.config.run_id, stages, trainers, self._channels, claims=claims)
        self.joining = Joining.at(self.config, entries_of(rows), insecure=self._channels.is_insecure)
        return dataclasses.replace(view, join_command=self.joining.peer)


async def views(lookouts: Sequence[Lookout]) -> list[SwarmView]:
    """Take views of all runs now, and leave out runs that cannot be seen. If none can be seen, raise what Lookout.view
    raises."""
    seen = await asyncio.gather(*(lookout.view() for lookout in lookouts), return_exceptions=True)
    return _what_came(seen, [lookout.config.run_id for lookout in lookouts])


class Way(NamedTuple):
    """The way to a run, or to all runs of a DHT.

    Attributes:
        node: this process's node of the DHT, a client; None if peers are asked instead.
        all_runs: whether all runs that are announced in that DHT are shown.
    """

    entrance: Entrance
    node: DhtNode | None
    all_runs: bool


@contextmanager
def ways_to(entrances: Sequence[Entrance], *, all_runs: bool) -> Iterator[list[Way]]:
    """Make a way for each entrance; inside the block, run nodes of the DHT where addresses or all runs need them.

    Enter this block before the event loop starts, because it blocks the thread. Raises what dht_node.start and
    Entrance.dht_addresses raise.
    """
    clock, ways = SystemClock(), []
    with ExitStack() as nodes:
        for entrance in entrances:
            node = None
            if all_runs or not entrance.entries:
                addresses = run_loop(entrance.dht_addresses(clock))
                node = dht_node.start(clock=clock, initial_peers=addresses, client_mode=True)
                nodes.callback(node.shutdown)
            ways.append(Way(entrance, node, all_runs))
        yield ways


@asynccontextmanager
async def lookouts_on(ways: Sequence[Way]) -> AsyncIterator[list[Lookout]]:
    """Open a lookout for each run that is found, for as long as the block runs. A run that is found in several ways
    gets one.

    Raises:
        ValueError, IncompatibleVersion, PeerUnavailable: no run is found; as of discover_config, PeerStore.get and
            agree_on_config.
    """
    async with AsyncExitStack() as stack:
        opened = [stack.enter_async_context(_lookouts_at(way)) for way in ways]
        found = await asyncio.gather(*opened, return_exceptions=True)
        lookouts = _what_came(found, [way.entrance.where for way in ways])
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
async def _lookouts_at(way: Way) -> AsyncIterator[list[Lookout]]:
    entrance, clock, node = way.entrance, SystemClock(), way.node
    if node is None:
        async with entrance.asking(clock) as (member, store):
            yield [Lookout(member.config, member.directory, member.channels, store.learn)]
        return
    identity = admitted(generate(), entrance.token)
    channels = ChannelPool(insecure=entrance.insecure, identity=identity, clock=clock)
    try:
        configs = await _configs(way, node, identity)
        yield [Lookout(one, Directory(node, identity, one.run_id, clock), channels) for one in configs]
    finally:
        await channels.close()


async def _configs(way: Way, node: DhtNode, identity: Identity) -> list[RunConfig]:
    """The configurations of the runs to show. From now on the node reads the records of these runs.

    A client stores nothing for others, so it may belong to several runs.
    """
    entrance, clock, authority = way.entrance, SystemClock(), identity.authority
    if not way.all_runs:
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
    node.belong_to([key for one in shown for key in keys.of_run(one.run_id, one.stages.num_stages)], authority)
    return shown
