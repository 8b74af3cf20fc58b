"""The options of swarm-model's commands, and their help, which needs no torch."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from peers.shared import cli
from peers.shared import option_types as takes
from peers.shared.run_options import RunOptions, SettingsOption, joins
from swarm.config.data import Format

PROG = "swarm-model"
ABOUT = """swarm-model: takes models in and gives them out.

    swarm-model import ./Llama-3.2-1B --output run/      a model of Hugging Face becomes the beginning of a run
    swarm-model export --checkpoint checkpoints/ --output out/
    swarm-model export --checkpoint checkpoints/ --adapter --output out/
    swarm-model export INVITE --output out/
    swarm-model route --config run.toml --output shards/      a shard of the text for each path of a run with variants
    swarm-model show run/
    swarm-model push out/ NAME/REPOSITORY --dry-run

But for an export from a running swarm it works on files alone. A model that is named as on the hub is downloaded first;
nothing of it is executed.
"""


@dataclass(frozen=True, kw_only=True)
class ImportModelOptions:
    """Make a run folder of a model of Hugging Face: swarm-peer --model DIR begins a run with it."""

    source: tyro.conf.Positional[takes.FolderOrName]
    """The model's folder, or its name on the hub."""
    output: takes.Folder
    """Folder to make."""
    stages: Annotated[int, takes.whole(0, 4096)] = 0
    """Into how many stages the model is cut; 0 takes two. The first peer's --stages changes it later."""
    dataset: tyro.conf.UseAppendAction[tuple[takes.FolderOrName, ...]] = ()
    """What to train on: stdlib, a file, a folder, a glob, or hf:NAME; may be given several times. The first peer's
    --dataset changes it later."""
    format: Format = "text"
    """Format of the dataset: text, chat (rows of messages), or completion (rows of a prompt and a completion)."""
    set: SettingsOption = ()
    run: str = ""
    """Name of the run; left out, that of the model."""


@dataclass(frozen=True, kw_only=True)
class ExportModelOptions(RunOptions):
    """Write what a run has learnt into a folder that Hugging Face's transformers can load.

    With an INVITE the weights come from the peers of all stages; in a locked run that needs a peer's token.
    """

    output: takes.Folder
    """Folder to make."""
    checkpoint: takes.Folder | None = None
    """Folder with checkpoints of all stages, instead of a running swarm. Peers write one every 10 rounds, unless their
    --checkpoint-every says otherwise, and one as they leave."""
    model: takes.Folder | None = None
    """Run folder, instead of checkpoints: the model as it was imported."""
    round: takes.Count | None = None
    """Round to export; left out, the newest of which all stages have a checkpoint. A running swarm has only its present
    round: for a later one the export waits."""
    base: takes.FolderOrName | None = None
    """The model to which a run's adapters (LoRA) belong, as in the first peer's --model: a run folder, a model's folder
    of Hugging Face, or its name on the hub. The adapters are merged into it. Not needed with an INVITE: a running swarm
    has the model. With --adapter it is only checked, and named in adapter_config.json."""
    path: takes.Count | None = None
    """Of a run with several paths (stages.variants): the one to export. Left out, all are, each into a folder of its
    own within the output: path-00, ..."""
    router: takes.Folder | None = None
    """Folder with the router of all paths, as swarm-model route makes it; it is written beside them."""
    adapter: bool = False
    """For a run that trains adapters: write these alone, as peft loads them."""
    merged: bool = False
    """For a run that trains adapters: write the whole model, with the adapters added to its weights. That is also what
    happens without --adapter."""
    dtype: Literal["keep", "fp32", "bf16", "fp16"] = "keep"
    """Type of the weights; keep leaves them as they are: fp32 in a checkpoint and a swarm; where adapters are merged,
    the type of the model."""
    tokenizer: takes.FolderOrName | None = None
    """The run's tokenizer, if it is not beside the checkpoints: a folder, a tokenizer.json, a hub name, or
    class:MODULE:CLASS, which then is not in the export."""
    metrics: Path | None = None
    """A trainer's --output folder, or the metrics.jsonl in it: its losses go into the model card."""

    def __post_init__(self) -> None:
        takes.require_one({
            "INVITE": self.invite is not None,
            "--lan": self.lan,
            "--initial-peers ADDRESS": bool(self.initial_peers),
            "--checkpoint DIR": self.checkpoint is not None,
            "--model DIR": self.model is not None,
        })  # fmt: skip
        if self.round is not None and self.model is not None:
            raise ValueError("--round needs INVITE or --checkpoint DIR: a run folder has no rounds")
        if (self.token is not None or self.insecure) and not (joins(self) or self.lan):
            raise ValueError(
                "--token and --insecure belong to a running swarm: INVITE, --lan, or --initial-peers ADDRESS"
            )
        if self.model is not None and (self.base or self.adapter or self.merged):
            raise ValueError(
                "--base, --adapter and --merged need INVITE or --checkpoint DIR: a run folder has no adapters yet"
            )
        if self.model is not None and (self.path is not None or self.router is not None):
            raise ValueError("--path and --router need INVITE or --checkpoint DIR: in a run folder all paths are equal")
        if self.path is not None and self.router is not None:
            raise ValueError("--router goes with all paths: leave --path out")
        if self.adapter and self.merged:
            raise ValueError("--adapter excludes --merged: it writes adapters without the model")


