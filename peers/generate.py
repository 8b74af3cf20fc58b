"""swarm-generate: text from what a run has learnt, in this process.

    swarm-generate --checkpoint checkpoints/ --prompt "def "
    swarm-generate --model run/ --prompt "Once upon a time" --temperature 0.8 --max-tokens 200

The whole model is loaded, from checkpoints of all stages, a run folder, or a model's folder of Hugging Face.
"""

import asyncio
import dataclasses
import json
import sys
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import torch

from peers.shared import cli, process
from swarm.data import tokenizers
from swarm.data.tokenizers import Tokenizer
from swarm.generation.engine import LocalEngine
from swarm.generation.sampling import Sampling
from swarm.generation.text import texts
from swarm.interchange import origin, run_folder
from swarm.interchange.export import Origin
from swarm.model.transformer import Transformer

PROG = "swarm-generate"


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Continue a text with a model in this process."""

    prompt: str
    """Text to continue."""
    checkpoint: Path | None = None
    """Folder with checkpoints of all stages."""
    round: int | None = None
    """Round of the checkpoints; left out, the newest that is whole."""
    base: Path | None = None
    """Run folder with the weights that the checkpoints' adapters belong to, of a run that trains adapters (LoRA)."""
    model: Path | None = None
    """Run folder, or a model's folder of Hugging Face, instead of checkpoints."""
    tokenizer: str | None = None
    """bytes, or the path of a tokenizer.json, if it is not where the model's configuration says."""
    max_tokens: int = 200
    """Tokens to write, at most."""
    temperature: float = 0.8
    """Divides the logits; 0 takes the likeliest token each time."""
    top_p: float = 1.0
    """Choose among the likeliest tokens that have this probability together."""
    top_k: int = 0
    """Choose among so many of the likeliest tokens; 0 among all."""
    seed: int = 0
    """The same seed gives the same text."""
    stop: tuple[str, ...] = ()
    """Strings before which the text ends."""
    threads: int = 0
    """CPU threads for computing; 0 leaves the choice to PyTorch."""

    def __post_init__(self) -> None:
        if (self.checkpoint is None) == (self.model is None):
            raise ValueError("give either --checkpoint DIR or --model DIR")
        if self.round is not None and self.checkpoint is None:
            raise ValueError("--round needs --checkpoint DIR: a model's folder has no rounds")
        if self.base is not None and self.checkpoint is None:
            raise ValueError("--base needs --checkpoint DIR")
        if not self.prompt:
            raise ValueError("--prompt must not be empty")
        cli.require_at_least(self, {"max_tokens": 1, "threads": 0, "round": 0})
        if "" in self.stop:
            raise ValueError("--stop must not be empty")
        # Its rules are its own.
        _ = self.sampling

    @property
    def sampling(self) -> Sampling:
        """How tokens are chosen."""
        return Sampling(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, seed=self.seed)


def main(argv: Sequence[str]) -> int:
    """Run the program; gives its exit code."""
    options = cli.parse(GenerateOptions, prog=PROG, argv=argv)
    process.setup_logging(PROG, "warning")
    if options.threads:
        torch.set_num_threads(options.threads)
    with process.interruptible():
        _say("loading the model")
        found = _origin(options)
        config = found.config
        data = dataclasses.replace(config.data, tokenizer=options.tokenizer or config.data.tokenizer)
        tokenizer = tokenizers.load_for_run(data, vocab_size=config.model.vocab_size)
        engine = LocalEngine(load(found), longest=config.model.max_positions or config.data.sequence_length)
        ends = end_tokens(options.model) if options.model is not None else set()
        asyncio.run(write(engine, tokenizer, options, ends))
    return 0


def load(found: Origin) -> Transformer:
    """The whole model with its weights, in float32. Raises IntegrityError."""
    model = Transformer(found.config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(found.load({name})[name])
    return model


def end_tokens(folder: Path) -> set[int]:
    """The tokens with which a text ends, as a model's folder says; none if it does not."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        values = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        ends = values.get("eos_token_id")
        if ends is not None:
            return set(ends if isinstance(ends, list) else [ends])
    return set()


async def write(engine: LocalEngine, tokenizer: Tokenizer, options: GenerateOptions, ends: set[int]) -> None:
    """Print the prompt, and what follows, as it comes. Raises ValueError for a prompt that is too long."""
    prompt = tokenizer.encode(options.prompt).tolist()
    max_tokens = min(options.max_tokens, engine.longest - len(prompt))
    if max_tokens < 1:
        raise ValueError(f"--prompt has {len(prompt)} tokens, and the model takes {engine.longest} with what follows")
    sys.stdout.write(options.prompt)
    sys.stdout.flush()
    async with aclosing(engine.generate(prompt, options.sampling, max_tokens)) as tokens:
        async for piece in texts(tokens, tokenizer, prompt=prompt, end_tokens=ends, stops=options.stop):
            sys.stdout.write(piece)
            sys.stdout.flush()
    sys.stdout.write("\n")


def _origin(options: GenerateOptions) -> Origin:
    if options.checkpoint is not None:
        return origin.from_checkpoints(options.checkpoint, options.round, options.base)
    assert options.model is not None
    if (options.model / run_folder.CONFIG).is_file():
        return origin.from_run_folder(options.model)
    return origin.from_model_folder(options.model)


def _say(text: str) -> None:
    print(f"{PROG}: {text}", file=sys.stderr, flush=True)
