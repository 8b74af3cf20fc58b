"""Finds out how others reach this peer: it asks them to dial back, and waits at meeting points if they get no answer.

It announces direct endpoints that at least one peer reached, and tunnels if at least one did not. A peer with neither,
or from which only short messages reach others, is not announced, and its log says why.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from hashlib import sha256
from typing import Never

from peers.reach.inquiry import BUSY, Inquiry, Verdict
from peers.reach.listen import Announced, Listen, Outside, loopback_advice, private_advice
from peers.reach.own_port import DhtReach, OwnPort
from peers.reach.router_ports import RouterPorts
from peers.shared.network import Membership
from swarm.dht.node import DhtNode
from swarm.machine.words import Repeats
from swarm.rpc.endpoint import endpoint_of
from swarm.rpc.entry import Entry, direct, points_of, versions
from swarm.rpc.meeting.carrying import Kind
from swarm.rpc.meeting.check import GAP_SECONDS, MAX_ENDPOINTS
from swarm.rpc.meeting.dialler import Points
from swarm.rpc.meeting.waiting import Waiting
from swarm.rpc.v1 import meeting_pb2 as pb
from swarm.types import PeerId

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""Time between two attempts to ask other peers, while none has answered."""
AGAIN_SECONDS, DOUBT_SECONDS = 30.0, 15.0
"""Time after which others are asked again. Together they are less than a minute, within which others learn of a new
address. The second, shorter time is for a result that differs from the one before,
and for a first result in which nobody reached this peer: either may have been an accident."""
MOST_BUSY = 3
"""If other peers had no time to dial back in this many attempts, the machine's own addresses are announced
unchecked."""
MOST_ALONE = 8
"""The most meeting points that are no peers of the run and of which others' records tell."""
MOST_ENDPOINTS = 8
"""The most endpoints that a peer announces."""
SAY_SECONDS = 15.0
"""Time between two log lines that nobody can reach this peer."""
_LOOPBACK = ("127.0.0.1", "::1")
_EVERYWHERE = ("", "0.0.0.0", "::")
"""Values of --host that stand for all addresses of the machine."""


