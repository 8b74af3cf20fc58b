"""swarm-trainer: feeds text into a running swarm and follows its steps.

    swarm-trainer --initial-peers ADDRESS... --steps 100

Holds no parameters. Reads top to bottom: options -> join the DHT as a client -> find the text -> train, evaluate,
report -> say goodbye.
"""

import asyncio
import dataclasses
import logging
import os
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console

from peers.shared import cli, process
from peers.shared.cache import cache_folder
from peers.shared.event_file import begin, open_events, start_of
from peers.shared.network import (
    REFRESH_SECONDS,
    KnownPeers,
    agree_on_config,
    default_name,
    say_who_may_join,
)
from peers.shared.sole_writer import require_sole_writer
from peers.shared.token_option import admitted, find_token, stop_or_expiry
from peers.trainer.options import TrainerOptions
from peers.trainer.report import Report
from swarm.config import RunConfig
from swarm.credentials.certificates import Role
from swarm.credentials.identity import Identity, generate
from swarm.data import corpora, tokenizers
from swarm.data.microbatches import Microbatches
from swarm.dht import node as dht_node
from swarm.dht.directory import Directory
from swarm.dht.node import DhtNode
from swarm.errors import Fatal, PeerUnavailable
from swarm.events.kinds import Events, Leave
from swarm.hop.connections import watch_connections
from swarm.hop.hop import Hop
from swarm.machine.clock import SystemClock, run_loop
from swarm.metrics.log import MetricsLog
from swarm.metrics.plot import plot_loss
from swarm.metrics.wandb_run import WandbRun
from swarm.pipeline.evaluate import generate as generate_text
from swarm.pipeline.evaluate import held_out_loss
from swarm.pipeline.lease_service import LeaseClient
from swarm.pipeline.leased_work import LeasedWork
from swarm.pipeline.round_watcher import RoundWatcher
from swarm.pipeline.train_loop import Step, TrainLoop
from swarm.routing.router import Router
from swarm.rpc.channels import ChannelPool
from swarm.types import TRAINER_STAGE, TrainerRecord

logger = logging.getLogger(__name__)

PROG = "swarm-trainer"
RECORD_SECONDS = 20.0
"""Lifetime of a trainer's announcement."""
ATTEMPTS = 5
"""Times that an evaluation is tried while other trainers move the swarm on."""

Result = TypeVar("Result")


def main(argv: Sequence[str]) -> int:
    """Run the program; gives its exit code."""
    options = cli.parse(TrainerOptions, prog=PROG, argv=argv)
    process.setup_logging(options.name or "trainer", options.log_level)
    torch.set_num_threads(1)
    clock = SystemClock()
    events = open_events(options.events, clock)
    addresses, token = find_token(
        options.token, options.initial_peers, os.environ, role=Role.TRAINER, insecure=options.insecure, clock=clock
    )
    options.output.mkdir(parents=True, exist_ok=True)
    require_sole_writer(options.output, f"--output {options.output}")
    node = dht_node.start(clock=clock, initial_peers=addresses, client_mode=True)
    try:
        identity = admitted(generate(), token)
        config = run_loop(agree_on_config(node, None, addresses, clock, identity.authority))
        # In the main thread, outside of any event loop: to prepare text may take minutes, and a thread cannot be ended.
        with process.interruptible():
            corpus, data = open_corpus(config, options.dataset, options.tokenizer)
        process.require_addresses(process.THREAD_BYTES)
        return run_loop(run(options, config, corpus, data, node, identity, events))
    finally:
        node.shutdown()


