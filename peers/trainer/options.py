"""The options of swarm-trainer, for the program itself and for those that start it.

It imports neither torch nor hivemind.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from peers.shared import logs
from peers.shared import option_types as takes
from peers.shared.run_options import ReportingOptions, RunOptions, joins

MOST_IN_FLIGHT = 256
"""The most microbatches that a trainer has in flight, unless the user chooses another number."""


@dataclass(frozen=True, kw_only=True)
class TrainerOptions(RunOptions, ReportingOptions):
    """Train: feed text into a running swarm. A step is one round of the whole swarm."""

    steps: takes.Positive = 100
    """Steps to train from where the swarm is now."""
    paths: takes.Paths | None = None
    """In a run whose stages have variants: feed only these paths, by their numbers, from 0; left out, all."""
    dataset: tyro.conf.UseAppendAction[tuple[takes.FolderOrName, ...]] = ()
    """Where this machine has the run's text; its contents must be the run's. By default the run's own name for it. Of
    several datasets all are given, in any order: --dataset ONE --dataset OTHER."""
    validation: takes.FolderOrName | None = None
    """Where this machine has the run's text for evaluations, if the run has one of its own."""
    tokenizer: takes.FolderOrName | None = None
    """This machine's copy of the run's tokenizer (a folder, a tokenizer.json, or class:MODULE:CLASS); left out, it
    comes from the run's peers, unless it is a class."""
    output: takes.Folder = Path("swarm-output")
    """Folder for metrics.jsonl, summary.json, loss.png, sample.txt and evaluation.json."""
    evaluate_every: takes.Count = 10
    """Steps between two evaluations on held-out text, of which the first comes before the first step; 0 leaves only the
    one at the end."""
    evaluation_samples: takes.Positive = 256
    """Held-out samples in an evaluation; of several datasets as many of each."""
    router: takes.Folder | None = None
    """In a run with several paths: folder with their router, as swarm-model route writes it, for --reroute-every."""
    reroute_every: Annotated[int, takes.whole(32, takes.LARGEST_COUNT)] | None = None
    """With --router: in evaluations the last 32 tokens choose the path anew after every so many tokens of a sample,
    which begins along its own path."""
    evaluate_only: bool = False
    """Train nothing: evaluate the round at which the swarm is, write evaluation.json, and end."""
    sample_tokens: takes.Count = 0
    """Tokens of text that the trained swarm writes at the end."""
    max_in_flight: Annotated[int, takes.whole(1, 1 << 16)] = MOST_IN_FLIGHT
    """Largest number of microbatches under way at once, but one of each path at least; the trainer finds how many are
    worth while."""
    metrics_port: takes.Port | None = None
    """Answer at this port, at /metrics, with this process's figures for Prometheus; 0 takes a free one. Needs the extra
    metrics."""
    metrics_host: str = "127.0.0.1"
    """Address of --metrics-port: Prometheus on another machine needs 0.0.0.0, say."""
    events: takes.File | None = None
    """Append what this trainer does with each microbatch to this file, for swarm-status --audit."""
    name: takes.Name = ""
    """What others see; by default host name and process id."""
    log_level: logs.LogLevel = "info"

    def __post_init__(self) -> None:
        if joins(self) and self.lan:
            raise ValueError("INVITE, --initial-peers and --lan all say which run to enter: leave all but one out")
        if not joins(self) and not self.lan:
            raise ValueError("which run? type swarm-trainer INVITE, with the invite that every swarm-peer prints")
        if (self.router is None) != (self.reroute_every is None):
            raise ValueError("--router DIR and --reroute-every N go together: give both, or neither")
        super().__post_init__()
