"""What a stage peer says of itself: in the DHT, in its answer to Describe, and what it does with its time."""

import contextlib
import logging
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from torch import nn

import swarm
from peers.shared import devices
from peers.shared.network import Membership
from peers.stage_peer.news import Around, StageNews, fitting_bottleneck
from peers.stage_peer.own_process import OwnProcess
from peers.stage_peer.own_stage import ServerOptions
from swarm.averaging.averager import Averager
from swarm.config import RunConfig
from swarm.dht.directory import Announcement
from swarm.errors import PeerUnavailable
from swarm.machine.clock import Clock
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.stage.member import StageMember
from swarm.stage.stage import Stage
from swarm.types import LONGEST_WAIT, MOST_DHT_ADDRESSES, PROTOCOLS, Block, PeerRecord, PeerState, TrainerRecord

logger = logging.getLogger(__name__)

MOST_LINKS = 16
LOOK_SECONDS = 5.0
"""Time between two looks at what others say about this peer."""
SHARES_LOOK_SECONDS = 0.25
KEPT_SECONDS = 60.0
"""The time to which the shares of time refer."""


class Presence:
    def __init__(
        self, membership: Membership, stage: Stage, member: StageMember, options: ServerOptions, process: OwnProcess,
        times: "TimeWatch",
    ) -> None:  # fmt: skip
        self.state = PeerState.JOINING
        self._process = process
        self._times = times
        self._membership = membership
        self._stage = stage
        self._member = member
        self._options = options
        self._trainers: Sequence[TrainerRecord] = ()
        """As last read from the DHT."""
        self._will_leave = False
        self._announcement = Announcement(
            membership.directory, "this peer", self.record, membership.clock, occasion=lambda: self._occasion,
            level=logging.WARNING,
        )  # fmt: skip

    def _neighbours(self, step: Literal[-1, 1]) -> Sequence[Block]:
        return self._membership.config.neighbours(self._stage.block, step)

    async def become(self, state: PeerState) -> None:
        self.state = state
        await self._process.tell_health()

    def will_leave(self) -> None:
        """From now on say in answers to Describe that this peer leaves, so that no other peer relies on it. It still
        serves."""
        self._will_leave = True

    @property
    def stays(self) -> bool:
        return self.state is PeerState.SERVING and not self._will_leave

    # -- in the DHT --------------------------------------------------------------------------------------------------

    def record(self) -> PeerRecord:
        identity, options, stage = self._membership.identity, self._options, self._stage
        announced = self._process.announced
        return PeerRecord(
            peer_id=identity.peer_id,
            name=options.given.name,
            software_version=swarm.__version__,
            announced_at=self._membership.clock.time(),
            stage=stage.block.stage,
            variant=stage.block.variant,
            endpoint=announced.endpoints[0],
            other_endpoints=announced.endpoints[1:],
            certificate_pem="" if self._membership.channels.is_insecure else identity.certificate_pem,
            state=self.state,
            samples_per_second=self._samples_per_second,
            queue_length=stage.context.runtime.queue_length,
            round=stage.round,
            samples=self._member.run_samples,
            lineage=self._member.progress().lineage,
            dht_address=next(iter(announced.dht_addresses), ""),
            other_dht_addresses=announced.dht_addresses[1:MOST_DHT_ADDRESSES],
            device=str(options.device),
            movable=options.given.rebalance_seconds > 0,
            moves=self._process.num_moves,
            nonce=options.incarnation.nonce,
            started_at=options.incarnation.started_at,
            bans=self._membership.known.bans(self._neighbours(1), self._membership.clock),
        )

    async def announce(self) -> None:
        await self._announcement.now()

    def works(self, news: StageNews) -> Sequence[Coroutine[Any, Any, None]]:
        return self.keep_announced(), self._look_around(news), self._times.run()

    async def keep_announced(self) -> None:
        """Announce the record at intervals; at once after a commit, with new endpoints, and when the DHT is back."""
        unheard = "a node of the DHT that takes this peer's record, without which others do not find it"
        with self._membership.waits.on(lambda _: unheard if self._announcement.is_refused else ""):
            await self._announcement.keep()

    async def _look_around(self, news: StageNews) -> None:
        while True:
            await self._membership.clock.sleep(LOOK_SECONDS)
            around = await self._around()
            news.look(self._stage.counters["forwards"] + self._stage.counters["backwards"], around)
            news.look_at(self._times.shares, around)

    async def _around(self) -> Around:
        block, member = self._stage.block, self._membership
        known, now = member.known, member.clock.time()
        with contextlib.suppress(PeerUnavailable):
            self._trainers = await member.directory.trainers(partly=True)
        before = [record for other in self._neighbours(-1) for record in known.peers(other)]
        on_paths = {one for path in member.config.paths_through(block) for one in member.config.blocks_of(path)}
        return Around(
            endpoint=self._process.endpoint,
            num_calls=self._process.callers.num_begun,
            num_others=len(known.others(block)) + len(self._trainers),
            has_trainer=bool(self._trainers),
            empty_blocks=[
                other for other in sorted(on_paths) if other not in self._process.blocks and not known.others(other)
            ],
            left_alone_by={
                sender.display_name: ban.reason
                for sender in (before if block.stage else self._trainers)
                for ban in sender.bans
                if ban.peer_id == member.peer_id and ban.until > now
            },
            fitting_bottleneck=fitting_bottleneck(
                self._stage.context.config_in(self._stage.round),
                self._process.samples_per_second(self._stage),
                self._process.line_samples_per_second(self._stage),
            ),
        )

    @property
    def _samples_per_second(self) -> float:
        """What the peer announces: what it computes, and no more than its line to the next stage carries."""
        process, stage = self._process, self._stage
        return min(process.samples_per_second(stage), process.line_samples_per_second(stage))

    @property
    def _occasion(self) -> tuple[int, int, Sequence[str]]:
        return self._stage.round, self._membership.directory.num_returns, self._process.announced.endpoints

    async def withdraw(self) -> None:
        try:
            await self._membership.directory.withdraw(self._stage.block)
        except PeerUnavailable as error:
            logger.debug("not withdrawn: %s", error)

    # -- to those who ask --------------------------------------------------------------------------------------------

    def describe(self, averager: Averager, generation: pb.GenerationCounters | None = None) -> pb.DescribeReply:
        stage, progress, averaging = self._stage, self._member.progress(), averager.counters()
        averaging.exchanged_bytes = self._member.exchanged_bytes
        return pb.DescribeReply(
            peer_id=self._membership.peer_id,
            name=self._options.given.name,
            protocol_version=PROTOCOLS.newest,
            software_version=swarm.__version__,
            run_id=self._membership.config.run_id,
            stage=stage.block.stage,
            variant=stage.block.variant,
            state=PeerState.LEAVING if self._will_leave else self.state,
            round=progress.round,
            run_samples=progress.run_samples,
            round_samples=progress.num_samples,
            lineage=progress.lineage,
            samples_per_second=self._samples_per_second,
            queue_length=stage.context.runtime.queue_length,
            counters=pb.StageCounters(
                **stage.counters, recomputed_forwards=stage.context.backend.budget.num_recomputed
            ),
            averaging=averaging,
            generation=generation,
            lines=self._process.lines(),
            waiting_for=self._membership.waits.present[:LONGEST_WAIT],
            links=self._links(),
            last_peers=self._last_peers(),
            rounds=list(self._member.reports),
            loop_lag_seconds=self._process.loop_lag.seconds,
            time_shares=self._times.shares,
            resident_bytes=devices.most_resident_bytes(),
            device_bytes=devices.most_device_bytes(self._options.device),
            amended=self._member.timeline.last,
        )

    def _last_peers(self) -> list[pb.LastPeer]:
        member, clock = self._membership, self._membership.clock
        gone = {block: member.known.router.gone(block) for block in member.blocks if block != self._stage.block}
        offset = clock.time() - clock.monotonic()
        return [
            pb.LastPeer(
                stage=block.stage, variant=block.variant, name=last.name, last_at=offset + last.last_at,
                has_left=last.has_left,
            )
            for block, last in gone.items()
            if last is not None
        ]  # fmt: skip

    def _links(self) -> list[pb.Link]:
        links = map(self._membership.known.router.links, self._neighbours(1))
        measured = [(peer, link) for row in links for peer, link in row.items() if link.bytes_per_second is not None]
        return [
            pb.Link(
                peer_id=peer_id, round_trip_seconds=link.round_trip_seconds or 0.0,
                bytes_per_second=link.bytes_per_second or 0.0,
            )
            for peer_id, link in measured[:MOST_LINKS]
        ]  # fmt: skip


