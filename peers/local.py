"""swarm-local: a whole swarm on one machine, in processes that are as real as anywhere.

    swarm-local --stages 3 --peers-per-stage 2 --steps 60 --kill-at 20 --join-at 30

Starts the peers and a trainer, shows them in one table, kills and adds peers on request, and ends every child
whatever happens. Reads top to bottom: options -> peers -> trainer -> watch -> summary.
"""

import asyncio
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from peers import cli, process
from peers.live_table import LiveTable
from peers.observe import observe
from peers.supervisor import Child, Supervisor
from peers.token_option import VARIABLE, admitted, find_token
from peers.view import PeerRow, StageRow, SwarmView, TrainerRow
from swarm import config as configs
from swarm.certificates import Role
from swarm.clock import SystemClock
from swarm.config import RunConfig
from swarm.errors import PeerUnavailable
from swarm.identity import Identity, generate
from swarm.metrics import log as metrics_log
from swarm.metrics.log import MetricsLog
from swarm.metrics.plot import plot_loss
from swarm.rpc.channels import ChannelPool
from swarm.types import PeerRecord, PeerState

PROG = "swarm-local"
START_SECONDS = 120.0
"""Longest wait for a peer to serve; on a slow disk the first import alone takes its time."""
LOOK_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class LocalOptions:
    """Launch a swarm on this machine and train."""

    preset: str = "tiny"
    """Configuration that comes with swarm: tiny, small or llama-124m."""
    config: Path | None = None
    """TOML file, instead of a preset."""
    stages: int | None = None
    """Number of stages, instead of the configuration's."""
    peers_per_stage: int = 2
    """Peers that each stage begins with."""
    steps: int = 60
    """Steps to train; a step is one outer round of the whole swarm."""
    dataset: str | None = None
    """Text, instead of the configuration's: stdlib, a file, a folder, a glob, or hf:NAME."""
    output: Path = Path("swarm-output")
    """Folder for metrics.jsonl, summary.json, loss.png and the processes' logs."""
    kill_at: int | None = None
    """Kill -9 a random peer at this step."""
    join_at: int | None = None
    """Start one more peer at this step, where there are fewest."""
    evaluate_every: int = 10
    """Steps between two evaluations on held-out text."""
    sample_tokens: int = 200
    """Tokens of text that the trained swarm writes at the end; 0 for none."""
    threads: int = 1
    """CPU threads of each peer."""
    device: str = "cpu"
    """Device of every peer."""
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
    checkpoint_every: int = 10
    """Rounds from one checkpoint to the next."""
    resume: Path | None = None
    """Go on from the newest checkpoint in this folder, with as many stages as are asked for."""
    seed: int = 0
    """Chooses the peer that is killed."""

    def __post_init__(self) -> None:
        least = {
            "peers_per_stage": 1, "steps": 1, "threads": 1, "evaluate_every": 0, "sample_tokens": 0,
            "checkpoint_every": 1,
        }  # fmt: skip
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"--{name.replace('_', '-')} must be at least {bound}, not {getattr(self, name)}")
        if self.stages is not None and self.stages < 1:
            raise ValueError(f"--stages must be at least 1, not {self.stages}")
        for name in ("kill_at", "join_at"):
            step = getattr(self, name)
            if step is not None and not 0 <= step < self.steps:
                raise ValueError(f"--{name.replace('_', '-')} must be between 0 and {self.steps - 1}, not {step}")