class Reach:
    def __init__(
        self, membership: Membership, node: DhtNode, listen: Listen, *, router_ports: RouterPorts | None = None,
        meet: Sequence[Entry] = (), own: Callable[[], tuple[Outside, ...]] | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            listen: where the peer's server will listen, and where others may reach the server. If the port is 0, a free
                one is taken and kept for this process.
            router_ports: asks the router to forward the ports if nobody reaches them; None for no router.
            meet: meeting points that the user named.
            own: gives the addresses that the machine has now, which may change; None for those of `listen`.
        """
        insecure = membership.channels.is_insecure
        self._membership = membership
        self._listen = listen
        self._meet = meet
        self._own = own
        self._dht = DhtReach(node, listen)
        self._router_ports = router_ports or RouterPorts(membership.clock, ())
        self._own_port = OwnPort(*listen.server, membership.identity, insecure=insecure)
        self.port = self._own_port.number
        """Where the server is to listen."""
        self.open_port = self.port if listen.behind_front is None else listen.port
        """The port that others dial."""
        self._found: Verdict | None = None
        """None while it is not known which endpoints others reach."""
        self._announced: tuple[str, ...] = ("",)
        self._inquiry = Inquiry(membership.channels, membership.clock, random.Random(membership.peer_id))
        self._waiting = Waiting(
            membership.identity,
            Points(membership.identity, insecure=insecure, run_id=membership.config.run_id),
            membership.clock,
            server=("127.0.0.1" if listen.server[0] in _EVERYWHERE else listen.server[0], self.port),
            candidates=self._points,
        )  # fmt: skip

    @property
    def host(self) -> str:
        return self._listen.server[0]

    @property
    def endpoints(self) -> tuple[str, ...]:
        if self._found is None:
            return ()
        found = self._found.endpoints
        behind = self._listen.behind(found, self.open_port) if found else ()
        tunnels = self._waiting.endpoints if self._found.needs_tunnels else ()
        return (*(*found, *tunnels)[: MOST_ENDPOINTS - len(behind)], *behind)

    @property
    def _candidates(self) -> tuple[str, ...]:
        return self._listen.endpoints(self.open_port)[: MAX_ENDPOINTS - 1]

    def announced(self, own_port: int) -> Announced:
        # Without endpoints the former ones stay announced: once all meeting points are gone, the connections that were
        # punched with their help still work, and callers use them as long as the endpoints stay the same.
        self._announced = self.endpoints or self._announced
        return Announced(
            endpoints=self._announced,
            dht_addresses=self._dht.addresses,
            num_punched=self._waiting.num_lines(Kind.PUNCHED),
            num_relayed=self._waiting.num_lines(Kind.RELAYED),
        )

    def held(self) -> AbstractAsyncContextManager[None]:
        """Leave the port to a server of this peer inside the block; outside of it, Reach itself answers those that dial
        back."""
        return self._own_port.held()

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
        """Find out how others reach this peer, again and again, until cancelled. Raises ValueError if the port is in
        use."""
        waiting: asyncio.Task[Never] | None = None
        former: Verdict | None = None
        may_ask_router = 4 in versions(self._listen.endpoints(1))
        num_busy = 0
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._own_port.answer())
                await self._own_port.is_answered.wait()
                while True:
                    verdict, seconds = await self._verdict(), LOOK_SECONDS
                    if verdict is not None and not verdict.endpoints and may_ask_router:
                        may_ask_router = False
                        verdict = await self._with_router(verdict, tasks)
                    if verdict is None:
                        num_busy += self._inquiry.hindrance == BUSY
                        if self._found is None and (not self._inquiry.hindrance or num_busy >= MOST_BUSY):
                            outside = await self._outside_by_router(tasks) if may_ask_router else ()
                            may_ask_router = may_ask_router and not outside
                            self._found = Verdict.unchecked((*outside, *self._candidates))
                    else:
                        seconds = DOUBT_SECONDS if verdict.is_doubtful(former) else AGAIN_SECONDS
                        if former is None or former.endpoints == verdict.endpoints:
                            self._conclude(verdict)
                            if verdict.needs_tunnels and waiting is None:
                                waiting = tasks.create_task(self._waiting.run())
                        if former is None or bool(former.dht_endpoints) == bool(verdict.dht_endpoints):
                            await self._dht.conclude(verdict.dht_endpoints)
                        former = verdict
                    await self._membership.clock.sleep(seconds)
        finally:
            await self._router_ports.release()

    async def _with_router(self, verdict: Verdict, tasks: asyncio.TaskGroup) -> Verdict:
        """Ask the router to forward the ports, and then ask the peers again. Return what they reach."""
        if not await self._router_ports.ask(self._open_ports):
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

    async def _outside_by_router(self, tasks: asyncio.TaskGroup) -> tuple[str, ...]:
        """The endpoint at which the router of the first peer of a run says that it forwards; none if it does not."""
        ports, own = self._router_ports, self._listen.outside
        if self._inquiry.hindrance or not private_advice(self._candidates):
            return ()
        if loopback_advice(self._listen.host) or all(one.host in _LOOPBACK for one in own):
            return ()  # No router leads to the loopback.
        if not await ports.ask(self._open_ports):
            return ()
        host = await ports.outer_host()
        if host is None:
            await ports.release()
            return ()
        tasks.create_task(ports.keep())
        self._dht.is_forwarded_from(host, ports.outer.get(self._dht.port, 0))
        return (endpoint_of(host, ports.outer[self.open_port]),)

    @property
    def _open_ports(self) -> list[int]:
        return list(dict.fromkeys(port for port in (self.open_port, self._dht.port) if port))

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

    def _what_to_do(self, verdict: Verdict) -> str:
        if advice := loopback_advice(self._listen.host):
            return advice
        ends = f"{', '.join(self._candidates)} (gRPC)"
        these, them, fix = "that TCP port", "it", "--port fixes"
        if not verdict.dht_endpoints and self._open_ports != [self.open_port]:
            ends += f" and {self._dht.named} (DHT)"
            these, them, fix = "these TCP ports", "them", "--port and --dht-port fix"
        return (
            f"those that dialled back got no answer at {ends}. To be reached directly, open {these} in the firewall or "
            f"forward {them} in the router; {fix} {them}, and --announce names the address outside"
        )

    def _look_at_own(self) -> None:
        """Take over the addresses that the machine has now: a laptop changes networks, and a lease ends."""
        own = self._listen.own if self._own is None else self._own()
        # Without any network the former addresses stay, because they may come back.
        if own and own != self._listen.own and not all(one.host in _LOOPBACK for one in own):
            logger.info("this machine's addresses are now %s", ", ".join(one.host for one in own))
            self._listen = self._listen.moved(own)
            self._dht.moved(own)

    async def _verdict(self) -> Verdict | None:
        """Ask some peers to dial back. Return None if none of them answers."""
        self._look_at_own()
        own = versions(self._candidates)
        known = self._membership.known.everyone()
        # A meeting point that is no peer dials back too, and is asked where no peer can.
        others = [r for r in known if versions(direct(r.endpoints)) & own] or self._points_alone()
        if not others:
            return await self._inquiry.verdict(others, pb.CheckRequest())
        outer = self._router_ports.outer
        async with self._dht.answering(outer.get(self._dht.port)) as dht_endpoints:
            request = pb.CheckRequest(
                peer_id=self._membership.peer_id,
                endpoints=[*self._candidates, f":{outer.get(self.open_port, self.open_port)}"],
                dht_endpoints=dht_endpoints,
                run_id=self._membership.config.run_id,
            )
            return await self._inquiry.verdict(others, request)

    def _points(self) -> Sequence[Entry]:
        """Peers that may be meeting points, with all of their endpoints, in an order of this peer's own.

        If only peers with the other version of IP cannot reach this one, only peers with both versions are returned.
        """
        own_id, is_hidden = self._membership.peer_id, self._found is not None and self._found.is_hidden
        others = sorted(
            self._membership.known.everyone(), key=lambda record: sha256(f"{own_id} {record.peer_id}".encode()).digest()
        )
        ends = ((PeerId(record.peer_id), direct(record.endpoints)) for record in others)
        peers = [
            Entry(peer_id, end) for peer_id, found in ends if is_hidden or len(versions(found)) == 2 for end in found
        ]
        alone = self._points_alone() if is_hidden else []
        # Those that the user named come first, and last those that other peers' records name.
        return [*(point for point in alone if point in self._meet), *peers, *alone]

    def _points_alone(self) -> list[Entry]:
        """Meeting points that are no peers of the run: those that the user named, and those where other peers wait."""
        known = self._membership.known.everyone()
        peers = {self._membership.peer_id, *(record.peer_id for record in known)}
        named = points_of(end for record in known for end in record.endpoints)
        return list(dict.fromkeys([*self._meet, *(p for p in named if p.peer_id not in peers)]))[:MOST_ALONE]
