"""One run of a local swarm, from its peers and its trainer to the summary, and what is printed of it."""

import asyncio
import dataclasses
import json
import random
import re
import time
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path

from peers.commands import command_line
from peers.local.options import LocalOptions
from peers.local.peers import LocalPeer, LocalPeers
from peers.local.supervisor import Child, Exit, Supervisor, last_line
from peers.shared import cli
from peers.status.live_table import LiveTable, Screen
from peers.status.lookout import observe
from peers.status.peer_row import PeerRow
from peers.status.view import SwarmView, TrainerRow
from peers.trainer.options import TrainerOptions
from swarm.credentials.identity import Identity
from swarm.errors import PeerUnavailable
from swarm.machine import json_file
from swarm.machine.words import numbered, printable
from swarm.metrics import MetricsLog, plot_loss
from swarm.metrics import read as read_metrics
from swarm.rpc.channels import ChannelPool
from swarm.types import Block, PeerRecord

START_SECONDS, START_SECONDS_PER_PEER = 300.0, 60.0
"""Longest wait until the peers after the first serve: they import, connect and perhaps compile, all at once. The first
may take any time, because it may have to download and prepare the text."""
LOOK_SECONDS = 0.5
TELL_SECONDS = 2.0
"""What takes longer is told; then again after twice the time, and so on."""
MOST_WARNINGS = 20
"""How many of the children's warnings are shown. The others are in their logs."""


class Output:
    def __init__(self, folder: Path, *, goes_on: bool) -> None:
        """If the run goes on from a checkpoint, metrics.jsonl is kept."""
        self.folder = folder
        self.logs = folder / "logs"
        self.metrics = folder / "metrics.jsonl"
        self.first_step = 0
        self._goes_on = goes_on
        self._num_old_rows = 0
        """How many lines of metrics.jsonl an earlier run wrote."""

    def clear(self, logs_in_use: Collection[Path]) -> None:
        """Delete what an earlier run left, now that this one has begun; keep metrics.jsonl if this run goes on."""
        if not self._goes_on:
            self.metrics.unlink(missing_ok=True)
        elif self.metrics.exists() and (rows := list(read_metrics(self.metrics))):
            self._num_old_rows, self.first_step = len(rows), rows[-1]["step"]
        stale = {*self.logs.glob("peer-*.log"), self.logs / "trainer.log"} - set(logs_in_use)
        for path in (*stale, *(self.folder / name for name in ("summary.json", "loss.png", "sample.txt"))):
            path.unlink(missing_ok=True)

    @property
    def has_begun(self) -> bool:
        return bool(self.trainer_rows())

    def trainer_rows(self) -> tuple[TrainerRow, ...]:
        """The trainer's row in the table, by the last step in metrics.jsonl; empty before its first step."""
        rows = list(read_metrics(self.metrics))[self._num_old_rows :] if self.metrics.exists() else []
        steps = [row for row in rows if "train/loss" in row]
        if not steps:
            return ()
        self.first_step, last = steps[0]["step"] - 1, steps[-1]
        rate = last["train/tokens_per_sec"]
        return (TrainerRow(name="trainer", step=last["step"], loss=last["train/loss"], tokens_per_second=rate),)

    def finish(self, figures: Mapping[str, int]) -> None:
        """Add figures to the trainer's summary, and print it, with the sample and where the files are."""
        path = self.folder / "summary.json"
        summary = json.loads(path.read_text(encoding="utf-8")) | dict(figures)
        json_file.write_object(path, summary)
        # The trainer's plot lacks our last events, so it is drawn again.
        plot_loss(self.metrics, self.folder / "loss.png")
        sample = self.folder / "sample.txt"
        if sample.exists():
            print(printable(sample.read_text(encoding="utf-8"), keep="\n\t"))
        console = Screen()
        console.print_json(data=summary)
        console.print(f"Figures, plot and logs are in {self.folder}", highlight=False, soft_wrap=True)
        for run in sorted((self.folder / "wandb").glob("offline-run-*"))[-1:]:
            console.print(f"To upload this run to Weights & Biases: wandb sync {run}", highlight=False, soft_wrap=True)