def main(argv: Sequence[str]) -> int:
    """Run the program; gives its exit code."""
    options = cli.parse(LocalOptions, prog=PROG, argv=argv)
    process.setup_logging("local", "warning")
    config = configs.load(options.config) if options.config else configs.load_preset(options.preset)
    clock = SystemClock()
    _, token = find_token(options.token, (), os.environ, role=Role.PEER, insecure=options.insecure, clock=clock)
    if token is not None:
        # For the children: command lines can be read by everybody on this machine.
        os.environ[VARIABLE] = str(token)
    options.output.mkdir(parents=True, exist_ok=True)
    for name in ("metrics.jsonl", "summary.json", "loss.png", "sample.txt"):
        (options.output / name).unlink(missing_ok=True)
    shutil.rmtree(options.output / "logs", ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="swarm-local-") as folder, Supervisor(options.output / "logs") as children:
        return asyncio.run(LocalSwarm(options, config, children, Path(folder), admitted(generate(), token)).run())


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
        self._random = random.Random(self.options.seed)

    async def run(self) -> int:
        """Start, train, show; gives the exit code."""
        stop = process.stop_event()
        work = asyncio.create_task(self._run())
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait([work, stopped], return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
            await asyncio.wait([work])
            print(f"{PROG}: stopped; every process is being ended", file=sys.stderr)
            return process.EXIT_INTERRUPTED
        stopped.cancel()
        return work.result()

    async def _run(self) -> int:
        self.channels = ChannelPool(insecure=self.options.insecure, identity=self.identity)
        with LiveTable() as table:
            self._note(f"starting {self.num_stages} x {self.options.peers_per_stage} peers and a trainer")
            # The others join through the first.
            await self._until_ready([self._start_peer(0)])
            for number in range(1, self.num_stages * self.options.peers_per_stage):
                self._start_peer(number % self.num_stages)
            await self._until_ready(self.peers, table)
            self._start_trainer()
            with MetricsLog(self.options.output / "metrics.jsonl") as metrics:
                code = await self._watch(table, metrics)
        await self.channels.close()
        if code == 0:
            self._finish()
        return code

    # -- children ------------------------------------------------------------------------------------------------------

    def _start_peer(self, stage: int) -> LocalPeer:
        options, self.num_started = self.options, self.num_started + 1
        name = f"peer-{self.num_started}"
        ready_file = self.folder / f"{name}.json"
        arguments = [
            "--stage", str(stage), "--name", name, "--host", "127.0.0.1", "--device", options.device,
            "--threads", str(options.threads), "--identity", str(self.folder / f"{name}.pem"),
            "--ready-file", str(ready_file),
        ]  # fmt: skip
        addresses = [peer.dht_address for peer in self.peers if peer.dht_address][:4]
        if addresses:
            arguments += ["--initial-peers", *addresses]
        else:
            arguments += ["--config", str(options.config)] if options.config else ["--preset", options.preset]
            arguments += ["--stages", str(options.stages)] if options.stages else []
            arguments += ["--dataset", options.dataset] if options.dataset else []
        arguments += ["--insecure"] if options.insecure else []
        every = ["--checkpoint-every", str(options.checkpoint_every)]
        arguments += ["--checkpoint", str(options.checkpoint), *every] if options.checkpoint else []
        arguments += ["--resume", str(options.resume)] if options.resume else []
        child = self.children.start(name, _command("peer", arguments))
        peer = LocalPeer(child=child, stage=stage, ready_file=ready_file)
        self.peers.append(peer)
        return peer

    def _start_trainer(self) -> None:
        options = self.options
        arguments = [
            "--steps", str(options.steps), "--output", str(options.output), "--name", "trainer",
            "--evaluate-every", str(options.evaluate_every), "--sample-tokens", str(options.sample_tokens),
            "--initial-peers", *[peer.dht_address for peer in self.peers][:4],
        ]  # fmt: skip
        arguments += ["--wandb", options.wandb] if options.wandb else []
        arguments += ["--wandb-online"] if options.wandb_online else []
        arguments += ["--insecure"] if options.insecure else []
        self.trainer = self.children.start("trainer", _command("trainer", arguments))

    async def _until_ready(self, peers: Sequence[LocalPeer], table: LiveTable | None = None) -> None:
        async with asyncio.timeout(START_SECONDS):
            while not all([self._is_ready(peer) for peer in peers]):
                self._fail_on_exit()
                if table is not None:
                    table.show(await self._view())
                await asyncio.sleep(0.1)

    def _is_ready(self, peer: LocalPeer) -> bool:
        if peer.record is None and peer.ready_file.exists():
            ready = json.loads(peer.ready_file.read_text())
            peer.dht_address = ready["dht_addresses"][0]
            peer.record = PeerRecord(
                peer_id=ready["peer_id"], name=peer.child.name, announced_at=ready["time"], stage=peer.stage,
                endpoint=ready["endpoint"], certificate_pem=ready["certificate_pem"], state=PeerState.SERVING,
            )  # fmt: skip
        return peer.record is not None

    def _fail_on_exit(self) -> None:
        for exit_ in self.children.exits():
            raise PeerUnavailable(f"{exit_.name} did not start: {_without_prefix(exit_.reason)}")

    # -- while it trains -----------------------------------------------------------------------------------------------

    async def _watch(self, table: LiveTable, metrics: MetricsLog) -> int:
        while True:
            view = await self._view()
            table.show(view)
            step = view.trainers[0].step if view.trainers else 0
            self._kill_and_join(step, metrics)
            for exit_ in self.children.exits():
                if self.trainer is not None and exit_.name == self.trainer.name:
                    table.show(await self._view())
                    if exit_.returncode != 0:
                        raise PeerUnavailable(f"the trainer ended early: {_without_prefix(exit_.reason)}")
                    return 0
                self.peers = [peer for peer in self.peers if peer.child.name != exit_.name]
                self._note(f"{exit_.name} ended by itself: {_without_prefix(exit_.reason)}", metrics, step)
            await asyncio.sleep(LOOK_SECONDS)

    def _kill_and_join(self, step: int, metrics: MetricsLog) -> None:
        options = self.options
        if options.kill_at is not None and step >= options.kill_at and not self.num_killed:
            victim = self._random.choice(self.peers)
            self.peers.remove(victim)
            self.children.kill9(victim.child)
            self.num_killed += 1
            self._note(f"step {step}: kill -9 {victim.child.name} of stage {victim.stage}", metrics, step)
        if options.join_at is not None and step >= options.join_at and not self.num_joined and not self._joining:
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
        steps = [row for row in metrics_log.read(path) if "train/loss" in row] if path.exists() else []
        if not steps:
            return ()
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


def _command(program: str, arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-c", f"from peers.commands import {program}; {program}()", *arguments]


def _without_prefix(reason: str) -> str:
    """A child's last line without the program's name, which says nothing new here."""
    return reason.split(": error: ", 1)[-1]
