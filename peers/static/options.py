"""The options of swarm-static. It imports no torch."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from peers.shared import cli, logs
from peers.shared import option_types as takes
from peers.shared.run_options import CheckpointOptions, ReportingOptions, SettingsOption, TextOptions
from swarm.config.rounds import CompressedCodec

PROG = "swarm-static"


@dataclass(frozen=True, kw_only=True)
class StaticOptions(CheckpointOptions, TextOptions, ReportingOptions):
    """Train a run's model on a fixed set of workers, without a swarm: alone, or as torchrun's script.

    The three sizes, dp * tp * pp, make up the workers that torchrun starts.
    """

    config: takes.File | None = None
    """TOML file of the run."""
    preset: str | None = None
    """Configuration that comes with swarm: tiny, small, shakespeare, gpt2-124m and others (docs/models.md)."""
    model: takes.FolderOrName | None = None
    """Begin with this model: a folder made by swarm-model import, a model's folder of Hugging Face, or its name on the
    hub. The run's configuration is then the folder's, or that of --config, where model.weights is its digest."""
    set: SettingsOption = ()
    steps: takes.Count | None = None
    """The step at which to end, counted from the run's beginning; 100 if left out. With 0 nothing is trained: what the
    run began with, or what --resume has, is evaluated."""
    epochs: Annotated[float, takes.number(0, 10**6, above=True)] | None = None
    """Passes through the text at which to end, instead of --steps."""
    dp: takes.Positive | None = None
    """Data parallelism: workers, or groups of them, that each compute a part of every step's microbatches. Left out, it
    is what --tp and --pp leave of the workers."""
    fsdp: Literal["zero3", "zero2"] | None = None
    """Cut weights, gradients and the optimizer's state over the --dp workers (FSDP2). zero3, which --fsdp alone means,
    gathers a layer's weights anew in the backward; zero2 keeps them from the forward on."""
    tp: takes.Positive = 1
    """Tensor parallelism: workers that share the matrices of every layer."""
    pp: takes.Positive = 1
    """Pipeline parallelism: stages of layers, one behind the other (1F1B)."""
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Type of matrix products; weights are kept in fp32. fp16 scales losses, so that small gradients survive. Left out,
    it is what model.autocast says."""
    compress: CompressedCodec | None = None
    """Codec in which gradients are averaged, with the options of [averaging]; for --dp alone."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile every layer (torch.compile). auto does so on a CUDA GPU. Not for runs with dropout."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto takes a CUDA GPU for each worker if there are any. mps, a Mac's GPU, is for a single worker."""
    threads: takes.Threads = 0
    """CPU threads of each worker; 0 takes the machine's physical cores over its workers, or what OMP_NUM_THREADS says.
    The 1 that torchrun itself writes there does not count."""
    checkpoint: takes.Folder | None = None
    """Write checkpoints to this folder, which all machines share, and go on from the newest one there."""
    resume: takes.Folder | None = None
    """Where --checkpoint has none yet, go on from the newest one in this folder, such as a swarm's."""
    metrics: takes.File = Path("swarm-output/metrics.jsonl")
    """Append figures of every step to this file."""
    evaluate_every: takes.Count = 10
    """Steps between two evaluations on held-out text; 0 leaves only the one at the end."""
    evaluation_samples: takes.Positive = 256
    """Held-out samples in an evaluation; of several datasets as many of each."""
    log_level: logs.LogLevel = "info"

    def __post_init__(self) -> None:
        sources = self.config, self.preset, self.model
        if sources == (None, None, None) or (self.config is not None and self.preset is not None):
            raise ValueError("which run? give one of --config FILE, --preset NAME and --model DIR")
        if self.epochs is not None and self.steps is not None:
            raise ValueError("--steps and --epochs exclude each other")
        if self.compress is not None and (self.fsdp is not None or self.tp > 1 or self.pp > 1):
            raise ValueError("--compress is for --dp alone, without --fsdp, --tp and --pp")
        CheckpointOptions.__post_init__(self)
        ReportingOptions.__post_init__(self)


def explain(argv: Sequence[str]) -> None:
    """Print the help if the command line asks for it, or a mistake in it, and end the process; else return."""
    if is_first_here(os.environ) or not {"-h", "--help"}.isdisjoint(argv):
        parse(argv)


def parse(argv: Sequence[str]) -> StaticOptions:
    """Parse the command line, in which `--fsdp` without a word behind it means `--fsdp zero3`."""
    following = [*argv, "--"][1:]
    named = [
        word
        for given, after in zip(argv, following, strict=True)
        for word in ([given, "zero3"] if given == "--fsdp" and after.startswith("-") else [given])
    ]
    return cli.parse(StaticOptions, prog=PROG, argv=named)


def is_first_here(environment: Mapping[str, str]) -> bool:
    """Whether this worker is its machine's first one, which speaks for all workers there."""
    return environment.get("LOCAL_RANK", "0") == "0"
