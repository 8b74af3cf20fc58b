"""swarm-local: a whole swarm on one machine, in processes that are as real as anywhere.

    swarm-local --stages 3 --peers-per-stage 2 --steps 60 --kill-at 20 --join-at 30

Starts the peers and a trainer, shows them in one table, kills and adds peers on request, and ends every child
whatever happens. Reads top to bottom: options -> peers -> trainer -> watch -> summary.
"""

import asyncio
import json
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from peers.commands import command_line
from peers.local.supervisor import GRACE_SECONDS, Child, Supervisor
from peers.shared import cli, devices, process
from peers.shared.devices import Device
from peers.shared.sole_writer import require_sole_writer
from peers.shared.token_option import VARIABLE, admitted, find_token
from peers.stage_peer.options import PeerOptions
from peers.status.live_table import LiveTable
from peers.status.observe import observe
from peers.status.peer_row import PeerRow
from peers.status.view import StageRow, SwarmView, TrainerRow
from peers.trainer.options import TrainerOptions
from swarm import config as configs
from swarm.config import RunConfig
from swarm.credentials.certificates import Role
from swarm.credentials.identity import Identity, generate
from swarm.errors import PeerUnavailable
from swarm.machine.clock import SystemClock
from swarm.metrics import log as metrics_log
from swarm.metrics.log import MetricsLog
from swarm.metrics.plot import plot_loss
from swarm.rpc.channels import ChannelPool
from swarm.types import PeerRecord, PeerState

PROG = "swarm-local"
PRESET = "tiny"
"""Taken where neither --preset nor --config is given."""
START_SECONDS, START_SECONDS_PER_PEER = 120.0, 20.0
"""Longest wait for the peers that follow the first: all at once import, look and connect. The first may take its time:
it may have to fetch the text and prepare it."""
LOOK_SECONDS = 0.5
CHECKPOINT_GRACE_SECONDS = 120.0
"""How long peers may take to end that finish a round first, and write a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class LocalOptions:
    """Launch a swarm on this machine and train."""

    preset: str | None = None
    """Configuration that comes with swarm: tiny, small, llama-124m, sparseloco or targon; tiny if no --config is given
    either."""
    config: Path | None = None
    """TOML file, instead of a preset."""
    stages: int | None = None
    """Number of stages, instead of the configuration's."""
    peers_per_stage: int = 2
    """Peers that each stage begins with."""
    steps: int = 60
    """Steps to train; a step is one round of the whole swarm."""
    dataset: str | None = None
    """Text, instead of the configuration's: stdlib, a file, a folder, a glob, or hf:NAME."""
    output: Path = Path("swarm-output")
    """Folder for metrics.jsonl, summary.json, loss.png and the processes' logs."""
    kill_at: int | None = None
    """Kill -9 a random peer once this run has made so many steps; its stage keeps another one."""
    join_at: int | None = None
    """Start one more peer, where there are fewest, once this run has made so many steps."""
    evaluate_every: int = 10
    """Steps between two evaluations on held-out text."""
    sample_tokens: int = 200
    """Tokens of text that the trained swarm writes at the end; 0 for none."""
    threads: int = 1
    """CPU threads of each peer."""
    max_in_flight: int = 0
    """Microbatches that each peer works on at once; 0 lets it find out."""
    device: str = "cpu"
    """cpu, cuda:1, ... or mps, for all peers; cuda and auto spread them over the GPUs by free memory. Each peer's
    autograd graphs get their part of it."""
    wandb: str | None = None
    """Report to this Weights & Biases project, into local files."""
    wandb_online: bool = False
    """Report to the Weights & Biases service as it happens."""
    token: str | None = None
    """A peer's token, or @FILE: the run is locked. It may also be in SWARM_TOKEN."""
    insecure: bool = False
    """Plain TCP instead of TLS between the peers."""
    checkpoint: Path | None = None
    """Folder to which all peers write checkpoints."""
    checkpoint_every: int | None = None
    """Rounds from one checkpoint to the next, instead of swarm-peer's 10."""
    resume: Path | None = None
    """Go on from the newest checkpoint in this folder, with as many stages as are asked for; metrics.jsonl is kept."""
    seed: int = 0
    """Chooses the peer that is killed."""

    def __post_init__(self) -> None:
        least = {
            "stages": 1, "peers_per_stage": 1, "steps": 1, "threads": 1, "max_in_flight": 0, "evaluate_every": 0,
            "sample_tokens": 0, "checkpoint_every": 1,
        }  # fmt: skip
        cli.require_at_least(self, least)
        if self.config is not None and self.preset is not None:
            raise ValueError("--config and --preset exclude each other")
        if self.wandb_online and self.wandb is None:
            raise ValueError("--wandb-online needs --wandb PROJECT")
        if self.checkpoint_every is not None and self.checkpoint is None:
            raise ValueError("--checkpoint-every needs --checkpoint DIR")
        for name in ("kill_at", "join_at"):
            step = getattr(self, name)
            if step is not None and not 0 <= step < self.steps:
                raise ValueError(f"--{name.replace('_', '-')} must be between 0 and {self.steps - 1}, not {step}")
        if self.kill_at is not None and self.peers_per_stage < 2:
            raise ValueError("--kill-at needs --peers-per-stage 2 or more: a stage without a peer stops the run")