@dataclass(frozen=True, kw_only=True)
class RouteModelOptions:
    """Cut a text into a shard for each path of a run with stages.variants, and write the router that did it.

    Sequences that are alike, as far as their first 32 tokens tell it, come into one shard. A sequence is a text, or a
    window of a long one.
    """

    output: takes.Folder
    """Folder to make, with path-00.jsonl, ... and the router."""
    config: takes.File | None = None
    """The run's configuration, for its text, its tokenizer and the number of its paths."""
    paths: takes.Positive | None = None
    """The number of paths, instead of --config."""
    dataset: tyro.conf.UseAppendAction[tuple[takes.FolderOrName, ...]] = ()
    """The text, as in swarm-peer --dataset; may be given several times."""
    tokenizer: takes.FolderOrName | None = None
    """bytes, a folder with a tokenizer.json, its path, a hub name, or class:MODULE:CLASS; left out, that of --config,
    or bytes."""
    model: takes.FolderOrName | None = None
    """A model (a run folder, a model's folder of Hugging Face, or its name on the hub) whose hidden states tell
    what is alike. Left out, runs of up to three tokens do."""
    refine: takes.Folder | None = None
    """Folder with the paths' models, as swarm-model export writes them: the router is fitted to the path that has the
    least loss on each of some sequences."""
    random: bool = False
    """Cut the text at random instead, for comparisons. There is no router then."""
    window: takes.Positive = 4096
    """The most characters of a sequence: a longer text is cut into several."""
    most_over_mean: Annotated[float, takes.number(1, 1000, above=True)] = 1.2
    """How much larger than the mean of all a shard may be."""
    seed: takes.Seed = 0
    """Of the clusters, or of the random cut."""

    def __post_init__(self) -> None:
        takes.require_one({"--config FILE": self.config is not None, "--paths N": self.paths is not None})
        if self.paths is not None and not self.dataset:
            raise ValueError("--paths needs --dataset: which text?")
        if self.random and (self.model is not None or self.refine is not None):
            raise ValueError("--random excludes --model and --refine")


@dataclass(frozen=True, kw_only=True)
class ShowModelOptions:
    """Say what a model's folder, a run folder, or a folder of checkpoints has.

    A swarm-peer that was started with --checkpoint writes a checkpoint every 10 rounds, or as --checkpoint-every says,
    and one as it leaves.
    """

    folder: tyro.conf.Positional[takes.Folder]
    """The folder."""


@dataclass(frozen=True, kw_only=True)
class PushModelOptions:
    """Upload an exported folder to the hub; needs a token of the hub (HF_TOKEN, or `hf auth login`)."""

    folder: tyro.conf.Positional[takes.Folder]
    """The folder that export made."""
    repository: tyro.conf.Positional[str]
    """NAME/REPOSITORY, or REPOSITORY of your own account; made if it is not there."""
    private: bool = False
    """If the repository is not there yet, make it visible to you alone."""
    dry_run: bool = False
    """Say what would be uploaded, and upload nothing."""


COMMANDS: dict[str, type[Any]] = {
    "import": ImportModelOptions,
    "export": ExportModelOptions,
    "route": RouteModelOptions,
    "show": ShowModelOptions,
    "push": PushModelOptions,
}
"""The options of each command, by the word that chooses it."""


def explain(argv: Sequence[str]) -> None:
    """Print the help that the command line asks for, or what is wrong with it, and end the process; else return."""
    asked_to_run = list[object]()
    commands = {name: (options, asked_to_run.append) for name, options in COMMANDS.items()}
    exit_code = cli.run(PROG, ABOUT, commands, argv)
    if not asked_to_run:
        sys.exit(exit_code)
