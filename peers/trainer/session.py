"""What a trainer does from its first step to its last evaluation.

Between steps and at the end it has the swarm compute the loss on held-out text; at the end it may have it write a
sample.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from peers.trainer.held_out_loss import Along, Rerouting, held_out_loss
from peers.trainer.options import TrainerOptions
from peers.trainer.report import Report
from swarm.config import Timeline
from swarm.data import tokenizers
from swarm.data.microbatches import HeldOutLoss, Microbatches, Texts
from swarm.errors import Fatal, SwarmError
from swarm.generation.engine import collect
from swarm.generation.sampling import Sampling
from swarm.hop.hop import Hop
from swarm.machine.waits import Waits
from swarm.machine.words import printable
from swarm.pipeline.round_watcher import RoundWatcher
from swarm.pipeline.swarm_engine import SwarmEngine
from swarm.pipeline.train_loop import Step, TrainLoop
from swarm.pipeline.trainer_paths import TrainerPaths
from swarm.training.samples import TOKENS
from swarm.types import Block

logger = logging.getLogger(__name__)

ATTEMPTS = 5
"""How often an evaluation is tried if other trainers bring the swarm to the next round meanwhile."""
PROGRESS_SECONDS = 0.5
TEMPERATURE = 0.7


@dataclass
class Session:
    options: TrainerOptions
    paths: TrainerPaths
    texts: Texts
    timeline: Timeline
    hops: Mapping[Block, Hop]
    watcher: RoundWatcher
    loop: TrainLoop
    report: Report
    rerouting: Rerouting | None = None
    waits: Waits = field(default_factory=Waits)
    sample: str = ""
    _evaluated: tuple[int, int] = (0, 0)
    """How many parts of an evaluation are done, and how many there are; both are 0 at its beginning."""

    async def train(self) -> None:
        first = await self._present_round()
        self.report.begin(first)
        if self.options.evaluate_every and (before := await self.evaluate()) is not None:
            self.report.evaluated_before(before)
        showing = asyncio.create_task(self._show_progress())
        try:
            await self.loop.run(first, self.options.steps, self.step)
        finally:
            showing.cancel()
        loss = await self.evaluate()
        if loss is not None:
            self.report.evaluated(loss)
        self.sample = await self.write_sample()

    async def _show_progress(self) -> None:
        """Move the bar within a step, which may take minutes."""
        while True:
            self.report.within(self.loop.num_counted)
            await asyncio.sleep(PROGRESS_SECONDS)

    async def only_evaluate(self) -> None:
        """Evaluate as `train` does at its end. Raises Fatal if the swarm could not compute the losses."""
        self.report.figures.begin(await self._present_round())
        loss = await self.evaluate()
        if loss is None:
            raise Fatal("the swarm could not be evaluated; the line above says why")
        self.report.figures.begin(self.watcher.latest_round)
        self.report.evaluated(loss)
        self.sample = await self.write_sample()

    async def _present_round(self) -> int:
        """The round at which the swarm is. Waits until a peer reports it."""
        await self.watcher.poll()
        # A resumed run begins at a later round than 0, and some of its stages may have no peer yet.
        while (present := self.watcher.known_round) is None:
            for block in self.paths.blocks:
                if (obstacle := self.watcher.obstacle(block)) is not None:
                    self.report.waiting(block, obstacle)
            await asyncio.sleep(0.5)
            await self.watcher.poll()
        return present

    async def step(self, step: Step) -> None:
        number, every = step.number, self.options.evaluate_every
        last = number - self.report.figures.first_step == self.options.steps
        loss = await self.evaluate() if every and number % every == 0 and not last else None
        self.report.step(step, loss)

    async def evaluate(self) -> HeldOutLoss | None:
        """Losses on held-out text at the newest round; None, with a warning, if the swarm could not compute them.

        The trainer feeds nothing meanwhile. If the swarm moves on before its peers hold the round, it tries again.
        """
        cause: Fatal | None = None
        with self.loop.paused(), self.waits.on(self._evaluation_in_words):
            for _ in range(ATTEMPTS):
                self._evaluated = 0, 0
                await self.watcher.poll()
                try:
                    work = held_out_loss(
                        self._alongs(), await self.text(), round_number=self.watcher.latest_round,
                        num_samples=self.options.evaluation_samples, rerouting=self.rerouting,
                        evaluated=self._has_evaluated,
                    )  # fmt: skip
                    # The evaluation runs in a task of its own, because in older Pythons a failed task group leaves the
                    # task around it half cancelled.
                    return await asyncio.create_task(work)
                except Fatal as error:
                    logger.info("evaluating again: %s", error)
                    cause = error
        logger.warning("no evaluation, after %d attempts: %s", ATTEMPTS, cause)
        return None

    def _has_evaluated(self, num_done: int, num_all: int) -> None:
        self._evaluated = num_done, num_all

    def _evaluation_in_words(self, seconds: float) -> str:
        num_done, num_all = self._evaluated
        left = (
            f": {num_done} of {num_all} parts are done, {seconds * (num_all / num_done - 1):.0f} s left"
            if num_done
            else ""
        )
        return f"the loss on held-out text{left}"

    async def text(self) -> Microbatches:
        """The text of the newest round that is known. Raises CorpusMismatch if this machine does not have it."""
        data = self.timeline.at(self.watcher.latest_round).data
        return await asyncio.wrap_future(self.texts.want(data))

    def _alongs(self) -> list[Along]:
        live = [path for path in self.paths.paths if self.paths.is_live(path)]
        first = {path: self.timeline.config.blocks_of(path)[0] for path in live or self.paths.paths}
        return [Along(path, self.hops[block], self.loop.listener(path)) for path, block in first.items()]

    async def write_sample(self) -> str:
        """Let the trained swarm continue a held-out prompt. Empty if the user asked for no text, or (with a warning) if
        the swarm could not write it."""
        if not self.options.sample_tokens:
            return ""
        config = self.timeline.config
        tokenizer = tokenizers.load(self.options.tokenizer or config.data.tokenizer)
        sampling = Sampling(temperature=TEMPERATURE, seed=config.data.seed)
        try:
            along = self._alongs()[0]
            engine = SwarmEngine(along.hop, config, path=along.path)
            texts = (await self.text()).held_out_by_source(1)
            own = next(text for text in texts if not text.paths or along.path in text.paths)
            prompt = own.batches[0][TOKENS][0, :-1].tolist()[-_half(engine) :]
            with self.waits.on("a sample of text"):
                tokens = await _continued(engine, prompt, sampling, self.options.sample_tokens)
        except (ValueError, SwarmError) as error:
            logger.warning("no sample of text: %s", error)
            return ""
        # The swarm's text comes from strangers, and may have control characters for the terminal.
        written = [printable(tokenizer.decode(part), keep="\n\t") for part in (prompt, tokens)]
        return f"--- held-out text ---\n{written[0]}\n--- the swarm goes on ---\n{written[1]}\n---"


async def _continued(engine: SwarmEngine, prompt: list[int], sampling: Sampling, num_tokens: int) -> list[int]:
    """The given number of tokens after the prompt. If a sequence reaches its greatest length, a new one begins with its
    second half."""
    tokens = list(prompt)
    while (num_left := len(prompt) + num_tokens - len(tokens)) > 0:
        context = tokens[-_half(engine) :]
        tokens += await collect(engine, context, sampling, max(1, min(num_left, engine.longest - len(context))))
    return tokens[len(prompt) :]


def _half(engine: SwarmEngine) -> int:
    return max(1, engine.longest // 2)
