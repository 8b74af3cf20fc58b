"""A stage that records everything that averaging does to it, and checks of what must be true of these records.

Used by tests/averaging/faults.py. A contribution encodes which microbatches it has, so a result shows which
microbatches it counts, and how often. Sends nothing.

Shapes: D elements of the model, of which the last SLOTS tell the microbatches.
"""

import asyncio
import dataclasses
import functools
import hashlib
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from swarm.training.round_member import Contribution, RoundResult, Snapshot, Tensors, known
from tests.averaging.fake_stage import MICROBATCH, FakeStage, gradient

SLOTS = 512
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9

Gate = Callable[[str, str], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Commit:
    """The commit of one result by one member."""

    parent: str
    """The lineage before the commit."""
    result: RoundResult
    digest: str
    """The digest of anchor and outer state after the commit."""


@dataclass(frozen=True, kw_only=True)
class Closed:
    """One contribution of one member."""

    lineage: str
    microbatches: frozenset[int]


@functools.cache
def gradient_D(index: int) -> torch.Tensor:
    """The gradient of a microbatch, which encodes the microbatch's number. All gradients have about the same norm, so
    none is clipped."""
    slots = torch.zeros(SLOTS)
    slots[index] = 1.0
    return torch.cat([gradient(index) + 10.0, slots])


def vector_D(result: RoundResult) -> torch.Tensor:
    """A result as one vector, in the form of `gradient_D`."""
    return torch.cat([result.tensors["b"], result.tensors["a"].reshape(-1)])


def microbatches_in(result: RoundResult) -> list[int]:
    """Which microbatches a result counts, each as often as it is counted."""
    counts = vector_D(result)[-SLOTS:].double() * result.num_samples / MICROBATCH
    whole = counts.round()
    assert float((counts - whole).abs().max()) < 0.05, "a part of a microbatch counts"
    return torch.repeat_interleave(whole.long()).tolist()


class WitnessStage(FakeStage):
    """A stage with an outer momentum. `gate` is awaited before and after each of its methods."""

    def __init__(self, lineage: str = "00") -> None:
        super().__init__(lineage)
        self.anchor = torch.zeros(17 + SLOTS)
        self.momentum = torch.zeros_like(self.anchor)
        self.commits: list[Commit] = []
        self.closings: list[Closed] = []
        self.states: list[tuple[str, str]] = [(lineage, self.digest)]
        """The lineage and the digest of every state that the stage was ever in."""
        self.fed: set[int] = set()
        self.lost: set[int] = set()
        """The microbatches that were learnt while it was undecided whether a result would be committed, if it was
        committed in the end."""
        self.gate: Gate = _open

    def learn(self, *indices: int) -> None:
        self.fed.update(indices)
        super().learn(*indices)

    async def freeze(self, round_number: int, *, drop: Collection[int]) -> Contribution:
        await self.gate("close", "before")
        contribution = await super().freeze(round_number, drop=drop)
        total_D = sum((gradient_D(index) for index in sorted(contribution.committed)), torch.zeros(17 + SLOTS))
        mean_D = total_D / max(1, len(contribution.committed))
        self.closings.append(Closed(lineage=self.lineage, microbatches=contribution.committed))
        await self.gate("close", "after")
        return dataclasses.replace(contribution, tensors={"b": mean_D[:5], "a": mean_D[5:].reshape(4, -1)})

    async def reopen(self, round_number: int) -> None:
        await self.gate("reopen", "before")
        await super().reopen(round_number)
        await self.gate("reopen", "after")

    async def apply(self, result: RoundResult) -> asyncio.Future[str]:
        await self.gate("apply", "before")
        assert result.round == self.round, "a round is applied once"
        step_D = vector_D(result)
        self.momentum = OUTER_MOMENTUM * self.momentum + step_D
        self.anchor = self.anchor - OUTER_RATE * (step_D + OUTER_MOMENTUM * self.momentum)
        parent, self.lineage = self.lineage, result.lineage
        self.run_samples += result.num_samples
        self.round += 1
        if result.contributed:
            self.lost |= self.indices - set(microbatches_in(result))
        self._begin(carry=not result.contributed)
        self.results.append(result)
        self.digests.append(self.digest)
        self.commits.append(Commit(parent=parent, result=result, digest=self.digest))
        self.states.append((self.lineage, self.digest))
        await self.gate("apply", "after")
        return known(self.digest)

    @property
    def digest(self) -> str:
        return self.digest_of({"anchor": self.anchor, "momentum": self.momentum})

    def digest_of(self, tensors: Tensors) -> str:
        return hashlib.sha256(tensors["anchor"].numpy().tobytes() + tensors["momentum"].numpy().tobytes()).hexdigest()

    async def snapshot(self) -> Snapshot:
        await self.gate("snapshot", "before")
        snapshot = await super().snapshot()
        return dataclasses.replace(snapshot, tensors={**snapshot.tensors, "momentum": self.momentum})

    async def install(self, snapshot: Snapshot, *, carry: bool = False) -> None:
        await self.gate("install", "before")
        await super().install(snapshot, carry=carry)
        self.momentum = snapshot.tensors["momentum"]
        self.states.append((self.lineage, self.digest))
        await self.gate("install", "after")


async def _open(name: str, moment: str) -> None:
    await asyncio.sleep(0)


@dataclass(frozen=True)
class Testimony:
    """The records of all members of one group, and checks of them."""

    stages: dict[str, WitnessStage]
    """By peer id, including dead peers."""
    living: frozenset[str]

    @property
    def edges(self) -> dict[str, Commit]:
        """Each committed result once, by the lineage that it led to."""
        return {commit.result.lineage: commit for stage in self.stages.values() for commit in stage.commits}

    def chain(self, lineage: str) -> list[Commit]:
        """The commits from the beginning to a lineage."""
        edges, chain = self.edges, []
        while lineage in edges:
            chain.append(edges[lineage])
            lineage = edges[lineage].parent
        return chain[::-1]

    @property
    def forks(self) -> list[str]:
        """Lineages from which more than one round went out."""
        parents = [commit.parent for commit in self.edges.values()]
        return sorted({parent for parent in parents if parents.count(parent) > 1})

    def together_since(self, round_number: int) -> bool:
        """Whether all living members have the same state, after a later round to which all of them contributed."""
        lineages = {self.stages[peer_id].lineage for peer_id in self.living}
        chain = self.chain(lineages.pop())[round_number:]
        return not lineages and any(self.living == set(commit.result.members) for commit in chain)

    @property
    def has_majority(self) -> bool:
        """Whether more than half of the last round's members live."""
        latest = max((self.stages[peer_id] for peer_id in self.living), key=lambda stage: stage.round)
        members = set(self.chain(latest.lineage)[-1].result.members)
        return 2 * len(members & self.living) > len(members)

    def check(self, *, round_microbatches: int | None) -> None:
        """Check what must be true at all times, whatever happened.

        Args:
            round_microbatches: in the synchronous setting, how many a round has.
        """
        self._check_one_state_a_lineage()
        edges = self.edges
        for stage in self.stages.values():
            for commit in stage.commits:
                edge = edges[commit.result.lineage]
                assert (commit.parent, commit.result.round) == (edge.parent, edge.result.round), "branches mixed"
                assert commit.result.members == edge.result.members
                assert commit.result.num_samples == edge.result.num_samples
                assert torch.equal(vector_D(commit.result), vector_D(edge.result))
        for edge in edges.values():
            self._check_sources(edge)
            if round_microbatches is not None:
                start = edge.result.round * round_microbatches
                assert microbatches_in(edge.result) == [*range(start, start + round_microbatches)]
        for stage in self.stages.values():
            self._check_lineage(stage)

    def _check_one_state_a_lineage(self) -> None:
        digests: dict[str, str] = {}
        for stage in self.stages.values():
            for lineage, digest in stage.states:
                assert digests.setdefault(lineage, digest) == digest, "members of one lineage differ"

    def _check_sources(self, edge: Commit) -> None:
        """Check that a result has exactly what its members contributed at the state before it, each microbatch once."""
        counted = microbatches_in(edge.result)
        assert len(counted) == len(set(counted)), "a microbatch counts twice"
        assert MICROBATCH * len(counted) == edge.result.num_samples
        assert len(set(edge.result.members)) == len(edge.result.members)
        unexplained = set(counted)
        for peer_id in edge.result.members:
            given = [c.microbatches for c in self.stages[peer_id].closings if c.lineage == edge.parent]
            assert given, "a member of another branch took part"
            fitting = [microbatches for microbatches in given if microbatches <= set(counted)]
            assert fitting, "a member is said to have taken part, and its contribution is not in the result"
            unexplained -= frozenset().union(*fitting)
        assert not unexplained

    def check_nothing_lost(self) -> None:
        """With DiLoCo, check that all microbatches count that were learnt by members that neither died nor took over
        another state.

        Microbatches in `lost` are left out.
        """
        for stage in (self.stages[peer_id] for peer_id in self.living):
            if all(stage.carried):
                counted = set(counted_in(self.chain(stage.lineage)))
                assert stage.fed - stage.indices - stage.lost <= counted, "gradient mass is lost"

    def _check_lineage(self, stage: WitnessStage) -> None:
        """Check that applying the rounds of its lineage to the first anchor gives the stage's anchor, and that nothing
        counts twice."""
        chain = self.chain(stage.lineage)
        anchor_D, momentum_D = np.zeros(17 + SLOTS), np.zeros(17 + SLOTS)
        for commit in chain:
            step_D = vector_D(commit.result).double().numpy()
            momentum_D = OUTER_MOMENTUM * momentum_D + step_D
            anchor_D -= OUTER_RATE * (step_D + OUTER_MOMENTUM * momentum_D)
        np.testing.assert_allclose(stage.anchor.numpy(), anchor_D, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(stage.momentum.numpy(), momentum_D, rtol=1e-4, atol=1e-4)
        assert (stage.round, stage.run_samples) == (len(chain), sum(c.result.num_samples for c in chain))
        counted = counted_in(chain)
        assert len(counted) == len(set(counted)), "a microbatch counts in two rounds"


def counted_in(chain: Sequence[Commit]) -> list[int]:
    """The microbatches of some rounds."""
    return [index for commit in chain for index in microbatches_in(commit.result)]


def check_same_step(groups: Sequence[Testimony]) -> None:
    """Check that all stages clipped by the norm of the whole model, and that none is more than one round ahead."""
    norms: dict[int, dict[int, float]] = {}
    totals: dict[int, set[float]] = {}
    for number, group in enumerate(groups):
        for commit in group.edges.values():
            norms.setdefault(commit.result.round, {})[number] = commit.result.squared_norm
        for stage in group.stages.values():
            for result in stage.results:
                totals.setdefault(result.round, set()).add(result.total_squared_norm)
    for round_number, found in totals.items():
        assert len(found) == 1, "a round was scaled in two ways"
        if len(norms[round_number]) == len(groups):
            assert found == {sum(norm for _, norm in sorted(norms[round_number].items()))}
        else:
            assert round_number == max(totals), "a stage went on without the others"
