"""The options of swarm-local."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from peers.shared import option_types as takes
from peers.shared.run_options import CheckpointOptions, ReportingOptions, SettingsOption, TextOptions

PRESET = "tiny"
"""The preset if neither --preset nor --config is given."""


@dataclass(frozen=True, kw_only=True)
class LocalOptions(CheckpointOptions, TextOptions, ReportingOptions):
    """Launch a swarm on this machine and train."""

    preset: str | None = None
    """Configuration that comes with swarm: tiny, small, shakespeare, gpt2-124m and others (docs/models.md); tiny if
    there is no --config and no --model either."""
    config: takes.File | None = None
    """TOML file, instead of a preset."""
    model: takes.FolderOrName | None = None
    """Begin with this model, instead of a preset: a folder made by swarm-model import, a model's folder of Hugging
    Face, or its name on the hub."""
    lora_rank: takes.LoraRank | None = None
    """Train adapters (LoRA) of this rank, and leave the model's own weights as they are."""
    stages: takes.Stages | None = None
    """Number of stages, instead of the configuration's."""
    peers_per_stage: Annotated[int, takes.whole(1, 1000)] = 2
    """Peers that each stage begins with. Where stages have variants, a peer serves the blocks of a path, and there are
    as few such peers as serve every block, so many times."""
    stages_per_peer: Annotated[int | None, takes.whole(1, 1000)] = None
    """Adjacent stages that each peer serves, instead of one: fewer processes, which take less memory and CPU time."""
    steps: takes.Positive = 60
    """Steps to train; a step is one round of the whole swarm."""
    set: SettingsOption = ()
    output: takes.Folder = Path("swarm-output")
    """Folder for metrics.jsonl, summary.json, loss.png and the processes' logs."""
    kill_at: takes.Count | None = None
    """Kill -9 a random peer once this run has made this many steps; its stage keeps another one."""
    join_at: takes.Count | None = None
    """Start one more peer, where there are fewest, once this run has made this many steps."""
    evaluate_every: takes.Count = 10
    """Steps between two evaluations on held-out text."""
    sample_tokens: takes.Count = 200
    """Tokens of text that the trained swarm writes at the end; 0 for none."""
    threads: Annotated[int, takes.whole(1, 1024)] = 1
    """CPU threads of each peer."""
    max_in_flight: Annotated[int, takes.whole(0, 1 << 16)] = 0
    """Microbatches that each peer works on at once; 0 lets it find out."""
    device: str = "cpu"
    """cpu, cuda:1, ... or mps, for all peers; cuda and auto spread them over the GPUs by free memory. Each peer's
    autograd graphs get a part of that memory."""
    token: str | None = None
    """A peer's token, or @FILE: the run is locked. It may also be in SWARM_TOKEN."""
    insecure: bool = False
    """Plain TCP instead of TLS between the peers."""
    resume: takes.Folder | None = None
    """Go on from the newest checkpoint in this folder, with as many stages as are asked for; metrics.jsonl is kept."""
    seed: takes.Seed = 0
    """Chooses the peer that is killed."""

    def __post_init__(self) -> None:
        if self.config is not None and (self.preset or self.model) is not None:
            raise ValueError("--config, --preset and --model exclude each other")
        CheckpointOptions.__post_init__(self)
        ReportingOptions.__post_init__(self)
        for name in ("kill_at", "join_at"):
            step = getattr(self, name)
            if step is not None and step >= self.steps:
                raise ValueError(f"{takes.as_typed(name)} must be between 0 and {self.steps - 1}, not {step}")
        if self.kill_at is not None and self.peers_per_stage < 2:
            raise ValueError("--kill-at needs --peers-per-stage 2 or more: a stage without a peer stops the run")
