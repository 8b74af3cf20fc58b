"""Joining through a donor with a slow, shared line: each newcomer gets the state in its turn, from the donor or from
others.

The tests run in virtual time, with lines of a fixed rate. The bench `joining` measures the same between real hosts.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from unittest.mock import patch

import pytest

from swarm.averaging.agreement.timing import Timing
from swarm.averaging.donor import snapshot_id
from swarm.averaging.wire.transport import REPORT
from swarm.errors import PeerUnavailable
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.training.round_member import Activity, Snapshot
from swarm.types import Block, PeerRecord, PeerState
from tests.averaging.doubles import Network, Peer, peer_id, until
from tests.averaging.fake_stage import FakeStage, make_config
from tests.support.virtual_time import in_virtual_time

DONOR = 9
RESULT_BYTES = 68
"""The size of a round's average; a snapshot is three times as large."""
LINE_BYTES_PER_SECOND = 21.0
QUANTUM_BYTES = 3
"""How many bytes a flow sends before the next one has its turn: flows over one line share it."""
MICROBATCHES = 8
MICROBATCH_BYTES = 18
"""The bytes that training on one microbatch sends over the donor's line. In a round these are twice the bytes of an
average."""
COMPUTING_SECONDS = 0.8
PAUSE_SECONDS = 2.0
"""The time between a commit and the next round's first microbatch."""


class LargeStage(FakeStage):
    """A stage with moments in its snapshots."""

    def activity(self) -> Activity:
        return Activity(quiet_seconds=0.0, longest_seconds=0.0, num_bytes=RESULT_BYTES)

    async def snapshot(self) -> Snapshot:
        tensors = {name: self.anchor.clone() for name in ("anchor", "first_moment", "second_moment")}
        return Snapshot(
            round=self.round, run_samples=self.run_samples, lineage=self.lineage, tensors=tensors, digest=self.digest
        )


class SlowDonor(Network):
    """A stage that one peer serves, over a slow line, while a run trains over it.

    Attributes:
        serving: the numbers of the newcomers that have arrived, and now train as well.
    """

    def __init__(self) -> None:
        super().__init__(make_config("synchronous", microbatches=MICROBATCHES), LargeStage)
        self.timing, self.takes_turns = Timing(), True
        self.before, self.tamper = self._before, self._tamper
        self.serving = {DONOR}
        self._line = asyncio.Lock()
        self._owed = Counter[int]()
        """How many bytes the donor has given to each peer that downloads and that have not passed the line yet."""
        self._round, self._began_at, self._left = -1, 0.0, list[int]()

    def directory(self, block: Block) -> list[PeerRecord]:
        return [
            each.model_copy(
                update={
                    "state": PeerState.SERVING
                    if self.peers[each.peer_id].number in self.serving
                    else PeerState.JOINING,
                    "samples_per_second": 200.0,
                }
            )
            for each in super().directory(block)
        ]

    async def _send(self, num_bytes: float) -> None:
        """Send bytes over the donor's line."""
        while num_bytes > 0:
            async with self._line:
                await asyncio.sleep(min(num_bytes, QUANTUM_BYTES) / LINE_BYTES_PER_SECOND)
            num_bytes -= QUANTUM_BYTES
            await asyncio.sleep(0)

    def _tamper(self, target: int, piece: pb.DownloadReply) -> None:
        if target == DONOR:
            self._owed[target] += len(piece.data)

    async def _before(self, name: str, source: int, target: int) -> None:
        if source == target or DONOR not in (source, target):
            return
        if name == "Exchange":
            await self._send(RESULT_BYTES / len(self.serving))
        elif name == "Download" and target == DONOR:
            await self._send(self._owed.pop(target, 0))

    # -- training ----------------------------------------------------------------------------------------------------

    async def train(self, number: int) -> None:
        """Train one peer's share of each round, until cancelled."""
        stage, donor = self.peers[peer_id(number)].stage, self.peers[peer_id(DONOR)].stage
        now = asyncio.get_running_loop().time
        while True:
            if donor.round != self._round:
                self._round, self._began_at = donor.round, now()
                self._left = [donor.round * MICROBATCHES + i for i in range(MICROBATCHES)]
            if not self._left or now() < self._began_at + PAUSE_SECONDS or stage.closed or stage.round != donor.round:
                await asyncio.sleep(0.1)
                continue
            microbatch = self._left.pop()
            await (self._send(MICROBATCH_BYTES) if number == DONOR else asyncio.sleep(COMPUTING_SECONDS))
            stage.learn(microbatch)

    async def join(self, number: int) -> None:
        """Join as a peer's program does."""
        newcomer = self.add(number)
        await asyncio.sleep(0)
        await newcomer.averager.join()
        await newcomer.averager.arrived()
        self.serving.add(number)


@asynccontextmanager
async def slow_donor() -> AsyncIterator[SlowDonor]:
    with patch("swarm.averaging.donor.SEGMENT_BYTES", 34), patch("swarm.averaging.vectors.snapshots.CHUNK_BYTES", 8):
        async with SlowDonor() as network:
            network.add(DONOR)
            yield network


