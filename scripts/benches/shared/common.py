"""What most benches use: their options, progress, configurations, and files for which other processes wait."""

import asyncio
import dataclasses
import json
import math
import sys
import tempfile
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from peers.local.supervisor import Child, Supervisor
from peers.shared import process
from peers.shared.process import cache_folder
from scripts.benches.shared.throttle import Lines, Throttle
from swarm import config as configs
from swarm.config import RunConfig
from swarm.data import corpora
from swarm.data.microbatches import Microbatches
from swarm.errors import DeadlineExceeded, PeerUnavailable
from swarm.interchange.run_folder import to_toml
from swarm.model.stages import build_stage
from swarm.stage.backend import StageBackend
from swarm.stage.graphs import GraphBudget
from swarm.stage.stage import weights_of
from swarm.stage.staging import Staging
from swarm.types import Block

START_SECONDS = 600.0  # Longest wait for a peer to serve; many that start at once share the cores
POLL_SECONDS = 0.05
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # The environment of a process like swarm-peer's


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """The options that every bench has."""

    json: bool = False
    """Print one JSON object as the last line of stdout, instead of a table."""

    def __post_init__(self) -> None:
        """Refuse empty lists, and numbers below 1, or below 0 if that is the default; of seconds and shares those that
        are not positive."""
        for field in dataclasses.fields(self):
            value, option = getattr(self, field.name), f"--{field.name.replace('_', '-')}"
            if value == () and field.default:
                raise ValueError(f"{option} needs at least one entry")
            least = 0 if field.default in (0, (0,)) else 1
            for number in value if isinstance(value, tuple) else (value,):
                if type(number) is int and number < least:
                    raise ValueError(f"{option} must be at least {least}, not {number}")
                if type(number) is float and not 0 < number < math.inf and number != field.default:
                    raise ValueError(f"{option} must be positive, not {number}")


@dataclass(frozen=True, kw_only=True)
class BenchOptions(OutputOptions):
    """The options of a bench that trains on a text."""

    dataset: str = "stdlib"
    """Text to train on: stdlib, a file, a folder or a glob."""


def require_multiple(option: str, value: int, of: int) -> None:
    """Raise ValueError for an option's value that is no multiple of a number."""
    if value < of or value % of:
        raise ValueError(f"--{option} must be a multiple of {of}, not {value}")


def require_at_least(options: object, least: Mapping[str, int]) -> None:
    """Raise ValueError, which names the option, for a number below its bound."""
    for name, bound in least.items():
        if (value := getattr(options, name)) < bound:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {bound}, not {value}")


def require_known(options: object, name: str, known: Collection[str]) -> None:
    """Raise ValueError for an option that lists a name that is none of the known ones."""
    if unknown := [value for value in getattr(options, name) if value not in known]:
        raise ValueError(f"--{name.replace('_', '-')}: {unknown[0]!r} is none of {', '.join(known)}")


def require_distinct(options: object, names: Iterable[str]) -> None:
    """Raise ValueError for an option that lists something twice."""
    for name in names:
        values = getattr(options, name)
        if len(set(values)) < len(values):
            raise ValueError(f"--{name.replace('_', '-')} must name none twice")


def largest_of(errors: Iterable[float]) -> float:
    """The largest value, or infinity if any value is not finite. max() alone would ignore a NaN that is not the first
    value."""
    return max(error if math.isfinite(error) else math.inf for error in errors)


