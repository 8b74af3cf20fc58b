"""A process with our averagers, one for each codec, for the bench `allreduce`, which gives it orders.

python -m scripts.benches.sides.swarm_averager FOLDER NUMBER NUM_PEERS NUM_PARAMETERS CODEC...
"""

import asyncio
import dataclasses
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from scripts.benches.shared.common import compute_like_peers, write_json
from scripts.benches.sides.averaging_peer import POLL_SECONDS, READY_FILE, Orders, as_tensors, compare, digest, values
from scripts.benches.sides.worker import Place
from swarm.averaging.averager import Averager
from swarm.averaging.wire.context import Context
from swarm.averaging.wire.transport import Transport
from swarm.config import AveragingConfig, DataConfig, RoundsConfig, RunConfig, StagesConfig
from swarm.credentials.identity import Identity, generate
from swarm.machine.clock import SystemClock
from swarm.rpc.channels import ChannelPool
from swarm.training.round_member import Activity, Contribution, Progress, RoundResult, Snapshot, Tensors, known
from swarm.types import PeerRecord


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
        self.contribution = dataclasses.replace(self.contribution, num_samples=num_samples, round_samples=num_samples)

    def progress(self) -> Progress:
        return Progress(
            round=self.round, lineage=self.lineage, run_samples=self.run_samples,
            num_samples=self.contribution.num_samples, committed=frozenset(), highest_microbatch=-1,
        )  # fmt: skip

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
            round=self.round, run_samples=self.run_samples, lineage=self.lineage, tensors=tensors,
            digest=digest(list(tensors.values())),
        )  # fmt: skip

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
        self.place = Place(identity, 0)
        self.member = Member(contribution)
        self._averager: Averager
        self._running: asyncio.Task[None]
        self._started_at = 0.0

    async def meet(self, records: list[PeerRecord], channels: ChannelPool) -> None:
        """Serve an averager that knows all members."""
        context = Context(
            config=self._config, own=self.place.record, peers=lambda stage: records, transport=Transport(channels),
            clock=SystemClock(),
        )  # fmt: skip
        self._averager = Averager(context, self.member)
        await self.place.serve(self._averager)

    def run(self, tasks: asyncio.TaskGroup) -> None:
        self._running = tasks.create_task(self._averager.run())

    async def rest(self) -> None:
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
                "num_members": len(result.members), "attempts": result.attempts, "bytes_sent": result.cost.bytes_sent,
                "bytes_received": result.cost.bytes_received, "exchange_seconds": result.cost.exchange_seconds,
            }  # fmt: skip
        return reply


async def main(folder: Path, number: int, num_peers: int, num_parameters: int, codecs: list[str]) -> None:
    compute_like_peers()
    own = as_tensors(values(number, num_parameters))
    contribution = {f"layer-{index:04d}": tensor for index, tensor in enumerate(own)}
    identity, channels = generate(), ChannelPool()
    peers = {codec: CodecPeer(codec, num_peers, identity, contribution) for codec in codecs}
    contact = {codec: peer.place.record.model_dump(mode="json") for codec, peer in peers.items()}
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
                        await peer.meet(
                            [PeerRecord.model_validate(contact[codec]) for contact in order["contacts"]], channels
                        )
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


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:]))