@in_virtual_time
async def test_four_that_join_at_once_all_serve_soon(caplog: pytest.LogCaptureFixture) -> None:
    """The first newcomer uses the donor's line. Another one has begun to download a snapshot that only the donor holds.
    It must not stay with that snapshot: over the donor's line it would get one round in the time in which the group
    commits one."""
    caplog.set_level(logging.INFO)
    async with slow_donor() as network, asyncio.TaskGroup() as tasks:
        training = [tasks.create_task(network.train(DONOR))]
        await until(lambda: network.peers[peer_id(DONOR)].stage.round >= 3, seconds=60.0)

        async def join(number: int) -> None:
            await network.join(number)
            training.append(tasks.create_task(network.train(number)))

        async with asyncio.timeout(150.0), asyncio.TaskGroup() as joining:
            for number in range(1, 5):
                joining.create_task(join(number))
        for task in training:
            task.cancel()
        assert "never arrive" not in caplog.text
        assert "cannot take part" not in caplog.text


# -- what a donor that is busy has to give ---------------------------------------------------------------------------


@asynccontextmanager
async def alone(**changes: bool) -> AsyncIterator[tuple[Network, Peer]]:
    """A stage of one peer, number 2, at round 1; newcomers have lower numbers."""
    async with Network(make_config("diloco", microbatches=1)) as network:
        network.takes_turns = changes.get("takes_turns", False)
        network.add(2)
        await commit(network)
        yield network, network.peers[peer_id(2)]


async def commit(network: Network) -> None:
    stage = network.peers[peer_id(2)].stage
    number = stage.round
    stage.learn(number)
    await until(lambda: stage.round > number)


async def asked(donor: Peer, request: pb.DownloadRequest) -> list[pb.DownloadReply]:
    return [reply async for reply in donor.averager.donor.serve(request)]


async def hold(donor: Peer) -> pb.SnapshotHeader:
    """Ask for a snapshot, as a peer does while its download is not finished."""
    (offer,) = await asked(donor, pb.DownloadRequest(offer=pb.OfferRequest()))
    segment = pb.SegmentRequest(snapshot=snapshot_id(offer.header), index=0)
    await asked(donor, pb.DownloadRequest(segment=segment))
    return offer.header


@in_virtual_time
async def test_an_older_snapshot_that_a_donor_keeps_for_others_is_taken_with_the_results_since() -> None:
    """The donor keeps two snapshots, and makes no third one while both are being fetched."""
    async with alone() as (network, donor):
        headers = []
        for _ in range(2):
            headers.append(await hold(donor))
            await commit(network)
        newcomer = network.add(1)
        await asyncio.sleep(0)
        async with asyncio.timeout(5.0):
            await newcomer.averager.join()
        assert (newcomer.stage.round, newcomer.stage.digest) == (3, donor.stage.digest)
        assert newcomer.stage.num_installs == 1
        assert [result.round for result in newcomer.stage.results] == [2]


@in_virtual_time
async def test_a_dead_peer_that_is_still_announced_makes_no_newcomer_leave_the_queue(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with alone(takes_turns=True) as (network, donor):
        network.add(3)
        network.kill(3)
        turns = donor.averager.context.turns
        assert turns is not None
        async with turns.turn("another"):
            newcomer = network.add(1)
            joining = asyncio.create_task(newcomer.averager.join())
            await asyncio.sleep(30.0)
            assert not joining.done(), caplog.text
        await asyncio.wait_for(joining, 10.0)
        assert newcomer.stage.digest == donor.stage.digest
        assert "others have the state" not in caplog.text


@in_virtual_time
async def test_a_newcomer_that_reaches_no_peer_at_first_serves_only_when_it_has_arrived() -> None:
    async with alone() as (network, donor):
        began_at = asyncio.get_running_loop().time()

        async def busy(name: str, source: int, target: int) -> None:
            if source == 1 and name == REPORT.name and asyncio.get_running_loop().time() < began_at + 2.0:
                raise PeerUnavailable("the line is busy")
            if source == 1 and name == "Download":
                await asyncio.sleep(0.3)
                if newcomer.stage.num_installs and donor.stage.round < 4:
                    await commit(network)

        network.before = busy
        newcomer = network.add(1)
        await asyncio.sleep(0)
        await newcomer.averager.join()
        assert newcomer.stage.round == 0
        await until(lambda: newcomer.stage.num_installs > 0)
        await newcomer.averager.arrived()
        assert newcomer.stage.digest == donor.stage.digest
        assert donor.stage.round > 1


@in_virtual_time
async def test_a_newcomer_that_loses_its_only_donor_for_a_moment_does_not_serve_before_it_has_arrived(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with alone() as (network, donor):
        num_broken = 0

        async def breaks(name: str, source: int, target: int) -> None:
            nonlocal num_broken
            if source == 1 and name == "Download" and num_broken < 3:
                num_broken += 1
                raise PeerUnavailable("the stream was removed")

        network.before = breaks
        newcomer = network.add(1)
        await newcomer.averager.join()
        assert "cannot catch up" in caplog.text
        assert newcomer.stage.round == 0
        await newcomer.averager.arrived()
        assert (newcomer.stage.round, newcomer.stage.digest) == (1, donor.stage.digest)