class _Look(NamedTuple):
    """The sums since the first look. `seconds` says on what they were spent, by the names of TimeShares."""

    at: float
    busy: float
    seconds: Mapping[str, float]
    flops: float = 0.0
    num_tasks: int = 0


class TimeWatch:
    """What a stage did with the last minute: it computed, waited for input or for room, or averaged.

    A look a few times a second sees what the stage waits for, and the compute thread knows how long it has computed.
    Nothing is decided by these figures.
    """

    def __init__(self, stage: Stage, clock: Clock, *, peak_flops: float = 0.0) -> None:
        """`peak_flops` is what the device can do in a second; 0 if that is not known."""
        self._stage = stage
        self._clock = clock
        self._peak_flops = peak_flops
        backend = stage.context.backend
        self._forward_flops, self._backward_flops = microbatch_flops(backend.config, stage.number, backend.module)
        nothing = dict.fromkeys(("computing", "waiting_for_input", "waiting_for_room", "averaging"), 0.0)
        self._looks = deque(
            [_Look(clock.monotonic(), stage.context.runtime.busy_seconds, nothing)],
            maxlen=1 + int(KEPT_SECONDS / SHARES_LOOK_SECONDS),
        )

    async def run(self) -> None:
        while True:
            await self._clock.sleep(SHARES_LOOK_SECONDS)
            self.look()

    def look(self) -> None:
        """Add what happened since the last look. The time in which nothing was computed goes to what is waited for
        now."""
        last, now, counters = self._looks[-1], self._clock.monotonic(), self._stage.counters
        busy, elapsed = self._stage.context.runtime.busy_seconds, now - last.at
        computing, seconds = min(max(0.0, busy - last.busy), elapsed), dict(last.seconds)
        seconds["computing"] += computing
        waits = "waiting_for_room" if self._stage.context.is_held_up else "waiting_for_input"
        seconds["averaging" if self._stage.stands_still else waits] += elapsed - computing
        flops = counters["forwards"] * self._forward_flops + counters["backwards"] * self._backward_flops
        self._looks.append(_Look(now, busy, seconds, flops, num_tasks=counters["forwards"] + counters["backwards"]))

    @property
    def shares(self) -> pb.TimeShares:
        """Shares of the last minute, which are 1 together; all 0 if no microbatch was computed in it."""
        first, last = self._looks[0], self._looks[-1]
        seconds = last.at - first.at
        if last.num_tasks == first.num_tasks or seconds <= 0.0:
            return pb.TimeShares()
        flops_per_second = (last.flops - first.flops) / seconds
        return pb.TimeShares(
            **{name: (spent - first.seconds[name]) / seconds for name, spent in last.seconds.items()},
            flops_per_second=flops_per_second,
            utilisation=flops_per_second / self._peak_flops if self._peak_flops else 0.0,
        )