def main(argv: Sequence[str]) -> int:
    """Run the program; gives its exit code."""
    options = cli.parse(LocalOptions, prog=PROG, argv=argv)
    process.setup_logging("local", "warning")
    if not hasattr(os, "waitid"):
        raise ValueError("swarm-local cannot watch over processes with this Python: on macOS take 3.13 or newer")
    config = configs.load(options.config) if options.config else configs.load_preset(options.preset or PRESET)
    clock = SystemClock()
    _, token = find_token(options.token, (), os.environ, role=Role.PEER, insecure=options.insecure, clock=clock)
    if token is not None:
        # For the children: command lines can be read by everybody on this machine.
        os.environ[VARIABLE] = str(token)
    num_peers = (options.stages or config.stages.num_stages) * options.peers_per_stage
    places = devices.spread(devices.named(options.device), num_peers + (options.join_at is not None))
    logs = options.output / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    require_sole_writer(logs, f"--output {options.output}")
    # The folder itself is our trainer's, later on: we write to metrics.jsonl beside it. Now nobody else may have it.
    os.close(require_sole_writer(options.output, f"--output {options.output}"))
    grace_seconds = CHECKPOINT_GRACE_SECONDS if options.checkpoint else GRACE_SECONDS
    with (
        tempfile.TemporaryDirectory(prefix="swarm-local-") as folder,
        Supervisor(logs, grace_seconds=grace_seconds) as children,
    ):
        swarm = LocalSwarm(options, config, children, Path(folder), admitted(generate(), token), places)
        return asyncio.run(swarm.run())


@dataclass(eq=False)
class LocalPeer:
    """A peer that we started."""

    child: Child
    stage: int
    ready_file: Path
    record: PeerRecord | None = None
    dht_address: str = ""


