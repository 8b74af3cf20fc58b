"""Honest members of two kinds of processors, without a network: does their rounding make anybody look like a liar?

Half of the members compute in a child process whose torch is told to use the plainest instructions (the environment
variable ATEN_CPU_CAPABILITY), and so rounds otherwise. Contributions are compared by the owners of parts, and judged,
by the swarm's own code; nothing is encoded or sent. In synchronous rounds one microbatch of each member is computed on
both kinds, and the two gradients and their sketches are compared as a check does that. Every third round one member is
killed, and replaced.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import IO, Any

import numpy as np
import torch

from peers.shared import process
from scripts.benches.shared.common import side, with_corpus
from scripts.benches.sides.reference import Reference
from swarm.averaging.agreement.shares import part_sizes
from swarm.averaging.vectors.scrutiny import Newcomers
from swarm.compression import buffers
from swarm.config import RunConfig
from swarm.data.microbatches import Microbatches
from swarm.errors import PeerUnavailable
from swarm.honesty.comparison import Comparison, Memory, growth_of, layers_of
from swarm.honesty.suspects import Suspects
from swarm.stage.spot_check import TOLERANCE
from swarm.training.samples import amount
from swarm.training.sketches import SIGNED_TOLERANCE, Sketch, share_of_difference

PLAINEST = "default"
REPLACED_EVERY = 3
"""In every so many rounds a member is killed and replaced."""
Work = Mapping[str, Sequence[int]]
"""By member, the microbatches of a round that it computes."""


class Trainers:
    """What some members compute. With DiLoCo each keeps its optimizer's state from round to round."""

    def __init__(self, config: RunConfig, data: Microbatches) -> None:
        self._config, self._data = config, data
        self._references: dict[str, Reference] = {}

    def contributions(self, anchor: torch.Tensor, work: Work, number: int) -> dict[str, torch.Tensor]:
        self._references = {name: each for name, each in self._references.items() if name in {"", *work}}
        return {name: self._contribution(name, anchor, indices, number) for name, indices in work.items()}

    def _contribution(self, name: str, anchor: torch.Tensor, indices: Sequence[int], number: int) -> torch.Tensor:
        name = "" if self._config.rounds.synchronous else name
        reference = self._references.get(name) or Reference(self._config, self._data)
        self._references[name] = reference
        reference.load(buffers.cut(anchor, reference.weights))
        if self._config.rounds.synchronous:
            reference.accumulate_mean(dict.fromkeys(indices, 1))
            return vector_of(reference.take_gradients())
        for index in indices:
            reference.accumulate_mean({index: 1})
            reference.update(number)
        return anchor - vector_of(reference.weights)


