"""Where a program enters a run, and with which token: an invite, or addresses of the DHT.

Used by every program that joins a run. An invite names peers by their gRPC endpoints, and these are asked at which
addresses the DHT can be entered; so an address that has changed since does no harm while one of them is there.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from peers.shared.cli import spelled_out
from peers.shared.invite_option import EntranceOptions
from peers.shared.network import KnownPeers
from peers.shared.token_option import admitted, find_token
from swarm.config import RunConfig
from swarm.credentials.certificates import Role
from swarm.credentials.identity import generate
from swarm.credentials.token import Token
from swarm.dht.directory import Directory
from swarm.dht.discovery import discover_config
from swarm.dht.lookup import PeerStore
from swarm.errors import PeerUnavailable
from swarm.machine import json_file
from swarm.machine.clock import Clock
from swarm.machine.patience import patiently
from swarm.routing.router import Router
from swarm.rpc.channels import ChannelPool
from swarm.rpc.entry import Entry
from swarm.rpc.invite import Invite

MAX_ADDRESSES = 8
"""The DHT is entered at so many peers at most, where more are known."""


@dataclass(frozen=True, kw_only=True)
class Entrance:
    """Where one run is entered, and with which token.

    Attributes:
        entries: peers that are asked, as an invite names them; none where addresses were given.
        addresses: addresses of nodes of the DHT; none where there are entries.
        run: the digest with which the run's id ends; empty where any run will do.
        token: None for an open run.
        insecure: whether the run does without TLS.
    """

    entries: tuple[Entry, ...] = ()
    addresses: tuple[str, ...] = ()
    run: str = ""
    token: Token | None
    insecure: bool

    async def dht_addresses(self, clock: Clock) -> tuple[str, ...]:
        """Where the DHT is entered: as given, or as the peers say that are asked. Cancellation ends the search.

        Raises:
            PeerUnavailable: none of them answered, for as long as `patiently` tries.
            ValueError, IncompatibleVersion: as of discover_config.
        """
        if not self.entries:
            return self.addresses

        async def ask() -> tuple[str, ...]:
            _, known = await self.look(clock)
            addresses = known.dht_addresses(MAX_ADDRESSES)
            if not addresses:
                raise PeerUnavailable(f"no peer of the run at {self.where} says where the DHT is entered")
            return tuple(addresses)

        return await patiently(ask, clock, f"the run at {self.where}")

    async def look(self, clock: Clock) -> tuple[RunConfig, KnownPeers]:
        """The run and its peers, as one of those shows them that are to be asked. Cancellation ends the question.

        Raises:
            PeerUnavailable: none of them answers.
            ValueError, IncompatibleVersion: as of discover_config.
        """
        own = admitted(generate(), self.token)
        channels = ChannelPool(insecure=self.insecure, identity=own, clock=clock)
        store = PeerStore(self.entries, channels, own, insecure=self.insecure)
        try:
            config = await discover_config(store, clock, address=self.where, authority=own.authority, run=self.run)
            known = KnownPeers(Router(clock, random.Random(own.peer_id)))
            await known.look(Directory(store, own, config.run_id, clock), range(config.stages.num_stages))
            return config, known
        finally:
            await store.close()
            await channels.close()

    @property
    def where(self) -> str:
        """The peers that are asked, or else the addresses, for people."""
        return ", ".join(entry.endpoint for entry in self.entries) or ", ".join(self.addresses)


def find_entrance(
    options: EntranceOptions, environment: Mapping[str, str], *, role: Role, clock: Clock, peers: Sequence[str] = ()
) -> Entrance:
    """Where the options and the environment have a program enter a run.

    Args:
        role: what the program needs.
        peers: PEER_ID@HOST:PORT of peers that are to be asked, where the options name neither an invite nor addresses.

    Raises:
        ValueError, OSError: as of find_token; an invite or a peer is none, its file cannot be read, or the run is
            locked and there is no token.
    """
    given = peers or options.initial_peers if options.invite is None else (_invite(options.invite),)
    addresses, token = find_token(options.token, given, environment, role=role, insecure=options.insecure, clock=clock)
    if peers:
        entries = tuple(map(Entry.parse, addresses))
        return Entrance(entries=entries, token=token, insecure=options.insecure)
    if options.invite is None:
        return Entrance(addresses=addresses, token=token, insecure=options.insecure)
    invite = Invite.parse(addresses[0])
    if invite.is_locked and token is None:
        raise ValueError("the run is locked: ask its owner for a token, and say INVITE#TOKEN")
    return Entrance(entries=invite.entries, run=invite.run, token=token, insecure=options.insecure)


def _invite(text: str) -> str:
    """The invite of an argument: itself, or in the file that it names, alone or as a peer's --ready-file has it."""
    content = spelled_out(text)
    if not text.startswith("@") or not content.startswith("{"):
        return content
    try:
        return str(json_file.parse(content)["invite"])
    except (ValueError, KeyError):
        raise ValueError(f"{text[1:]} holds no invite: name a file that a peer wrote for --ready-file") from None
