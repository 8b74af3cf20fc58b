"""Code that most benches use: their common options, progress, and a swarm of real peers.

The peers and trainers are the very programs that users run, over TLS on this machine; the supervisor ends them.
Never measures anything.
"""

import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from peers.commands import command_line
from peers.local.supervisor import Child, Supervisor, last_line
from peers.shared import cli, process
from peers.shared.cache import cache_folder
from peers.stage_peer.options import PeerOptions
from peers.trainer.options import TrainerOptions
from scripts.benches.shared.meeting import put
from swarm.config import DataConfig, ModelConfig, RoundsConfig, RunConfig, StagesConfig
from swarm.data import corpora
from swarm.data.microbatches import Microbatches
from swarm.errors import DeadlineExceeded, PeerUnavailable
from swarm.metrics import log as metrics_log
from swarm.pipeline.window import MOST_IN_FLIGHT
from swarm.types import PeerRecord, PeerState

START_SECONDS = 600.0
"""Longest wait for a peer to serve; many that start at once share the cores."""
STALL_SECONDS = 600.0
"""A trainer that takes no step for this long will take none."""
POLL_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """The options that every bench has."""

    json: bool = False
    """Print one JSON object as the last line of stdout, instead of a table."""


@dataclass(frozen=True, kw_only=True)
class BenchOptions(OutputOptions):
    """The options of a bench that trains on a text."""

    dataset: str = "stdlib"
    """Text to train on: stdlib, a file, a folder or a glob."""


def require_multiple(option: str, value: int, of: int) -> None:
    """Raise ValueError for an option's value that is no multiple of a number."""
    if value < of or value % of:
        raise ValueError(f"--{option} must be a multiple of {of}, not {value}")


def largest_of(errors: Iterable[float]) -> float:
    """The largest value, or infinity if any value is not finite. max() alone would ignore a NaN that is not the first
    value."""
    return max(error if math.isfinite(error) else math.inf for error in errors)


def compute_like_peers(num_threads: int = 1) -> None:
    """Make this process compute as swarm's programs do: with this many threads, and keeping freed memory."""
    process.keep_freed_memory()
    torch.set_num_threads(num_threads)


def say(text: str) -> None:
    """Report progress."""
    print(text, file=sys.stderr, flush=True)


def with_corpus(config: RunConfig) -> tuple[RunConfig, Microbatches]:
    """The configuration as the swarm publishes it, with the digests of its text and all that it leaves out, and the
    run's microbatches."""
    corpus = corpora.prepare(config.data, cache_dir=cache_folder() / "corpora")
    data = corpora.published(config.data, corpus, None)
    return dataclasses.replace(config, data=data).begun(), Microbatches(corpus, data)


def small_run(name: str, dataset: str) -> RunConfig:
    """A DiLoCo run in two stages that needs little computing."""
    return RunConfig(
        run=name,
        model=ModelConfig(num_layers=2, d_model=64, num_heads=2),
        stages=StagesConfig(num_stages=2),
        data=DataConfig(dataset=dataset, sequence_length=64, microbatch_size=4),
        rounds=RoundsConfig(setting="diloco", round_samples=32, inner_batch_samples=8),
    )


def write_config(config: RunConfig, path: Path) -> None:
    """Write a configuration as the TOML file that peers read."""
    values = dataclasses.asdict(config)
    sections = {name: value for name, value in values.items() if isinstance(value, dict)}
    lines = [f"{name} = {json.dumps(value)}" for name, value in values.items() if name not in sections]
    for section, entries in sections.items():
        # JSON's scalars and arrays are TOML's as well.
        lines += [f"[{section}]", *(f"{name} = {json.dumps(value)}" for name, value in entries.items())]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class ServingPeer:
    """A peer that serves, and its addresses."""

    child: Child
    record: PeerRecord
    dht_address: str


