"""What does a GPU give, and what does the swarm take of it?

    plain        a plain training loop in torch: a compiled Llama, autocast, fused AdamW
    static       swarm-static with the same model, microbatches and steps
    stage        one stage in the middle as a peer computes it, and its layers as a bare CUDA graph
    generate     a single text from a model in this process, and from transformers
    one_stage    a swarm of one peer that has the whole model, which trains with DiLoCo
    two_stages   a swarm of two peers on this GPU, each with half of the layers

Figures are printed as soon as they are there. Several parts are a process each, and each may take so long and no
longer: what one of them does to the GPU ends with it. A part that fails is named, and the others go on.
"""

import asyncio
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, get_args

import torch

from peers.commands import command_line
from peers.local.supervisor import Exit, Process, Supervisor, spawned
from peers.shared import cli
from peers.shared.devices import computing_in, num_cores
from peers.static.options import StaticOptions
from scripts.benches.shared import paired
from scripts.benches.shared.common import (
    POLL_SECONDS,
    BenchOptions,
    require_multiple,
    run_of,
    say,
    with_corpus,
    workplace,
    write_config,
)
from scripts.benches.shared.proc import gpu_busy_shares
from scripts.benches.shared.swarm import SwarmProcesses
from scripts.benches.sides import gpu_stage
from scripts.benches.sides.gpu_stage import BareSide, StageSide
from swarm.config import RunConfig, Setting
from swarm.errors import DeadlineExceeded, Fatal, PeerUnavailable, in_one_line
from swarm.generation.engine import LocalEngine, Room, collect
from swarm.generation.sampling import Sampling
from swarm.interchange.origin import from_model_folder, transformer
from swarm.machine.recording import recorder_of
from swarm.metrics import read as read_metrics

Part = Literal["plain", "static", "stage", "generate", "one_stage", "two_stages"]
Figures = dict[str, Any]

MOST_TOKENS = 4_000_000  # Of the text, so that preparing it takes seconds
STEP_MICROBATCHES = 4  # Microbatches of an optimizer step, everywhere
ROUND_STEPS = 16  # Inner steps of a round
WARM_UP_STEPS, WARM_UP_MICROBATCHES = 4, 10
SECONDS = 450.0  # How long all parts may take at most, and below, each of them
PART_SECONDS: dict[Part, float] = {
    "plain": 120.0, "static": 110.0, "stage": 90.0, "generate": 80.0, "one_stage": 150.0, "two_stages": 150.0
}  # fmt: skip
LOG_LINES = 12  # Last lines of each log that are shown of a swarm that fails
PROMPT_TOKENS = 32
REPETITIONS = 3  # Turns of each side of the parts stage and generate