class Drama:
    def __init__(self, options: LocalOptions, peers: LocalPeers) -> None:
        self.num_killed = 0
        self.num_joined = 0
        self._kill_at = options.kill_at
        self._join_at = options.join_at
        self._random = random.Random(options.seed)
        self._peers = peers
        self._newcomer: LocalPeer | None = None

    def act(self, num_steps: int) -> list[str]:
        """Do what is due after this number of steps of this run. Returns what happened."""
        happened = []
        if self._kill_at is not None and num_steps >= self._kill_at and not self.num_killed:
            happened += self._kill()
        if self._newcomer is not None:
            happened += self._see_it_join(self._newcomer)
        elif self._join_at is not None and num_steps >= self._join_at:
            self._newcomer = self._peers.start(self._peers.most_needed())
            happened.append(f"{self._newcomer.child.name} starts for {self._newcomer.span.label}")
        return happened

    def _kill(self) -> list[str]:
        # Peers may have died by themselves, so the last one of a block is not killed.
        serving = self._peers.serving
        counts = Counter(block for peer in serving for block in peer.blocks)
        victims = [peer for peer in serving if all(counts[block] > 1 for block in peer.blocks)]
        if not victims:
            return []
        victim = self._random.choice(victims)
        self._peers.kill(victim)
        self.num_killed += 1
        return [f"kill -9 {victim.child.name} of {victim.span.label}"]

    def _see_it_join(self, newcomer: LocalPeer) -> list[str]:
        if self.num_joined or not newcomer.is_ready():
            return []
        self.num_joined += 1
        return [f"{newcomer.child.name} joined {newcomer.span.label}"]


