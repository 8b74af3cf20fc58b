"""The options of swarm-local."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from peers.shared import option_checks
from peers.shared.run_options import SettingsOption

PRESET = "tiny"
"""The preset if neither --preset nor --config is given."""


@dataclass(frozen=True, kw_only=True)
class LocalOptions:
    """Launch a swarm on this machine and train."""

    preset: str | None = None
    """Configuration that comes with swarm: tiny, small, shakespeare, gpt2-124m and others (docs/models.md); tiny if
    there is no --config and no --model either."""
    config: Path | None = None
    """TOML file, instead of a preset."""
    model: str | None = None
    """Begin with this model, instead of a preset: a folder made by swarm-model import, a model's folder of Hugging
    Face, or its name on the hub."""
    lora_rank: int | None = None
    """Train adapters (LoRA) of this rank, and leave the model's own weights as they are."""
    stages: int | None = None
    """Number of stages, instead of the configuration's."""
    peers_per_stage: int = 2
    """Peers that each stage begins with."""
    steps: int = 60
    """Steps to train; a step is one round of the whole swarm."""
    dataset: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text, instead of the configuration's: stdlib, a file, a folder, a glob, hf:NAME, or dummy. It may be given
    several times."""
    validation: str | None = None
    """Text for evaluations, named as in --dataset, of which then nothing is held out."""
    tokenizer: str | None = None
    """Tokenizer, instead of the configuration's: bytes, a folder with a tokenizer.json, the path of one, the name of a
    model on the hub, or class:MODULE:CLASS."""
    max_tokens: int | None = None
    """Tokens of each dataset, at most; left out, it is what the configuration says, and usually all."""
    set: SettingsOption = ()
    output: Path = Path("swarm-output")
    """Folder for metrics.jsonl, summary.json, loss.png and the processes' logs."""
    kill_at: int | None = None
    """Kill -9 a random peer once this run has made this many steps; its stage keeps another one."""
    join_at: int | None = None
    """Start one more peer, where there are fewest, once this run has made this many steps."""
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
    autograd graphs get a part of that memory."""
    wandb: str | None = None
    """Report to this Weights & Biases project, into local files."""
    wandb_online: bool = False
    """Report to the Weights & Biases service as it happens."""
    tensorboard: Path | None = None
    """Write figures for TensorBoard into this folder. Needs the extra tensorboard."""
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
            "sample_tokens": 0, "checkpoint_every": 1, "max_tokens": 0,
        }  # fmt: skip
        option_checks.require_at_least(self, least)
        if self.config is not None and (self.preset or self.model) is not None:
            raise ValueError("--config, --preset and --model exclude each other")
        option_checks.require_kinds(self, files=["config"], folders=["output", "tensorboard", "checkpoint", "resume"])
        option_checks.require_reporters(self)
        if self.checkpoint_every is not None and self.checkpoint is None:
            raise ValueError("--checkpoint-every needs --checkpoint DIR")
        for name in ("kill_at", "join_at"):
            step = getattr(self, name)
            if step is not None and not 0 <= step < self.steps:
                raise ValueError(f"--{name.replace('_', '-')} must be between 0 and {self.steps - 1}, not {step}")
        if self.kill_at is not None and self.peers_per_stage < 2:
            raise ValueError("--kill-at needs --peers-per-stage 2 or more: a stage without a peer stops the run")
