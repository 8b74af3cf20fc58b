"""A stage's weights through time: versions, gradient buckets, inner and outer steps.

Owned by the compute thread; the backend reads versions and fills buckets, the round member closes and commits
rounds. Weights are double-buffered as in PipeDream-2BW (arXiv 2006.09503): an optimizer writes only into the
masters, microbatches compute with an immutable copy of them, and at most two copies are in use.

With DiLoCo a stage may be averaged in fragments, a round each, in turn, and may go on training while a round is
exchanged (Streaming DiLoCo, arXiv 2501.18512): what was learnt since the contribution was closed is then carried over
to the new anchor, and counts towards the next round. So is all that was learnt in rounds which were committed without
this peer, a few at most: it contributes late (as in asynchronous local SGD, arXiv 2401.09135). Anchors and outer
momentum are needed once a round: they are kept on the CPU, and the outer step is taken there, whatever device trains.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from blake3 import blake3
from torch import nn

from swarm.config import RunConfig
from swarm.errors import IntegrityError, NotReady
from swarm.events.kinds import Events, NoEvents, Step
from swarm.machine.memory import Recycler
from swarm.stage.buckets import Buckets, GradientBucket, Tensors, Version
from swarm.stage.staging import HostReader, staging_of
from swarm.training import optim
from swarm.training.inner_steps import InnerSteps

CPU = torch.device("cpu")
LARGEST_WEIGHT = 1e15
"""No weight and no moment of an honest peer is larger: contributions to an average are bounded by it as well."""
KEPT_ANCHORS = 2
"""Rounds whose anchor weights stay readable, for evaluation and for stages that have to repeat a round: this one and
the one before."""
LATE_VERSIONS = 2
"""Versions that are kept, beside the newest and those that `max_staleness` asks for, for microbatches that take much
longer than others: their peer further on has died, say."""


@dataclass
class Round:
    """Where the stage is in the run."""

    number: int = 0
    run_samples: int = 0
    """Samples the run had committed when this round began."""
    stepped_samples: int = 0
    """Samples that inner steps of this round have used here."""
    num_members: int = 1
    """Members of the last committed round."""
    lineage: str = ""
    closed: bool = field(default=False)
    """A contribution has been handed out; until the round commits or is reopened, few inner steps are taken or
    none."""


@dataclass(frozen=True, kw_only=True)
class FrozenContribution:
    """What a stage contributes to a round, frozen.

    Attributes:
        tensors: a mean over the samples, on the CPU.
        num_samples: samples behind it.
        round_samples: of these, the ones of this round.
        fragment: the part of the parameters it is about.
        version: the weights it was taken from.
    """

    tensors: Tensors
    num_samples: int
    round_samples: int
    fragment: int
    version: Version


class StageWeights:
    """Weights, gradients and optimizers of one stage."""

    def __init__(self, config: RunConfig, module: nn.Module, *, lineage: str, events: Events | None = None) -> None:
        self._config = config
        self._events = events or NoEvents()
        self._memory = Recycler()
        self.masters: dict[str, nn.Parameter] = dict(module.named_parameters())
        self._staging = staging_of(next(iter(self.masters.values())).device)
        """For what goes to the device and comes from there at a round's end."""
        self.round: Round
        self._adamw = optim.AdamW(config.optimizer)
        self._outer = None if config.rounds.synchronous else optim.OuterSgd(config.outer)
        self._fragments = fragments(self.masters, 1 if self._outer is None else config.averaging.num_fragments)
        self._unaveraged_samples = [0] * len(self._fragments)
        """By fragment, samples of inner steps since it was last averaged."""
        self.buckets = Buckets(
            lambda: self._memory.like(self.masters), None if self._outer is None else config.rounds.inner_batch_samples
        )
        self.inner_steps = self._no_inner_steps()
        """Of this round."""
        self._frozen: FrozenContribution | None
        """The newest contribution of this round, also after it was reopened: its result may be decided all the same."""
        self._num_overlapped = 0
        """Inner steps since the round was closed."""
        self._num_versions = 0
        self.version = self._publish()
        self._old_versions: list[Version] = []
        """DiLoCo: those before the newest that are in use."""
        self._anchors: dict[int, Tensors] = {}
        self._evaluated: tuple[Tensors, Tensors] | None = None
        """The anchor that was last evaluated on, and its copy on the device, where it is not there itself."""
        self._earlier: Version | None
        """Synchronous: the weights of the round before, once a microbatch has been computed with them."""
        self._failure: Exception | None = None
        """Of an inner step."""
        self._begin(Round(lineage=lineage), self.version.parameters)

    # -- microbatches ------------------------------------------------------------------------------------------

    def anchor(self, round_number: int) -> Tensors | None:
        """The weights that began a round; None unless it is this round or the one before.

        They are on the CPU with DiLoCo, and on the stage's device in the synchronous setting, which computes with them.
        """
        return self._anchors.get(round_number)

    def on_device(self, anchor: Tensors) -> Tensors:
        """An anchor where the stage computes.

        If it is elsewhere, a copy is kept for the evaluation's next microbatches, one at most: until another anchor is
        asked for, or a round begins.
        """
        device = next(iter(self.masters.values())).device
        if all(value.device == device for value in anchor.values()):
            return anchor
        if self._evaluated is None or self._evaluated[0] is not anchor:
            # First, memory for what follows.
            self._evaluated = None
            self._evaluated = anchor, moved(anchor, device)
        return self._evaluated[1]

    def version_for(self, round_number: int) -> Version:
        """The weights with which a microbatch is computed: the newest; in the synchronous setting its round's own.

        Raises:
            NotReady: its round is neither this one nor the one before.
        """
        if not self._config.rounds.synchronous or round_number == self.round.number:
            return self.version
        if round_number not in self._anchors:
            raise NotReady(f"the weights of round {round_number} are not kept: this peer is at {self.round.number}")
        if self._earlier is None:
            self._earlier = Version(parameters=self._anchors[round_number])
        return self._earlier

    def step_if_due(self) -> None:
        """Take DiLoCo inner steps for which everything is ready; called after whatever may make one ready.

        What it raises, as a rule that there is no memory, is no microbatch's fault: see `require_sound`.
        """
        self.require_sound()
        try:
            self._step_if_due()
        except Exception as error:
            self._failure = error
            raise

    def require_sound(self) -> None:
        """Raise what an inner step has failed with, if one has.

        Weights may be half stepped then, and a gradient in a sum that nobody knows of. The peer is to end, since
        nothing it does from now on can be trusted.
        """
        if self._failure is not None:
            raise self._failure

    def _step_if_due(self) -> None:
        if self._config.rounds.synchronous:
            return
        self._old_versions = [version for version in self._old_versions if version.users]
        for bucket in self.buckets.ready:
            if self.round.closed and self._num_overlapped >= self._config.averaging.overlap_steps:
                break
            # A step that would need one more version waits, and so does what the stage admits: no batch grows.
            if len(self._old_versions) >= self._config.rounds.max_staleness + LATE_VERSIONS:
                break
            self.buckets.remove(bucket)
            self._inner_step(bucket)

    @property
    def num_unstepped_samples(self) -> int:
        """Samples accumulated that no step has used yet. May be asked from another thread."""
        return self.buckets.num_samples

    def _inner_step(self, bucket: GradientBucket) -> None:
        # In place: nobody adds to this bucket any more, nor takes anything out.
        gradients = bucket.sums
        torch._foreach_mul_(list(gradients.values()), bucket.scale)
        factor = optim.clip_factor(optim.squared_norm(gradients.values()), self._config.optimizer.clip_norm)
        torch._foreach_mul_(list(gradients.values()), factor)
        optim.step(self._adamw, self.masters, gradients, self.learning_rate)
        self._events.write(Step(bucket=bucket.number, samples=bucket.num_samples))
        self.inner_steps.add(bucket.num_samples, bucket.versions, newest=self.version.number)
        self.round.stepped_samples += bucket.num_samples
        self._unaveraged_samples = [samples + bucket.num_samples for samples in self._unaveraged_samples]
        self._num_overlapped += self.round.closed
        self._replace_version()

    @property
    def learning_rate(self) -> float:
        """The rate at the run's sample count, as well as this peer can know it within a round."""
        elsewhere = 0 if self._config.rounds.synchronous else self.round.stepped_samples * self.round.num_members
        return optim.learning_rate(self._config.optimizer, self.round.run_samples + elsewhere)

    @property
    def num_elements(self) -> int:
        """Elements of all parameters."""
        return sum(master.numel() for master in self.masters.values())

    # -- rounds ------------------------------------------------------------------------------------------------

    @property
    def round_samples(self) -> int:
        """Samples that count towards the current round here."""
        if self._config.rounds.synchronous:
            return self.num_unstepped_samples
        return self.round.stepped_samples

    def seal(self) -> None:
        """Synchronous: let nothing begin that would join the sum, until the round commits or is reopened.

        From any thread: a compute thread in the middle of a long microbatch would be waited for.
        """
        self.round.closed = True

    def close(self) -> FrozenContribution:
        """Freeze this round's contribution.

        In the synchronous setting the accumulated gradient itself: as a difference of weights it would lose
        its small entries to rounding. With DiLoCo the pseudo-gradient, anchor minus weights, of this round's
        fragment.
        """
        self.round.closed, self._num_overlapped = True, 0
        fragment = self.round.number % len(self._fragments)
        if self._outer is None:
            mean = self.buckets.open().mean()
            tensors = {name: self._staging.download(value).wait() for name, value in mean.items()}
            num_samples = self.num_unstepped_samples
        else:
            anchor, weights = self._anchors[self.round.number], self.masters
            tensors = self._memory.like({name: anchor[name] for name in self._fragments[fragment]})
            with torch.no_grad():
                for name, difference in tensors.items():
                    subtract = partial(torch.sub, anchor[name], out=difference)
                    self._staging.download(weights[name].detach(), subtract).wait()
            num_samples = self._unaveraged_samples[fragment]
        self._frozen = FrozenContribution(
            tensors=tensors, num_samples=num_samples, round_samples=self.round_samples, fragment=fragment,
            version=self.version,
        )  # fmt: skip
        return self._frozen

    def reopen(self) -> None:
        """Go on in the same round: its attempt to average was aborted."""
        self.round.closed = False
        self.step_if_due()

    def commit(
        self, average: Mapping[str, torch.Tensor], *, total_squared_norm: float, num_samples: int, num_members: int,
        lineage: str, contributed: bool = True,
    ) -> float:  # fmt: skip
        """Move the anchor by the averaged contribution and begin the next round; gives the rate that was used.

        An inner step may be due then.

        Args:
            contributed: whether this peer's contribution is in the average.
        """
        rate = self.learning_rate
        carried_samples = 0
        if self._outer is None:
            self._synchronous_step(average, total_squared_norm, rate)
            anchor = self.version.parameters
        else:
            carried_samples, anchor = self._outer_step(self._outer, average, contributed=contributed)
        new_round = Round(
            number=self.round.number + 1,
            run_samples=self.round.run_samples + num_samples,
            stepped_samples=carried_samples,
            num_members=num_members,
            lineage=lineage,
        )
        self._begin(new_round, anchor)
        return rate

    def _synchronous_step(self, average: Mapping[str, torch.Tensor], total_squared_norm: float, rate: float) -> None:
        factor = optim.clip_factor(total_squared_norm, self._config.optimizer.clip_norm)
        gradients = {name: self._staging.upload(value) for name, value in average.items()}
        if factor != 1.0:
            # Into memory of its own: others may still fetch the average.
            clipped = self._memory.like(gradients)
            for name, value in gradients.items():
                torch.mul(value, factor, out=clipped[name])
            gradients = clipped
            del clipped
        optim.step(self._adamw, self.masters, gradients, rate)
        del gradients  # Memory for what follows.
        self.buckets.clear()
        self.version = self._publish()

    def _outer_step(
        self, outer: optim.OuterSgd, average: Mapping[str, torch.Tensor], *, contributed: bool
    ) -> tuple[int, Tensors]:
        """Step from the anchor; gives the samples that are not in the average, and the new anchor.

        What was learnt from these is carried over: the weights get it on top of the new anchor.
        """
        anchor, names = self._anchors[self.round.number], list(average)
        fragment = self.round.number % len(self._fragments)
        carried: Tensors = {}
        carried_samples = 0
        # A result that was decided without this peer's knowledge, after a restart of the attempt, has no closing.
        frozen = self._frozen
        if not contributed:
            carried = self._learnt(names, self._unaveraged_samples[fragment])
            carried_samples = self.round.stepped_samples if carried else 0
        elif frozen is not None and frozen.version is not self.version and set(frozen.tensors) == set(names):
            carried = {name: (self.masters[name] - frozen.version.parameters[name]).detach() for name in names}
            carried_samples = self.round.stepped_samples - frozen.round_samples
        # Memory for what follows.
        self._frozen = frozen = None
        if contributed or not carried:
            self._unaveraged_samples[fragment] = carried_samples
        stepped = self._memory.copies({name: anchor[name] for name in names})
        optim.step(outer, stepped, average, self._config.outer.learning_rate)
        self._load_masters(stepped)
        if carried:
            self._add_to_masters(carried)
        self._replace_version(None if carried else stepped)
        return carried_samples, {**anchor, **stepped}

    def _learnt(self, names: Iterable[str], num_samples: int) -> Tensors:
        """What inner steps have added to parameters since their last average.

        Nothing if it is not finite: who went astray is to come back.

        Args:
            num_samples: that these steps have used. With fragments they may all be of earlier rounds, in which it was
                the turn of others.
        """
        if not num_samples:
            return {}
        anchor = self._anchors[self.round.number]
        learnt = {name: (self.masters[name] - anchor[name].to(self.masters[name].device)).detach() for name in names}
        return learnt if all(bool(value.isfinite().all()) for value in learnt.values()) else {}

    def _begin(self, new_round: Round, anchor: Tensors) -> None:
        self.round, self._frozen, self._evaluated, self._earlier = new_round, None, None, None
        self.inner_steps = self._no_inner_steps()
        self._anchors[new_round.number] = anchor if self._outer is None else moved(anchor, CPU)
        for number in sorted(self._anchors)[:-KEPT_ANCHORS]:
            del self._anchors[number]

    # -- transfer ----------------------------------------------------------------------------------------------

    def state_tensors(self) -> Tensors:
        """Anchor and outer state of the current round as named CPU tensors that nobody writes to."""
        return {name: value.to("cpu", copy=True) for name, value in self.state().items()}

    def state(self) -> Tensors:
        """The same where they are. From any thread they may be read until the next commit, which writes to some.

        No inner step does: anchors are never written to, and what remembers the steps of a round's end is not what
        remembers inner steps.
        """
        tensors = {f"anchor/{name}": value for name, value in self._anchors[self.round.number].items()}
        tensors |= {f"outer/{key}": value for key, value in optim.state_tensors(*self._stepping()).items()}
        return {name: value.detach() for name, value in sorted(tensors.items())}

    def check(self, tensors: Mapping[str, torch.Tensor], digest: str, *, round_number: int) -> None:
        """Raise IntegrityError unless `tensors` are a whole and possible state of this stage, of that digest.

        The names, shapes and types are those of this stage's parameters and of what its optimizer remembers of them.
        All numbers are finite and at most LARGEST_WEIGHT, and no optimizer has taken more steps than there were rounds.
        """
        optimizer, shapes = self._outer or self._adamw, dict[str, torch.Size]()
        for name, master in self.masters.items():
            shapes[f"anchor/{name}"] = master.shape
            remembered = {f"outer/{name}/{key}": shape for key, shape in optimizer.state_shapes(master).items()}
            if not tensors.keys().isdisjoint(remembered):
                shapes |= remembered
        if {name: tensor.shape for name, tensor in tensors.items()} != shapes:
            raise IntegrityError("the state is of another model or stage")
        for name, tensor in tensors.items():
            low, high = _bounds(name, round_number)
            least, largest = map(float, torch.aminmax(tensor)) if tensor.numel() else (low, high)
            if tensor.dtype is not torch.float32 or not low <= least <= largest <= high:
                raise IntegrityError(
                    f"{name} of the state is not of numbers between {low:g} and {high:g} in float32, but of "
                    f"{least:g} to {largest:g} in {str(tensor.dtype).removeprefix('torch.')}"
                )
        if digest_of(tensors) != digest:
            raise IntegrityError("the state does not match its digest")

    def install(self, tensors: Mapping[str, torch.Tensor], new_round: Round, *, carry: bool = False) -> None:
        """Become a state that `state_tensors` gave; drops every gradient and version of the past.

        Args:
            carry: with DiLoCo, what inner steps have learnt and no average has is kept: the weights get it on top of
                the new anchor, and its samples count towards the new round.
        """
        anchor = {name.removeprefix("anchor/"): t for name, t in tensors.items() if name.startswith("anchor/")}
        outer = {name.removeprefix("outer/"): t for name, t in tensors.items() if name.startswith("outer/")}
        learnt = self._learnt(self.masters, sum(self._unaveraged_samples)) if carry else {}
        if learnt:
            new_round.stepped_samples = self.round.stepped_samples
        else:
            self._unaveraged_samples = [0] * len(self._fragments)
        self._load_masters(anchor)
        self.buckets.clear()
        self._old_versions.clear()
        self._anchors.clear()
        self.version = self._publish()
        self._begin(new_round, self.version.parameters)
        optim.load_state_tensors(*self._stepping(), outer)
        if learnt:
            self._add_to_masters(learnt)
            self.version = self._publish()

    def state_digest(self) -> str:
        """BLAKE3 over anchor and outer state, in hexadecimal."""
        return digest_of(self.state())

    # -- helpers -----------------------------------------------------------------------------------------------

    def _stepping(self) -> tuple[optim.Optimizer, optim.Parameters]:
        """What steps at the end of a round, and from where."""
        if self._outer is None:
            return self._adamw, self.masters
        return self._outer, self._anchors[self.round.number]

    def _no_inner_steps(self) -> InnerSteps:
        return InnerSteps(configured_samples=0 if self._outer is None else self._config.rounds.inner_batch_samples)

    def _replace_version(self, copies: Mapping[str, torch.Tensor] | None = None) -> None:
        """Publish the masters; the version before stays for those who use it."""
        if self.version.users:
            self._old_versions.append(self.version)
        self.version = self._publish(copies)

    def _publish(self, copies: Mapping[str, torch.Tensor] | None = None) -> Version:
        """The masters as they are. Of some there may be copies, to which nobody writes: these are taken if they fit."""
        taken = {name: copy for name, copy in (copies or {}).items() if copy.device == self.masters[name].device}
        made = self._memory.copies({name: master for name, master in self.masters.items() if name not in taken})
        self._num_versions += 1
        parameters = {name: (taken | made)[name].requires_grad_() for name in self.masters}
        return Version(parameters=parameters, number=self._num_versions - 1)

    def _load_masters(self, values: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, value in values.items():
                self.masters[name].copy_(self._staging.upload(value) if value.device == CPU else value)

    def _add_to_masters(self, values: Tensors) -> None:
        torch._foreach_add_([self.masters[name].data for name in values], list(values.values()))


def _bounds(name: str, round_number: int) -> tuple[float, float]:
    """Between which two the numbers of a state's tensor lie; NaN lies between none."""
    # A parameter's name has no slash, and may be that of a key.
    match name.split("/"):
        case ["outer", _, "step"]:
            return 0.0, round_number
        case ["outer", _, "exp_avg_sq"]:
            return 0.0, LARGEST_WEIGHT**2
    return -LARGEST_WEIGHT, LARGEST_WEIGHT


def moved(tensors: Tensors, device: torch.device) -> Tensors:
    """The tensors on a device; those that are there already are no copies."""
    return {name: value if value.device == device else value.detach().to(device) for name, value in tensors.items()}


def fragments(names: Iterable[str], num_fragments: int) -> list[list[str]]:
    """Parameter names dealt out by block (embedding, each layer, head), so that a fragment's layers are far apart.

    Raises:
        ValueError: there are fewer blocks than fragments.
    """
    blocks: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        blocks.setdefault(".".join(parts[: 2 if parts[0] == "layers" else 1]), []).append(name)
    if len(blocks) < num_fragments:
        raise ValueError(f"averaging.num_fragments is {num_fragments}, but a stage has only {len(blocks)} blocks")
    dealt = list(blocks.values())
    return [[name for block in dealt[first::num_fragments] for name in block] for first in range(num_fragments)]


def digest_of(tensors: Mapping[str, torch.Tensor], reader: HostReader | None = None) -> str:
    """BLAKE3 over a state's names and values, in hexadecimal, with as many threads as torch computes with.

    Taken at every round's end, where SHA-256 took two and a half times as long on a processor that has instructions
    for it.

    Args:
        reader: brings what is on a device to the CPU; None where nothing is.
    """
    reader = reader or HostReader()
    digest = blake3(max_threads=torch.get_num_threads())
    for name, value in sorted(tensors.items()):
        digest.update(name.encode())
        for piece in reader.pieces(value):
            digest.update(piece.view(torch.uint8).numpy().data)
    return digest.hexdigest()
