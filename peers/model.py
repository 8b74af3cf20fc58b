"""swarm-model: takes models in and gives them out.

    swarm-model import ./Llama-3.2-1B --output run/      a model of Hugging Face becomes the beginning of a run
    swarm-model export --checkpoint checkpoints/ --output out/
    swarm-model export --checkpoint checkpoints/ --adapter --output out/
    swarm-model show run/
    swarm-model push out/ NAME/REPOSITORY --dry-run

Works on files alone: it needs no swarm. A model that is named as on the hub is downloaded first; nothing of it is
executed.
"""

import dataclasses
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from peers.shared import cli, process
from swarm.checkpoint import file
from swarm.config import RunConfig, StagesConfig
from swarm.config.data import Format
from swarm.errors import PeerUnavailable
from swarm.interchange import adapter, origin, run_folder
from swarm.interchange.adapter import export_adapter
from swarm.interchange.export import Origin, Target, export_model
from swarm.interchange.families.known import family_of
from swarm.interchange.run_folder import ImportOptions, import_model
from swarm.interchange.source import DTYPES, Source, parameter_shapes
from swarm.model.stages import trained_shapes

PROG = "swarm-model"
HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
"""What is downloaded of a model: its configuration, its weights if they are safetensors, and its tokenizer."""
_DTYPES = {"fp32": DTYPES["F32"], "fp16": DTYPES["F16"], "bf16": DTYPES["BF16"]}


@dataclass(frozen=True, kw_only=True)
class ImportModelOptions:
    """Make a run folder of a model of Hugging Face: swarm-peer --model DIR begins a run with it."""

    source: tyro.conf.Positional[str]
    """The model's folder, or its name on the hub."""
    output: Path
    """Folder to make."""
    stages: int = 0
    """Into how many stages the model is cut; 0 takes two. The first peer's --stages changes it later."""
    dataset: str = ""
    """What to train on: stdlib, a file, a folder, a glob, or hf:NAME. The first peer's --dataset changes it later."""
    format: Format = "text"
    """What that is: text, chat (rows of messages), or completion (rows of a prompt and a completion)."""
    run: str = ""
    """Name of the run; left out, that of the model."""

    def __post_init__(self) -> None:
        cli.require_at_least(self, {"stages": 0})


@dataclass(frozen=True, kw_only=True)
class ExportModelOptions:
    """Make a folder that transformers loads of what a run has learnt."""

    output: Path
    """Folder to make."""
    checkpoint: Path | None = None
    """Folder with checkpoints of all stages."""
    round: int | None = None
    """Round to export; left out, the newest that is whole."""
    model: Path | None = None
    """Run folder, instead of checkpoints: the model as it was imported."""
    base: Path | None = None
    """Run folder with the weights that a run's adapters (LoRA) belong to, to merge them."""
    adapter: bool = False
    """Of a run that trains adapters, write these alone, as peft loads them."""
    merged: bool = False
    """Of a run that trains adapters, write the whole model with what they add: the same as without --adapter."""
    dtype: Literal["keep", "fp32", "bf16", "fp16"] = "keep"
    """Type of the weights; keep leaves them as they are: fp32 in a checkpoint, and where adapters are merged."""
    tokenizer: Path | None = None
    """Folder with the tokenizer's files, if it is not where the run's configuration says."""

    def __post_init__(self) -> None:
        if (self.checkpoint is None) == (self.model is None):
            raise ValueError("give either --checkpoint DIR or --model DIR")
        if self.round is not None and self.checkpoint is None:
            raise ValueError("--round needs --checkpoint DIR: a run folder has no rounds")
        if self.checkpoint is None and (self.base or self.adapter or self.merged):
            raise ValueError("--base, --adapter and --merged need --checkpoint DIR: a run folder has no adapters yet")
        if self.adapter and (self.merged or self.base):
            raise ValueError("--adapter excludes --merged and --base: it writes adapters without the model")
        cli.require_at_least(self, {"round": 0})


