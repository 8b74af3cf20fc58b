"""A process with our averagers, one for each codec, for the bench `allreduce`, which gives it orders."""

import asyncio
import dataclasses
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from scripts.benches.shared.common import compute_like_peers, run_of, write_json
from scripts.benches.sides.averaging_peer import READY_FILE, as_tensors, digest, obey, values
from scripts.benches.sides.worker import Place
from swarm.averaging.averager import Averager
from swarm.averaging.wire.context import Context
from swarm.averaging.wire.transport import Transport
from swarm.config import RunConfig
from swarm.credentials.identity import Identity, generate
from swarm.machine.clock import SystemClock
from swarm.rpc.channels import ChannelPool
from swarm.training.round_member import Activity, Contribution, Progress, RoundResult, Snapshot, Tensors, known
from swarm.types import PeerRecord


def averaging_config(codec: str, num_peers: int) -> RunConfig:
    """DiLoCo with the plain mean. A round ends with all members, or with one fewer if each of those has `num_peers`
    samples."""
    return run_of(
        f"allreduce-{codec}", width=64, layers=1, setting="diloco", length=16, microbatch=1,
        round_samples=num_peers * (num_peers - 1), rounds={"inner_batch_samples": 1},
        averaging={"codec": codec, "clip_to_median": 0.0},
    )  # fmt: skip


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

    def disproved(self) -> Mapping[str, str]:
        return {}

    def set_behind(self, is_behind: bool) -> None:
        pass  # This member takes no microbatches.

    async def freeze(self, round_number: int, *, drop: Collection[int]) -> Contribution:
        return self.contribution

    async def reopen(self, round_number: int) -> None:
        pass  # There is nothing to resume, because this member never stops training.

    async def train_on(self) -> None:
        pass

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
    def __init__(self, codec: str, num_peers: int, identity: Identity, contribution: Tensors) -> None:
        self._config = averaging_config(codec, num_peers)
        self.place = Place(identity, 0)
        self.member = Member(contribution)
        self.averager: Averager
        self.running: asyncio.Task[None]

    async def meet(self, records: list[PeerRecord], channels: ChannelPool) -> None:
        """Serve an averager that knows all members."""
        context = Context(
            config=self._config, own=self.place.record, peers=lambda stage: records, transport=Transport(channels),
            clock=SystemClock(),
        )  # fmt: skip
        self.averager = Averager(context, self.member)
        await self.place.serve(self.averager)


class SwarmPeer:
    def __init__(self, number: int, num_peers: int, num_parameters: int, codecs: Sequence[str]) -> None:
        own = as_tensors(values(number, num_parameters))
        contribution = {f"layer-{index:04d}": tensor for index, tensor in enumerate(own)}
        identity = generate()
        self._channels, self._num_peers, self._started_at = ChannelPool(), num_peers, 0.0
        self._peers = {codec: CodecPeer(codec, num_peers, identity, contribution) for codec in codecs}
        self._active: CodecPeer

    @property
    def contact(self) -> dict[str, Any]:
        return {codec: peer.place.record.model_dump(mode="json") for codec, peer in self._peers.items()}

    async def meet(self, contacts: list[dict[str, Any]]) -> None:
        for codec, peer in self._peers.items():
            await peer.meet([PeerRecord.model_validate(contact[codec]) for contact in contacts], self._channels)

    async def prepare(self, codec: str) -> None:
        self._active = self._peers[codec]
        self._active.running = asyncio.create_task(self._active.averager.run())

    async def start(self, at: float) -> None:
        """Count the samples of the round at this time of the clock, which starts the round."""
        self._active.member.finished.clear()
        self._active.member.last = None
        await asyncio.sleep(at - time.monotonic())
        self._started_at = at
        await self.learn(self._num_peers - 1)

    async def learn(self, num_samples: int) -> None:
        self._active.member.learn(num_samples)
        self._active.averager.notify()

    async def finish(self) -> dict[str, Any]:
        """Wait until the member has applied the result, or has downloaded it from another member."""
        member = self._active.member
        await member.finished.wait()
        reply: dict[str, Any] = {"seconds": member.finished_at - self._started_at}
        if (result := member.last) is not None:
            reply |= {
                "num_members": len(result.members), "attempts": result.attempts,
                "exchange_seconds": result.cost.exchange_seconds,
            }  # fmt: skip
        return reply

    async def rest(self) -> None:
        self._active.running.cancel()
        await asyncio.wait([self._active.running])

    def held(self) -> list[torch.Tensor]:
        return list(self._active.member.held.values())


async def main(folder: Path, number: int, num_peers: int, num_parameters: int, *codecs: str) -> None:
    compute_like_peers()
    peer = SwarmPeer(number, num_peers, num_parameters, codecs)
    write_json(folder / READY_FILE, peer.contact)
    await obey(folder, peer, num_parameters)
