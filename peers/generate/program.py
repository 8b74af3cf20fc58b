"""swarm-generate: text from what a run has learnt.

    swarm-generate INVITE --prompt "It was"
    swarm-generate --checkpoint checkpoints/ --prompt "def "
    swarm-generate --model run/ --prompt "Once upon a time" --temperature 0.8 --max-tokens 200
    swarm-generate --model run/ --chat
    swarm-generate --model run/ --serve 127.0.0.1:8000

With addresses of peers a running swarm writes the text. Else the whole model is loaded into this process, from
checkpoints of all stages, a run folder, or a model of Hugging Face: a folder, or a name on the hub.
"""

import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from peers.generate import conversation, terminal
from peers.generate.local_model import open_local_model
from peers.generate.options import GenerateOptions
from peers.generate.swarm_model import open_swarm
from peers.shared import cli, process
from peers.shared.invite_option import joins
from swarm.interchange.source import located
from swarm.machine.clock import run_loop

if TYPE_CHECKING:
    from peers.generate.server import Server

PROG = "swarm-generate"


def main(argv: Sequence[str]) -> int:
    """Run the program; gives its exit code."""
    options = cli.parse(GenerateOptions, prog=PROG, argv=argv)
    process.setup_logging(PROG, "warning")
    if options.threads:
        torch.set_num_threads(options.threads)
    # What a server lacks is to be told before anything is loaded.
    server = _server(options) if options.serve is not None else None
    with process.interruptible():
        if options.model is not None:
            folder, _ = located(options.model, _say)
            options = dataclasses.replace(options, model=str(folder))
        run_loop(_run(options, server))
    return 0


async def _run(options: GenerateOptions, server: "Server | None") -> None:
    from_swarm = joins(options)
    _say("looking for the swarm" if from_swarm else "loading the model")
    async with (open_swarm if from_swarm else open_local_model)(options) as model:
        if server is not None:
            await server.serve(model)
        elif options.chat:
            await conversation.talk(model, options)
        else:
            await terminal.write(model, options)


def _server(options: GenerateOptions) -> "Server":
    """Raises ValueError if its libraries are not installed, or it cannot have its address."""
    try:
        from peers.generate.server import Server
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn"):
            raise
        raise ValueError(
            "--serve needs starlette and uvicorn: .venv/bin/pip install -c constraints.txt -e '.[serve]'"
        ) from None
    return Server(options, os.environ)


def _say(text: str) -> None:
    print(f"{PROG}: {text}", file=sys.stderr, flush=True)