@dataclass(eq=False)
class LocalSwarm:
    """The swarm on this machine."""

    options: LocalOptions
    config: RunConfig
    children: Supervisor
    folder: Path
    identity: Identity
    """With which the peers are asked how they are."""
    places: Sequence[Device]
    """The device of each peer, in the order in which they start."""
    peers: list[LocalPeer] = field(default_factory=list)
    trainer: Child | None = None
    events: list[str] = field(default_factory=list)
    num_started: int = 0
    num_killed: int = 0
    num_joined: int = 0

    def __post_init__(self) -> None:
        self.num_stages = self.options.stages or self.config.stages.num_stages
        self.channels: ChannelPool
        self._joining: list[LocalPeer] = []
        self._num_old_rows = 0
        """Lines of metrics.jsonl that are an earlier run's."""
        self._first_step = 0
        """Step of the whole training from which this run goes on."""
        self._random = random.Random(self.options.seed)

    async def run(self) -> int:
        """Start, train, show; gives the exit code."""
        exit_code = await process.before_stop(self._run())
        if exit_code is None:
            print(f"{PROG}: stopped; every process is being ended", file=sys.stderr)
            return process.EXIT_INTERRUPTED
        return exit_code

    async def _run(self) -> int:
        self.channels = ChannelPool(insecure=self.options.insecure, identity=self.identity)
        with LiveTable() as table:
            output = self.options.output
            self._note(
                f"starting {self.num_stages} x {self.options.peers_per_stage} peers and a trainer; their logs are in "
                f"{output / 'logs'}"
            )
            table.show(SwarmView(run=self.config.run, stages=(), trainers=(), events=tuple(self.events)))
            await self._start_first_peer()
            self._clear()
            for number in range(1, self.num_stages * self.options.peers_per_stage):
                self._start_peer(number % self.num_stages)
            await self._until_ready(table)
            self._start_trainer()
            with MetricsLog(output / "metrics.jsonl") as metrics:
                code = await self._watch(table, metrics)
        await self.channels.close()
        if code == 0:
            self._finish()
        return code

    def _clear(self) -> None:
        """Delete what an earlier run left, now that this one has begun; metrics that it goes on with are kept."""
        output = self.options.output
        metrics, logs = output / "metrics.jsonl", output / "logs"
        if self.options.resume is None:
            metrics.unlink(missing_ok=True)
        elif metrics.exists() and (rows := list(metrics_log.read(metrics))):
            self._num_old_rows, self._first_step = len(rows), rows[-1]["step"]
        in_use = {child.log for child in self.children.running}
        stale = {*logs.glob("peer-*.log"), logs / "trainer.log"} - in_use
        for path in (*stale, *(output / name for name in ("summary.json", "loss.png", "sample.txt"))):
            path.unlink(missing_ok=True)

    # -- children ------------------------------------------------------------------------------------------------------

    async def _start_first_peer(self) -> None:
        """The others join through it."""
        # Children append to their logs, and the last line says why one ended: it must be this one's.
        (self.options.output / "logs" / "peer-1.log").unlink(missing_ok=True)
        first = self._start_peer(0)
        while not self._is_ready(first):
            self._fail_on_exit()
            await asyncio.sleep(0.1)

    def _start_peer(self, stage: int) -> LocalPeer:
        options, self.num_started = self.options, self.num_started + 1
        name = f"peer-{self.num_started}"
        ready_file = self.folder / f"{name}.json"
        device = self.places[self.num_started - 1]
        graph_bytes = devices.graph_bytes(device, num_processes=self.places.count(device))
        own = PeerOptions(
            stage=stage,
            name=name,
            host="127.0.0.1",
            device=device.name,
            graph_memory_mib=graph_bytes >> 20,
            threads=options.threads,
            max_in_flight=options.max_in_flight,
            identity=self.folder / f"{name}.pem",
            ready_file=ready_file,
            insecure=options.insecure,
            checkpoint=options.checkpoint,
            checkpoint_every=options.checkpoint_every,
            resume=options.resume,
            **self._run_options(),
        )
        child = self.children.start(name, command_line("peer", cli.arguments(own)))
        peer = LocalPeer(child=child, stage=stage, ready_file=ready_file)
        self.peers.append(peer)
        return peer

    def _run_options(self) -> dict[str, Any]:
        """How a peer joins the run: at the addresses of those that serve, or as the first, which begins it."""
        options = self.options
        if addresses := self._addresses():
            return {"initial_peers": addresses, "allow_class": self.config.model.custom_class or None}
        preset = None if options.config else options.preset or PRESET
        return {
            "config": options.config, "preset": preset, "stages": options.stages, "dataset": options.dataset,
        }  # fmt: skip

    def _addresses(self) -> tuple[str, ...]:
        return tuple(peer.dht_address for peer in self.peers if peer.dht_address)[:4]

    def _start_trainer(self) -> None:
        options = self.options
        own = TrainerOptions(
            initial_peers=self._addresses(),
            steps=options.steps,
            output=options.output,
            name="trainer",
            evaluate_every=options.evaluate_every,
            sample_tokens=options.sample_tokens,
            wandb=options.wandb,
            wandb_online=options.wandb_online,
            insecure=options.insecure,
        )
        self.trainer = self.children.start("trainer", command_line("trainer", cli.arguments(own)))

    async def _until_ready(self, table: LiveTable) -> None:
        seconds = START_SECONDS + START_SECONDS_PER_PEER * len(self.peers)
        deadline = time.monotonic() + seconds
        while late := [peer.child for peer in self.peers if not self._is_ready(peer)]:
            self._fail_on_exit()
            if time.monotonic() > deadline:
                raise PeerUnavailable(f"{late[0].name} does not serve after {seconds:.0f} s; its log is {late[0].log}")
            table.show(await self._view())
            await asyncio.sleep(0.1)

    def _is_ready(self, peer: LocalPeer) -> bool:
        if peer.record is None and peer.ready_file.exists():
            ready = json.loads(peer.ready_file.read_text())
            peer.dht_address = ready["dht_addresses"][0]
            peer.record = PeerRecord(
                peer_id=ready["peer_id"], name=peer.child.name, announced_at=ready["time"], stage=peer.stage,
                endpoint=ready["endpoint"], certificate_pem=ready["certificate_pem"], state=PeerState.SERVING,
                device=ready["device"],
            )  # fmt: skip
        return peer.record is not None

    def _fail_on_exit(self) -> None:
        for exit_ in self.children.exits():
            raise PeerUnavailable(f"{exit_.name} did not start: {_without_prefix(exit_.reason)}")

    # -- while it trains -----------------------------------------------------------------------------------------------

    async def _watch(self, table: LiveTable, metrics: MetricsLog) -> int:
        lost = ""
        while True:
            view = await self._view()
            table.show(view)
            step = view.trainers[0].step if view.trainers else self._first_step
            self._kill_and_join(step, metrics)
            for exit_ in self.children.exits():
                if self.trainer is not None and exit_.name == self.trainer.name:
                    table.show(await self._view())
                    if exit_.returncode != 0:
                        # Whether before its last step or, where a file could not be written, after it.
                        raise PeerUnavailable(f"the trainer failed: {_without_prefix(exit_.reason)}")
                    return 0
                gone = next(peer for peer in self.peers if peer.child.name == exit_.name)
                self.peers.remove(gone)
                what = f"{exit_.name} ended by itself: {_without_prefix(exit_.reason)}"
                self._note(what, metrics, step)
                if gone.stage not in {peer.stage for peer in self.peers}:
                    lost = f"stage {gone.stage} has no peer left: {what}; its log is {gone.child.log}"
            if lost:
                # What the stage had learnt is gone, and the trainer would wait for ever.
                raise PeerUnavailable(lost)
            await asyncio.sleep(LOOK_SECONDS)

    def _kill_and_join(self, step: int, metrics: MetricsLog) -> None:
        options, num_made = self.options, step - self._first_step
        serving = [peer for peer in self.peers if peer.record is not None]
        # Peers may have died by themselves: one that is the last of its stage is spared.
        stages = Counter(peer.stage for peer in serving)
        victims = [peer for peer in serving if stages[peer.stage] > 1]
        if options.kill_at is not None and num_made >= options.kill_at and not self.num_killed and victims:
            victim = self._random.choice(victims)
            self.peers.remove(victim)
            self.children.kill9(victim.child)
            self.num_killed += 1
            self._note(f"step {step}: kill -9 {victim.child.name} of stage {victim.stage}", metrics, step)
        if options.join_at is not None and num_made >= options.join_at and not self.num_joined and not self._joining:
            counts = {stage: 0 for stage in range(self.num_stages)}
            for peer in self.peers:
                counts[peer.stage] += 1
            self._joining.append(self._start_peer(min(counts, key=lambda stage: (counts[stage], stage))))
            newcomer = self._joining[0]
            self._note(f"step {step}: {newcomer.child.name} starts for stage {newcomer.stage}", metrics, step)
        if self._joining and self._is_ready(self._joining[0]):
            newcomer = self._joining.pop()
            self.num_joined += 1
            self._note(f"step {step}: {newcomer.child.name} joined stage {newcomer.stage}", metrics, step)

    async def _view(self) -> SwarmView:
        stages: dict[int, list[PeerRecord]] = {stage: [] for stage in range(self.num_stages)}
        for peer in self.peers:
            if peer.record is not None:
                stages[peer.stage].append(peer.record)
        view = await observe(self.config.run, stages, (), self.channels, self.events)
        rows = tuple(StageRow(stage=row.stage, peers=row.peers + self._starting(row.stage)) for row in view.stages)
        return SwarmView(run=view.run, stages=rows, trainers=self._trainer_rows(), events=view.events)

    def _starting(self, stage: int) -> tuple[PeerRow, ...]:
        """Our peers of a stage that cannot be asked yet."""
        return tuple(
            PeerRow(name=peer.child.name, peer_id="", state="joining")
            for peer in self.peers
            if peer.stage == stage and peer.record is None
        )

    def _trainer_rows(self) -> tuple[TrainerRow, ...]:
        path = self.options.output / "metrics.jsonl"
        rows = list(metrics_log.read(path))[self._num_old_rows :] if path.exists() else []
        steps = [row for row in rows if "train/loss" in row]
        if not steps:
            return ()
        self._first_step = steps[0]["step"] - 1
        last: dict[str, Any] = steps[-1]
        return (
            TrainerRow(
                name="trainer", step=last["step"], loss=last["train/loss"],
                tokens_per_second=last["train/tokens_per_sec"],
            ),
        )  # fmt: skip

    def _note(self, text: str, metrics: MetricsLog | None = None, step: int = 0) -> None:
        self.events.append(text)
        if metrics is not None:
            metrics.event(step, text)

    # -- the end -------------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        output = self.options.output
        path = output / "summary.json"
        summary = json.loads(path.read_text(encoding="utf-8"))
        summary |= {"peers_killed": self.num_killed, "peers_joined": self.num_joined}
        path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        # Once more, with the last events in it.
        plot_loss(output / "metrics.jsonl", output / "loss.png")
        sample = output / "sample.txt"
        if sample.exists():
            print(sample.read_text(encoding="utf-8"))
        console = Console()
        console.print_json(data=summary)
        console.print(f"Figures, plot and logs are in {output}", highlight=False, soft_wrap=True)
        for run in sorted((output / "wandb").glob("offline-run-*"))[-1:]:
            console.print(f"To upload this run to Weights & Biases: wandb sync {run}", highlight=False, soft_wrap=True)


def _without_prefix(reason: str) -> str:
    """A child's last line without its beginning (program; or time, name and level), which says nothing new here."""
    return re.split(r": error: | ERROR: ", reason, maxsplit=1)[-1]
