"""The lies that a peer of the bench `liars` tells, each where a liar would tell it: in what it computes, so that its
answers and its contribution agree, in its answers alone, or in its contribution alone."""

import dataclasses
from collections.abc import Callable, Collection, Mapping

import torch

from swarm.stage.backend import StageBackend
from swarm.stage.buckets import Accumulated
from swarm.stage.function import WireInputs
from swarm.stage.member import StageMember
from swarm.stage.staging import Download
from swarm.training.round_member import Contribution
from swarm.training.samples import TOKENS

FLIPPED_LAYER = "layers.2."
Vectors = Mapping[str, torch.Tensor]
Lie = Callable[[Vectors, Vectors | None, int], Vectors]
"""Makes another contribution of the true one, of that of the round before, and of the round's number."""


def _random(true: Vectors, _: Vectors | None, number: int) -> Vectors:
    generator = torch.Generator().manual_seed(number)
    return {name: _of_the_norm(value, generator) for name, value in true.items()}


def _of_the_norm(true: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    drawn = torch.randn(true.shape, generator=generator)
    told: torch.Tensor = drawn * (true.norm() / drawn.norm().clamp_min(1e-30))
    return told


def _one_layer(true: Vectors, _: Vectors | None, __: int) -> Vectors:
    return {name: -value if name.startswith(FLIPPED_LAYER) else value for name, value in true.items()}


CONTRIBUTIONS: Mapping[str, Lie] = {
    "zeros": lambda true, _, __: {name: torch.zeros_like(value) for name, value in true.items()},
    "sign": lambda true, _, __: {name: -value for name, value in true.items()},
    "scaled": lambda true, _, __: {name: 3.0 * value for name, value in true.items()},
    "random": _random,
    "yesterday": lambda true, before, _: before or true,
    "one-layer": _one_layer,
}  # fmt: skip
COMPUTED = ("other-microbatch", "labels", "one-in-ten", "activations")
"""Lies in what is computed: another microbatch under this one's name; the tokens in a random order, so that labels do
not follow from inputs; that for one microbatch in ten; and random numbers of the right norm for the gradient that is
answered, where the contribution is true."""
WAYS = (*CONTRIBUTIONS, *COMPUTED)


class LyingMember:
    """Stands between a peer's stage and its averager, and lies from some round on."""

    def __init__(self, member: StageMember, lie: Lie, first_round: int) -> None:
        self._freeze = member.freeze
        self._lie = lie
        self._first_round = first_round
        self._told: tuple[Contribution, Contribution] | None = None
        self._before: Vectors | None = None
        self._round = -1
        self._true: Vectors = {}
        member.freeze = self.freeze  # type: ignore[method-assign]

    async def freeze(self, round_number: int, *, drop: Collection[int]) -> Contribution:
        true = await self._freeze(round_number, drop=drop)
        if self._told is None or self._told[0] is not true:
            if round_number != self._round:
                self._round, self._before = round_number, self._true or None
            self._true = {name: tensor.clone() for name, tensor in true.tensors.items()}
            is_lie = round_number >= self._first_round and true.num_samples
            tensors = self._lie(self._true, self._before, round_number) if is_lie else true.tensors
            self._told = true, dataclasses.replace(true, tensors=tensors)
        return self._told[1]


class LyingBackend:
    """Stands before a last stage's computation, and lies once `is_lying`. What it is asked to compute for others'
    checks is true: who lies there finds all others wrong, and gives itself away."""

    def __init__(self, backend: StageBackend, way: str, is_lying: Callable[[], bool]) -> None:
        self._compute = backend.forward_loss
        self._way = way
        self._is_lying = is_lying
        self._generator = torch.Generator().manual_seed(0)
        self._before: WireInputs | None = None
        self._num_computed = 0
        backend.forward_loss = self.forward_loss  # type: ignore[method-assign]

    def forward_loss(
        self, microbatch: int, round_number: int, wire_inputs: WireInputs, *, accumulate: bool,
        only_at: int | None = None,
    ) -> tuple[float, Download | None, Accumulated | None]:  # fmt: skip
        lies = accumulate and self._is_lying()
        told = self._inputs(wire_inputs) if lies else wire_inputs
        loss, answer, accumulated = self._compute(
            microbatch, round_number, told, accumulate=accumulate, only_at=only_at
        )
        if lies and self._way == "activations" and answer is not None:
            answer = Download(_of_the_norm(answer.wait(), self._generator))
        return loss, answer, accumulated

    def _inputs(self, true: WireInputs) -> WireInputs:
        self._num_computed += 1
        if self._way == "other-microbatch":
            told, self._before = self._before or true, true
            return told
        if self._way == "labels" or (self._way == "one-in-ten" and self._num_computed % 10 == 0):
            order = torch.rand(true[TOKENS].shape, generator=self._generator).argsort(dim=1)
            return {**true, TOKENS: true[TOKENS].gather(1, order)}
        return true
