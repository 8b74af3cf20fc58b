"""What the commands of swarm-model do: it takes models in and gives them out. See ABOUT in options.py."""

import dataclasses
import glob
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from peers.model.live import fetch_model
from peers.model.options import (
    ABOUT,
    COMMANDS,
    PROG,
    ExportModelOptions,
    ImportModelOptions,
    PushModelOptions,
    ShowModelOptions,
)
from peers.model.route import route
from peers.shared import cli, logs
from peers.shared.named_model import open_model
from peers.shared.process import cache_folder
from peers.shared.run_options import naming_options
from swarm.checkpoint import file
from swarm.config import RunConfig
from swarm.config.data import CLASS
from swarm.data import hub, path_router
from swarm.data.path_router import path_names
from swarm.errors import IntegrityError, PeerUnavailable
from swarm.interchange import adapter, origin, run_folder
from swarm.interchange.adapter import export_adapter
from swarm.interchange.export import Origin, export_model
from swarm.interchange.families.known import family_of
from swarm.interchange.run_folder import ImportOptions, import_model
from swarm.interchange.source import DTYPES, Source, located, parameter_shapes
from swarm.interchange.weights import Weights
from swarm.machine import json_file
from swarm.machine.disk import require_new, whole_folder
from swarm.machine.words import counted
from swarm.metrics import OF_SOURCE
from swarm.model.stages import trained_shapes

_DTYPES = {"fp32": DTYPES["F32"], "fp16": DTYPES["F16"], "bf16": DTYPES["BF16"]}
METRICS = "metrics.jsonl"
_LOSSES = {"train/loss": "training", "val/loss": "held-out"}
"""The figures of metrics.jsonl that are read, and their names in a model's card. Those of single datasets are read as
well."""


@dataclass(frozen=True, kw_only=True)
class MeasuredLoss:
    """A loss that a trainer has measured, for the model's card.

    Attributes:
        name: the text on which it was measured: training, held-out, or one dataset's held-out text.
        round: the trainer's step, which is a round of the whole swarm.
        loss: nats per token.
    """

    name: str
    round: int
    loss: float


def main(argv: Sequence[str]) -> int:
    return cli.run(PROG, ABOUT, {name: (COMMANDS[name], run) for name, run in _RUN.items()}, argv)


def import_(options: ImportModelOptions) -> None:
    """Make a run folder. Raises ValueError, IntegrityError, PeerUnavailable, OSError."""
    folder, name = located(options.source, _say)
    _require_apart(options.output, folder)
    source = Source(folder)
    _say(f"{source.family.architecture}, {_count(source.shapes)} parameters, {_name_of(source.dtype)}")
    wanted = ImportOptions(
        num_stages=options.stages, dataset=options.dataset, format=options.format, run=options.run or name,
        settings=options.set,
    )  # fmt: skip
    with naming_options(options):
        config = import_model(source, options.output, wanted)
    print(f"{options.output}: the run {config.run} in {config.stages.num_stages} stages, {config.model.weights}")
    print(f"  begin:  swarm-peer --model {options.output}")


def export(options: ExportModelOptions) -> None:
    """Make a folder for transformers, or for peft. Raises ValueError, IntegrityError, OSError, PeerUnavailable."""
    logs.setup_logging(PROG, "info")
    # These checks come before any peer is asked, and before anything large is read.
    require_new(options.output)
    for source in (options.checkpoint, options.model, options.base):
        if source is not None:
            _require_apart(options.output, Path(source).expanduser())
    losses = read_losses(options.metrics) if options.metrics is not None else []
    base = open_model(options.base, _say).all_weights(cache_folder()) if options.base is not None else None
    if options.model is not None:
        _export(origin.from_run_folder(options.model), options, losses)
    elif options.checkpoint is not None:
        _export_paths(options.checkpoint, options.round, base, options, losses)
    else:
        # The temporary folder is beside the output, because there has to be room for a model there anyway.
        with TemporaryDirectory(dir=_existing(options.output.absolute().parent), prefix=".swarm-export-") as folder:
            tokenizer, live_base = fetch_model(options, Path(folder))
            options = dataclasses.replace(options, tokenizer=tokenizer)
            _export_paths(Path(folder), None, base or live_base, options, losses)


