"""How fast does a swarm write text, and what does that cost its training?

Three peers and transformers' own `generate` in one process take turns at writing greedily after the same prompt. Then a
small swarm trains once while it writes a text, and once beside a process that is as busy as the text made it.
"""

import asyncio
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from peers.local.supervisor import Supervisor
from peers.shared import option_checks
from scripts.benches.shared import paired, proc
from scripts.benches.shared.common import BenchOptions, compute_like_peers, say, with_corpus
from scripts.benches.shared.swarm import SwarmProcesses
from swarm import config as configs
from swarm.config import DataConfig, ModelConfig, OptimizerConfig, RoundsConfig, RunConfig, StagesConfig
from swarm.credentials.identity import generate
from swarm.generation.engine import collect
from swarm.generation.sampling import Sampling
from swarm.interchange.run_folder import ImportOptions, import_model
from swarm.interchange.source import Source
from swarm.pipeline.swarm_engine import SwarmEngine

GREEDY = Sampling(temperature=0.0)
NUM_STAGES = 3
PROMPT_TOKENS = 32
EARLY, LATE, AROUND = 100, 900, 64
"""Two positions that are compared, and the number of tokens after each that is measured."""


@dataclass(frozen=True, kw_only=True)
class Options(BenchOptions):
    """Compare a swarm's text with that of transformers in one process."""

    d_model: int = 768
    """Width of the model; a multiple of 64."""
    num_layers: int = 12
    """Layers of the model, at least three."""
    vocabulary: int = 8192
    """Size of its vocabulary."""
    tokens: int = 128
    """Tokens that each turn writes."""
    repetitions: int = 3
    """How many turns each side has."""
    steps: int = 4
    """Rounds that are trained in each turn."""

    def __post_init__(self) -> None:
        least = {"d_model": 64, "num_layers": NUM_STAGES, "vocabulary": 256, "tokens": 2, "repetitions": 1, "steps": 1}
        option_checks.require_at_least(self, least)
        if self.d_model % 64:
            raise ValueError(f"--d-model must be a multiple of 64, not {self.d_model}")


def run(options: Options) -> dict[str, Any]:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    compute_like_peers(torch.get_num_threads())
    with tempfile.TemporaryDirectory(prefix="bench-generate-") as name:
        figures = _speed(options, Path(name))
        return {**figures, **_training(options, Path(name))}


# -- how fast ----------------------------------------------------------------------------------------------------------


def _speed(options: Options, folder: Path) -> dict[str, Any]:
    model = _model(options)
    model.save_pretrained(folder / "model")
    import_model(
        Source(folder / "model"), folder / "run", ImportOptions(num_stages=NUM_STAGES, dataset=(options.dataset,))
    )
    config, _ = with_corpus(configs.load(folder / "run" / "run.toml"))
    prompt = torch.randint(options.vocabulary, (1, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))
    with Supervisor(folder / "logs") as children:
        swarm = SwarmProcesses(
            config, children, folder / "swarm", model=folder / "run", threads=torch.get_num_threads()
        )
        say("three peers start")
        swarm.start_peers(range(NUM_STAGES))
        ours, theirs = _ours(swarm, prompt, options.tokens), _theirs(model, prompt, options.tokens)
        sides: dict[str, Callable[[int], float]] = {
            "swarm": lambda _: _rate(ours, options.tokens),
            "transformers": lambda _: _rate(theirs, options.tokens),
        }
        is_same = ours() == theirs()
        rates = paired.in_turns(sides, options.repetitions, what="text", unit="tokens/s")
        say("a long text")
        early, late = asyncio.run(_early_and_late(swarm, prompt[0].tolist()))
    ratio = paired.ratio(rates["swarm"], rates["transformers"])
    return {
        **paired.figures({"ratio_to_transformers": ratio}), "tokens_per_second": paired.medians(rates),
        "same_tokens": is_same, "late_over_early": late / early,
        "milliseconds_a_token": {str(EARLY): 1e3 * early, str(LATE): 1e3 * late}, "repetitions": rates,
    }  # fmt: skip