@dataclass(frozen=True, kw_only=True)
class Options(BenchOptions):
    """Measure training and text on a GPU, against plain torch and transformers."""

    device: Literal["cuda", "cpu"] = "cuda"
    """What to compute on; cpu is for trying the bench with small sizes."""
    only: tuple[Part, ...] = ()
    """Parts to measure; left out, all. Ratios to plain need that part as well."""
    d_model: int = 768
    """Width of the model that is trained; a multiple of 64."""
    layers: int = 12
    """Its layers, at least two."""
    vocab_size: int = 50_304
    """Its vocabulary, and that of the model that writes text."""
    microbatch_size: int = 8
    """Samples of a microbatch."""
    sequence_length: int = 1024
    """Tokens of a sample."""
    steps: int = 20
    """Steps of plain and static that are measured, of four microbatches each."""
    rounds: int = 3
    """Rounds of the swarms that are measured, of 16 inner steps each."""
    stage_width: int = 1024
    """Width of the stage in the middle, which has four layers and microbatches of 8 x 512 tokens, or shorter ones."""
    microbatches: int = 100
    """Microbatches of each of its turns."""
    tokens: int = 128
    """Tokens of a text."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_multiple("d-model", self.d_model, 64)
        require_multiple("stage-width", self.stage_width, 64)

    @property
    def compiles(self) -> bool:
        """Whether layers and the plain model are compiled, as they are at peers by default."""
        return self.device == "cuda"


def run(options: Options) -> Figures:
    if options.device == "cuda" and not torch.cuda.is_available():
        raise Fatal(
            "this bench needs a GPU, and PyTorch finds none: run it on a machine that has one, or try it with "
            "--device cpu and small sizes"
        )
    found: Figures = {"gpu": torch.cuda.get_device_name() if options.device == "cuda" else "none", "failed": {}}
    parts = [part for part in get_args(Part) if part in (options.only or get_args(Part))]
    is_one, ends_at = len(parts) == 1, time.monotonic() + SECONDS
    device = torch.device("cuda:0" if options.device == "cuda" else "cpu")  # Of several GPUs the first one alone.
    for part in parts:
        began_at = time.monotonic()
        seconds = min(PART_SECONDS[part], ends_at - began_at)
        try:
            new = MEASURES[part](options, device) if is_one else apart(part, options, seconds)
        except Exception as error:  # noqa: BLE001 - a GPU is lent for minutes: the other parts are still of use
            new = {"failed": {part: in_one_line(error)}}
            say(f"{part} failed: {in_one_line(error)}")
        compared = compared_with_plain(part, new, found)
        # A process of its own has said what it found.
        for figure, value in (new if is_one else compared).items():
            say(f"{figure}: {value:.4g}" if isinstance(value, float) else f"{figure}: {value}")
        for figure, value in (new | compared).items():
            found[figure] = {**found.get(figure, {}), **value} if isinstance(value, dict) else value
        say(f"{part} took {time.monotonic() - began_at:.0f} s")
    return found


def exit_code(figures: Figures) -> int:
    return int(bool(figures["failed"]))


def apart(part: Part, options: Options, seconds: float) -> Figures:
    """Measure a part in a process of its own. Raises DeadlineExceeded if that takes longer, and PeerUnavailable if it
    ends without figures."""
    own = dataclasses.replace(options, only=(part,), json=True)
    command = [sys.executable, "-m", "scripts.benches", "gpu", *cli.arguments(own)]

    def heard(command: Sequence[str | Path], environment: Mapping[str, str], output: IO[bytes]) -> Process:
        return spawned(command, environment, output, sys.__stderr__)

    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as name, Supervisor(Path(name), spawn=heard) as children:
        child = children.start(part, command)
        end = _end(children, part, seconds)
        said = child.log.read_text(encoding="utf-8").strip().rpartition("\n")[2]
    try:
        figures: Figures = json.loads(said)
    except ValueError:
        raise PeerUnavailable(f"the process that measures ended early: {end.reason}") from None
    return figures


def _end(children: Supervisor, what: str, seconds: float) -> Exit:
    """Wait until the only child has ended. Raises DeadlineExceeded."""
    deadline = time.monotonic() + seconds
    while not (ended := children.exits()):
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"{what} took more than {max(0.0, seconds):.0f} s")
        time.sleep(POLL_SECONDS)
    return ended[0]


def compared_with_plain(part: Part, figures: Figures, found: Figures) -> Figures:
    """The figures of a part over those of the plain loop, which were found before, if both are there."""
    compared: Figures = {}
    rate, plain = figures.get(f"{part}_tokens_per_second"), found.get("plain_tokens_per_second")
    if rate and plain and part in ("static", "one_stage", "two_stages"):
        compared[f"{part}_ratio_to_plain"] = rate / plain
    if part == "static" and "static_losses" in figures and "plain_losses" in found:
        pairs = zip(figures["static_losses"], found["plain_losses"], strict=True)
        compared["largest_loss_difference"] = max(abs(ours - theirs) for ours, theirs in pairs)
    return compared


# -- training ----------------------------------------------------------------------------------------------------------


def _config(options: Options, num_stages: int, setting: Setting) -> RunConfig:
    step_samples = STEP_MICROBATCHES * options.microbatch_size
    return run_of(
        "gpu", width=options.d_model, layers=options.layers, stages=num_stages, setting=setting,
        length=options.sequence_length, microbatch=options.microbatch_size, dataset=options.dataset,
        round_samples=step_samples if setting == "synchronous" else ROUND_STEPS * step_samples,
        model={"vocab_size": options.vocab_size, "autocast": "bf16"}, data={"max_tokens": MOST_TOKENS},
        rounds={"inner_batch_samples": step_samples}, wire={"dtype": "bf16"},
        optimizer={"name": "adamw", "learning_rate": 4e-4, "warmup_samples": 0, "clip_norm": 1.0},
    )  # fmt: skip


def _plain(options: Options, device: torch.device) -> Figures:
    config, data = with_corpus(_config(options, 1, "synchronous"))
    trained = gpu_stage.train(
        config, data, device, warm_up=WARM_UP_STEPS, steps=options.steps, compiles=options.compiles
    )
    return {
        "plain_tokens_per_second": trained.tokens_per_second, "plain_device_bytes": trained.peak_bytes,
        "plain_losses": trained.losses,
    }  # fmt: skip


def _static(options: Options, device: torch.device) -> Figures:
    config, num_steps = _config(options, 1, "synchronous"), WARM_UP_STEPS + options.steps
    with workplace("gpu") as (folder, children), _said_if_it_fails(folder):
        write_config(config, folder / "run.toml")
        static = StaticOptions(
            config=folder / "run.toml", steps=num_steps, device=options.device, evaluate_every=0, evaluation_samples=1,
            metrics=folder / "metrics.jsonl", compile="on" if options.compiles else "off",
        )  # fmt: skip
        children.start("static", command_line("static", cli.arguments(static)))
        end = _end(children, "swarm-static", PART_SECONDS["static"])
        if end.returncode:
            raise PeerUnavailable(f"swarm-static failed: {end.reason}")
        rows = [row for row in read_metrics(folder / "metrics.jsonl") if "train/loss" in row]
    return {
        "static_tokens_per_second": statistics.median(row["train/tokens_per_sec"] for row in rows[WARM_UP_STEPS:]),
        "static_device_bytes": rows[-1]["device/memory_bytes"],
        "static_losses": [row["train/loss"] for row in rows],
    }


def _swarm(options: Options, device: torch.device, *, num_stages: int) -> Figures:
    part = "one_stage" if num_stages == 1 else "two_stages"
    config, _ = with_corpus(_config(options, num_stages, "diloco"))
    with workplace("gpu") as (folder, children), _said_if_it_fails(folder):
        # Each process has its share of the cores, for the steps at rounds' ends.
        threads = max(1, num_cores() // (num_stages + 1))
        swarm = SwarmProcesses(config, children, folder / part, device=str(device), threads=threads)
        swarm.start_peers(range(num_stages))
        with gpu_busy_shares(device) as busy_shares:
            rate = swarm.tokens_per_second("trainer", options.rounds)
        last = swarm.steps("trainer")[-1]
        _say_logs(folder, lambda lines: [line for line in lines if "graph" in line or "compiled" in line])
    figures: Figures = {
        f"{part}_tokens_per_second": rate, f"{part}_device_bytes": last["device/memory_bytes"],
        f"{part}_loss": last["train/loss"],
    }  # fmt: skip
    if busy_shares:
        figures["gpu_busy_share" if num_stages == 2 else f"{part}_gpu_busy_share"] = statistics.mean(busy_shares)
    return figures


@contextmanager
def _said_if_it_fails(folder: Path) -> Iterator[None]:
    """Says the last lines of each process's log if the block fails: the folder goes with it."""
    try:
        yield
    except BaseException:
        _say_logs(folder, lambda lines: lines[-LOG_LINES:])
        raise