def _export_paths(
    checkpoints: Path, round_number: int | None, base: Weights | None, options: ExportModelOptions,
    losses: Sequence[MeasuredLoss],
) -> None:  # fmt: skip
    """Export the one path, or that of --path, or else all, each into a folder of its own. Raises what `export` does."""
    config = origin.config_of_checkpoints(checkpoints)
    num_paths = len(config.paths)
    router = None if options.router is None else path_router.read(options.router)
    if router is not None:
        router.require(num_paths, config.data.tokenizer_identity or router.tokenizer)
    if num_paths == 1 or options.path is not None:
        _export(origin.from_checkpoints(checkpoints, round_number, base, path=options.path or 0), options, losses)
        return
    with whole_folder(options.output) as folder:
        for path, name in enumerate(path_names(num_paths)):
            found = origin.from_checkpoints(checkpoints, round_number, base, path=path)
            _export(found, dataclasses.replace(options, output=folder / name), losses, shown=options.output / name)
        if router is not None:
            router.write(folder)


def _export(
    found: Origin, options: ExportModelOptions, losses: Sequence[MeasuredLoss], *, shown: Path | None = None
) -> None:  # fmt: skip
    """Write one model; `shown` is the folder that is named, if it is not there yet."""
    shown = shown or options.output
    if options.merged and found.adapters is None:
        raise ValueError("this run trains the model's own weights, and has no adapters to merge: leave --merged out")
    card = dataclasses.replace(found.card, losses=losses_until(losses, found.card.round))
    found = dataclasses.replace(found, card=card)
    dtype = _DTYPES.get(options.dtype)
    if options.adapter:
        base = _loadable(options.base)
        files = export_adapter(found, options.output, dtype, base=base)
        if base is None:
            _say(f"{adapter.CONFIG} does not name the model: --base would, with its folder or its name on the hub")
        _say_exported(shown, found, files, "peft.PeftModel.from_pretrained(model, {})")
        return
    with naming_options(options):
        files = export_model(found, options.output, dtype=dtype, tokenizer=options.tokenizer)
    _say_exported(shown, found, files, "transformers.AutoModelForCausalLM.from_pretrained({})")
    if (tokenizer := options.tokenizer or "").startswith(CLASS):
        print(f"  tokenizer: {tokenizer} is code, and is not in this folder: name it with --tokenizer, or import it")


def _loadable(base: str | None) -> str | None:
    """The name by which transformers finds the model that `--base` names; None if that is a run folder, or nothing."""
    folder = Path(base or "").expanduser()
    if base is None or not folder.is_dir():
        return base
    return str(folder.resolve()) if (folder / "config.json").is_file() else None


def _say_exported(folder: Path, found: Origin, files: Sequence[Path], load: str) -> None:
    num_bytes = sum(path.stat().st_size for path in files)
    print(f"{folder}: round {found.card.round} of the run {found.config.run}, {num_bytes / 1e6:,.1f} MB")
    print(f"  load:   {load.format(repr(str(folder)))}")


def _require_apart(output: Path, source: Path) -> None:
    """Raise ValueError if the output would lie in a folder that it is made from."""
    if source.is_dir() and output.resolve().is_relative_to(source.resolve()):
        raise ValueError(f"--output {output} lies in {source}, which it is made from: name a folder elsewhere")


def _existing(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def show(options: ShowModelOptions) -> None:
    """Say what a folder has. Raises ValueError, IntegrityError."""
    if not options.folder.is_dir():
        raise ValueError(f"{options.folder}: there is no such folder")
    if (options.folder / run_folder.CONFIG).is_file():
        found, kind = origin.from_run_folder(options.folder), "run folder"
    elif file.names(options.folder):
        found, kind = origin.from_checkpoints(options.folder, None), "checkpoints"
    elif not (options.folder / "config.json").is_file():
        raise IntegrityError(
            f"{options.folder} has no run.toml, no config.json, and no checkpoint yet: {origin.WHEN_WRITTEN}"
        )
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
        **({"paths": f"{len(config.paths)}, of {len(config.blocks)} blocks"} if len(config.paths) > 1 else {}),
        "round": found.card.round,
        "digest": found.card.digest,
        "tokens": f"{found.card.num_samples * config.data.sequence_length:,}",
        "weights at the beginning": config.model.weights or "random",
        "text": ", ".join(config.data.datasets),
        "tokenizer": config.data.tokenizer,
    })  # fmt: skip


