"""Asks peers that could not be reached whether they are back, so that a ban lasts as long as the fault that it was for.

Run beside each hop, by trainers and stage peers. Decides nothing: the router does with an answer, or with none, what it
likes.
"""

import asyncio
import logging
from typing import Any, Never

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from swarm.clock import Clock
from swarm.errors import PeerUnavailable
from swarm.routing.router import Router
from swarm.rpc.channels import ChannelPool
from swarm.types import PeerId, PeerRecord

logger = logging.getLogger(__name__)

GAP_SECONDS = 0.5
"""Between two looks at who is banned."""
PATIENCE_SECONDS = 10.0
"""A probe waits so long for a connection and an answer, and finds at once what comes back meanwhile."""


async def probe_unreachable(*, stage: int, router: Router, channels: ChannelPool, clock: Clock) -> Never:
    """Have the router hear of a stage's peers that serve again, and of those that do not. Runs until it is cancelled.

    One call at a time to each peer that the router takes for unreachable, none where there is no such peer: gRPC's
    own health check, which is answered once a peer serves.
    """
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
            under_way.discard(record.endpoint)

    async with asyncio.TaskGroup() as tasks:
        while True:
            for record in router.unreachable(stage):
                if record.endpoint in under_way:
                    # Over the end of this probe, and the next look.
                    router.unanswered(PeerId(record.peer_id), 4 * GAP_SECONDS)
                else:
                    under_way.add(record.endpoint)
                    tasks.create_task(probe(record))
            await clock.sleep(GAP_SECONDS)
