"""What a trainer does from its first step to its last evaluation.

Used by program.py. Between steps, and at the end, the swarm is asked for the loss on held-out text and for a sample.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from peers.shared import process
from peers.trainer.options import TrainerOptions
from peers.trainer.report import Report
from swarm.config import RunConfig
from swarm.data import tokenizers
from swarm.data.microbatches import Microbatches
from swarm.errors import Fatal
from swarm.hop.hop import Hop
from swarm.pipeline.evaluate import HeldOutLoss, generate, held_out_loss
from swarm.pipeline.round_watcher import RoundWatcher
from swarm.pipeline.train_loop import Step, TrainLoop
from swarm.training.samples import TOKENS

logger = logging.getLogger(__name__)

ATTEMPTS = 5
"""Times that an evaluation is tried while other trainers move the swarm on."""

Result = TypeVar("Result")


@dataclass
class Session:
    """One run of the trainer, from its first step to its last evaluation."""

    options: TrainerOptions
    config: RunConfig
    data: Microbatches
    hop: Hop
    watcher: RoundWatcher
    loop: TrainLoop
    report: Report
    sample: str = ""

    async def train(self) -> None:
        """Train the steps that were asked for, then evaluate."""
        first = await self._present_round()
        self.report.begin(first)
        await self.loop.run(first, self.options.steps, self.step)
        loss = await self.evaluate()
        if loss is not None:
            self.report.evaluated(loss)
        await self._write_sample_if_due()

    async def only_evaluate(self) -> None:
        """Evaluate as `train` does at its end. Raises Fatal if the swarm could not compute it."""
        self.report.figures.begin(await self._present_round())
        loss = await self.evaluate()
        if loss is None:
            raise Fatal("the swarm could not be evaluated; the line above says why")
        self.report.figures.begin(self.watcher.latest_round)
        self.report.evaluated(loss)
        await self._write_sample_if_due()

    async def _write_sample_if_due(self) -> None:
        if self.options.sample_tokens:
            self.sample = await self.write_sample()

    async def _present_round(self) -> int:
        """At which the swarm is; waits until that can be told."""
        await self.watcher.poll()
        # A run that was resumed begins at a later round, and not all of its stages may be there yet.
        while (present := self.watcher.known_round) is None:
            for stage in range(self.config.stages.num_stages):
                if (obstacle := self.watcher.obstacle(stage)) is not None:
                    self.report.waiting(stage, obstacle)
            await asyncio.sleep(0.5)
            await self.watcher.poll()
        return present

    async def step(self, step: Step) -> None:
        """Report a step, with an evaluation if it is time for one."""
        number, every = step.number, self.options.evaluate_every
        last = number - self.report.figures.first_step == self.options.steps
        loss = await self.evaluate() if every and number % every == 0 and not last else None
        self.report.step(step, loss)

    async def evaluate(self) -> HeldOutLoss | None:
        """Losses on held-out text; None, with a warning, if the swarm could not compute it."""
        return await self.at_rest(
            lambda round_number: held_out_loss(
                self.hop,
                self.data,
                round_number=round_number,
                num_samples=self.options.evaluation_samples,
                listener=self.loop,
            )
        )

    async def write_sample(self) -> str:
        """Text that the trained swarm writes, after a held-out prompt."""
        tokenizer = tokenizers.load(self.options.tokenizer or self.config.data.tokenizer)
        prompt = self.data.held_out(1)[0][TOKENS][0, :-1].tolist()
        tokens = await self.at_rest(
            lambda round_number: generate(
                self.hop,
                self.config,
                prompt,
                round_number=round_number,
                num_tokens=self.options.sample_tokens,
                temperature=0.7,
                seed=self.config.data.seed,
                listener=self.loop,
            )
        )
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
