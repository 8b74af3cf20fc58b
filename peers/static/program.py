"""swarm-static: trains a run's model on a fixed set of workers, without a swarm.

    swarm-static --preset tiny                                               alone
    torchrun --nproc-per-node 4 --no-python swarm-static --preset tiny       on several GPUs or cores

It shares with the swarm the configuration, model, order of microbatches, optimizer, figures and checkpoints, and no
more. Reads top to bottom: options -> meet the other workers -> text -> spread the model -> train (loop.py).
"""

import contextlib
import dataclasses
import logging
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from peers.shared import cli, process
from peers.shared.cache import cache_folder
from peers.shared.own_text import with_text
from peers.static import precision, sharded, spread, traffic, workers
from peers.static.batches import Batches
from peers.static.checkpoints import Checkpoints
from peers.static.compressed import CompressedAverage
from peers.static.computing import OneByOne, Pipeline
from peers.static.loop import Run, train
from peers.static.options import StaticOptions
from peers.static.report import Report
from peers.static.spread import Spread
from peers.static.workers import Workers
from swarm import config as configs
from swarm.config import RoundsConfig, RunConfig
from swarm.data.microbatches import Microbatches
from swarm.errors import PeerUnavailable, SwarmError

logger = logging.getLogger(__name__)

PROG = "swarm-static"


def main(argv: Sequence[str]) -> int:
    """Run the program; gives its exit code."""
    environment = os.environ
    if int(environment.get("LOCAL_RANK", "0")) == 0:
        return run(argv, environment)
    # The same faults are found by all workers of a machine, and the first one says them.
    try:
        with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stderr(nowhere):
            options = cli.parse(StaticOptions, prog=PROG, argv=argv)
        return run(cli.arguments(options), environment)
    except ValueError:
        return process.EXIT_USAGE
    except (SwarmError, OSError):
        return process.EXIT_FAILURE


def run(argv: Sequence[str], environment: Mapping[str, str]) -> int:
    """Train, as one of the workers; gives the exit code."""
    options = cli.parse(StaticOptions, prog=PROG, argv=argv)
    is_first_here = int(environment.get("LOCAL_RANK", "0")) == 0
    level: process.LogLevel = options.log_level if is_first_here or options.log_level == "debug" else "error"
    process.setup_logging(f"worker {environment.get('RANK', '0')}", level)
    if options.threads:
        torch.set_num_threads(options.threads)
    shape = workers.shape_of(options, environment)
    device = workers.device_of(options.device, environment)
    config = spread.cut(trained_config(options), shape, is_sharded=options.fsdp is not None)
    with stopping(environment) as stops, workers.joined(shape, device, environment) as joined:
        try:
            is_stopped = work(config, options, joined, stops)
        except (dist.DistError, RuntimeError) as error:
            if not is_loss(error):
                raise
            raise PeerUnavailable(f"another worker is gone, and this one ends ({process.first_line(error)})") from None
    # torchrun takes any other code for a failure, and starts the workers again.
    return process.EXIT_INTERRUPTED if is_stopped and "WORLD_SIZE" not in environment else 0


def work(config: RunConfig, options: StaticOptions, joined: Workers, stops: Callable[[], bool]) -> bool:
    """Prepare all parts, and train; gives whether training was told to stop."""
    config, corpus = joined.one_after_another(lambda: with_text(config, cache_folder()))
    data = Microbatches(corpus, config.data)
    last_step = 100 if options.steps is None else options.steps
    if options.epochs is not None:
        last_step = math.ceil(options.epochs * data.num_windows / config.rounds.round_samples)
    model = Spread(config, options, joined)
    batches = Batches(config, data, joined)
    num_parameters = sum(parameter.numel() for parameter in model.local_parameters.values())
    plain_bytes = traffic.bytes_sent(
        config, options, joined.shape, num_parameters=num_parameters, num_microbatches=batches.size
    )
    bytes_sent = None
    if options.compress is not None:
        assert isinstance(model.module, DistributedDataParallel)
        averaging = dataclasses.replace(config.averaging, codec=options.compress)
        average = CompressedAverage(averaging, model.parameters, joined.mesh.get_group("dp"))
        model.module.register_comm_hook(None, average.hook)
        bytes_sent = average.bytes_sent
    report = None
    if joined.is_first:
        report = Report(config, options, joined, plain_bytes=plain_bytes, bytes_sent=bytes_sent)
    is_piped = joined.shape.pp > 1
    return train(
        Run(
            config=config,
            dtype=options.dtype,
            workers=joined,
            spread=model,
            computing=Pipeline(model.module, config, joined, batches.size) if is_piped else OneByOne(model.module),
            batches=batches,
            checkpoints=Checkpoints(config, model, options, joined),
            report=report,
        ),
        data.held_out_by_source(options.evaluation_samples),
        last_step=last_step,
        evaluate_every=options.evaluate_every,
        stops=stops,
    )


def trained_config(options: StaticOptions) -> RunConfig:
    """The configuration that the command line names, as a synchronous run.

    Of a DiLoCo run the inner steps remain, which are then those of all workers together.
    """
    config = configs.load(options.config) if options.config else configs.load_preset(options.preset or "")
    data = config.data
    data = dataclasses.replace(
        data, dataset=options.dataset or data.dataset, tokenizer=options.tokenizer or data.tokenizer
    )
    config = dataclasses.replace(config, data=data)
    if config.lora.is_on and (options.fsdp or options.tp > 1):
        raise ValueError("--fsdp and --tp are not for [lora]")
    if options.compile and (config.model.dropout or config.lora.dropout):
        raise ValueError("--compile is not for runs with dropout: every microbatch's masks would be compiled anew")
    sharded.check(config, options)
    if config.model.weights:
        raise ValueError("model.weights: a static run begins with drawn weights")
    if not config.rounds.synchronous:
        size = config.rounds.inner_batch_samples
        rounds = RoundsConfig(setting="synchronous", round_samples=size)
        averaging = dataclasses.replace(config.averaging, num_fragments=1)
        config = dataclasses.replace(config, rounds=rounds, averaging=averaging)
        logger.info("the run's setting is diloco: a static run takes a step every %d samples, its inner batch", size)
    return precision.with_dtype(config, options.dtype)


@contextlib.contextmanager
def stopping(environment: Mapping[str, str]) -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed, for as long as the block runs. A second one ends a worker that is alone at once."""
    pressed = threading.Event()

    def press(number: int, frame: object) -> None:
        # torchrun passes on what the terminal has sent to all: with several workers each hears it twice.
        if pressed.is_set() and "WORLD_SIZE" not in environment:
            raise KeyboardInterrupt
        pressed.set()

    before = signal.signal(signal.SIGINT, press)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def is_loss(error: RuntimeError) -> bool:
    """Whether an exchange failed because another worker has died."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower() or "connection" in str(error).lower()