async def run(
    options: TrainerOptions, config: RunConfig, corpus: corpora.Corpus, data: Microbatches, node: DhtNode,
    identity: Identity, events: Events,
) -> int:  # fmt: skip
    """Train, and leave; gives the exit code."""
    clock = SystemClock()
    say_who_may_join(identity.authority)
    name = options.name or default_name()
    begin(events, options.events, start_of(config, peer_id=identity.peer_id, name=name, stage=TRAINER_STAGE))
    router = Router(clock, random.Random(identity.peer_id))
    directory = Directory(node, identity, config.run_id, clock)
    known = KnownPeers(router)
    stages = range(config.stages.num_stages)
    await known.look_first(directory, stages, clock)
    channels = ChannelPool(insecure=options.insecure, identity=identity, clock=clock)
    hop = Hop(
        run_id=config.run_id, stage=0, reply_specs={}, router=router, channels=channels, clock=clock, events=events
    )
    watcher = RoundWatcher(
        run_id=config.run_id, num_stages=len(stages), synchronous=config.rounds.synchronous, peers=known.peers,
        channels=channels,
    )  # fmt: skip
    leases = LeaseClient(config=config, trainer_id=identity.peer_id, peers=known.peers, channels=channels, clock=clock)
    wandb_run = None
    if options.wandb is not None:
        wandb_run = WandbRun(
            project=options.wandb, folder=options.output, online=options.wandb_online,
            config=dataclasses.asdict(config),
        )  # fmt: skip
    metrics = MetricsLog(options.output / "metrics.jsonl", wandb_run=wandb_run)
    report = Report(
        config, steps=options.steps, output=options.output, metrics=metrics, console=Console(stderr=True),
        why_silent=watcher.why_silent,
    )  # fmt: skip
    with metrics, report:
        work = LeasedWork(
            config=config, leases=leases, clock=clock, max_in_flight=options.max_in_flight, on_waiting=report.waiting
        )
        loop = TrainLoop(
            config=config, data=data, hop=hop, work=work, watcher=watcher, clock=clock, on_waiting=report.waiting,
            events=events,
        )  # fmt: skip
        session = Session(options, config, data, hop, watcher, directory, identity, loop, report)
        stop = process.stop_event()
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(directory.watch(stages, known.update, REFRESH_SECONDS)),
                tasks.create_task(session.keep_announced(clock)),
                tasks.create_task(watch_connections(stage=0, router=router, channels=channels, clock=clock)),
            ]
            training = tasks.create_task(session.train())
            stopped = tasks.create_task(stop_or_expiry(stop, identity, clock))
            await asyncio.wait([training, stopped], return_when=asyncio.FIRST_COMPLETED)
            interrupted = not training.done() or training.cancelled()
            for task in [*background, training, stopped]:
                task.cancel()
        await channels.close()
    events.write(Leave())
    return await finish(report, options.output, corpus, session.sample, wandb_run, interrupted=interrupted)


async def finish(
    report: Report, folder: Path, corpus: corpora.Corpus, sample: str, wandb_run: WandbRun | None, *, interrupted: bool
) -> int:  # fmt: skip
    """Say where training is, and write down how it went; gives the exit code.

    A file that cannot be written is one line in the log and keeps nothing else from being written or said.
    """
    report.goodbye(interrupted=interrupted)
    if sample:
        print(sample)
    files: dict[str, Callable[[Path], object]] = {"loss.png": lambda path: plot_loss(folder / "metrics.jsonl", path)}
    if not interrupted:
        files["summary.json"] = lambda _: report.write_summary(corpus)
    if sample:
        files["sample.txt"] = lambda path: path.write_text(sample + "\n", encoding="utf-8")
    exit_code = process.EXIT_INTERRUPTED if interrupted else 0
    for name, write in files.items():
        try:
            write(folder / name)
        except OSError as error:
            logger.error("%s is not written: %s", folder / name, error.strerror or error)
            exit_code = process.EXIT_FAILURE
    if wandb_run is not None and (command := await asyncio.to_thread(wandb_run.finish, timeout_seconds=30.0)):
        print(f"To upload this run to Weights & Biases: {command}")
    return exit_code


def open_corpus(
    config: RunConfig, dataset: str | None, tokenizer: str | None = None
) -> tuple[corpora.Corpus, Microbatches]:
    """This machine's copy of the run's text.

    Args:
        dataset: where it is, if not where the run says.
        tokenizer: likewise, the copy of the run's tokenizer.

    Raises:
        CorpusMismatch: the text or the tokenizer is another.
        ValueError: there is none, or the run does not say which text it is.
    """
    if dataset is None and not config.data.digest:
        # Else whoever began the run could have any file of ours tokenized, and see what comes of it.
        raise ValueError("this run does not say which text it is trained on: name yours with --dataset")
    local = config.data if dataset is None else dataclasses.replace(config.data, dataset=dataset)
    local = local if tokenizer is None else dataclasses.replace(local, tokenizer=tokenizer)
    # Before a text is tokenized that may take minutes.
    tokenizers.load_for_run(local, vocab_size=config.model.vocab_size)
    corpus = corpora.prepare(local, cache_dir=cache_folder() / "corpora")
    corpora.check_digest(local, corpus)
    return corpus, Microbatches(corpus, config.data)


