"""A process with our averagers: gRPC with TLS, one averager and one server a codec.

    python -m scripts.benches.sides.swarm_averager FOLDER NUMBER NUM_PEERS NUM_PARAMETERS CODEC...

The allreduce bench starts it and gives it orders (averaging_peer.py). The averagers, the transport and the servicer are
those of a stage peer. Instead of a stage there is a member that contributes known tensors. An averager runs only during
its own rounds, so that it costs the other arms nothing.
"""

import asyncio
import dataclasses
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import grpc
import torch
from grpc_health.v1._async import HealthServicer
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from scripts.benches.shared.common import compute_like_peers, write_json
from scripts.benches.sides.averaging_peer import POLL_SECONDS, READY_FILE, Orders, as_tensors, compare, digest, values
from swarm.averaging.averager import Averager
from swarm.averaging.servicer import AveragingServicer
from swarm.averaging.wire.context import Context
from swarm.averaging.wire.transport import Transport
from swarm.config import AveragingConfig, DataConfig, RoundsConfig, RunConfig, StagesConfig
from swarm.credentials.identity import Identity, generate
from swarm.machine.clock import SystemClock
from swarm.rpc import tls
from swarm.rpc.channels import ChannelPool
from swarm.rpc.serving import SERVER_OPTIONS, bind_server
from swarm.rpc.v1.averaging_pb2_grpc import add_AveragingServiceServicer_to_server
from swarm.training.round_member import Activity, Contribution, Progress, RoundResult, Snapshot, Tensors, known
from swarm.types import PeerRecord, PeerState


def averaging_config(codec: str, num_peers: int) -> RunConfig:
    """DiLoCo with the plain mean. A round ends with all members, or with one fewer if each of those has `num_peers`
    samples."""
    return RunConfig(
        run=f"bench-allreduce-{codec}",
        stages=StagesConfig(num_stages=1),
        data=DataConfig(microbatch_size=1),
        rounds=RoundsConfig(setting="diloco", round_samples=num_peers * (num_peers - 1), inner_batch_samples=1),
        averaging=AveragingConfig(codec=codec, clip_to_median=0.0),  # type: ignore[arg-type]  # pydantic checks it
    )


class Member:
    """A RoundMember that contributes the same values in every round, and keeps the last result."""

    def __init__(self, tensors: Tensors) -> None:
        self.held = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        self.round, self.run_samples, self.lineage = 0, 0, ""
        self.contribution = Contribution(
            tensors=tensors, num_samples=0, num_targets=0, round_samples=0, committed=frozenset()
        )
        self.last: RoundResult | None = None
        self.finished_at = 0.0
        self.finished = asyncio.Event()

    def learn(self, num_samples: int) -> None:
        """Count this many samples as trained on in this round."""
        self.contribution = dataclasses.replace(self.contribution, num_samples=num_samples, round_samples=num_samples)

    def progress(self) -> Progress:
        return Progress(
            round=self.round,
            lineage=self.lineage,
            run_samples=self.run_samples,
            num_samples=self.contribution.num_samples,
            committed=frozenset(),
            highest_microbatch=-1,
        )

    def activity(self) -> Activity:
        return Activity(quiet_seconds=0.0, longest_seconds=0.0, num_bytes=sum(t.nbytes for t in self.held.values()))

    def set_behind(self, is_behind: bool) -> None:
        pass  # This member takes no microbatches.

    async def close(self, round_number: int, *, drop: Collection[int]) -> Contribution:
        return self.contribution

    async def reopen(self, round_number: int) -> None:
        pass  # There is nothing to resume, because this member never stops training.

    async def apply(self, result: RoundResult) -> asyncio.Future[str]:
        state_digest = await asyncio.to_thread(self._hold, result.tensors)
        self.last = result
        self._begin(self.round + 1, self.run_samples + result.num_samples, result.lineage)
        return known(state_digest)

    async def snapshot(self) -> Snapshot:
        tensors = {name: tensor.clone() for name, tensor in self.held.items()}
        return Snapshot(
            round=self.round,
            run_samples=self.run_samples,
            lineage=self.lineage,
            tensors=tensors,
            digest=digest(list(tensors.values())),
        )

    async def install(self, snapshot: Snapshot, *, carry: bool = False) -> None:
        self._hold(snapshot.tensors)
        self._begin(snapshot.round, snapshot.run_samples, snapshot.lineage)

    def _hold(self, tensors: Tensors) -> str:
        for name, tensor in self.held.items():
            tensor.copy_(tensors[name])
        return digest(list(self.held.values()))

    def _begin(self, round_number: int, run_samples: int, lineage: str) -> None:
        self.finished_at = time.monotonic()
        self.round, self.run_samples, self.lineage = round_number, run_samples, lineage
        self.learn(0)
        self.finished.set()


