"""How fast does a swarm write text, and what does that cost its training?

Three peers and transformers' own `generate` in one process take turns at writing greedily after the same prompt. Then a
small swarm trains once while it writes a text, and once beside a process that is as busy as the text made it.
"""

import asyncio
import dataclasses
import itertools
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from peers.local.supervisor import Supervisor
from scripts.benches.shared import paired, proc
from scripts.benches.shared.common import (
    BenchOptions,
    compute_like_peers,
    require_multiple,
    run_of,
    say,
    with_corpus,
    workplace,
    write_config,
)
from scripts.benches.shared.swarm import SwarmProcesses
from scripts.benches.shared.theirs import llama, writer
from swarm import config as configs
from swarm.config import WireConfig
from swarm.credentials.identity import generate
from swarm.generation.engine import collect
from swarm.generation.sampling import Sampling
from swarm.interchange.run_folder import ImportOptions, import_model
from swarm.interchange.source import Source
from swarm.pipeline.swarm_engine import SwarmEngine

GREEDY = Sampling(temperature=0.0)
NUM_STAGES, VOCABULARY = 3, 8192
PROMPT_TOKENS = 32
STEPS = 4  # Rounds that are trained in each turn
EARLY, LATE, AROUND = 100, 900, 64
"""Two positions that are compared, and the number of tokens after each that is measured."""