def _say_logs(folder: Path, chosen: Callable[[list[str]], list[str]]) -> None:
    for log in sorted((folder / "logs").glob("*.log")):
        for line in chosen(log.read_text(encoding="utf-8", errors="replace").splitlines()):
            say(f"{log.stem}: {line}")


# -- one stage ---------------------------------------------------------------------------------------------------------


def _stage(options: Options, device: torch.device) -> Figures:
    config = run_of(
        "gpu-stage", width=options.stage_width, layers=12, stages=3, length=min(512, options.sequence_length),
        microbatch=8, model={"autocast": "bf16"}, wire={"dtype": "bf16"},
    )  # fmt: skip
    warm_up, memory = min(WARM_UP_MICROBATCHES, options.microbatches), Figures()
    with gpu_stage.noting_memory("stage", device, memory):
        side = StageSide(config, device, compiles=options.compiles, recorder=recorder_of(device))
        side.tokens_per_second(warm_up)
    with gpu_stage.noting_memory("graph", device, memory):
        bare = BareSide(config, device)
        bare.tokens_per_second(warm_up)
    rate_of = {"swarm": side.tokens_per_second, "graph": bare.tokens_per_second}
    figures = _compared("stage", "graph", rate_of, options.microbatches)
    return {**figures, **memory, "stage_num_recorded": side.backend.function.num_recorded}