@dataclass(frozen=True, kw_only=True)
class ShowModelOptions:
    """Say what a model's folder, a run folder, or a folder of checkpoints has."""

    folder: tyro.conf.Positional[Path]
    """The folder."""


@dataclass(frozen=True, kw_only=True)
class PushModelOptions:
    """Upload an exported folder to the hub; needs a token of its (HF_TOKEN, or `hf auth login`)."""

    folder: tyro.conf.Positional[Path]
    """What export has made."""
    repository: tyro.conf.Positional[str]
    """NAME/REPOSITORY; made if it is not there."""
    private: bool = False
    """Whether a repository that is made can be seen by you alone."""
    dry_run: bool = False
    """Say what would be uploaded, and upload nothing."""


def main(argv: Sequence[str]) -> int:
    """Run the program; gives its exit code."""
    name, *arguments = argv or [""]
    if name in ("-h", "--help"):
        print(f"{__doc__}\n{PROG} {'|'.join(_COMMANDS)} --help explains the options.")
        return 0
    if name not in _COMMANDS:
        known = ", ".join(_COMMANDS)
        print(f"{PROG}: error: say one of {known}, not {name!r} (see {PROG} --help)", file=sys.stderr)
        return process.EXIT_USAGE
    options, command = _COMMANDS[name]
    with process.interruptible():
        command(cli.parse(options, prog=f"{PROG} {name}", argv=arguments))
    return 0


def import_(options: ImportModelOptions) -> None:
    """Make a run folder. Raises ValueError, IntegrityError, PeerUnavailable, OSError."""
    source = Source(_folder_of(options.source))
    _say(f"{source.family.architecture}, {_count(source.shapes)} parameters, {_name_of(source.dtype)}")
    wanted = ImportOptions(
        num_stages=options.stages,
        dataset=options.dataset,
        format=options.format,
        run=options.run or ("" if Path(options.source).is_dir() else options.source.replace("/", "-")[:64]),
    )
    config = import_model(source, options.output, wanted)
    print(f"{options.output}: the run {config.run} in {config.stages.num_stages} stages, {config.model.weights}")
    print(f"  begin:  swarm-peer --model {options.output}")


def export(options: ExportModelOptions) -> None:
    """Make a folder for transformers. Raises ValueError, IntegrityError, OSError."""
    found = _origin(options)
    if options.merged and found.adapters is None:
        raise ValueError("this run trains the model's own weights, and has no adapters to merge: leave --merged out")
    if options.adapter:
        files = export_adapter(found, options.output, _DTYPES.get(options.dtype))
        _say_exported(options.output, found, files, "peft.PeftModel.from_pretrained(model, {})")
        return
    tokenizer = options.tokenizer or Path(os.path.expanduser(found.config.data.tokenizer)).parent
    target = Target(dtype=_DTYPES.get(options.dtype), tokenizer_folder=tokenizer)
    files = export_model(found, options.output, target)
    _say_exported(options.output, found, files, "transformers.AutoModelForCausalLM.from_pretrained({})")


def _say_exported(folder: Path, found: Origin, files: Sequence[Path], load: str) -> None:
    num_bytes = sum(path.stat().st_size for path in files)
    print(f"{folder}: round {found.card.round} of the run {found.config.run}, {num_bytes / 1e6:,.1f} MB")
    print(f"  load:   {load.format(repr(str(folder)))}")


def show(options: ShowModelOptions) -> None:
    """Say what a folder has. Raises ValueError, IntegrityError."""
    if (options.folder / run_folder.CONFIG).is_file():
        found, kind = origin.from_run_folder(options.folder), "run folder"
    elif file.names(options.folder):
        found, kind = origin.from_checkpoints(options.folder, None), "checkpoints"
    else:
        source = Source(options.folder)
        _rows({
            "kind": "model of Hugging Face",
            "family": source.family.architecture,
            "parameters": _count(source.shapes),
            "type": _name_of(source.dtype),
            "layers": source.model.num_layers,
        })  # fmt: skip
        return
    config = found.config
    try:
        family = family_of(config.model).architecture
    except ValueError as error:
        family = f"none of transformers' ({error})"
    _rows({
        "kind": kind,
        "run": config.run_id,
        "family": family,
        "parameters": _count(parameter_shapes(config.model)) if not config.model.custom_class else "not known",
        **_lora_rows(config),
        "stages": config.stages.num_stages,
        "round": found.card.round,
        "tokens": f"{found.card.num_samples * config.data.sequence_length:,}",
        "weights at the beginning": config.model.weights or "random",
        "text": config.data.dataset,
        "tokenizer": config.data.tokenizer,
    })  # fmt: skip