@dataclass(frozen=True, kw_only=True)
class Options(BenchOptions):
    """Compare a swarm's text with that of transformers in one process."""

    d_model: int = 768
    """Width of the model; a multiple of 64."""
    num_layers: int = 12
    """Layers of the model, at least three."""
    tokens: int = 128
    """Tokens that each turn writes."""
    repetitions: int = 3
    """How many turns each side has."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_multiple("d-model", self.d_model, 64)


def run(options: Options) -> dict[str, Any]:
    compute_like_peers(torch.get_num_threads())
    with workplace("generate") as (folder, children):
        figures = _speed(options, folder, children)
        return {**figures, **_training(options, folder, children)}


# -- how fast ----------------------------------------------------------------------------------------------------------


def _speed(options: Options, folder: Path, children: Supervisor) -> dict[str, Any]:
    model = llama(
        width=options.d_model, layers=options.num_layers, vocabulary=VOCABULARY, longest=LATE + 2 * AROUND
    ).eval()
    model.save_pretrained(folder / "model")
    import_model(
        Source(folder / "model"), folder / "run", ImportOptions(num_stages=NUM_STAGES, dataset=(options.dataset,))
    )
    settings = folder / "run" / "run.toml"
    # The bfloat16 that an imported run sends between stages may lead to another token than transformers writes.
    write_config(dataclasses.replace(configs.load(settings), wire=WireConfig(dtype="fp32")), settings)
    config, _ = with_corpus(configs.load(settings))
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(VOCABULARY, (PROMPT_TOKENS,), generator=generator).tolist()
    swarm = SwarmProcesses(config, children, folder / "swarm", model=folder / "run", threads=torch.get_num_threads())
    say("three peers start")
    swarm.start_peers(range(NUM_STAGES))
    ours, theirs = _ours(swarm, prompt, options.tokens), writer(model, prompt, options.tokens)
    is_same = ours() == theirs()
    sides = {
        name: partial(_rate, text, options.tokens) for name, text in {"swarm": ours, "transformers": theirs}.items()
    }
    rates = paired.in_turns(sides, options.repetitions, what="text", unit="tokens/s")
    say("a long text")
    early, late = asyncio.run(_early_and_late(swarm, prompt))
    swarm.stop()
    ratio = paired.ratio(rates["swarm"], rates["transformers"])
    return {
        **paired.figures({"ratio_to_transformers": ratio}), "tokens_per_second": paired.medians(rates),
        "same_tokens": is_same, "late_over_early": late / early,
        "milliseconds_a_token": {str(EARLY): 1e3 * early, str(LATE): 1e3 * late}, "repetitions": rates,
    }  # fmt: skip


def _rate(write: Callable[[], list[int]], count: int, _: int) -> float:
    began_at = time.perf_counter()
    write()
    return count / (time.perf_counter() - began_at)


def _ours(swarm: SwarmProcesses, prompt: Sequence[int], count: int) -> Callable[[], list[int]]:
    async def write() -> list[int]:
        async with _engine(swarm) as engine:
            return await collect(engine, prompt, GREEDY, count)

    return lambda: asyncio.run(write())


@asynccontextmanager
async def _engine(swarm: SwarmProcesses) -> AsyncIterator[SwarmEngine]:
    """An engine that asks the first stage directly, without the DHT."""
    hop, channels = swarm.hop(0, generate())
    try:
        yield SwarmEngine(hop, swarm.config)
    finally:
        await channels.close()


async def _early_and_late(swarm: SwarmProcesses, prompt: Sequence[int]) -> tuple[float, float]:
    """The median seconds for a token, after each of the two positions."""
    came_at = [time.perf_counter()]
    async with _engine(swarm) as engine, aclosing(engine.generate(prompt, GREEDY, LATE + AROUND)) as stream:
        came_at += [time.perf_counter() async for _ in stream]
    gaps = [later - earlier for earlier, later in itertools.pairwise(came_at)]
    first = [position - len(prompt) for position in (EARLY, LATE)]
    early, late = (statistics.median(gaps[start : start + AROUND]) for start in first)
    return early, late


# -- beside training ---------------------------------------------------------------------------------------------------


def _training(options: Options, folder: Path, children: Supervisor) -> dict[str, Any]:
    config, _ = with_corpus(
        run_of(
            "generate", width=384, layers=6, stages=NUM_STAGES, length=256, microbatch=4, round_samples=48,
            dataset=options.dataset, data={"max_tokens": 4_000_000}, optimizer={"learning_rate": 3e-5},
        )
    )  # fmt: skip
    swarm = SwarmProcesses(config, children, folder / "training")
    say("a swarm that trains starts")
    swarm.start_peers(range(NUM_STAGES))
    swarm.train("warm-up", 2)
    share: list[float] = []

    def beside_text(number: int) -> float:
        rate, tokens_per_second = asyncio.run(_train_and_write(swarm, f"text-{number}", STEPS))
        share.append(tokens_per_second * cost)
        return rate

    def beside_process(number: int) -> float:
        busy = statistics.median(share) if share else 0.1
        child = children.start(f"busy-{number}", proc.busy(min(1.0, busy)))
        try:
            return swarm.tokens_per_second(f"process-{number}", STEPS)
        finally:
            children.kill9(child)

    cost = _cpu_seconds_a_token(swarm)
    beside_text(-1)
    sides = {"text": beside_text, "process": beside_process}
    rates = paired.in_turns(sides, options.repetitions, what="training", unit="tokens/s")
    return {
        **paired.figures({"training_beside_text": paired.ratio(rates["text"], rates["process"])}),
        "training_tokens_per_second": paired.medians(rates), "cpu_seconds_a_token": cost,
        "cores_for_text": statistics.median(share),
    }  # fmt: skip


def _cpu_seconds_a_token(swarm: SwarmProcesses, count: int = 200) -> float:
    """The CPU seconds that all peers together need for a token while nothing is trained."""
    ours = _ours(swarm, [0] * 8, count)
    ours()
    pids = [peer.child.pid for peer in swarm.peers]
    before = sum(map(proc.cpu_seconds, pids))
    ours()
    return (sum(map(proc.cpu_seconds, pids)) - before) / count


async def _train_and_write(swarm: SwarmProcesses, trainer: str, steps: int) -> tuple[float, float]:
    num_written, began_at = 0, time.perf_counter()

    async def write() -> None:
        nonlocal num_written
        async with _engine(swarm) as engine:
            while True:
                async with aclosing(engine.generate([0] * 8, GREEDY, 240)) as stream:
                    async for _ in stream:
                        num_written += 1

    writing = asyncio.create_task(write())
    try:
        rate = await asyncio.to_thread(swarm.tokens_per_second, trainer, steps)
    finally:
        writing.cancel()
        with suppress(asyncio.CancelledError):
            await writing
    return rate, num_written / (time.perf_counter() - began_at)
