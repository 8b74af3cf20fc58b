"""A stage's weights: versions, gradient buckets, and the steps that end rounds. What both settings share.

Owned by the compute thread. Weights are double-buffered as in PipeDream-2BW (arXiv 2006.09503): an optimizer writes
only into the masters, and microbatches compute with an immutable copy of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import nn

from swarm.config import RunConfig, Timeline
from swarm.config.schedule import learning_rate
from swarm.errors import NotReady
from swarm.machine.memory import Recycler
from swarm.model.adapters import trained_parameters
from swarm.stage import state
from swarm.stage.buckets import Buckets, GradientBucket, Source, Tensors, Version, Versions, moved
from swarm.stage.staging import staging_of
from swarm.training import optim
from swarm.training.inner_steps import InnerSteps
from swarm.training.optimizers import round_optimizer
from swarm.training.round_member import Contribution, RoundResult
from swarm.training.samples import NOTHING, Amount
from swarm.training.sketches import Sketch
from swarm.training.tally import EMPTY, Tally

KEPT_ANCHORS = 2
"""The number of rounds whose anchors stay readable: this round and the last one. They are for evaluation, and for
stages that have to repeat a round."""


@dataclass
class Round:
    """The stage's round, and its figures.

    Attributes:
        run_samples: the samples that the run had committed when this round began.
        stepped: the amount that inner steps of this round have used here.
        num_members: members of the last committed round.
        tally: what peers have given to the rounds before it.
        closed: whether a contribution was handed out. Until the round commits or is reopened, few inner steps are
            taken, or none.
        signed: by peer of the block and microbatch, the sketches that it has signed in the round. This peer's own are
            under an empty id; of others those that senders have passed on.
    """

    number: int = 0
    run_samples: int = 0
    stepped: Amount = NOTHING
    num_members: int = 1
    lineage: str = ""
    tally: Tally = EMPTY
    closed: bool = False
    signed: dict[str, dict[int, torch.Tensor]] = field(default_factory=dict)


class StageWeights(ABC):
    """Weights, gradients and optimizers of one stage.

    Attributes:
        masters: all parameters that are trained, on the `device`; optimizers write into these.
        timeline: the configuration of each round, with the amendments that this peer knows.
        inner_steps: the inner steps of this round; none in the synchronous setting.
    """

    sketch: Sketch | None = None
    """How gradients of the present round are sketched; None if they are not. For the compute thread."""

    def __init__(
        self, config: RunConfig, module: nn.Module, timeline: Timeline, *, batch_samples: int | None,
        anchor_device: torch.device, lineage: str, share: Fraction, fused: bool, outer_memory: Recycler | None = None,
    ) -> None:  # fmt: skip
        """Anchors are kept on `anchor_device`; for `batch_samples` see Buckets, for `outer_memory` OuterSgd, and for
        `share` and `fused` weights_of."""
        self.timeline = timeline
        self._config = timeline.config
        """The configuration of the present round."""
        self._share = share
        self._outer_memory = outer_memory
        self._memory = Recycler()
        self.masters = trained_parameters(module)
        self.device = next(iter(self.masters.values())).device
        self._staging = staging_of(self.device)
        """The staging for tensors that go to the device, or come from it, at a round's end."""
        self._fused = fused
        self._ends_rounds = round_optimizer(config, outer_memory, fused=fused)
        self.buckets = Buckets(lambda: self._memory.like(self.masters), batch_samples)
        self._versions = Versions(self.masters, self._memory, rounds=config.model.versions == "bf16")
        self._anchor_device = anchor_device
        self._anchors: dict[int, Tensors] = {}
        """By round, the weights that began it. Nothing writes to them."""
        self.inner_steps = InnerSteps()
        self.round: Round
        self._begin(Round(lineage=lineage), self._present())

    # -- microbatches ------------------------------------------------------------------------------------------

    @property
    def version(self) -> Version:
        return self._versions.newest

    @abstractmethod
    def version_for(self, round_number: int) -> Version:
        """The weights with which a microbatch of a round is computed. Raises NotReady if they are not kept."""

    def anchored(self, round_number: int) -> Version:
        """The weights that began a round, as a version. Raises NotReady if they are not kept."""
        if (anchor := self.anchor(round_number)) is None:
            raise NotReady(f"the weights of round {round_number} are not kept: this peer is at {self.round.number}")
        return self._versions.of(anchor)

    def anchor(self, round_number: int) -> Tensors | None:
        """The weights that began a round; None unless it is this round or the one before.

        Evaluation computes with them. With DiLoCo a round's outer step starts from them. In the synchronous setting
        microbatches of the last round are computed with them.
        """
        return self._anchors.get(round_number)

    def accumulate(self, gradients: Iterable[torch.Tensor], source: Source) -> GradientBucket:
        """Add a microbatch's gradient to the bucket that is being filled, and return the bucket.

        The gradient is tentative there until GradientBucket.settled is called.
        """
        bucket = self.buckets.open()
        bucket.accumulate(gradients, source)
        return bucket

    @abstractmethod
    def step_if_due(self) -> None:
        """Take all inner steps that are due. Call this after anything that may make a step due.

        An error here (usually lack of memory) is not the fault of a microbatch: see `require_sound`.
        """

    @abstractmethod
    def require_sound(self) -> None:
        """Raise the error with which an inner step failed, if one did.

        Then some weights may have been stepped and others not, and a sum may hold a gradient that is not in the ledger.
        The peer has to end, because its results cannot be trusted any more.
        """

    @property
    def num_elements(self) -> int:
        return sum(master.numel() for master in self.masters.values())

    # -- rounds ------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def learning_rate(self) -> float:
        """The learning rate for the run's sample count, as far as this peer knows the count within a round."""

    def _rate_after(self, block_samples: int) -> float:
        return learning_rate(self._config.gradient_step, int(block_samples / self._share))

    @property
    @abstractmethod
    def round_samples(self) -> int:
        """Samples that count towards the current round here."""

    @abstractmethod
    def contribute(self) -> Contribution:
        """Freeze this round's contribution. Its microbatches are not filled in here."""

    def reopen(self) -> None:
        """Go on in the same round, because its attempt to average was aborted."""
        self.round.closed = False
        self.step_if_due()

    @abstractmethod
    def train_on(self) -> None:
        """Take one inner step more than averaging.overlap_steps while the round is closed, once one is due."""

    def commit(self, result: RoundResult) -> float:
        """Move the anchor by the averaged contribution, and begin the next round. Returns the learning rate that was
        used.

        Afterwards an inner step may be due.
        """
        self._amend(self.timeline.under(result.amended))
        rate = self.learning_rate
        carried, anchor = self._end_round(result, rate)
        new_round = Round(
            number=self.round.number + 1,
            run_samples=self.round.run_samples + result.num_samples,
            stepped=carried,
            num_members=len(result.members),
            lineage=result.lineage,
            tally=result.tally,
        )
        self._begin(new_round, anchor)
        return rate

    @abstractmethod
    def _end_round(self, result: RoundResult, rate: float) -> tuple[Amount, Tensors]:
        """Take the step that ends a round. Returns the amount that is carried over, and the new anchor."""

    def _begin(self, new_round: Round, anchor: Tensors) -> None:
        self.round = new_round
        self._anchors[new_round.number] = moved(anchor, self._anchor_device)
        for number in sorted(self._anchors)[:-KEPT_ANCHORS]:
            del self._anchors[number]
        self._amend(self.timeline.at(new_round.number))

    def _amend(self, config: RunConfig) -> bool:
        """From now on step as this configuration of the run says. Returns whether it is another one than before."""
        if config is self._config:
            return False
        self._config, before = config, self._ends_rounds
        self._ends_rounds = round_optimizer(config, self._outer_memory, fused=self._fused)
        self._ends_rounds.take_over(before)
        return True

    # -- transfer ----------------------------------------------------------------------------------------------

    def state(self) -> Mapping[str, torch.Tensor]:
        """Anchor and outer state of the current round, by name. Any thread may read them until the next commit.

        A commit writes to the state of the optimizer that ends rounds. Anchors are replaced and never written to, and
        inner steps have an optimizer of their own.
        """
        return state.named(self._anchor, optim.state_views(self._ends_rounds, self._stepped()))

    def check(self, tensors: Mapping[str, torch.Tensor], digest: str, *, round_number: int) -> None:
        """Raise IntegrityError unless `tensors` are a whole and possible state of this stage; see state.check."""
        state.check(tensors, digest, masters=self.masters, optimizer=self._ends_rounds, round_number=round_number)

    def install(self, tensors: Mapping[str, torch.Tensor], new_round: Round, *, carry: bool = False) -> None:
        """Install a state that `state` gave, and drop every gradient and version of the past.

        With DiLoCo, `carry` keeps the changes by inner steps that are in no average: they are added to the new anchor,
        and their samples count towards the new round.
        """
        anchor, remembered = state.parts(tensors)
        self._load_masters(anchor)
        self.buckets.clear()
        self._anchors.clear()
        self._versions.restart()
        self._begin(new_round, self._present())
        optim.load_state_tensors(self._ends_rounds, self._stepped(), remembered)

    def recall(self, moments: Tensors) -> None:
        """Let inner steps go on with the moments of a run that was synchronous until now, by `NAME/KEY`."""
        raise AssertionError("only DiLoCo has inner steps")

    # -- helpers -----------------------------------------------------------------------------------------------

    @abstractmethod
    def _stepped(self) -> optim.Parameters:
        """The weights from which the step at a round's end is taken."""

    @property
    def _anchor(self) -> Tensors:
        return self._anchors[self.round.number]

    @abstractmethod
    def _present(self) -> Tensors:
        """The present weights, as the anchor of a round that begins with them. Nothing writes to them."""

    def _load_masters(self, values: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, value in values.items():
                self.masters[name].copy_(self._staging.upload(value) if value.device.type == "cpu" else value)
