"""swarm-static: trains a run's model on a fixed set of workers, without a swarm.

    swarm-static --preset tiny                                               alone
    torchrun --nproc-per-node 4 --no-python swarm-static --preset tiny       on several GPUs or cores

It shares with the swarm the configuration, model, order of microbatches, optimizer, figures and checkpoints. Reads top
to bottom: options -> the run -> join the other workers -> text -> spread the model -> train (loop.py).
"""

import contextlib
import dataclasses
import io
import logging
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from peers.shared import logs, option_types, process
from peers.shared.devices import num_cores, warn_of_emulation
from peers.shared.process import EXIT_FAILURE, EXIT_USAGE, cache_folder, keep_compiled_code, kept_tokenizer
from peers.shared.reporting import require_reporters
from peers.shared.run_options import naming_options
from peers.shared.sole_writer import require_sole_writer
from peers.shared.stopping import Stop
from peers.stage_peer.own_model import with_text
from peers.static import run_config, workers
from peers.static.checkpoints import Checkpoints
from peers.static.computing import Batches, CompressedAverage, OneByOne, Pipeline
from peers.static.loop import Report, Run, train
from peers.static.options import StaticOptions, is_first_here, parse
from peers.static.spread import Spread
from peers.static.workers import Workers
from swarm.checkpoint import file
from swarm.config import RunConfig
from swarm.data import tokenizer_files
from swarm.data.microbatches import Microbatches
from swarm.errors import SwarmError
from swarm.interchange.origin import TOKENIZER_FOLDER
from swarm.interchange.weights import Weights
from swarm.model.compiled import compiles

logger = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    environment = os.environ
    if is_first_here(environment):
        options = parse(argv)
        with naming_options(options):
            return run(options, environment)
    # All workers of a machine find the same mistakes of the user. Only the first worker prints them.
    with contextlib.redirect_stderr(io.StringIO()):
        options = parse(argv)
    try:
        return run(options, environment)
    except (ValueError, SwarmError, OSError) as error:
        logger.debug("where it went wrong:", exc_info=error)
        return EXIT_USAGE if isinstance(error, ValueError) else EXIT_FAILURE


def run(options: StaticOptions, environment: Mapping[str, str]) -> int:
    is_heard = is_first_here(environment) or options.log_level == "debug"
    if "TORCHELASTIC_RUN_ID" in environment:
        # Without this, the workers of a torchrun that was killed would go on, beside the workers of the next torchrun.
        process.die_with_parent(os.getppid())()
    level: logs.LogLevel = options.log_level if is_heard else "error"
    logs.setup_logging(f"worker {environment.get('RANK', '0')}", level)
    shape = workers.shape_of(options, environment)
    device = workers.device_of(options.device, environment)
    own_share = workers.num_threads(environment, num_cores()) if device.type == "cpu" else None
    if threads := options.threads or own_share:
        torch.set_num_threads(threads)
    require_reporters(options)
    config, given = run_config.trained(options, shape, device)
    warn_of_emulation(config.model, device)
    keep_compiled_code(os.environ)
    options = dataclasses.replace(options, compile="on" if compiles(options.compile, config, device) else "off")
    require_beginning(options)
    is_first = environment.get("RANK", "0") == "0"
    own_files = writing_alone(options) if is_first else contextlib.nullcontext()
    with own_files, stopping(environment) as stop, workers.joined(shape, device, environment) as joined:
        is_stopped = work(config, given, options, joined, stop.is_set)
    # torchrun treats any other code as a failure, and starts the workers again.
    return stop.exit_code if is_stopped and "WORLD_SIZE" not in environment else 0


def require_beginning(options: StaticOptions) -> None:
    """If --resume is given, raise ValueError unless it or --checkpoint has a checkpoint to go on from."""
    if options.resume is None or (options.checkpoint is not None and file.names(options.checkpoint)):
        return
    option_types.require_folder("--resume", options.resume)
    if not file.names(options.resume):
        raise ValueError(f"--resume {options.resume}: there is no checkpoint in this folder")


@contextlib.contextmanager
def writing_alone(options: StaticOptions) -> Iterator[None]:
    """Inside the block, keep other runs from writing to this run's files. Raises ValueError if another run already uses
    them."""
    with contextlib.ExitStack() as locks:
        for option, path in (("--metrics", options.metrics), ("--checkpoint", options.checkpoint)):
            if path is not None:
                (path.parent if option == "--metrics" else path).mkdir(parents=True, exist_ok=True)
                locks.callback(os.close, require_sole_writer(path, f"{option} {path}"))
        yield


def work(
    config: RunConfig, given: Weights | None, options: StaticOptions, joined: Workers, stops: Callable[[], bool]
) -> bool:
    """Prepare all parts, and train. Return whether training was told to stop."""
    config, corpus = joined.one_after_another(lambda: with_text(config, cache_folder()))
    if joined.is_first and options.checkpoint is not None and config.data.tokenizer_files:
        files = tokenizer_files.read(kept_tokenizer(cache_folder(), config.data.tokenizer_files))
        files.keep(options.checkpoint / TOKENIZER_FOLDER)
    data = Microbatches(corpus, config.data)
    last_step = 100 if options.steps is None else options.steps
    if options.epochs is not None:
        last_step = math.ceil(options.epochs * data.num_windows / config.rounds.round_samples)
    model = Spread(config, options, joined, given)
    batches = Batches(config, data, joined)
    compressed = None
    if options.compress is not None:
        averaging = dataclasses.replace(config.averaging, codec=options.compress)
        compressed = CompressedAverage(model, averaging, joined)
    is_piped = joined.shape.pp > 1
    parts = Run(
        config=config, workers=joined, model=model, batches=batches,
        computing=Pipeline(model.module, config, joined, batches.size) if is_piped else OneByOne(model.module),
        checkpoints=Checkpoints(config, model, options, joined),
        report=Report(config, options, model, joined, compressed) if joined.is_first else None,
    )  # fmt: skip
    held_out = data.held_out_by_source(options.evaluation_samples)
    return train(parts, held_out, last_step=last_step, evaluate_every=options.evaluate_every, stops=stops)


TERM_SECONDS = 20.0
"""torchrun kills workers 30 s after its SIGTERM."""


@contextlib.contextmanager
def stopping(environment: Mapping[str, str]) -> Iterator[Stop]:
    """Yields an event that Ctrl-C and SIGTERM set inside the block. Training then ends after its present step. Without
    torchrun a second Ctrl-C ends the process at once. Under torchrun, SIGTERM may also come because another worker has
    died. Then no step is finished any more, so a worker that does not end by itself within TERM_SECONDS is ended."""
    is_alone = "WORLD_SIZE" not in environment
    stop = Stop()

    def note(number: int, frame: object) -> None:
        # Some launchers, such as srun, signal all processes. Workers then get Ctrl-C twice: from the launcher and from
        # torchrun.
        if stop.is_set() and is_alone and number == signal.SIGINT:
            raise KeyboardInterrupt
        if number == signal.SIGTERM and not is_alone and not ending.is_alive():
            ending.start()
        stop.by(number)

    ending = threading.Timer(TERM_SECONDS, os._exit, [128 + signal.SIGTERM])
    ending.daemon = True
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        ending.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)
