"""A swarm of real processes: the programs that users run, over TLS on this machine. The supervisor ends them."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from peers.commands import command_line
from peers.local.supervisor import Child, Supervisor, last_line
from peers.shared import cli
from peers.shared.stage_choice import StageChoice, StagesOrAuto
from peers.stage_peer.options import PeerOptions
from peers.trainer.options import MOST_IN_FLIGHT, TrainerOptions
from scripts.benches.shared.common import POLL_SECONDS, wait_for_json, write_config
from scripts.benches.shared.throttle import Lines
from swarm.config import RunConfig
from swarm.credentials.identity import Identity
from swarm.errors import DeadlineExceeded, PeerUnavailable
from swarm.hop.answers import HopListener
from swarm.hop.hop import Hop
from swarm.hop.retries import HopContext
from swarm.machine.clock import SystemClock
from swarm.metrics import read as read_metrics
from swarm.routing.router import Router
from swarm.rpc.channels import ChannelPool
from swarm.stage.boundary import GRADIENT, HIDDEN, boundary_of
from swarm.training.samples import Microbatch
from swarm.types import Block, PeerRecord, PeerState

STALL_SECONDS = 600.0  # A trainer that takes no step for this long will take none
NEVER = 1_000_000_000  # Microbatches of a round that does not end, or steps of a trainer that does not


@dataclass(frozen=True, kw_only=True)
class ServingPeer:
    """A peer that serves, and its addresses."""

    child: Child
    record: PeerRecord
    """Its announcement of the first of its blocks."""
    dht_address: str
    blocks: Sequence[Block]
    told: int | StagesOrAuto
    """The stages that it was told to serve."""

    @property
    def stages(self) -> list[int]:
        return [block.stage for block in self.blocks]

    @property
    def records(self) -> list[PeerRecord]:
        """Its announcements of all of its blocks."""
        return [self.record.model_copy(update=block._asdict()) for block in self.blocks]


@dataclass(eq=False)
class SwarmProcesses:
    """Peers and trainers of one run, each a process of its own."""

    config: RunConfig
    children: Supervisor
    folder: Path
    peers: list[ServingPeer] = field(default_factory=list)
    logs_events: bool = False  # Whether every process writes an event log, to `events`
    program: Callable[[str, Sequence[str]], list[str]] = field(default=command_line)
    """The command line of a program, by its name and arguments."""
    model: Path | None = None
    """Run folder with the weights with which the run begins; None if they are drawn from the run's seed."""
    threads: int = 1  # CPU threads of each peer
    device: str = "cpu"  # What each peer computes on
    _num_started: int = 0

    @property
    def events(self) -> Path:
        return self.folder / "events"

    def start_peers(self, stages: Sequence[int | StagesOrAuto]) -> None:
        """Start one peer for each entry, a stage or several or auto, and return when all of them serve. Raises
        PeerUnavailable and DeadlineExceeded."""
        self.prepare()
        # The first one has to be there before others can join it.
        for batch in (stages[:1], stages[1:]):
            started = [(self.launch_peer(stage), stage) for stage in batch]
            self.peers += [self.until_ready(child, stage) for child, stage in started]

    def prepare(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write_config(self.config, self.folder / "run.toml")

    def train(self, name: str, steps: int, *, evaluation_samples: int = 1) -> list[dict[str, Any]]:
        """Let a trainer train `steps` steps, and evaluate at the end. Return its metrics, one dictionary a step. Raises
        PeerUnavailable and DeadlineExceeded."""
        self.until_ended(self.launch_trainer(name, steps, evaluation_samples=evaluation_samples), name)
        return self.steps(name)

    def until_ended(self, trainer: Child, name: str) -> None:
        """Wait until a trainer, which was launched under this name, has ended. Raises as `train` does."""
        metrics, num_bytes, grown_at = self.metrics(name), 0, time.monotonic()
        # The trainer is waited for without reaping it, so that the supervisor can still report how it ended.
        while not (ended := self.children.exits()):
            now = time.monotonic()
            # Only the file's size is read. Reading all of the file so often would slow down what is measured.
            if metrics.exists() and (size := metrics.stat().st_size) != num_bytes:
                num_bytes, grown_at = size, now
            if now - grown_at > STALL_SECONDS:
                raise stalled(trainer)
            time.sleep(POLL_SECONDS)
        failed = [end for end in ended if end.name != trainer.name or end.returncode != 0]
        if failed:
            raise PeerUnavailable(f"{failed[0].name} ended early: {failed[0].reason}")

    def tokens_per_second(self, trainer: str, steps: int) -> float:
        """Let a trainer train one step to warm up, and then `steps` that are measured. Raises as `train` does."""
        # An evaluation of a whole microbatch has the shape for which compiled layers have their code.
        rows = self.train(trainer, 1 + steps, evaluation_samples=self.config.data.microbatch_size)[1:]
        tokens = len(rows) * self.config.rounds.round_samples * self.config.data.sequence_length
        seconds: float = sum(row["train/step_time"] for row in rows)
        return tokens / seconds

    def launch_trainer(
        self, name: str, steps: int, *, evaluation_samples: int = 1, max_in_flight: int = MOST_IN_FLIGHT
    ) -> Child:
        options = TrainerOptions(
            initial_peers=tuple(peer.dht_address for peer in self.peers[:4]), steps=steps, output=self.folder / name,
            name=name, evaluate_every=0, evaluation_samples=evaluation_samples, max_in_flight=max_in_flight,
            events=self._event_log(name),
        )  # fmt: skip
        return self.children.start(f"{self.folder.name}-{name}", self.program("trainer", cli.arguments(options)))

    def steps(self, name: str) -> list[dict[str, Any]]:
        path = self.metrics(name)
        return [row for row in read_metrics(path) if "train/loss" in row] if path.exists() else []

    def metrics(self, name: str) -> Path:
        return self.folder / name / "metrics.jsonl"

    def stop(self) -> None:
        for peer in self.peers:
            self.children.kill9(peer.child)
        self.peers.clear()

    def launch_peer(
        self, stage: int | StagesOrAuto, *, environment: Mapping[str, str] | None = None, **more: Any
    ) -> Child:
        """Start a peer, with `more` of PeerOptions."""
        name = f"{self.folder.name}-stage-{stage}-peer-{self._num_started}"
        self._num_started += 1
        addresses = tuple(peer.dht_address for peer in self.peers[:8])
        options = PeerOptions(
            stage=StageChoice(stage, stage) if isinstance(stage, int) else stage, name=name[:64], host="127.0.0.1",
            threads=self.threads, device=self.device,
            identity=self.folder / f"{name}.pem", ready_file=self.ready_file(name), events=self._event_log(name),
            initial_peers=addresses, allow_class=self.config.own_classes if addresses else (),
            config=None if addresses or self.model else self.folder / "run.toml",
            model=None if self.model is None else str(self.model), **more,
        )  # fmt: skip
        return self.children.start(name, self.program("peer", cli.arguments(options)), environment=environment)

    def hop(self, stage: int, identity: Identity | None = None) -> tuple[Hop, ChannelPool]:
        """A hop to the peers of a stage, and its connections, which belong to the running event loop."""
        clock = SystemClock()
        router, channels = Router(clock, random.Random(0)), ChannelPool(identity=identity)
        records = [record for peer in self.peers for record in peer.records if record.stage == stage]
        router.update(Block(stage), records)
        hop = Hop(
            HopContext(run_id=self.config.run_id, block=Block(stage), router=router, channels=channels, clock=clock),
            encodings_in=lambda _: boundary_of(self.config).encodings,
        )  # fmt: skip
        return hop, channels

    def ready_file(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def _event_log(self, name: str) -> Path | None:
        return self.events / f"{name}.jsonl" if self.logs_events else None

    def look_again(self) -> None:
        """Read again which stages the peers serve: one that was told `auto` moves."""
        self.peers = [self.until_ready(peer.child, peer.told) for peer in self.peers]

    def until_ready(self, child: Child, stage: int | StagesOrAuto) -> ServingPeer:
        """Wait until a peer serves. Raises as `start_peers` does."""
        ready = wait_for_json(self.ready_file(child.name), self.children)
        blocks = [Block.parse(str(label)) for label in ready["stages"]]
        record = PeerRecord(
            peer_id=ready["peer_id"], name=child.name[:64], announced_at=ready["time"], **blocks[0]._asdict(),
            endpoint=ready["endpoint"], certificate_pem=ready["certificate_pem"], state=PeerState.SERVING,
        )  # fmt: skip
        if isinstance(self.children, Lines):
            self.children.throttle.serve(record.endpoint, self.children.links[child.name])
        return ServingPeer(child=child, record=record, dht_address=ready["dht_addresses"][0], blocks=blocks, told=stage)


def mixed_spans(num_stages: int, num_copies: int) -> list[int | StagesOrAuto]:
    """Peers with one stage, with all but the last one, and one with all of a run."""
    pair: list[int | StagesOrAuto] = [StageChoice(0, num_stages - 2), num_stages - 1]
    return [StageChoice(0, num_stages - 1), *pair * num_copies]


@dataclass(eq=False)
class StageBefore:
    """This process in the place of the stage before: it hands on microbatches, always with these tensors."""

    hop: Hop
    channels: ChannelPool
    tensors: dict[str, torch.Tensor]
    num_called: int = 0

    async def call(self) -> float:
        """Hand over the next microbatch, get its gradient and acknowledge it. Return the seconds that this took."""
        index, self.num_called = self.num_called, self.num_called + 1
        microbatch = Microbatch(index=index, round=0, num_samples=len(self.tensors[HIDDEN]))
        start = time.perf_counter()
        reply = await self.hop.train(microbatch, self.tensors, HopListener(), {})
        await reply.ack()
        seconds = time.perf_counter() - start
        assert reply.tensors[GRADIENT].shape == self.tensors[HIDDEN].shape
        return seconds


def stalled(trainer: Child) -> DeadlineExceeded:
    """The error for a trainer that has taken no step for too long. It quotes the trainer's log, which may soon be
    deleted."""
    said = last_line(trainer.log) or "nothing"
    return DeadlineExceeded(f"{trainer.name} took no step for {STALL_SECONDS:.0f} s; the last that it said: {said}")