@dataclass(eq=False)
class SwarmProcesses:
    """Peers and trainers of one run, each a process of its own."""

    config: RunConfig
    children: Supervisor
    folder: Path
    peers: list[ServingPeer] = field(default_factory=list)
    logs_events: bool = False
    """Whether every process writes an event log, to `events`."""
    program: Callable[[str, Sequence[str]], list[str]] = field(default=command_line)
    """The command line of a program, by its name and arguments."""
    model: Path | None = None
    """Run folder with the weights with which the run begins; None if they are drawn from the run's seed."""
    threads: int = 1
    """CPU threads of each peer."""
    device: str = "cpu"
    """What each peer computes on."""
    _num_started: int = 0

    @property
    def events(self) -> Path:
        """The folder of the event logs."""
        return self.folder / "events"

    def start_peers(self, stages: Sequence[int], environments: Sequence[Mapping[str, str]] = ()) -> None:
        """Start one peer for each entry, and return when all of them serve.

        Args:
            environments: the environment of each peer, added to this process's own.

        Raises:
            PeerUnavailable: one ended instead.
            DeadlineExceeded: one took too long.
        """
        self.prepare()
        peers = list(zip(stages, environments or [{}] * len(stages), strict=True))
        # The first one has to be there before others can join it.
        for batch in (peers[:1], peers[1:]):
            started = [(self.launch_peer(stage, environment=added), stage) for stage, added in batch]
            self.peers += [self.until_ready(child, stage) for child, stage in started]

    def prepare(self) -> None:
        """Make the folder, with the configuration that the first peer reads."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_config(self.config, self.folder / "run.toml")

    def train(self, name: str, steps: int, *, evaluation_samples: int = 1) -> list[dict[str, Any]]:
        """Let a trainer train `steps` steps, and evaluate at the end. Return its metrics, one dictionary a step.

        Raises:
            PeerUnavailable: the trainer or a peer ended with an error.
            DeadlineExceeded: the trainer took no step for a very long time, or did not end after the last one.
        """
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
        rows = self.train(trainer, 1 + steps)[1:]
        tokens = len(rows) * self.config.rounds.round_samples * self.config.data.sequence_length
        seconds: float = sum(row["train/step_time"] for row in rows)
        return tokens / seconds

    def launch_trainer(
        self, name: str, steps: int, *, evaluation_samples: int = 1, max_in_flight: int = MOST_IN_FLIGHT
    ) -> Child:
        """Start a trainer and do not wait."""
        options = TrainerOptions(
            initial_peers=tuple(peer.dht_address for peer in self.peers[:4]),
            steps=steps,
            output=self.folder / name,
            name=name,
            evaluate_every=0,
            evaluation_samples=evaluation_samples,
            max_in_flight=max_in_flight,
            events=self._event_log(name),
        )
        return self.children.start(f"{self.folder.name}-{name}", self.program("trainer", cli.arguments(options)))

    def steps(self, name: str) -> list[dict[str, Any]]:
        """The metrics that a trainer has written so far, one dictionary a step."""
        path = self.metrics(name)
        return [row for row in metrics_log.read(path) if "train/loss" in row] if path.exists() else []

    def metrics(self, name: str) -> Path:
        """The file to which a trainer appends its metrics."""
        return self.folder / name / "metrics.jsonl"

    def stop(self) -> None:
        """End all peers at once."""
        for peer in self.peers:
            self.children.kill9(peer.child)
        self.peers.clear()

    def launch_peer(self, stage: int, *, environment: Mapping[str, str] | None = None) -> Child:
        """Start a peer and do not wait; `environment` is added to this process's own."""
        name = f"{self.folder.name}-stage-{stage}-peer-{self._num_started}"
        self._num_started += 1
        addresses = tuple(peer.dht_address for peer in self.peers[:8])
        options = PeerOptions(
            stage=stage,
            name=name[:64],
            host="127.0.0.1",
            threads=self.threads,
            device=self.device,
            identity=self.folder / f"{name}.pem",
            ready_file=self.ready_file(name),
            events=self._event_log(name),
            initial_peers=addresses,
            allow_class=(self.config.model.custom_class or None) if addresses else None,
            config=None if addresses or self.model else self.folder / "run.toml",
            model=None if self.model is None else str(self.model),
        )
        return self.children.start(name, self.program("peer", cli.arguments(options)), environment=environment)

    def ready_file(self, name: str) -> Path:
        """The file that exists once a peer serves."""
        return self.folder / f"{name}.json"

    def _event_log(self, name: str) -> Path | None:
        return self.events / f"{name}.jsonl" if self.logs_events else None

    def until_ready(self, child: Child, stage: int) -> ServingPeer:
        """Wait until a peer serves. Raises as `start_peers` does."""
        ready = wait_for_json(self.ready_file(child.name), self.children)
        record = PeerRecord(
            peer_id=ready["peer_id"],
            name=child.name[:64],
            announced_at=ready["time"],
            stage=stage,
            endpoint=ready["endpoint"],
            certificate_pem=ready["certificate_pem"],
            state=PeerState.SERVING,
        )
        return ServingPeer(child=child, record=record, dht_address=ready["dht_addresses"][0])


def wait_for_json(path: Path, children: Supervisor, *, timeout_seconds: float = START_SECONDS) -> dict[str, Any]:
    """Wait until a child has written a JSON file, for example with `write_json`, and return its object.

    Raises:
        PeerUnavailable: some child ended meanwhile.
        DeadlineExceeded: it took longer than that.
    """
    deadline = time.monotonic() + timeout_seconds
    while not path.exists():
        fail_on_exit(children)
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"no {path.name} after {timeout_seconds:.0f} s: is the machine busy with other work?"
            )
        time.sleep(POLL_SECONDS)
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return values


def fail_on_exit(children: Supervisor, *, but: str = "") -> None:
    """Raise PeerUnavailable if a child has ended by itself; `but` names a child that may end."""
    for end in children.exits():
        if end.name != but:
            raise PeerUnavailable(f"{end.name} ended early: {end.reason}")


def stalled(trainer: Child) -> DeadlineExceeded:
    """The error for a trainer that has taken no step for too long. It quotes the trainer's log, which may soon be
    deleted."""
    said = last_line(trainer.log) or "nothing"
    return DeadlineExceeded(f"{trainer.name} took no step for {STALL_SECONDS:.0f} s; the last that it said: {said}")


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a file that `wait_for_json` of another process reads."""
    put(path, json.dumps(values))