def _model(options: Options) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=options.vocabulary, hidden_size=options.d_model, intermediate_size=4 * options.d_model,
        num_hidden_layers=options.num_layers, num_attention_heads=options.d_model // 64,
        max_position_embeddings=LATE + 2 * AROUND,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def _rate(write: Callable[[], list[int]], count: int) -> float:
    began_at = time.perf_counter()
    write()
    return count / (time.perf_counter() - began_at)


def _theirs(model: Any, prompt: torch.Tensor, count: int) -> Callable[[], list[int]]:
    def write() -> list[int]:
        written = model.generate(prompt, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
        tokens: list[int] = written[0, prompt.shape[1] :].tolist()
        return tokens

    return write


def _ours(swarm: SwarmProcesses, prompt: torch.Tensor, count: int) -> Callable[[], list[int]]:
    async def write() -> list[int]:
        async with _engine(swarm) as engine:
            return await collect(engine, prompt[0].tolist(), GREEDY, count)

    return lambda: asyncio.run(write())


@asynccontextmanager
async def _engine(swarm: SwarmProcesses) -> AsyncIterator[SwarmEngine]:
    """An engine that asks the first stage directly, without the DHT."""
    hop, channels = swarm.hop(0, generate(), trains=False)
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


def _training(options: Options, folder: Path) -> dict[str, Any]:
    config, _ = with_corpus(
        RunConfig(
            run="bench-generate", model=ModelConfig(num_layers=6, d_model=384, num_heads=6, vocab_size=256),
            stages=StagesConfig(num_stages=NUM_STAGES),
            data=DataConfig(dataset=options.dataset, sequence_length=256, microbatch_size=4, max_tokens=4_000_000),
            rounds=RoundsConfig(setting="synchronous", round_samples=48), optimizer=OptimizerConfig(learning_rate=3e-5),
        )
    )  # fmt: skip
    with Supervisor(folder / "training-logs") as children:
        swarm = SwarmProcesses(config, children, folder / "training")
        say("a swarm that trains starts")
        swarm.start_peers(range(NUM_STAGES))
        swarm.train("warm-up", 2)
        share: list[float] = []

        def beside_text(number: int) -> float:
            rate, tokens_per_second = asyncio.run(_train_and_write(swarm, f"text-{number}", options.steps))
            share.append(tokens_per_second * cost)
            return rate

        def beside_process(number: int) -> float:
            busy = statistics.median(share) if share else 0.1
            children.start(f"busy-{number}", [sys.executable, "-c", _BUSY, str(min(1.0, busy))])
            try:
                return swarm.tokens_per_second(f"process-{number}", options.steps)
            finally:
                for child in children.running:
                    if child.name.startswith("busy"):
                        children.kill9(child)

        cost = _cpu_seconds_a_token(swarm)
        beside_text(-1)
        sides = {"text": beside_text, "process": beside_process}
        rates = paired.in_turns(sides, options.repetitions, what="training", unit="tokens/s")
    return {
        **paired.figures({"training_beside_text": paired.ratio(rates["text"], rates["process"])}),
        "training_tokens_per_second": paired.medians(rates),
        "cpu_seconds_a_token": cost,
        "cores_for_text": statistics.median(share),
    }


_BUSY = """
import sys, time
share = float(sys.argv[1])
while True:
    until = time.perf_counter() + 0.02 * share
    while time.perf_counter() < until:
        pass
    time.sleep(0.02 * (1 - share))
"""


def _cpu_seconds_a_token(swarm: SwarmProcesses, count: int = 200) -> float:
    """The CPU seconds that all peers together need for a token while nothing is trained."""
    ours = _ours(swarm, torch.zeros((1, 8), dtype=torch.long), count)
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