def vector_of(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    num_elements = sum(tensor.numel() for tensor in tensors.values())
    return buffers.concatenate(tensors, torch.empty(num_elements))


# -- the other kind of processor ---------------------------------------------------------------------------------------


class OtherKind:
    """The child process, which computes as Trainers do."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child

    def stop(self) -> None:
        self._child.kill()
        self._child.wait()
        assert self._child.stdin is not None
        with suppress(BrokenPipeError):  # What it did not read any more is lost.
            self._child.stdin.close()

    def ask(self, anchor: torch.Tensor, work: Work, number: int) -> None:
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps([work, number]).encode() + b"\n" + anchor.numpy().tobytes())
            self._child.stdin.flush()
        except (BrokenPipeError, ValueError):
            raise PeerUnavailable("the child process has ended") from None

    def answer(self, anchor: torch.Tensor, work: Work) -> dict[str, torch.Tensor]:
        assert self._child.stdout is not None
        try:
            return {name: _read(self._child.stdout, anchor.numel()) for name in work}
        except EOFError:
            raise PeerUnavailable("the child process has ended") from None


@contextmanager
def other_kind(*arguments: object) -> Iterator[OtherKind]:
    """The child for the configuration and the text that these arguments of `serve` name."""
    environment = os.environ | {"ATEN_CPU_CAPABILITY": PLAINEST}
    words = side("mixed_processors", *arguments)
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as child:
        other = OtherKind(child)
        try:
            yield other
        finally:
            other.stop()


def _read(stream: IO[bytes], num_elements: int) -> torch.Tensor:
    data = stream.read(4 * num_elements)
    if len(data) < 4 * num_elements:
        raise EOFError
    return torch.from_numpy(np.frombuffer(bytearray(data), dtype=np.float32))


def serve(config: RunConfig, data: Microbatches, asked: IO[bytes], answers: IO[bytes]) -> None:
    """Compute until the other process has ended."""
    trainers = Trainers(config, data)
    num_elements = sum(weight.numel() for weight in Reference(config, data).weights.values())
    while line := asked.readline():
        work, number = json.loads(line)
        found = trainers.contributions(_read(asked, num_elements), work, number)
        answers.write(b"".join(found[name].numpy().tobytes() for name in work))
        answers.flush()


# -- rounds ------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class MixedRounds:
    """Rounds of a stage, as a member sees them that is there all the time.

    Attributes:
        num_words: how often an owner found a member out of line, and how often it could have.
        left_out: the members that were left out of a round.
        disproved: the microbatches whose gradient, or its sketch, a check would have found wrong.
        num_checked: the microbatches that were computed on both kinds of processors.
        most_rounding: the largest difference between the two gradients of one of them, as a share of their norm.
    """

    config: RunConfig
    data: Microbatches
    other: OtherKind
    num_members: int
    microbatches_each: int
    suspects: Suspects = field(default_factory=Suspects)
    named: set[str] = field(default_factory=set)
    left_out: set[tuple[int, str]] = field(default_factory=set)
    num_words: list[int] = field(default_factory=lambda: [0, 0])
    disproved: set[int] = field(default_factory=set)
    num_checked: int = 0
    most_rounding: float = 0.0

    def __post_init__(self) -> None:
        self._like = Reference(self.config, self.data).weights
        self.anchor = vector_of(self._like)
        self._main = Reference(self.config, self.data)
        if not self.config.rounds.synchronous:
            outer = self.config.outer_step
            self._outer = torch.optim.SGD(
                [self.anchor], lr=outer.learning_rate, momentum=outer.momentum, nesterov=outer.momentum > 0
            )
        self._trainers = Trainers(self.config, self.data)
        self._members = [f"{place} from the start" for place in range(self.num_members)]
        self._memories: dict[str, Memory] = {}
        self._newcomers = Newcomers(round_number=lambda: self._number, starts=dict)

    def run(self, number: int) -> None:
        self._number = number
        dead = number // REPLACED_EVERY % self.num_members if number % REPLACED_EVERY == REPLACED_EVERY - 1 else None
        vectors = self._computed(number, dead)
        weights = self._judged(number, vectors)
        average, total = torch.zeros_like(self.anchor), sum(weights.values())
        for name, weight in weights.items():
            average += vectors[name] * (weight / total)
        self._step(number, average)
        for line in self.suspects.lines:
            name, is_naming, _ = line.partition(" lies: ")
            if is_naming:
                self.named.add(name)
        if dead is not None:
            self._members[dead] = f"{dead} from round {number + 1}"

    def _computed(self, number: int, dead: int | None) -> dict[str, torch.Tensor]:
        """What the members contribute that live to its end: in the synchronous setting they compute what the dead one
        had."""
        first = number * self.num_members * self.microbatches_each
        living = [place for place in range(self.num_members) if place != dead]
        self._work: dict[str, list[int]] = {self._members[place]: [] for place in living}
        for nth in range(self.num_members * self.microbatches_each):
            place = nth % self.num_members
            if place == dead and not self.config.rounds.synchronous:
                continue
            owner = living[nth % len(living)] if place == dead else place
            self._work[self._members[owner]].append(first + nth)
        there = {name: work for name, work in self._work.items() if int(name.split()[0]) % 2}
        here = {name: work for name, work in self._work.items() if name not in there}
        checks = {f"check of {work[0]}": work[:1] for work in self._work.values() if self.config.rounds.synchronous}
        self.other.ask(self.anchor, {**there, **checks}, number)
        found = self._trainers.contributions(self.anchor, {**here, **checks}, number)
        others = self.other.answer(self.anchor, {**there, **checks})
        for name, work in checks.items():
            self._compare(work[0], found[name], others[name], number)
        found |= others
        return {name: found[name] for name in self._work}

    def _compare(self, microbatch: int, here: torch.Tensor, there: torch.Tensor, number: int) -> None:
        """Compare the gradients of one microbatch from the two kinds of processors, and what would have been signed."""
        sketch = Sketch(self._like, str(number))
        one, other = (sketch.of(buffers.cut(each, self._like)) for each in (here, there))
        rounding = share_of_difference(here, there)
        self.num_checked += 1
        self.most_rounding = max(self.most_rounding, rounding)
        if rounding > TOLERANCE or share_of_difference(one, other) > SIGNED_TOLERANCE:
            self.disproved.add(microbatch)

    def _judged(self, number: int, vectors: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """The members whose contributions are taken, with their targets."""
        length = self.anchor.numel()
        amounts = {name: sum(amount(self.data.samples(i)).targets for i in work) for name, work in self._work.items()}
        layers = layers_of(buffers.places(buffers.cut(self.anchor, self._like), is_tiled=False))
        while True:
            order = self.suspects.in_order(amounts, number)
            ends = np.cumsum([0, *part_sizes(length, [0.0] * len(order), tile=1)])
            places = {name: slice(int(ends[i]), int(ends[i + 1])) for i, name in enumerate(order)}
            said = {}
            for owner, part in places.items():
                memory = self._memories.setdefault(owner, Memory(np.random.default_rng(len(self._memories))))
                memory.begin(length)
                comparison = Comparison(
                    amounts=amounts, part=part, layers=layers, memory=memory,
                    growth=growth_of(is_synchronous=self.config.rounds.synchronous),
                    newcomers=self._newcomers.among(amounts),
                )  # fmt: skip
                said[owner] = comparison.deviations({name: vectors[name][part] for name in order})
                self.num_words[0] += len(said[owner])
                self.num_words[1] += len(order) - 1
            out = {found.peer_id for found in self.suspects.judge(number, said, places)}
            if not out:
                break
            self.left_out |= {(number, name) for name in out}
            amounts = {name: each for name, each in amounts.items() if name not in out}
        for name in amounts:
            self._memories[name].committed()
        return amounts

    def _step(self, number: int, average: torch.Tensor) -> None:
        if self.config.rounds.synchronous:
            self._main.load(buffers.cut(self.anchor, self._like))
            self._main.put_gradients(buffers.cut(average, self._like))
            self._main.update(number)
            self.anchor.copy_(vector_of(self._main.weights))
        else:
            self.anchor.grad = average
            self._outer.step()


def train(
    config: RunConfig, data: Microbatches, other: OtherKind, shape: tuple[int, int], num_rounds: int
) -> dict[str, Any]:
    """`shape` says how many members there are, and how many microbatches each has in a round."""
    began = time.perf_counter()
    rounds = MixedRounds(config, data, other, *shape)
    differing = rounding(rounds)
    for number in range(num_rounds):
        rounds.run(number)
    return {
        "caught": 0.0, "falsely_named": len(rounds.named) + len(rounds.disproved), "left_out": len(rounds.left_out),
        "rounds": num_rounds, "words": rounds.num_words[0] / rounds.num_words[1], "num_checked": rounds.num_checked,
        "rounding": max(differing, rounds.most_rounding),
        "seconds": time.perf_counter() - began,
    }  # fmt: skip


def rounding(rounds: MixedRounds) -> float:
    """How much one gradient differs between the two kinds of processors, relative to its norm."""
    work = {"1": [0]}
    rounds.other.ask(rounds.anchor, work, 0)
    there = rounds.other.answer(rounds.anchor, work)["1"]
    here = Trainers(rounds.config, rounds.data).contributions(rounds.anchor, work, 0)["1"]
    return float((there - here).norm() / here.norm())


def main(setting: str, dataset: str, codec: str, seed: int) -> None:
    from scripts.benches.sides.liars_arm import run_config  # It imports this module.

    process.prepare_environment()
    torch.set_num_threads(1)
    assert torch.backends.cpu.get_cpu_capability() == PLAINEST.upper()
    serve(*with_corpus(run_config(setting, dataset, codec, seed)), sys.stdin.buffer, sys.stdout.buffer)