class LocalSwarm:
    def __init__(
        self, options: LocalOptions, run_name: str, peers: LocalPeers, children: Supervisor, identity: Identity
    ) -> None:
        """This process asks the peers for their status with the identity."""
        self.peers = peers
        self.output = Output(options.output, goes_on=options.resume is not None)
        self._options = options
        self._run_name = run_name
        self._children = children
        self._drama = Drama(options, peers)
        self._channels = ChannelPool(insecure=options.insecure, identity=identity)
        self._events: list[str] = []
        self._said_warnings = set[str]()
        self._log_offsets = Counter[str]()
        """How many bytes of each child's log have been read."""
        self._awaited = ""
        self._awaited_since = self._tell_at = 0.0

    async def run(self) -> int:
        per_stage, spans = self._options.peers_per_stage, self.peers.spans
        with LiveTable() as table:
            self._events.append(
                f"starting {len(spans)} x {per_stage} peers and a trainer; their logs are in {self.output.logs}"
            )
            table.show(SwarmView(run=self._run_name, events=tuple(self._events)))
            await self.start_first_peer(table)
            self.output.clear([child.log for child in self._children.running])
            for span in (spans * per_stage)[1:]:
                self.peers.start(span)
            await self.until_ready(table)
            trainer = self.start_trainer()
            with MetricsLog(self.output.metrics) as metrics:
                await self.watch(trainer, table, metrics)
        await self._channels.close()
        self.output.finish({"peers_killed": self._drama.num_killed, "peers_joined": self._drama.num_joined})
        return 0

    async def start_first_peer(self, table: LiveTable) -> None:
        """Start the first peer and wait until it serves, because the others join through it. Raises PeerUnavailable if
        it ended instead."""
        # If the peer fails, the last line of its log is shown as the reason. Children append to their logs, so the log
        # of an earlier run is deleted first.
        (self.output.logs / "peer-1.log").unlink(missing_ok=True)
        first = self.peers.start(self.peers.spans[0])
        while not first.is_ready():
            self._fail_on_exit()
            self._follow(f"{first.child.name} to serve", first.child)
            table.show(SwarmView(run=self._run_name, events=tuple(self._events)))
            await asyncio.sleep(0.1)

    async def until_ready(self, table: LiveTable) -> None:
        """Wait until every peer serves. Raises PeerUnavailable if one ended, or takes too long."""
        seconds = START_SECONDS + START_SECONDS_PER_PEER * len(self.peers.running)
        deadline = time.monotonic() + seconds
        while late := [peer.child for peer in self.peers.running if not peer.is_ready()]:
            self._fail_on_exit()
            if time.monotonic() > deadline:
                raise PeerUnavailable(f"{late[0].name} does not serve after {seconds:.0f} s; its log is {late[0].log}")
            self._follow(f"{', '.join(child.name for child in late)} to serve", late[0])
            table.show(await self._view())
            await asyncio.sleep(0.1)

    def start_trainer(self) -> Child:
        options = self._options
        own = TrainerOptions(
            initial_peers=self.peers.addresses, steps=options.steps, output=options.output, name="trainer",
            evaluate_every=options.evaluate_every, sample_tokens=options.sample_tokens, wandb=options.wandb,
            wandb_online=options.wandb_online, tensorboard=options.tensorboard, insecure=options.insecure,
            **self.peers.own_text,
        )  # fmt: skip
        return self._children.start("trainer", command_line("trainer", cli.arguments(own)))

    async def watch(self, trainer: Child, table: LiveTable, metrics: MetricsLog) -> None:
        """Show the swarm until the trainer has trained, and meanwhile kill and start peers as the options say. Raises
        PeerUnavailable if the trainer failed, or so many blocks have lost their last peers that no path goes on."""
        while True:
            if not self.output.has_begun:
                self._follow("the first step", trainer)
            step = await self._show(table)
            self._note(self._drama.act(step - self.output.first_step), metrics, step, prefix=f"step {step}: ")
            lost = ""
            for end in self._children.exits():
                if end.name == trainer.name:
                    await self._show(table)
                    if end.returncode != 0:
                        # The trainer failed before its last step, or afterwards because it could not write a file.
                        raise PeerUnavailable(f"the trainer failed: {_why(end)}")
                    return
                gone = self.peers.ended(end.name)
                what = f"{end.name} ended by itself: {_why(end)}"
                self._note([what], metrics, step)
                counts = self.peers.counts()
                for block in (block for block in gone.blocks if not counts[block]):
                    lost = f"stage {block} has no peer left: {what}; its log is {gone.child.log}"
            if lost:
                still, goes_on = self.peers.still_paths()
                if not goes_on:
                    # What the stage had learnt is gone, and the trainer would wait for ever.
                    raise PeerUnavailable(lost)
                stands = "stands" if len(still) == 1 else "stand"
                self._note([f"{numbered('path', still)} {stands} still, and others go on: {lost}"], metrics, step)
            await asyncio.sleep(LOOK_SECONDS)

    async def _show(self, table: LiveTable) -> int:
        view = await self._view()
        table.show(view)
        return view.trainers[0].step if view.trainers else self.output.first_step

    async def _view(self) -> SwarmView:
        announced: dict[Block, list[PeerRecord]] = {block: [] for block in self.peers.blocks}
        for peer in self.peers.running:
            for block in peer.blocks:
                if peer.record is not None:
                    announced[block].append(peer.record.model_copy(update=block._asdict()))
        # The run's id ends with a digest that depends on the text. The first peer computes it; here only the run's name
        # is known.
        view = await observe("", announced, (), self._channels, self._events)
        rows = tuple(dataclasses.replace(row, peers=row.peers + self._starting(row.block)) for row in view.stages)
        return SwarmView(run=self._run_name, stages=rows, trainers=self.output.trainer_rows(), events=view.events)

    def _starting(self, block: Block) -> tuple[PeerRow, ...]:
        """Rows for the peers of a block that were started and cannot be asked yet."""
        return tuple(
            PeerRow(name=peer.child.name, peer_id="", state="joining")
            for peer in self.peers.running
            if block in peer.blocks and peer.record is None
        )

    def _fail_on_exit(self) -> None:
        for end in self._children.exits():
            raise PeerUnavailable(f"{end.name} did not start: {_why(end)}")

    def _follow(self, awaited: str, child: Child) -> None:
        """Note what children warn of; each warning once, as all peers may have the same one. If what is awaited takes
        long, note also what the child does for which this program waits."""
        for each in self._children.running:
            with each.log.open("rb") as log:
                log.seek(self._log_offsets[each.name])
                lines = log.read().rpartition(b"\n")[0]
            self._log_offsets[each.name] += len(lines) + bool(lines)
            for text in re.findall(r"^\S+ \S+ (?:WARNING|ERROR): (.*)$", lines.decode(errors="replace"), re.MULTILINE):
                if text not in self._said_warnings and len(self._said_warnings) < MOST_WARNINGS:
                    self._said_warnings.add(text)
                    self._events.append(f"{each.name}: {text}")
        now = time.monotonic()
        if awaited != self._awaited:
            self._awaited, self._awaited_since, self._tell_at = awaited, now, now + TELL_SECONDS
        elif now >= self._tell_at:
            seconds = now - self._awaited_since
            self._tell_at = now + seconds
            does = re.split(r" INFO: ", last_line(child.log), maxsplit=1)[-1]
            self._events.append(f"waiting for {awaited}, {seconds:.0f} s so far; {child.name}: {does or 'it begins'}")

    def _note(self, happened: list[str], metrics: MetricsLog, step: int, *, prefix: str = "") -> None:
        for text in happened:
            self._events.append(prefix + text)
            metrics.event(step, prefix + text)


def _why(end: Exit) -> str:
    """A child's last line, without the program, time, name and level at its beginning."""
    return re.split(r": error: | ERROR: ", end.reason, maxsplit=1)[-1]
