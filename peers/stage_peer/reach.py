"""Finds out how others reach this peer: it has them dial back, and waits at meeting points if they get no answer.

Run by swarm-peer from before it announces anything until it ends. The peer announces direct endpoints that one of the
others reached, and tunnels if one of them did not. A peer without either is not announced, and its user is told why; so
is a peer from which only short messages reach the others. What meeting points do is in swarm/rpc/meeting.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Never

from peers.shared.membership import Membership
from peers.stage_peer.inquiry import BUSY, Inquiry
from peers.stage_peer.listen import Announced, Listen
from peers.stage_peer.own_port import answering, reserved
from peers.stage_peer.router_ports import RouterPorts
from peers.stage_peer.verdict import Verdict
from swarm.dht import addresses
from swarm.dht.node import DhtNode
from swarm.errors import SwarmError
from swarm.machine.repeats import Repeats
from swarm.rpc.endpoint import endpoint_of, host_and_port
from swarm.rpc.entry import Entry
from swarm.rpc.meeting.carrying import Kind
from swarm.rpc.meeting.check import GAP_SECONDS, MAX_ENDPOINTS
from swarm.rpc.meeting.endpoints import direct, versions
from swarm.rpc.meeting.points import Points
from swarm.rpc.meeting.waiting import Waiting
from swarm.rpc.v1 import meeting_pb2 as pb
from swarm.types import PeerId

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""Time between two attempts to ask other peers, while none has answered."""
AGAIN_SECONDS, DOUBT_SECONDS = 300.0, 15.0
"""Time after which others are asked again. It is shorter after a result that differs from the one before, or where at
first nobody got through: that may have been an accident."""
MOST_BUSY = 3
"""After so many looks in which other peers had no time to dial back, the machine's own addresses are announced."""
SAY_SECONDS = 15.0
"""Time between two log lines that nobody can reach this peer."""
_EVERYWHERE = ("", "0.0.0.0", "::")
"""Values of --host that stand for all addresses of the machine."""