# -- text --------------------------------------------------------------------------------------------------------------


def _generate(options: Options, device: torch.device) -> Figures:
    from scripts.benches.shared import theirs  # It takes seconds, and the other parts do without it.

    longest, vocabulary = PROMPT_TOKENS + options.tokens, options.vocab_size
    model = theirs.llama(width=options.d_model, layers=options.layers, vocabulary=vocabulary, longest=longest)
    model = model.eval().to(torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(vocabulary, (PROMPT_TOKENS,), generator=generator).tolist()
    memory, greedy = Figures(), Sampling(temperature=0.0)
    with asyncio.Runner() as runner, tempfile.TemporaryDirectory(prefix="bench-gpu-") as name:
        model.save_pretrained(name)
        origin = from_model_folder(Path(name))
        with gpu_stage.noting_memory("generate", device, memory):
            ours = transformer(origin, computing_in(origin.config, "bf16", device), device)
            # One engine for all turns, as a server has it: its first text makes the recordings.
            engine = LocalEngine(ours, Room(1, longest), longest=longest, recorder=recorder_of(device))
            computing = runner.get_loop().create_task(engine.run())
            texts: dict[str, Callable[[], list[int]]] = {}
            texts["swarm"] = lambda: runner.run(collect(engine, prompt, greedy, options.tokens))
            own_text = texts["swarm"]()
        with gpu_stage.noting_memory("transformers", device, memory):
            texts["transformers"] = theirs.writer(model.to(device), prompt, options.tokens, device)
            is_same = own_text == texts["transformers"]()
        rate_of = {name: partial(_rate, text) for name, text in texts.items()}
        figures = _compared("generate", "transformers", rate_of, options.tokens)
        computing.cancel()
    return {**figures, **memory, "same_tokens": is_same}


# -- in turns ----------------------------------------------------------------------------------------------------------


def _compared(part: str, other: str, rate_of: Mapping[str, Callable[[int], float]], amount: int) -> Figures:
    """The figures of a part whose two sides, the swarm's and the other one, work in turns on this amount each."""

    def turn(rate: Callable[[int], float], number: int) -> float:
        return rate(amount)

    turns = {name: partial(turn, rate) for name, rate in rate_of.items()}
    rates = paired.in_turns(turns, REPETITIONS, what=part, unit="tokens/s")
    medians = paired.medians(rates)
    return {
        **paired.figures({f"{part}_ratio_to_{other}": paired.ratio(rates["swarm"], rates[other])}),
        f"{part}_tokens_per_second": medians["swarm"], f"{other}_tokens_per_second": medians[other],
    }  # fmt: skip


def _rate(text: Callable[[], list[int]], num_tokens: int) -> float:
    began_at = time.perf_counter()
    text()
    return num_tokens / (time.perf_counter() - began_at)


MEASURES: dict[Part, Callable[[Options, torch.device], Figures]] = {
    "plain": _plain, "static": _static, "one_stage": partial(_swarm, num_stages=1),
    "two_stages": partial(_swarm, num_stages=2), "stage": _stage, "generate": _generate,
}  # fmt: skip
