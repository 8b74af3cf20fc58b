"""Watches the connections to a stage's peers, so that a ban begins and ends with the fault that it is for.

Run beside each hop, by trainers and stage peers. A broken connection shows that its peer is out of reach, even if no
microbatch was under way; from then on the peer is asked whether it is back. The router decides what follows for its
ban.
"""

import asyncio
import logging
from typing import Any, Never

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from swarm.errors import PeerUnavailable
from swarm.machine.clock import Clock
from swarm.routing.router import Router
from swarm.rpc.channels import ChannelPool
from swarm.types import PeerId, PeerRecord

logger = logging.getLogger(__name__)

GAP_SECONDS = 0.5
"""Time between two checks of the connections and of the banned peers."""
PATIENCE_SECONDS = 10.0
"""How long a probe waits for a connection and an answer. A peer that comes back in this time is found at once."""


async def watch_connections(*, stage: int, router: Router, channels: ChannelPool, clock: Clock) -> Never:
    """Tell the router which peers' connections break, and which unreachable peers serve again or still do not.

    Runs until it is cancelled. Each peer that the router takes for unreachable gets one call at a time, of gRPC's own
    health check, which a peer answers once it serves.
    """
    connected: set[str] = set()
    under_way: set[str] = set()

    async def probe(record: PeerRecord) -> None:
        try:
            health: Any = HealthStub(channels.channel(record))
            reply = await health.Check(HealthCheckRequest(), timeout=PATIENCE_SECONDS, wait_for_ready=True)
        except (grpc.aio.AioRpcError, PeerUnavailable) as error:
            logger.debug("%s is still out of reach: %s", record.name, error)
        else:
            if reply.status == HealthCheckResponse.SERVING:
                router.answered(PeerId(record.peer_id))
        finally:
            under_way.discard(record.place)

    async with asyncio.TaskGroup() as tasks:
        while True:
            records = router.records(stage)
            connected, previously = {r.place for r in records if channels.is_connected(r)}, connected
            broken = previously - connected
            for record in records:
                if record.place in broken:
                    # Counted as a failure now, whichever call noticed the break, because a hop would wait for the next
                    # connection.
                    router.failed(PeerId(record.peer_id), is_unreachable=True, reason="its connection broke")
            for record in router.unreachable(stage):
                if record.place in under_way:
                    # The peer stays banned until this probe has ended and the next check has come.
                    router.unanswered(PeerId(record.peer_id), 4 * GAP_SECONDS)
                else:
                    under_way.add(record.place)
                    tasks.create_task(probe(record))
            await clock.sleep(GAP_SECONDS)
