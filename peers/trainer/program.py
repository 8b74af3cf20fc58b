"""swarm-trainer: feeds text into a running swarm and follows its steps.

Reads top to bottom: options -> join the DHT as a client -> find the text -> train, evaluate, report -> say goodbye.
"""

import asyncio
import dataclasses
import logging
import math
import os
import shlex
from collections.abc import Collection, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Never

import torch

from peers.shared import cli, logs, process, reporting, stopping
from peers.shared.entrance import find_entrance, reading
from peers.shared.event_file import begin, open_events, start_of
from peers.shared.lan import with_invite
from peers.shared.named_model import chooser
from peers.shared.network import (
    AMENDMENTS_SECONDS,
    REFRESH_SECONDS,
    Membership,
    default_name,
    newest_round,
    say_who_may_join,
)
from peers.shared.process import EXIT_FAILURE, cache_folder
from peers.shared.run_options import naming_options
from peers.shared.sole_writer import require_sole_writer
from peers.shared.tokenizer import have_tokenizer
from peers.status.exporter import OwnFigures, exporting, require_exporter
from peers.status.live_table import Screen
from peers.status.view import Joining, TrainerRow, remedy
from peers.trainer.held_out_loss import Rerouting
from peers.trainer.options import TrainerOptions
from peers.trainer.report import Report
from peers.trainer.session import Session
from swarm.config import RunConfig
from swarm.data import corpora, tokenizers
from swarm.data.microbatches import Microbatches, Texts
from swarm.dht.directory import Announcement
from swarm.errors import CorpusMismatch
from swarm.events import Events, Leave
from swarm.hop.hop import Hop
from swarm.hop.retries import HopContext, HopLimits
from swarm.machine.clock import Loop, SystemClock
from swarm.machine.words import counted, printable
from swarm.metrics import MetricsLog, Reporter
from swarm.pipeline.lease_service import LeaseClient
from swarm.pipeline.leased_work import LeasedWork
from swarm.pipeline.round_watcher import RoundWatcher
from swarm.pipeline.train_loop import TrainLoop
from swarm.pipeline.trainer_paths import TrainerPaths
from swarm.types import MOST_NAMED_PATHS, TRAINER_STAGE, Block, TrainerRecord

logger = logging.getLogger(__name__)

PROG = "swarm-trainer"


def cure_of(block: Block, member: Membership, *, insecure: bool) -> str:
    """Text that says when and how the last peer of an empty block ended, and what the user can do to fill the block."""
    command = Joining.at(member.config, member.known.entries(4), insecure=insecure).peer
    gone = member.known.router.gone(block)
    cure = remedy(command, block.label, member.known.round, may_return=gone is not None and not gone.has_left)
    return cure if gone is None else f"{gone.in_words(member.clock.monotonic())}; {cure}"


def main(argv: Sequence[str]) -> int:
    options = cli.parse(TrainerOptions, prog=PROG, argv=argv)
    logs.setup_logging(options.name or "trainer", options.log_level)
    require_exporter(options.metrics_host, options.metrics_port)
    reporting.require_reporters(options)
    torch.set_num_threads(1)
    clock = SystemClock()
    options = with_invite(options)
    events = open_events(options.events, clock)
    entrance = find_entrance(options, os.environ, prog=PROG, clock=clock)
    options.output.mkdir(parents=True, exist_ok=True)
    require_sole_writer(options.output, f"--output {options.output}")
    # One event loop serves the whole program. It does not run while the text is prepared.
    with asyncio.Runner(loop_factory=Loop) as runner:
        stack = AsyncExitStack()
        try:
            member = runner.run(stack.enter_async_context(reading(entrance, clock)))
            paths = paths_of(options, member)
            if options.tokenizer is None:
                options = dataclasses.replace(options, tokenizer=runner.run(have_tokenizer(member, cache_folder())))
            now = runner.run(present_config(member))
            # The text is prepared in the main thread, outside the loop: this may take minutes, and Ctrl-C could not end
            # another thread.
            with stopping.interruptible(), naming_options(options):
                first = open_text(now, options.dataset, options.tokenizer, options.validation, options.paths or ())
                texts = Texts(first, now.data, lambda later: open_later(options, dataclasses.replace(now, data=later)))
                rerouting = rerouting_of(options, member.config)
            process.require_addresses(process.THREAD_BYTES)
            return runner.run(run(options, member, paths, texts, events, rerouting))
        finally:
            runner.run(stack.aclose())


async def present_config(member: Membership) -> RunConfig:
    """The run's configuration with the amendments that are in force, as far as they matter for the text."""
    if not member.timeline.amendments:
        return member.config
    await member.known.look_first(member.directory, member.blocks, member.clock)
    replies = await member.poll().replies(member.known.everyone())
    return member.timeline.at(newest_round(replies))


def open_later(options: TrainerOptions, config: RunConfig) -> Microbatches:
    """Open a text that an amendment names. Its datasets are where the amendment says. Raises as open_text does."""
    return open_text(config, (), options.tokenizer, options.validation, options.paths or ())