class Reach:
    """Finds out, and keeps up, the ways in which others reach one peer."""

    def __init__(
        self, membership: Membership, node: DhtNode, listen: Listen, *, insecure: bool,
        router_ports: RouterPorts | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            listen: where the peer's server will listen, and where others may reach that. If any port will do, a free
                one is taken and kept for this process.
            router_ports: asks the router to forward the ports if nobody reaches them; None never asks it.
        """
        self._membership = membership
        self._node = node
        self._listen = listen
        self._insecure = insecure
        self._router_ports = router_ports
        self._reserved = None if listen.port else reserved(listen.host)
        self.port: int = listen.port if self._reserved is None else self._reserved.getsockname()[1]
        self._found: Verdict | None = None
        """None while it is not known which endpoints others reach."""
        self._dht_addresses = listen.dht_addresses
        """Where others enter the DHT at this peer, as far as is known; none once others do not reach its node."""
        self._announced: tuple[str, ...] = ("",)
        self._serves = False
        self._inquiry = Inquiry(membership, random.Random(membership.peer_id), insecure=insecure)
        self._waiting = Waiting(
            membership.identity, Points(membership.identity, insecure=insecure), membership.clock,
            server=(listen.host if listen.host not in _EVERYWHERE else "127.0.0.1", self.port),
            candidates=self._points,
        )  # fmt: skip

    @property
    def host(self) -> str:
        """Where the server is to listen, as Listen says."""
        return self._listen.host

    @property
    def endpoints(self) -> tuple[str, ...]:
        """All ways to this peer that are known to work, the best first."""
        if self._found is None:
            return ()
        return (*self._found.endpoints, *(self._waiting.endpoints if self._found.needs_tunnels else ()))[:8]

    @property
    def _candidates(self) -> tuple[str, ...]:
        """The endpoints at which others are to dial this peer back."""
        return self._listen.endpoints(self.port)[: MAX_ENDPOINTS - 1]

    def announced(self, own_port: int) -> Announced:
        """What others are told now. Called once the server listens on `own_port`."""
        self._serves = True
        # Where all meeting points are gone, lines that were punched with their help still lead here: callers use them
        # for as long as the endpoints stay the same.
        self._announced = self.endpoints or self._announced
        return Announced(
            endpoints=self._announced,
            dht_addresses=self._dht_addresses,
            num_punched=self._waiting.num_lines(Kind.PUNCHED),
            num_relayed=self._waiting.num_lines(Kind.RELAYED),
        )

    async def found_out(self) -> None:
        """Return once there is a way to this peer; until then, log at intervals that there is none."""
        clock = self._membership.clock
        said = Repeats(clock, SAY_SECONDS)
        # A meeting point needs a moment to take a peer in.
        patience = clock.monotonic() + SAY_SECONDS
        with self._membership.waits.on("other peers to find a way to this one"):
            while not self.endpoints:
                if (hindrance := self._inquiry.hindrance) and said.count(hindrance):
                    logger.warning("this peer does not serve yet: %s", hindrance)
                elif self._found is not None and clock.monotonic() >= patience and said.count(""):
                    logger.error(
                        "nobody can reach this peer, so it does not serve yet: no peer of the run takes it in, and %s",
                        self._what_to_do(self._found),
                    )
                await clock.sleep(0.05)

    async def keep(self) -> Never:
        """Find out how others reach this peer, again and again, until cancelled.

        Raises:
            ValueError: the port is in use.
        """
        waiting: asyncio.Task[Never] | None = None
        former: Verdict | None = None
        may_ask_router = self._router_ports is not None and 4 in versions(self._listen.endpoints(1))
        num_busy = 0
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    verdict, seconds = await self._verdict(), LOOK_SECONDS
                    if verdict is not None and not verdict.endpoints and may_ask_router:
                        may_ask_router = False
                        verdict = await self._with_router(verdict, tasks)
                    if verdict is None:
                        num_busy += self._inquiry.hindrance == BUSY
                        if self._found is None and (not self._inquiry.hindrance or num_busy >= MOST_BUSY):
                            self._found = Verdict.unchecked(self._candidates)
                    else:
                        differs = former is not None and former.endpoints != verdict.endpoints
                        is_doubtful = differs or (former is None and not verdict.endpoints)
                        former, seconds = verdict, DOUBT_SECONDS if is_doubtful else AGAIN_SECONDS
                        if not differs:
                            self._conclude(verdict)
                            if verdict.needs_tunnels and waiting is None:
                                waiting = tasks.create_task(self._waiting.run())
                            await self._conclude_dht(verdict)
                    await self._membership.clock.sleep(seconds)
        finally:
            if self._router_ports is not None:
                await self._router_ports.release()
            if self._reserved is not None:
                self._reserved.close()

    async def _with_router(self, verdict: Verdict, tasks: asyncio.TaskGroup) -> Verdict:
        """Ask the router to forward the ports, and then the peers again; gives what they reach."""
        assert self._router_ports is not None
        ports = [self.port, *(port for _, port in _nodes(self._listen.dht_addresses))]
        if not await self._router_ports.ask(list(dict.fromkeys(ports))):
            return verdict
        # Peers that were asked a moment ago do not dial back again so soon.
        await self._membership.clock.sleep(GAP_SECONDS + 0.1)
        forwarded = await self._verdict()
        if forwarded is None or not forwarded.endpoints:
            logger.info("the router says that it forwards this peer's ports, and nobody reaches them all the same")
            await self._router_ports.release()
            return verdict
        tasks.create_task(self._router_ports.keep())
        return forwarded

    def _outer(self, port: int) -> int:
        """The router's port that leads to this one."""
        return port if self._router_ports is None else self._router_ports.outer.get(port, port)

    def _conclude(self, verdict: Verdict) -> None:
        former, self._found = self._found, verdict
        if former is not None and former.endpoints == verdict.endpoints:
            return
        if verdict.endpoints:
            logger.info(
                "others reach this peer at %s: %d of %d that dialled back", verdict.endpoints[0], verdict.num_reached,
                verdict.num_asked,
            )  # fmt: skip
        else:
            logger.warning("others reach this peer by way of further peers alone, since %s", self._what_to_do(verdict))

    async def _conclude_dht(self, verdict: Verdict) -> None:
        if not self._dht_addresses:
            return
        if not verdict.dht_endpoints:
            tried = self._tried_nodes
            logger.info("others do not reach its node of the DHT at %s: from now on it asks, and is not asked", tried)
            self._dht_addresses = ()
            try:
                await self._node.become_client()
            except (SwarmError, OSError) as error:
                logger.debug("it stays a node that others would ask: %s", error)
            return
        _, libp2p_id = addresses.split(self._dht_addresses[0])
        ends = map(host_and_port, verdict.dht_endpoints)
        self._dht_addresses = tuple(f"{addresses.at(host, port)}/p2p/{libp2p_id}" for host, port in ends)

    @property
    def _tried_nodes(self) -> str:
        return ", ".join(endpoint_of(*node) for node in _nodes(self._listen.dht_addresses))

    def _what_to_do(self, verdict: Verdict) -> str:
        ends = f"{', '.join(self._candidates)} (gRPC)"
        these, them, fix = "that TCP port", "it", "--port fixes"
        if not verdict.dht_endpoints:
            ends += f" and {self._tried_nodes} (DHT)"
            these, them, fix = "these TCP ports", "them", "--port and --dht-port fix"
        return (
            f"those that dialled back got no answer at {ends}. To be reached directly, open {these} in the firewall or "
            f"forward {them} in the router; {fix} {them}, and --announce names the address outside"
        )

    async def _verdict(self) -> Verdict | None:
        """Ask some peers to dial back; gives None if none of them answers. Raises ValueError if the port is in use."""
        own = versions(self._candidates)
        others = [r for r in self._membership.known.everyone() if versions(direct(r.endpoints)) & own]
        nodes = _nodes(self._dht_addresses)[: MAX_ENDPOINTS - 1]
        seen = [f":{self._outer(port)}" for _, port in nodes[:1]]
        request = pb.CheckRequest(
            peer_id=self._membership.peer_id,
            endpoints=[*self._candidates, f":{self._outer(self.port)}"],
            dht_endpoints=[*(endpoint_of(*node) for node in nodes), *seen],
        )
        async with contextlib.AsyncExitStack() as stack:
            if others:
                await stack.enter_async_context(self._answering())
            return await self._inquiry.verdict(others, request)

    @asynccontextmanager
    async def _answering(self) -> AsyncIterator[None]:
        """Answer at this peer's port, with its certificate, while its server is not there yet."""
        if self._serves:
            yield
            return
        async with answering(self.host, self.port, self._membership.identity, insecure=self._insecure):
            yield

    def _points(self) -> Sequence[Entry]:
        """Peers that may be meeting points, with all of their endpoints, in an order of this peer's own.

        If this peer is out of reach only for peers with the other version of IP, these ones have both versions.
        """
        own_id, is_hidden = self._membership.peer_id, self._found is not None and self._found.is_hidden
        others = sorted(
            self._membership.known.everyone(), key=lambda record: sha256(f"{own_id} {record.peer_id}".encode()).digest()
        )
        ends = ((PeerId(record.peer_id), direct(record.endpoints)) for record in others)
        return [
            Entry(peer_id, end) for peer_id, found in ends if is_hidden or len(versions(found)) == 2 for end in found
        ]


def _nodes(addresses: Iterable[str]) -> list[tuple[str, int]]:
    """The host and port in each multiaddress of the DHT."""
    return [(host, int(port)) for _, _, host, _, port, *_ in (address.split("/") for address in addresses)]