def microbatch_flops(config: RunConfig, stage: int, module: nn.Module) -> tuple[float, float]:
    """The floating-point operations of a microbatch's forward and backward at a stage; 0 for a custom class.

    As for PaLM (arXiv 2204.02311, appendix B): each weight of a matrix is multiplied and added once for each token, and
    so is each pair of positions in attention, twice. A backward takes twice as many, or for frozen matrices as many.
    What is computed again does not count.
    """
    model, num_tokens = config.model, config.data.tokens_per_microbatch
    if model.custom_class:
        return 0.0, 0.0
    matrices = [value for name, value in module.named_parameters() if name.startswith("layers.") and value.ndim == 2]
    head = model.vocab_size * model.d_model if stage == config.stages.num_stages - 1 else 0
    num_layers = len({name.split(".")[1] for name, _ in module.named_parameters() if name.startswith("layers.")})
    attention = 4.0 * num_layers * model.num_heads * model.width_of_heads * config.data.sequence_length
    all_weights = sum(matrix.numel() for matrix in matrices) + head
    trained = sum(matrix.numel() for matrix in matrices if matrix.requires_grad) + head * (not config.lora.is_on)
    forward = 2.0 * all_weights + attention
    return num_tokens * forward, num_tokens * (2.0 * all_weights + 2.0 * trained + 2 * attention)