async def open_later_texts(member: Membership, texts: Texts, watcher: RoundWatcher) -> Never:
    """Open each text that an amendment names before its round comes, and say so if it is not here. Until cancelled."""
    named = set[str]()
    while True:
        present = math.inf if watcher.known_round is None else watcher.known_round
        for number in [each.round for each in member.timeline.amendments if each.round > present]:
            data = member.timeline.at(number).data
            if data.digest in named:
                continue
            named.add(data.digest)
            if not (text := texts.want(data)).done():
                logger.info("from round %d on the run trains on %s: reading it", number, ", ".join(data.source_names))
            try:
                await asyncio.wrap_future(text)
            except CorpusMismatch as error:
                logger.warning(
                    "%s; unless it is there at round %d, this trainer ends then, and may be started again with "
                    "--dataset", error, number,
                )  # fmt: skip
        await member.clock.sleep(AMENDMENTS_SECONDS)


def paths_of(options: TrainerOptions, member: Membership) -> TrainerPaths:
    """The paths that this trainer feeds. Raises ValueError if the run does not have them."""
    try:
        return TrainerPaths(member.config, member.clock, member.known.peers, options.paths or ())
    except ValueError as error:
        raise ValueError(f"--paths {','.join(map(str, options.paths or ()))}: {error}") from None


def rerouting_of(options: TrainerOptions, config: RunConfig) -> Rerouting | None:
    """How evaluations change paths; None if they do not. Blocks. Raises as `chooser` does."""
    if options.router is None or options.reroute_every is None:
        return None
    length = config.data.sequence_length
    if options.reroute_every >= length:
        raise ValueError(
            f"--reroute-every {options.reroute_every}: samples of this run have {counted(length, 'token')}"
        )
    tokenizer = tokenizers.load(options.tokenizer or config.data.tokenizer)
    choose = chooser(options.router, len(config.paths), tokenizer, cache_folder(), logger.info)
    return Rerouting(choose, options.reroute_every)


async def run(
    options: TrainerOptions, member: Membership, paths: TrainerPaths, texts: Texts, events: Events,
    rerouting: Rerouting | None,
) -> int:  # fmt: skip
    config = member.config
    say_who_may_join(member.identity.authority)
    name = options.name or default_name()
    begin(events, options.events, start_of(config, peer_id=member.peer_id, name=name, stage=TRAINER_STAGE))
    await member.known.look_first(member.directory, member.blocks, member.clock)
    member.directory.require_common_protocol()
    reporters = reporting.start(options, options.output, config)
    metrics = MetricsLog(options.output / "metrics.jsonl", reporters=reporters)
    watcher = RoundWatcher(
        run_id=config.run_id, blocks=paths.followed, synchronous=config.rounds.synchronous,
        peers=member.known.peers, channels=member.channels,
    )  # fmt: skip
    report = Report(
        member.timeline, steps=0 if options.evaluate_only else options.steps, output=options.output, metrics=metrics,
        console=Screen(stderr=True), clock=member.clock,
        remedy=lambda block: cure_of(block, member, insecure=options.insecure),
    )  # fmt: skip
    with metrics, report:
        session = make_session(options, member, paths, texts, watcher, report, events, rerouting)
        own = OwnFigures()
        own.follow((lambda: TrainerRow.of(record_of(member, session, name)), {"run": config.run_id}))
        async with exporting(own, "swarm_trainer", host=options.metrics_host, port=options.metrics_port):
            exit_code = await carry_out(member, session, name)
    events.write(Leave())
    corpus = texts.at_hand(member.timeline.at(watcher.latest_round).data).corpus
    return await finish(report, options.output, corpus, session.sample, reporters, exit_code=exit_code)


def make_session(
    options: TrainerOptions, member: Membership, paths: TrainerPaths, texts: Texts, watcher: RoundWatcher,
    report: Report, events: Events, rerouting: Rerouting | None,
) -> Session:  # fmt: skip
    config, clock, channels = member.config, member.clock, member.channels
    hops = {
        block: Hop(
            HopContext(
                run_id=config.run_id, block=block, router=member.known.router, channels=channels, clock=clock,
                limits=HopLimits.of(config, block),
            ),
            events=events, check_share=config.rounds.check_share, drifts=not config.rounds.synchronous,
        )
        for block in paths.entries
    }  # fmt: skip
    leases = LeaseClient(
        config=config, trainer_id=member.peer_id, peers=member.known.peers, channels=channels, clock=clock
    )
    work = LeasedWork(
        config=config, paths=paths, leases=leases, clock=clock, max_in_flight=options.max_in_flight,
        on_waiting=report.waiting,
    )  # fmt: skip
    loop = TrainLoop(
        config=config, paths=paths, texts=texts, hops=hops, work=work, watcher=watcher, clock=clock,
        on_waiting=report.waiting, events=events, timeline=member.timeline,
    )  # fmt: skip
    return Session(options, paths, texts, member.timeline, hops, watcher, loop, report, rerouting, member.waits)