@dataclass
class Session:
    """One run of the trainer, from its first step to its last evaluation."""

    options: TrainerOptions
    config: RunConfig
    data: Microbatches
    hop: Hop
    watcher: RoundWatcher
    directory: Directory
    identity: Identity
    loop: TrainLoop
    report: Report
    sample: str = ""

    async def train(self) -> None:
        """Train the steps that were asked for, then evaluate."""
        await self.watcher.poll()
        # A run that was resumed begins at a later round, and not all of its stages may be there yet.
        while (first := self.watcher.known_round) is None:
            self.report.waiting(0)
            await asyncio.sleep(0.5)
            await self.watcher.poll()
        self.report.begin(first)
        await self.loop.run(first, self.options.steps, self.step)
        await self.watcher.poll()
        self.report.final(await self.evaluate())
        if self.options.sample_tokens:
            self.sample = await self.write_sample()

    async def step(self, step: Step) -> None:
        """Report a step, with an evaluation if it is time for one."""
        number, every = step.number, self.options.evaluate_every
        last = number - self.report.first_step == self.options.steps
        loss = await self.evaluate() if every and number % every == 0 and not last else None
        self.report.step(step, loss)

    async def evaluate(self) -> float | None:
        """Loss on held-out text; None, with a warning, if the swarm could not compute it."""
        return await self.at_rest(
            lambda round_number: held_out_loss(
                self.hop, self.data, round_number=round_number, num_samples=self.options.evaluation_samples,
                listener=self.loop,
            )
        )  # fmt: skip

    async def write_sample(self) -> str:
        """Text that the trained swarm writes, after a held-out prompt."""
        tokenizer = tokenizers.load(self.options.tokenizer or self.config.data.tokenizer)
        prompt = [int(token) for token in self.data.held_out(1)[0][0][:-1]]
        tokens = await self.at_rest(
            lambda round_number: generate_text(
                self.hop, self.config, prompt, round_number=round_number, num_tokens=self.options.sample_tokens,
                temperature=0.7, seed=self.config.data.seed, listener=self.loop,
            )
        )  # fmt: skip
        if tokens is None:
            return ""
        # What goes on comes from strangers.
        written = [process.printable(tokenizer.decode(part), keep="\n\t") for part in (prompt, tokens)]
        return f"--- held-out text ---\n{written[0]}\n--- the swarm goes on ---\n{written[1]}\n---"

    async def at_rest(self, work: Callable[[int], Coroutine[Any, Any, Result]]) -> Result | None:
        """Do `work` on the newest round's anchor while this trainer feeds nothing; again if the swarm moved on."""
        cause: Fatal | None = None
        with self.loop.paused():
            for _ in range(ATTEMPTS):
                await self.watcher.poll()
                try:
                    # A task of its own: in older Pythons a failed task group leaves its task half cancelled.
                    return await asyncio.create_task(work(self.watcher.latest_round))
                except Fatal as error:
                    logger.info("evaluating again: %s", error)
                    cause = error
        logger.warning("no evaluation, after %d attempts: %s", ATTEMPTS, cause)
        return None

    async def keep_announced(self, clock: SystemClock) -> None:
        """Let status see this trainer."""
        while True:
            record = TrainerRecord(
                peer_id=self.identity.peer_id, name=self.options.name or default_name(), announced_at=clock.time(),
                step=self.report.step_number, loss=self.report.loss, tokens=self.report.own_tokens,
                tokens_per_second=self.report.tokens_per_second, in_flight=self.loop.num_in_flight,
            )  # fmt: skip
            try:
                await self.directory.announce_trainer(record, RECORD_SECONDS)
            except PeerUnavailable as error:
                logger.debug("not announced: %s", error)
            await asyncio.sleep(5.0)
