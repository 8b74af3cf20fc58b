"""Prints text as the model writes it."""

import asyncio
import sys

from peers.generate.options import PROG, GenerateOptions
from swarm.generation.text_model import TextModel
from swarm.machine.words import counted, printable


async def write(model: TextModel, options: GenerateOptions) -> None:
    """Print the prompt, its continuation as it is written, and then how fast that was and which model wrote it.

    Raises:
        ValueError: the prompt is too long.
    """
    assert options.prompt is not None
    longest, prompt = model.engine.longest, model.encode(options.prompt)
    max_tokens = min(options.most_tokens, longest - len(prompt))
    if max_tokens < 1:
        has = counted(len(prompt), "token")
        raise ValueError(f"--prompt has {has}, and the model takes {longest} with what follows")
    tell_of_cut(options, max_tokens, longest)
    say(options.prompt)
    loop = asyncio.get_running_loop()
    began_at = loop.time()
    try:
        async with model.continued(prompt, options.sampling, max_tokens, options.stop) as text:
            async for piece in text.pieces():
                say(piece)
    finally:
        # The end of the line is also printed if the text breaks off, so that the error begins on a new line.
        say("\n")
    seconds = loop.time() - began_at
    tell(f"{counted(text.num_tokens, 'token')} by {model.name}, {text.num_tokens / seconds:.1f} a second")


def tell_of_cut(options: GenerateOptions, max_tokens: int, longest: int) -> None:
    """Say so if fewer tokens will be written than --max-tokens asks for, since the model takes `longest` in all."""
    if (options.max_tokens or 0) > max_tokens:
        tell(
            f"--max-tokens {options.max_tokens} is more than fits: at most {counted(max_tokens, 'token')} will be "
            f"written, since the model takes {longest} with the prompt"
        )


def say(text: str) -> None:
    """Print at once. On a terminal, leave out control characters, because a terminal takes them for commands."""
    sys.stdout.write(printable(text, keep="\n\t") if sys.stdout.isatty() else text)
    sys.stdout.flush()


def tell(text: str) -> None:
    """Say on stderr what the program is doing."""
    print(f"{PROG}: {text}", file=sys.stderr, flush=True)