async def carry_out(member: Membership, session: Session, name: str) -> int:
    """Train, or only evaluate, until it is done or told to stop, and return the exit code, 0 if it is done."""
    known, directory, clock = member.known, member.directory, member.clock
    stop = stopping.stop_event()
    announcement = Announcement(directory, "this trainer", lambda: record_of(member, session, name), clock)
    watching = directory.watch(
        member.blocks, known.update, REFRESH_SECONDS,
        under_way=lambda block: 0 if block.stage else session.loop.num_in_flight,
    )  # fmt: skip
    async with stopping.beside(
        watching, announcement.keep(), member.waits.run(clock), member.follow_amendments(),
        open_later_texts(member, session.texts, session.watcher), *(hop.run() for hop in session.hops.values()),
    ):  # fmt: skip
        work = session.only_evaluate() if session.options.evaluate_only else session.train()
        await stopping.before(stopping.stop_or_expiry(stop, member.identity, clock), work)
    return stop.exit_code if stop.is_set() else 0


def record_of(member: Membership, session: Session, name: str) -> TrainerRecord:
    figures, paths = session.report.figures, session.paths
    return TrainerRecord(
        peer_id=member.peer_id, name=name, announced_at=member.clock.time(),
        paths=paths.paths[:MOST_NAMED_PATHS] if paths.paths != tuple(range(len(member.config.paths))) else (),
        step=figures.step_number, loss=figures.loss, tokens=figures.own_tokens,
        tokens_per_second=figures.tokens_per_second, in_flight=session.loop.num_in_flight,
        bans=member.known.bans(paths.entries, member.clock),
    )  # fmt: skip


async def finish(
    report: Report, folder: Path, corpus: corpora.Corpus, sample: str, reporters: Sequence[Reporter], *, exit_code: int
) -> int:  # fmt: skip
    """Print where training is, write the files that are due, and return the exit code, which is 0 at first if training
    is done. If a file cannot be written, log a line, go on, and return EXIT_FAILURE."""
    interrupted = exit_code != 0
    report.goodbye(interrupted=interrupted)
    if sample:
        print(printable(sample, keep="\n\t"))
    files = report.files(corpus, interrupted=interrupted)
    if sample:
        files["sample.txt"] = lambda path: path.write_text(sample + "\n", encoding="utf-8")
    for name, write in files.items():
        try:
            write(folder / name)
        except OSError as error:
            logger.error("%s is not written: %s", folder / name, error.strerror or error)
            exit_code = EXIT_FAILURE
    await asyncio.to_thread(reporting.finish, reporters)
    return exit_code


def open_text(
    config: RunConfig, datasets: tuple[str, ...], tokenizer: str | None = None, validation: str | None = None,
    paths: Collection[int] = (),
) -> Microbatches:  # fmt: skip
    """Open this machine's copy of the run's text, which is where the run's configuration says, unless the arguments
    name another place. If `paths` are named, only their datasets are opened.

    Raises CorpusMismatch if the text or the tokenizer differs from the run's, and ValueError if there is no such text,
    or the run does not say which text it is.
    """
    if not datasets and not config.data.digest:
        # A name without a digest is refused: with it the run's first peer could make this machine read any of its
        # files, and see the file's tokens.
        raise ValueError("this run does not say which text it is trained on: name yours with --dataset")
    here = config.data.datasets_of(paths)
    if datasets and len(datasets) != len(here):
        known = zip(config.data.source_names, config.data.datasets, strict=True)
        names = ", ".join(name for name, dataset in known if dataset in here)
        of_paths = " for these paths" if len(here) < len(config.data.datasets) else ""
        raise ValueError(
            f"--dataset names {counted(len(datasets), 'dataset')}, and the run has {names}{of_paths}: name all of them"
        )
    if config.data.validation and not config.data.digest and validation is None:
        raise ValueError("this run does not say which text it is evaluated on: name yours with --validation")
    if validation and not config.data.validation:
        raise ValueError("--validation names a text, and the run holds out a part of its own: leave it out")
    local = dataclasses.replace(
        config.data, paths=(), dataset=datasets or here, validation=validation or config.data.validation
    )
    for name in local.classes:
        if name not in (*datasets, validation):
            option = "--validation" if name == local.validation else "--dataset"
            raise ValueError(
                f"this run would have this machine import and run {name!r} for its text: if you trust that code, add "
                f"{option} {shlex.quote(name)}"
            )
    local = local if tokenizer is None else dataclasses.replace(local, tokenizer=tokenizer)
    # The tokenizer is checked first, because tokenizing the text may take minutes.
    tokenizers.load_for_run(local, vocab_size=config.model.vocab_size)
    corpus = corpora.prepare(local, cache_dir=cache_folder() / "corpora")
    corpus = corpora.in_order(config.data, corpus, paths)
    corpora.check_digest(local, corpus, corpora.wanted_digests(config.data, paths) if paths else ())
    return Microbatches(corpus, config.data, paths)
