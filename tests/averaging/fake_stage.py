"""A stage of which the contributions are known vectors, for the tests of averaging."""

import asyncio
import hashlib
from collections.abc import Callable, Collection, Mapping

import numpy as np
import torch

from swarm.averaging.averager import Averager
from swarm.config import RunConfig, from_dict
from swarm.errors import IntegrityError
from swarm.training.round_member import Activity, Contribution, Progress, RoundResult, Snapshot, Tensors, known
from swarm.training.tally import EMPTY

MICROBATCH = 2


def make_config(
    setting: str = "synchronous",
    *,
    microbatches: int = 6,
    stages: int = 1,
    codec: str = "fp32",
    quorum: str = "available",
) -> RunConfig:
    """The configuration of a run with rounds of this many microbatches, of two samples each."""
    return from_dict(
        {
            "model": {"num_layers": 4}, "stages": {"num_stages": stages}, "data": {"microbatch_size": MICROBATCH},
            "rounds": {
                "setting": setting, "round_samples": microbatches * MICROBATCH, "inner_batch_samples": MICROBATCH,
            },
            "averaging": {"codec": codec, "quorum": quorum},
        },
        source="test",
    )  # fmt: skip


def gradient(index: int) -> torch.Tensor:
    """The gradient of one microbatch, as one vector. Every peer computes the same one."""
    return torch.from_numpy(np.random.default_rng(index).standard_normal(17).astype(np.float32))


class FakeStage:
    """A RoundMember whose contribution is the mean gradient of the microbatches it was given."""

    def __init__(self, lineage: str = "00") -> None:
        self.round, self.run_samples, self.lineage = 0, 0, lineage
        self.is_behind = False
        self.anchor = torch.zeros(17)
        self.indices: set[int] = set()
        self.surplus = 0
        """How many microbatches it contributes without saying which ones."""
        self.results: list[RoundResult] = []
        self.digests: list[str] = []
        self.closed = False
        self.num_installs = 0
        self.carried: list[bool] = []
        """For each installed snapshot, whether the stage was to keep what it had learnt before."""
        self.dropped: set[int] = set()
        self.quiet_seconds: Callable[[], float] = lambda: 0.0
        """The seconds since it last finished a piece of work."""
        self.poison = False
        """Whether it contributes NaN."""
        self.carries = False
        """Whether it keeps, as DiLoCo does, microbatches that no round has counted yet when another state is installed
        or replayed."""
        self.on_training_on: Callable[[], None] = lambda: None
        self.averager: Averager | None = None
        self.tally = EMPTY

    def learn(self, *indices: int) -> None:
        """Commit microbatches."""
        self.indices.update(indices)
        if self.averager is not None:
            self.averager.notify()

    def progress(self) -> Progress:
        return Progress(
            round=self.round, lineage=self.lineage, run_samples=self.run_samples,
            num_samples=MICROBATCH * len(self.indices), committed=frozenset(self.indices),
            highest_microbatch=max(self.indices, default=-1), tally=self.tally,
        )  # fmt: skip

    def activity(self) -> Activity:
        return Activity(quiet_seconds=self.quiet_seconds(), longest_seconds=0.0, num_bytes=0)

    def disproved(self) -> Mapping[str, str]:
        return {}

    def set_behind(self, is_behind: bool) -> None:
        self.is_behind = is_behind

    async def freeze(self, round_number: int, *, drop: Collection[int]) -> Contribution:
        assert round_number == self.round
        self.closed = True
        self.dropped |= set(drop)
        self.indices -= set(drop)
        kept = sorted(self.indices)
        num_microbatches = len(kept) + self.surplus
        total = sum((gradient(i) for i in kept), torch.zeros(17))
        mean = total / max(1, len(kept))
        if self.poison:
            mean = mean * torch.nan
        return Contribution(
            tensors={"b": mean[:5], "a": mean[5:].reshape(3, 4)}, num_samples=MICROBATCH * num_microbatches,
            num_targets=MICROBATCH * num_microbatches, round_samples=MICROBATCH * num_microbatches,
            committed=frozenset(kept),
        )  # fmt: skip

    async def reopen(self, round_number: int) -> None:
        assert round_number == self.round
        self.closed = False

    async def train_on(self) -> None:
        self.on_training_on()

    async def apply(self, result: RoundResult) -> asyncio.Future[str]:
        assert result.round == self.round, "a round is applied once"
        await asyncio.sleep(0)
        self.anchor = self.anchor - torch.cat([result.tensors["b"], result.tensors["a"].reshape(-1)])
        self.run_samples += result.num_samples
        self.lineage, self.round, self.tally = result.lineage, self.round + 1, result.tally
        self._begin(carry=not result.contributed)
        self.results.append(result)
        self.digests.append(self.digest)
        return known(self.digest)

    def _begin(self, *, carry: bool) -> None:
        """Begin the next round. With `carry`, keep the microbatches that no round has counted yet."""
        self.indices = self.indices if carry and self.carries else set()
        self.closed = False

    @property
    def digest(self) -> str:
        return self.digest_of({"anchor": self.anchor})

    def digest_of(self, tensors: Tensors) -> str:
        """SHA-256 of a state."""
        return hashlib.sha256(tensors["anchor"].numpy().tobytes()).hexdigest()

    async def snapshot(self) -> Snapshot:
        tensors = {"anchor": self.anchor, "step": torch.tensor(float(self.round))}
        return Snapshot(
            round=self.round, run_samples=self.run_samples, lineage=self.lineage, tensors=tensors, digest=self.digest,
            tally=self.tally,
        )  # fmt: skip

    async def install(self, snapshot: Snapshot, *, carry: bool = False) -> None:
        if self.digest_of(snapshot.tensors) != snapshot.digest:
            raise IntegrityError("the snapshot does not match its digest")
        self.round, self.run_samples, self.lineage = snapshot.round, snapshot.run_samples, snapshot.lineage
        self.anchor, self.tally = snapshot.tensors["anchor"], snapshot.tally
        self._begin(carry=carry)
        self.num_installs += 1
        self.carried.append(carry)
