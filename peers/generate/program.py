"""swarm-generate: text from what a run has learnt.

    swarm-generate INVITE --prompt "It was"                     --lan in its place finds the run of this network
    swarm-generate --checkpoint checkpoints/ --prompt "def "
    swarm-generate --model run/ --prompt "Once upon a time" --temperature 0.8 --max-tokens 200
    swarm-generate --model run/ --chat
    swarm-generate --model run/ --serve 127.0.0.1:8000

With an INVITE or addresses of peers, a running swarm writes the text. Otherwise the whole model is loaded into this
process: from checkpoints of all stages, a run folder, or a model of Hugging Face (a folder, or a name on the hub).
"""

import dataclasses
import os
from collections.abc import Sequence
from random import SystemRandom
from typing import TYPE_CHECKING

import torch

from peers.generate import terminal
from peers.generate.models import open_local_model, open_swarm
from peers.generate.options import PROG, GenerateOptions
from peers.shared import cli, logs, stopping
from peers.shared.devices import device_of
from peers.shared.lan import with_invite
from peers.shared.run_options import joins
from swarm.interchange.source import located
from swarm.machine import extras
from swarm.machine.clock import run_loop

if TYPE_CHECKING:
    from peers.generate.server import Server


def main(argv: Sequence[str]) -> int:
    options = cli.parse(GenerateOptions, prog=PROG, argv=argv)
    logs.setup_logging(PROG, "warning")
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.device != "auto":
        # A model may have to be downloaded for hours before it comes to its device.
        device_of(options.device, SystemRandom())
    # If something keeps the server from starting, the user learns it before anything is loaded.
    server = _server(options) if options.serve is not None else None
    with stopping.interruptible():
        options = with_invite(options)
        options = dataclasses.replace(options, model=_folder(options.model), base=_folder(options.base))
        return run_loop(_run(options, server))


def _folder(place: str | None) -> str | None:
    """The folder of the model that the user names, if any; a model on the hub is downloaded."""
    return None if place is None else str(located(place, terminal.tell)[0])


async def _run(options: GenerateOptions, server: "Server | None") -> int:
    """Open the model and do what the options ask for, and return the exit code."""
    from_swarm = joins(options)
    terminal.tell("looking for the swarm" if from_swarm else "loading the model")
    async with (open_swarm if from_swarm else open_local_model)(options) as model:
        if server is not None:
            await server.serve(model)
        elif options.chat:
            return await terminal.talk(model, options)
        else:
            await terminal.write(model, options)
    return 0


def _server(options: GenerateOptions) -> "Server":
    """Make the server. Raises ValueError if its libraries are not installed, or its address cannot be taken."""
    extras.require("--serve", "starlette and uvicorn", "serve", modules=["starlette", "uvicorn"])
    from peers.generate.server import Server

    return Server(options, os.environ)
