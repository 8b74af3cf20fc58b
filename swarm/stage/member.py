"""The stage as a member of its averaging group: it closes rounds, applies their results, and gives its state to others.

Every change of the weights runs on the compute thread; this file only decides in which order. Other threads read the
state of a round's beginning, to digest or copy it, while training goes on: nothing writes to it until the next commit.
"""

import asyncio
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import torch

from swarm.config import Timeline
from swarm.events import Close, Commit, Install, State, ranges
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.stage.buckets import Tensors
from swarm.stage.stage import Stage
from swarm.stage.staging import HostReader
from swarm.stage.state import digest_of
from swarm.stage.weights import Round
from swarm.training.inner_steps import InnerSteps
from swarm.training.round_member import Activity, Contribution, Progress, RoundResult, Snapshot, known
from swarm.training.sketches import Sketched

_Result = TypeVar("_Result")

_KEPT_REPORTS = 16


class StageMember:
    """Implements training/round_member's RoundMember for a stage."""

    def __init__(
        self, stage: Stage, *, num_alive: Callable[[], int], on_commit: Callable[[], None] = lambda: None
    ) -> None:
        """`on_commit` is called whenever a round was committed. It may begin to copy the state, because the next commit
        is far away."""
        self._stage = stage
        self._num_alive = num_alive
        self._on_commit = on_commit
        self._events = stage.context.events
        self._runtime = stage.context.runtime
        self._weights = stage.context.backend.weights
        self._staging = stage.context.backend.staging
        self._closed: tuple[frozenset[int], Contribution] | None = None
        self.reports: deque[pb.RoundReport] = deque(maxlen=_KEPT_REPORTS)
        """The newest committed rounds, oldest first."""
        self.exchanged_bytes = 0
        """The bytes sent and received for the averages of all committed rounds."""
        self._digest: asyncio.Future[str] | None = None
        """The digest of the state at the beginning of the round. For the initial state it is computed only when asked
        for."""
        self._readings: set[asyncio.Future[Any]] = set()
        """The readings of the state on other threads. No round is committed before they are done."""
        self._may_commit = asyncio.Lock()
        """Held by a commit, and while a reading begins."""

    @property
    def timeline(self) -> Timeline:
        return self._weights.timeline

    @property
    def run_samples(self) -> int:
        """The samples that the run had committed when the current round began."""
        return self._weights.round.run_samples

    def progress(self) -> Progress:
        return Progress(
            round=self._stage.round,
            lineage=self._weights.round.lineage,
            run_samples=self.run_samples,
            num_samples=self._weights.round_samples,
            committed=self._stage.setting.committed(),
            highest_microbatch=self._stage.ledger.highest_microbatch,
            tally=self._weights.round.tally,
        )

    def activity(self) -> Activity:
        return Activity(
            quiet_seconds=self._runtime.quiet_seconds,
            longest_seconds=self._runtime.longest_seconds,
            num_bytes=4 * self._weights.num_elements,
        )

    def disproved(self) -> Mapping[str, str]:
        return self._stage.context.records.disproved

    def set_behind(self, is_behind: bool) -> None:
        """Note whether the group is at a later round, so that microbatches of that round should go to other peers."""
        self._stage.present_round.set_behind(is_behind)

    async def freeze(self, round_number: int, *, drop: Collection[int]) -> Contribution:
        """Freeze this member's contribution to the round. A second call returns the same contribution."""
        assert round_number == self._stage.round, "the group closes the round that its members are in"
        dropped = frozenset(drop)
        if self._closed is not None and dropped == self._closed[0]:
            return self._closed[1]
        await self._leave_out(dropped)
        committed = self._stage.setting.committed()
        sketched = self._sketched(committed)
        contribution = await self._runtime.control(lambda: self._freeze(committed, sketched))
        self._closed = (dropped, contribution)
        return contribution

    async def _leave_out(self, drop: Collection[int]) -> None:
        """Undo the computations that must not be in the round, which is about to end, if the setting wants that: those
        in `drop`, among others, which another member counts."""
        leaving = self._stage.setting.refuse_gradients(drop)
        if leaving is not None:
            await self._stage.endings.discard_all(leaving)

    def _sketched(self, committed: Collection[int]) -> Sketched | None:
        """What ties the contribution to what this peer has answered, and lets it check others'."""
        if (sketch := self._weights.sketch) is None:
            return None
        found = {index: self._stage.ledger.find(index) for index in committed}
        signed = self._weights.round.signed
        own = {index: entry.computation.sketch for index, entry in found.items() if entry and entry.computation}
        own |= {index: each for index, each in signed.get("", {}).items() if index in own}
        config = self._stage.context.config_in(self._stage.round)
        return Sketched(
            sketch=sketch, own=own, signed=signed, samples_each=config.data.microbatch_size,
            microbatches=config.microbatches_after(self.run_samples, self._stage.block),
        )  # fmt: skip

    def _freeze(self, committed: frozenset[int], sketched: Sketched | None) -> Contribution:
        """Close the round, on the compute thread. So the event log has the closing right after the round's last
        microbatch."""
        closing = dataclasses.replace(self._weights.contribute(), committed=committed, sketched=sketched)
        self._events.write(
            Close(
                round=self._stage.round,
                samples=closing.num_samples,
                round_samples=closing.round_samples,
                fragment=closing.fragment,
                microbatches=ranges(committed),
            )
        )
        return closing

    async def reopen(self, round_number: int) -> None:
        """Go on in the same round, because the attempt was aborted.

        There may be no contribution yet, because the leader may have gone while it was being closed.
        """
        if round_number == self._stage.round:
            self._closed = None
            await self._runtime.control(self._weights.reopen)
            self._stage.endings.changed()

    async def train_on(self) -> None:
        await self._runtime.control(self._weights.train_on)
        self._stage.endings.changed()

    async def state_digest(self) -> str:
        """Wait for the BLAKE3 digest of anchor and outer state at the beginning of the round."""
        async with self._may_commit:
            digest = self._digest
        return (await self.snapshot()).digest if digest is None else await asyncio.shield(digest)

    async def apply(self, result: RoundResult) -> asyncio.Future[str]:
        """Take the outer step of a committed round. Returns a future for the BLAKE3 digest of anchor and outer
        state."""
        async with self._may_commit:
            if self._readings:
                await asyncio.wait(set(self._readings))
            return await self._apply(result)

    async def _apply(self, result: RoundResult) -> asyncio.Future[str]:
        start = time.perf_counter()
        self._closed = None
        # Once more, because the round may have been reopened since `freeze`. A microbatch that came after that would
        # count in this round, but its gradient would be added to the next round's sum.
        await self._leave_out(frozenset())

        def commit() -> tuple[float, InnerSteps, Mapping[str, torch.Tensor], HostReader]:
            parent, inner_steps = self._weights.round.lineage, self._weights.inner_steps
            rate = self._weights.commit(result)
            self._events.write(
                Commit(
                    round=result.round,
                    parent=parent,
                    lineage=result.lineage,
                    digest=result.digest,
                    attempt=result.attempts,
                    samples=result.num_samples,
                    members=result.members,
                    next_microbatch=self._stage.context.first_after_amendments,
                    carried=self._weights.round.stepped.samples,
                    partners=result.partners,
                    total_squared_norm=result.total_squared_norm,
                    amended=result.amended,
                    given=tuple(result.given[peer][:3] for peer in result.members) if result.given else (),
                    tally=result.tally.digest if result.tally.members else "",
                    tally_since=result.tally.since,
                )
            )
            read = self._weights.state(), self._staging.reader()
            # After the commit, because the gradients of this step belong to the round that has begun.
            self._weights.step_if_due()
            return rate, inner_steps, *read

        rate, inner_steps, state, reader = await self._runtime.control(commit)
        report = self._report(result, rate, time.perf_counter() - start, inner_steps)

        def take_digest() -> str:
            digest = report.state_digest = digest_of(state, reader)
            self._events.write(State(round=result.round + 1, lineage=result.lineage, digest=digest))
            return digest

        self._digest = self._read(take_digest)
        self.reports.append(report)
        self.exchanged_bytes += report.bytes_sent + report.bytes_received
        self.round_began()
        self._on_commit()
        return self._digest

    def round_began(self) -> None:
        """Let the stage go on with the round that its weights are at now."""
        self._stage.setting.round_began()
        self._stage.present_round.began()
        self._stage.endings.changed()

    def _read(self, work: Callable[[], _Result]) -> asyncio.Future[_Result]:
        reading = asyncio.get_running_loop().run_in_executor(None, work)
        self._readings.add(reading)
        reading.add_done_callback(self._readings.discard)
        return reading

    def _report(
        self, result: RoundResult, learning_rate: float, seconds: float, inner_steps: InnerSteps
    ) -> pb.RoundReport:
        """Make the report of a committed round for trainers and status. `seconds` is how long the commit took."""
        cost = result.cost
        return pb.RoundReport(
            round=result.round,
            run_samples=self.run_samples,
            num_members=len(result.members),
            num_alive=self._num_alive(),
            gradient_norm=self._stage.setting.squared_norm(result) ** 0.5,
            learning_rate=learning_rate,
            aggregate_seconds=cost.seconds + seconds,
            bytes_sent=cost.bytes_sent,
            bytes_received=cost.bytes_received,
            compression_ratio=cost.compression_ratio,
            attempts=result.attempts,
            num_samples=result.num_samples,
            averaged_fraction=sum(t.numel() for t in result.tensors.values()) / self._weights.num_elements,
            contribution_norm=cost.contribution_norm,
            exchange_seconds=cost.exchange_seconds,
            wait_seconds=max(0.0, cost.seconds - cost.exchange_seconds),
            residual_bytes=cost.residual_bytes,
            inner_steps=pb.InnerSteps(**dataclasses.asdict(inner_steps)),
            contributed=result.contributed,
        )

    async def snapshot(self) -> Snapshot:
        """Copy the state at the last committed round while training goes on. Nothing writes to the copies."""

        def pin() -> tuple[Round, Mapping[str, torch.Tensor], HostReader]:
            return self._weights.round, self._weights.state(), self._staging.reader()

        async with self._may_commit:
            current, state, reader = await self._runtime.control(pin)
            copying = self._read(lambda: {name: reader.copy(value) for name, value in state.items()})
            if self._digest is None:
                self._digest = self._read(lambda: digest_of(state, reader))
            digest = self._digest
        return Snapshot(
            round=current.number, run_samples=current.run_samples, lineage=current.lineage,
            tensors=await asyncio.shield(copying), digest=await asyncio.shield(digest), tally=current.tally,
        )  # fmt: skip

    async def install(
        self, snapshot: Snapshot, *, carry: bool = False, source: str = "download", parent: str | None = None,
        highest_microbatch: int = -1, moments: Tensors | None = None,
    ) -> None:  # fmt: skip
        """Install the state of a snapshot, and undo what was in flight here.

        Args:
            carry: with DiLoCo, keep what inner steps have learnt, because the rounds between took nothing from this
                member.
            source: `download`, `initial` or `checkpoint`, for the record.
            parent: the lineage that the state had before, for the record, if it gets a new one.
            highest_microbatch: new microbatches are to have higher ids.
            moments: see StageWeights.recall.

        Raises:
            IntegrityError: the snapshot is of another model, or its digest is wrong. Then nothing has changed.
        """
        await asyncio.to_thread(self._weights.check, snapshot.tensors, snapshot.digest, round_number=snapshot.round)
        self._closed = None

        def install() -> None:
            new_round = Round(
                number=snapshot.round, run_samples=snapshot.run_samples, lineage=snapshot.lineage, tally=snapshot.tally
            )
            self._weights.install(snapshot.tensors, new_round, carry=carry)
            if moments:
                self._weights.recall(moments)
            self._events.write(
                Install(
                    round=snapshot.round,
                    lineage=snapshot.lineage,
                    state=snapshot.digest,
                    source=source,
                    parent=parent,
                    first_microbatch=self._stage.context.first_after_amendments,
                    carried=self._weights.round.stepped.samples,
                )
            )

        async with self._stage.changing_state(), self._may_commit:
            if self._readings:
                await asyncio.wait(set(self._readings))
            await self._runtime.control(install)
            self._digest = known(snapshot.digest)
        self.round_began()
        self._stage.ledger.saw(highest_microbatch)

    async def begin(self, *, highest_microbatch: int = -1) -> None:
        """Enter a run with the initial state, because no other peer has a later one. New microbatches are to have
        higher ids than this one."""
        self._stage.ledger.saw(highest_microbatch)
        now, digest = self._weights.round, await self.state_digest()
        self._events.write(Install(round=now.number, lineage=now.lineage, state=digest, source="initial"))