class CodecPeer:
    """The averager of one codec, and the server in front of it."""

    def __init__(self, codec: str, num_peers: int, identity: Identity, contribution: Tensors) -> None:
        self._config = averaging_config(codec, num_peers)
        self._num_peers = num_peers
        self._identity = identity
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        port = bind_server(self._server, "127.0.0.1", 0, tls.server_credentials(identity))
        self.endpoint = f"127.0.0.1:{port}"
        self.member = Member(contribution)
        self._averager: Averager
        self._running: asyncio.Task[None]
        self._started_at = 0.0

    async def meet(self, records: list[PeerRecord], channels: ChannelPool) -> None:
        """Serve an averager that knows all members."""
        (own,) = (record for record in records if record.peer_id == self._identity.peer_id)
        context = Context(
            config=self._config,
            own=own,
            peers=lambda stage: records,
            transport=Transport(channels),
            clock=SystemClock(),
        )
        self._averager = Averager(context, self.member)
        servicer = AveragingServicer(self._averager.handlers, own_id=self._identity.peer_id)
        add_AveragingServiceServicer_to_server(servicer, self._server)
        # A member asks an owner that is slow to answer whether it is alive.
        add_HealthServicer_to_server(HealthServicer(), self._server)
        await self._server.start()

    def run(self, tasks: asyncio.TaskGroup) -> None:
        """Take part in rounds from now on."""
        self._running = tasks.create_task(self._averager.run())

    async def rest(self) -> None:
        """Take no part in rounds any more."""
        self._running.cancel()
        await asyncio.wait([self._running])

    async def start(self, at: float) -> None:
        """Count the samples of the round at this time of the clock, which starts the round."""
        self.member.finished.clear()
        self.member.last = None
        await asyncio.sleep(at - time.monotonic())
        self._started_at = at
        self.learn(self._num_peers - 1)

    def learn(self, num_samples: int) -> None:
        """Count this many samples as trained on in this round, and report them to the leader."""
        self.member.learn(num_samples)
        self._averager.notify()

    async def finish(self) -> dict[str, Any]:
        """Wait until the member has applied the result, or has downloaded it from another member."""
        await self.member.finished.wait()
        reply: dict[str, Any] = {"seconds": self.member.finished_at - self._started_at}
        if (result := self.member.last) is not None:
            reply |= {
                "num_members": len(result.members),
                "attempts": result.attempts,
                "bytes_sent": result.cost.bytes_sent,
                "bytes_received": result.cost.bytes_received,
                "exchange_seconds": result.cost.exchange_seconds,
            }
        return reply


async def main(folder: Path, number: int, num_peers: int, num_parameters: int, codecs: list[str]) -> None:
    """Carry out orders until killed."""
    compute_like_peers()
    own = as_tensors(values(number, num_parameters))
    contribution = {f"layer-{index:04d}": tensor for index, tensor in enumerate(own)}
    identity, channels = generate(), ChannelPool()
    peers = {codec: CodecPeer(codec, num_peers, identity, contribution) for codec in codecs}
    endpoints = {codec: peer.endpoint for codec, peer in peers.items()}
    contact = {"peer_id": identity.peer_id, "certificate_pem": identity.certificate_pem, "endpoints": endpoints}
    write_json(folder / READY_FILE, contact)
    orders, active = Orders(folder), peers[codecs[0]]
    async with asyncio.TaskGroup() as tasks:
        while True:
            if (order := orders.poll()) is None:
                await asyncio.sleep(POLL_SECONDS)
                continue
            reply: dict[str, Any] = {}
            match order["name"]:
                case "meet":
                    for codec, peer in peers.items():
                        await peer.meet([_record(contact, codec) for contact in order["contacts"]], channels)
                case "prepare":
                    active = peers[order["codec"]]
                    active.run(tasks)
                case "start":
                    await active.start(order["at"])
                case "learn":
                    active.learn(order["num_samples"])
                case "finish":
                    reply = await active.finish()
                case "compare":
                    await active.rest()
                    reply = compare(list(active.member.held.values()), order["means"], num_parameters)
            orders.answer(reply)


def _record(contact: dict[str, Any], codec: str) -> PeerRecord:
    return PeerRecord(
        peer_id=contact["peer_id"],
        certificate_pem=contact["certificate_pem"],
        endpoint=contact["endpoints"][codec],
        stage=0,
        state=PeerState.SERVING,
        announced_at=0.0,
    )


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:]))