def compute_like_peers(num_threads: int = 1) -> None:
    """Make this process compute as swarm's programs do: with this many threads, and keeping freed memory."""
    process.keep_freed_memory()
    torch.set_num_threads(num_threads)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def workplace(name: str, *, line_seconds: float | None = None) -> Iterator[tuple[Path, Supervisor]]:
    """A temporary folder, and a supervisor whose children log there and are killed with the block. With `line_seconds`
    each child is behind a line of its own, whose length adds this time to a call and its answer."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"bench-{name}-")))
        logs = folder / "logs"
        lines = None if line_seconds is None else Lines(logs, stack.enter_context(Throttle(line_seconds)))
        children = stack.enter_context(lines or Supervisor(logs))
        try:
            yield folder, children
        finally:
            # A process that is stopped between its turns would not end by SIGTERM.
            for child in children.running:
                children.kill9(child)


def run_of(
    name: str, *, width: int, layers: int, length: int, microbatch: int, round_samples: int = 0, stages: int = 1,
    variants: Sequence[int] = (), setting: str = "synchronous", head_width: int = 64, dataset: str = "stdlib",
    **more: Mapping[str, Any],
) -> RunConfig:  # fmt: skip
    """The run of a bench: a model of bytes, with its width, layers and stages, or how many variants each stage has;
    samples of a microbatch and their length; samples of a round; and, by section, what else is not left to its default.
    Raises ValueError."""
    sections: dict[str, dict[str, Any]] = {
        "model": {"num_layers": layers, "d_model": width, "num_heads": width // head_width},
        "stages": {"num_stages": len(variants) or stages, "variants": variants},
        "data": {"dataset": dataset, "sequence_length": length, "microbatch_size": microbatch},
        "rounds": {"setting": setting} | ({"round_samples": round_samples} if round_samples else {}),
    }
    for section, values in more.items():
        sections[section] = {**sections.get(section, {}), **values}
    return configs.from_dict({"run": f"bench-{name}", **sections}, source=f"the bench {name}")


def side(module: str, *arguments: object) -> list[str]:
    """The command line of one of the programs in sides/."""
    return [sys.executable, "-m", "scripts.benches.sides", module, *map(str, arguments)]


def with_corpus(config: RunConfig, cache: Path | None = None) -> tuple[RunConfig, Microbatches]:
    """The configuration as the swarm publishes it, with the digests of its text and all that it leaves out, and the
    run's microbatches. Texts that nobody reads again have a `cache` of their own."""
    config = config.begun()
    corpus = corpora.prepare(config.data, cache_dir=cache or cache_folder() / "corpora")
    data = corpora.published(config.data, corpus, None)
    return dataclasses.replace(config, data=data), Microbatches(corpus, data)


def write_config(config: RunConfig, path: Path) -> None:
    path.write_text(to_toml(config), encoding="utf-8")


def wait_for_json(path: Path, children: Supervisor, *, timeout_seconds: float = START_SECONDS) -> dict[str, Any]:
    """Wait until a child has written a JSON file, for example with `write_json`, and return its object. Raises
    PeerUnavailable and DeadlineExceeded."""
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


def run_members(
    name: str, config: RunConfig, module: str, members: Mapping[int, Iterable[object]], *,
    environment: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Run a program of sides/ for each member at once, with the run's folder, its number and these arguments. Returns
    what each has written to NUMBER.json. Raises as `wait_for_json` does."""
    with workplace(name) as (folder, children):
        write_config(config, folder / "run.toml")
        for number, arguments in members.items():
            command = side(module, folder, number, *arguments)
            children.start(f"member-{number}", command, environment={**ONE_THREAD, **(environment or {})})
        return [wait_for_json(folder / f"{number}.json", children) for number in members]


def ended(children: Supervisor, commands: Mapping[str, Sequence[str]], jobs: int) -> Iterator[Child]:
    """Run so many of the commands at a time, and yield each child as it ends. Raises PeerUnavailable if one fails."""
    waiting, running = deque(commands.items()), dict[str, Child]()
    while waiting or running:
        while waiting and len(running) < jobs:
            name, command = waiting.popleft()
            running[name] = children.start(name, command)
        for end in children.exits():
            child = running.pop(end.name)
            if end.returncode:
                raise PeerUnavailable(f"{end.name} failed: {end.reason}")
            yield child
        time.sleep(POLL_SECONDS)


def fail_on_exit(children: Supervisor) -> None:
    """Raise PeerUnavailable if a child has ended by itself."""
    for end in children.exits():
        raise PeerUnavailable(f"{end.name} ended early: {end.reason}")


def put(path: Path, text: str) -> None:
    """Write a file for which other processes wait: it is there at once, with all that is in it."""
    unfinished = path.with_name(f"{path.name}.tmp")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.rename(path)


async def all_there(paths: Iterable[Path]) -> list[str]:
    """Wait for files that other processes `put`; gives what is in them."""
    paths = list(paths)
    while not all(path.exists() for path in paths):  # noqa: ASYNC110 - what other processes do
        await asyncio.sleep(POLL_SECONDS)
    return [path.read_text(encoding="utf-8") for path in paths]


def write_json(path: Path, values: dict[str, Any]) -> None:
    put(path, json.dumps(values))


def cpu_backend(
    config: RunConfig, stage: int, *, graph_bytes: int, module: nn.Module | None = None, variant: int = 0
) -> StageBackend:
    """The backend of a stage, or of a variant of it, with a new module if none is given, that may keep so many bytes of
    graphs; with 0 every forward is computed again."""
    module = build_stage(config, stage, device="cpu") if module is None else module
    weights = weights_of(config, module, lineage="", share=config.share_of(Block(stage, variant)))
    return StageBackend(
        config=config, stage=stage, module=module, weights=weights, staging=Staging(),
        budget=GraphBudget(limit_bytes=graph_bytes),
    )  # fmt: skip
