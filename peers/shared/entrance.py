"""Where a program enters a run (by an invite, or by addresses of the DHT), and with which token.

An invite names peers by their gRPC endpoints. The program asks these peers for addresses of the DHT, so addresses that
have changed do no harm while one of the invite's peers can be reached.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from peers.shared.cli import spelled_out
from peers.shared.network import Membership, agree_on_config
from peers.shared.run_options import EntranceOptions
from peers.shared.token_option import admitted, find_token
from swarm.credentials.identity import Identity, generate
from swarm.credentials.token import Token
from swarm.dht import keys
from swarm.dht import node as dht_node
from swarm.dht.discovery import discover_config
from swarm.dht.lookup import PeerStore
from swarm.errors import PeerUnavailable
from swarm.machine import json_file
from swarm.machine.clock import Clock
from swarm.machine.waits import patiently
from swarm.rpc.channels import ChannelPool
from swarm.rpc.entry import Entry
from swarm.rpc.invite import SCHEME, Invite

MAX_ADDRESSES = 8
"""The most peers at which a process enters the DHT."""


@dataclass(frozen=True, kw_only=True)
class Entrance:
    """Where one run is entered, and with which token.

    Attributes:
        entries: peers to ask, as an invite names them; none if addresses were given.
        addresses: addresses of nodes of the DHT; none if there are entries.
        run: the digest with which the run's id ends; empty if any run will do.
        token: None for an open run.
        insecure: whether the run does without TLS.
    """

    entries: tuple[Entry, ...] = ()
    addresses: tuple[str, ...] = ()
    run: str = ""
    token: Token | None
    insecure: bool

    async def dht_addresses(self, clock: Clock) -> tuple[str, ...]:
        """The addresses of the DHT: the ones that were given, or else the ones that the peers of the entries name.
        Cancellation ends the search. Raises PeerUnavailable if none of the entries answered, for as long as `patiently`
        tries, and ValueError and IncompatibleVersion as discover_config does."""
        if not self.entries:
            return self.addresses

        async def ask() -> tuple[str, ...]:
            async with self.asking(clock) as (member, store):
                await member.known.look(member.directory, member.blocks)
                addresses = dht_addresses_of(member, store)
            if not addresses:
                raise PeerUnavailable(f"no peer of the run at {self.where} says where the DHT is entered")
            return addresses

        return await patiently(ask, clock, f"the run at {self.where}")

    async def node_addresses(self, clock: Clock) -> tuple[str, ...]:
        """The addresses of the DHT as the entries themselves say, which need not know of any run. Raises
        PeerUnavailable if none of the entries answered, for as long as `patiently` tries."""

        async def ask() -> tuple[str, ...]:
            async with self._reading(clock) as (_, _, store):
                await store.get(keys.RUNS)
            if not store.dht_addresses:
                raise PeerUnavailable(f"nobody at {self.where} says where the DHT is entered")
            return store.dht_addresses

        return await patiently(ask, clock, f"the meeting point at {self.where}")

    @asynccontextmanager
    async def _reading(self, clock: Clock) -> AsyncIterator[tuple[Identity, ChannelPool, PeerStore]]:
        """Read the DHT through the peers of the entries inside the block, under a new identity."""
        own = admitted(generate(), self.token)
        channels = ChannelPool(insecure=self.insecure, identity=own, clock=clock)
        store = PeerStore(self.entries, channels, own, insecure=self.insecure)
        try:
            yield own, channels, store
        finally:
            await store.close()
            await channels.close()

    @asynccontextmanager
    async def asking(self, clock: Clock) -> AsyncIterator[tuple[Membership, PeerStore]]:
        """Join the run inside the block, under a new identity, and read its records through the peers of the entries.

        Yields the membership, and the store of these records. No peer is known yet when the block begins.

        Raises:
            PeerUnavailable: none of the entries answers.
            ValueError, IncompatibleVersion: as of discover_config.
        """
        async with self._reading(clock) as (own, channels, store):
            config = await discover_config(store, clock, address=self.where, authority=own.authority, run=self.run)
            member = Membership.enter(config, store, own, clock, insecure=self.insecure, channels=channels)
            yield member, store

    @property
    def where(self) -> str:
        return ", ".join(entry.endpoint for entry in self.entries) or ", ".join(self.addresses)


def dht_addresses_of(member: Membership, store: PeerStore) -> tuple[str, ...]:
    """Where a program enters the run's DHT: at the peers that are known, and at those that were asked."""
    return tuple(dict.fromkeys([*member.known.dht_addresses(MAX_ADDRESSES), *store.dht_addresses]))


def find_entrance(
    options: EntranceOptions, environment: Mapping[str, str], *, prog: str, clock: Clock, peers: Sequence[str] = ()
) -> Entrance:
    """Find where the options and the environment say that a program enters a run.

    Args:
        peers: PEER_ID@HOST:PORT of peers to ask, for options that name neither an invite nor addresses.

    Raises:
        ValueError, OSError: as of find_token; or an invite or a peer is malformed, the invite's file cannot be read,
            or the run is locked and there is no token.
    """
    given = peers or options.initial_peers if options.invite is None else (_invite(options.invite),)
    addresses, token = find_token(options.token, given, environment, prog=prog, insecure=options.insecure, clock=clock)
    if peers:
        entries = tuple(map(Entry.parse, addresses))
        return Entrance(entries=entries, token=token, insecure=options.insecure)
    if options.invite is None:
        return Entrance(addresses=addresses, token=token, insecure=options.insecure)
    invite = Invite.parse(addresses[0])
    if invite.is_locked and token is None:
        raise ValueError("the run is locked: ask its owner for a token, and give INVITE#TOKEN")
    return Entrance(entries=invite.entries, run=invite.run, token=token, insecure=options.insecure)


def _invite(text: str) -> str:
    """The invite in an argument, or for @FILE in that file, which holds the invite alone or is a peer's
    --ready-file."""
    content = spelled_out(text)
    if not text.startswith("@") or content.startswith(SCHEME):
        return content
    try:
        return str(json_file.parse(content)["invite"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{text[1:]} holds no invite: name a file that a peer wrote for --ready-file") from None


@asynccontextmanager
async def reading(entrance: Entrance, clock: Clock) -> AsyncIterator[Membership]:
    """Be in a run inside the block, under a new identity. No peer is known yet when the block begins. Raises what
    Entrance.dht_addresses, dht_node.as_client, agree_on_config and Membership.require_own_token raise."""
    addresses = await entrance.dht_addresses(clock)
    async with dht_node.as_client(clock, addresses) as node:
        identity = admitted(generate(), entrance.token)
        config = await agree_on_config(node, None, addresses, clock, identity.authority, run=entrance.run)
        member = Membership.enter(config, node, identity, clock, insecure=entrance.insecure)
        try:
            await member.require_own_token()
            yield member
        finally:
            await member.channels.close()