def _lora_rows(config: RunConfig) -> dict[str, object]:
    lora = config.lora
    if not lora.is_on:
        return {}
    return {
        "LoRA": f"rank {lora.rank}, alpha {lora.alpha:g}, dropout {lora.dropout:g}, {', '.join(lora.targets)}",
        "trained": f"{_count(trained_shapes(config.uncut, 0))} parameters, of adapters",
        "frozen": f"{_count(parameter_shapes(config.model))} parameters",
    }


def push(options: PushModelOptions) -> None:
    """Upload a folder. Raises ValueError if it is no export or the name is none, PeerUnavailable if the hub refuses."""
    is_model = any((options.folder / name).is_file() for name in ("config.json", adapter.CONFIG))
    if not is_model or not any(options.folder.glob("*.safetensors")):
        raise ValueError(f"{options.folder} is no exported model: make one with {PROG} export")
    if not hub.is_name(options.repository):
        raise ValueError(f"{options.repository!r} is no name of a repository: give NAME/REPOSITORY")
    files = sorted(path for path in options.folder.iterdir() if path.is_file())
    for path in files:
        print(f"  {path.name}  {path.stat().st_size:,} bytes")
    total = sum(path.stat().st_size for path in files)
    if options.dry_run:
        # The hub takes a bare name as one of the token's account, which only the hub knows.
        place = options.repository if "/" in options.repository else f"YOUR-ACCOUNT/{options.repository}"
        print(f"{counted(len(files), 'file')}, {total:,} bytes, would go to https://huggingface.co/{place}")
        return
    # The hub's library is imported only here, because importing it takes a while and no other command needs it.
    import huggingface_hub

    if huggingface_hub.get_token() is None:
        raise ValueError("there is no token for the hub: set HF_TOKEN, or run `hf auth login`")
    _say(f"uploading {total:,} bytes to {options.repository}")
    try:
        api = huggingface_hub.HfApi()
        repository = api.create_repo(options.repository, private=options.private, exist_ok=True).repo_id
        # Without the names the library would upload folders within this one as well.
        names = [glob.escape(path.name) for path in files]
        api.upload_folder(repo_id=repository, folder_path=options.folder, allow_patterns=names)
    except Exception as error:  # noqa: BLE001 - the library raises its own and those of its HTTP client
        raise PeerUnavailable(f"the hub did not take it: {hub.reason(error, options.repository)}") from None
    print(f"https://huggingface.co/{repository}")


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


def read_losses(path: Path) -> list[MeasuredLoss]:
    """All losses in a trainer's folder, or in its metrics.jsonl. Raises ValueError if there are none."""
    metrics = path / METRICS if path.is_dir() else path
    found = list[MeasuredLoss]()
    try:
        lines = metrics.read_text(encoding="utf-8").splitlines()
        for line in lines:
            row = json_file.parse(line)
            for key, loss in row.items():
                if isinstance(loss, float) and (name := _loss_name(key)):
                    found.append(MeasuredLoss(name=name, round=int(row["step"]), loss=loss))
    except OSError as error:
        raise ValueError(f"--metrics {metrics}: {error.strerror}") from None
    except (ValueError, OverflowError, KeyError, AttributeError, TypeError):
        raise ValueError(f"--metrics {metrics} is no metrics.jsonl of a swarm-trainer") from None
    if not found:
        raise ValueError(f"--metrics {metrics} has no losses")
    return found


def _loss_name(key: str) -> str:
    """The name of a loss, by its key in metrics.jsonl; empty for another figure."""
    if key.startswith(OF_SOURCE):
        return f"held-out, {key.removeprefix(OF_SOURCE)}"
    return _LOSSES.get(key, "")


def losses_until(losses: Sequence[MeasuredLoss], round_number: int) -> Mapping[str, float]:
    """For each figure, the last loss that was measured up to a round. The keys also say at which round it was."""
    last = {loss.name: loss for loss in sorted(losses, key=lambda loss: loss.round) if loss.round <= round_number}
    return {f"Loss, {loss.name}, at round {loss.round}": loss.loss for loss in last.values()}


_RUN: dict[str, Callable[[Any], None]] = {
    "import": import_, "export": export, "route": route, "show": show, "push": push,
}  # fmt: skip