def _lora_rows(config: RunConfig) -> dict[str, object]:
    lora = config.lora
    if not lora.is_on:
        return {}
    whole = dataclasses.replace(config, stages=StagesConfig(num_stages=1))
    return {
        "LoRA": f"rank {lora.rank}, alpha {lora.alpha:g}, dropout {lora.dropout:g}, {', '.join(lora.targets)}",
        "trained": f"{_count(trained_shapes(whole, 0))} parameters, of adapters",
        "frozen": f"{_count(parameter_shapes(config.model))} parameters",
    }


def push(options: PushModelOptions) -> None:
    """Upload a folder. Raises ValueError for one that is no export, PeerUnavailable if the hub does not take it."""
    is_model = any((options.folder / name).is_file() for name in ("config.json", adapter.CONFIG))
    if not is_model or not any(options.folder.glob("*.safetensors")):
        raise ValueError(f"{options.folder} is no exported model: make one with {PROG} export")
    files = sorted(path for path in options.folder.iterdir() if path.is_file())
    for path in files:
        print(f"  {path.name}  {path.stat().st_size:,} bytes")
    total = sum(path.stat().st_size for path in files)
    if options.dry_run:
        print(f"{len(files)} files, {total:,} bytes, would go to https://huggingface.co/{options.repository}")
        return
    # Only now: it takes a while to import, and nothing else needs it.
    import huggingface_hub

    if huggingface_hub.get_token() is None:
        raise ValueError("there is no token for the hub: set HF_TOKEN, or run `hf auth login`")
    _say(f"uploading {total:,} bytes to {options.repository}")
    try:
        hub = huggingface_hub.HfApi()
        hub.create_repo(options.repository, private=options.private, exist_ok=True)
        hub.upload_folder(repo_id=options.repository, folder_path=options.folder)
    except Exception as error:  # noqa: BLE001 - the library raises its own and those of its HTTP client
        raise PeerUnavailable(f"the hub did not take it: {_one_line(error)}") from None
    print(f"https://huggingface.co/{options.repository}")


def _origin(options: ExportModelOptions) -> Origin:
    if options.model is not None:
        return origin.from_run_folder(options.model)
    assert options.checkpoint is not None
    return origin.from_checkpoints(options.checkpoint, options.round, options.base)


def _folder_of(source: str) -> Path:
    """The folder of a model, downloaded if it is no folder here. Raises ValueError, PeerUnavailable."""
    if Path(source).is_dir():
        return Path(source)
    if source.count("/") > 1 or source.startswith((".", "/", "~")):
        raise ValueError(f"{source}: there is no such folder")
    # As above.
    import huggingface_hub

    _say(f"{source} is no folder here: downloading it from the hub")
    try:
        return Path(huggingface_hub.snapshot_download(source, allow_patterns=list(HUB_FILES)))
    except Exception as error:  # noqa: BLE001 - the library raises its own and those of its HTTP client
        raise PeerUnavailable(f"{source} cannot be downloaded from the hub: {_one_line(error)}") from None


def _one_line(error: Exception) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:300]


def _count(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return f"{sum(map(math.prod, shapes.values())):,}"


def _name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _rows(values: dict[str, object]) -> None:
    width = max(map(len, values))
    for name, value in values.items():
        print(f"{name:{width}}  {value}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


_COMMANDS: dict[str, tuple[type[Any], Callable[[Any], None]]] = {
    "import": (ImportModelOptions, import_),
    "export": (ExportModelOptions, export),
    "show": (ShowModelOptions, show),
    "push": (PushModelOptions, push),
}
