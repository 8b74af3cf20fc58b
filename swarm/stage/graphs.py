"""What is kept between a forward and its backward: autograd's graph, or a recording of both.

With a recording Python launches a microbatch as one thing, and not as a thousand. Checks, copies to the CPU and sums of
gradients stay outside. What a recording is, and what it may not hold, is told in machine/recording.py.

- The weights lie at fixed addresses. Before a forward or a backward that needs another version, this version is copied
  there: microbatches may be in flight with versions between them. What autocast casts lies there in its type only.
- Each microbatch in flight has a place: its inputs, its forward and its backward. A forward has memory of its own, a
  pool that nothing else is recorded in. So what it saves for the backward outlives the replays of all others.
- All backwards share one pool, and write the gradients to one set of tensors. These are used up, on the same stream,
  before another backward is replayed: they are checked, and added to a sum or copied.
- One place is spare, for gradients that follow at once: at the last stage, and where a forward is computed again. So a
  gradient that is taken out of a sum is computed by the same operations as when it came in.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from swarm.machine.out_of_memory import in_words
from swarm.machine.recording import Recorder
from swarm.stage.buckets import Version

MOST_IN_FLIGHT = 16
"""The most microbatches that get a place."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""How much any number may differ from what is computed without recordings, as a part of the largest one, by the type of
matrix products."""

Weights = Mapping[str, torch.Tensor]
Arguments = Mapping[str, torch.Tensor]
"""The tensors that the module takes, by name, on the device."""


@dataclass
class GraphBudget:
    """Bytes of autograd graphs that one block may keep between forward and backward. Blocks on one device share
    `limit_bytes`: each has a budget `beside` the others'."""

    limit_bytes: int
    graph_bytes: int = 0
    """The bytes of one microbatch's graph, measured at the first forward."""
    num_kept: int = 0
    num_recomputed: int = 0
    """Forwards that were computed again, because there was no room for their graphs."""
    recorded_bytes: int = 0
    """What recordings take, which have memory for graphs of their own. They are given back if it is too much."""
    _sharing: "list[GraphBudget]" = field(default_factory=list, repr=False, compare=False)
    """All budgets that share the limit, this one included."""

    def __post_init__(self) -> None:
        self._sharing.append(self)

    def beside(self) -> "GraphBudget":
        """The budget of another block on the same device."""
        return GraphBudget(self.limit_bytes, _sharing=self._sharing)

    def leave(self) -> None:
        """Share the limit no longer: the block is given up."""
        self._sharing[:] = [one for one in self._sharing if one is not self]

    def allow(self, limit_bytes: int) -> None:
        """Change the limit, for the blocks on the same device too."""
        for one in self._sharing:
            one.limit_bytes = limit_bytes

    @property
    def most_bytes(self) -> int:
        """What the recordings of other blocks leave to this one of the limit."""
        return self.limit_bytes - sum(other.recorded_bytes for other in self._sharing if other is not self)

    @property
    def taken_bytes(self) -> int:
        return sum(one.num_kept * one.graph_bytes + one.recorded_bytes for one in self._sharing)

    def has_room(self) -> bool:
        return self.taken_bytes + self.graph_bytes <= self.limit_bytes

    def keep(self, *, recomputed: bool = False) -> None:
        self.num_kept += 1
        self.num_recomputed += recomputed

    def let_go(self) -> None:
        self.num_kept -= 1

    def halve(self) -> None:
        """Allow half as many graphs as are kept now, of this block and of those on the same device."""
        self.allow(sum(one.num_kept // 2 * one.graph_bytes for one in self._sharing))

    def build(self, compute: Callable[[], torch.Tensor], version: Version) -> torch.Tensor:
        """Run `compute` with these weights. The first time, measure what autograd saves for the backward, without the
        weights themselves."""
        if self.graph_bytes:
            return compute()
        storages: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = compute()
        # After `compute`, because it may have made the casts.
        for tensor in (*version.parameters.values(), *version.casts.values()):
            storages.pop(tensor.untyped_storage().data_ptr(), None)
        self.graph_bytes = max(1, sum(storages.values()))
        return outputs


class Graph:
    """A forward that was computed, and that can be followed by one backward. This one is autograd's. `inputs` is a
    leaf, or not differentiable. `outputs` is the hidden state, or the last stage's loss."""

    is_recorded = False
    """Whether a recording computes it."""

    def __init__(self, inputs: torch.Tensor, outputs: torch.Tensor, parameters: Sequence[torch.Tensor]) -> None:
        self.outputs = outputs
        self._inputs = inputs
        self._parameters = parameters

    def gradients(
        self, gradient: torch.Tensor | None, *, of_inputs: bool, of_weights: bool = True
    ) -> list[torch.Tensor]:
        """Compute the gradient of the inputs first, if wanted, and then that of each parameter, if wanted. They are to
        be used up before another gradient is computed. `gradient` is that of the hidden state; None at the last
        stage."""
        wanted = [*([self._inputs] if of_inputs else []), *(self._parameters if of_weights else [])]
        root = self.outputs if gradient is None else with_gradient(self.outputs, gradient)
        return list(torch.autograd.grad(root, wanted, allow_unused=True, materialize_grads=True))

    def let_go(self) -> None:
        """Give the graph's memory back. Autograd's is free as soon as nothing refers to it."""


class _Scalar(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return outputs.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient, None


def with_gradient(outputs: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Make a scalar that has `gradient` as its gradient by `outputs`. torch.autograd.grad takes such a gradient itself,
    but then imports sympy, with hundreds of modules: a new peer's compute thread would stand still for a second or more
    at its first backward."""
    scalar: torch.Tensor = _Scalar.apply(outputs, gradient)  # type: ignore[no-untyped-call]  # torch's
    return scalar


class Example(NamedTuple):
    """A microbatch's arguments, and the gradient of its hidden state; None at the last stage."""

    arguments: Arguments
    gradient: torch.Tensor | None


class _Place(NamedTuple):
    arguments: Arguments
    outputs: torch.Tensor
    forward: Callable[[], None]
    backward: Callable[[], None]


class CapturedStage:
    """The recordings of a stage, for microbatches of the run's shape: they can compute `num_places` of these at once,
    and take `num_bytes` of the device's memory."""

    def __init__(
        self, recorder: Recorder, compute: Callable[[Weights, Arguments], torch.Tensor],
        plain: Callable[[Arguments], Graph], made_up: Callable[[int], Example], version: Version,
        *, cast_types: Mapping[str, torch.dtype], limit_bytes: int,
    ) -> None:  # fmt: skip
        """Record the stage, and see that it computes what is computed without recordings.

        Args:
            compute: gives the hidden state, or the last stage's loss.
            plain: computes a forward with the version's weights, without recordings.
            made_up: makes the microbatch of a number. All have the shapes of the run.
            version: has the shapes of all versions.
            cast_types: the types of weights that are only used in another type.

        Raises RuntimeError if something cannot be recorded, differs, or takes more than `limit_bytes`. The device's
        memory may run out, too.
        """
        example, parameters = made_up(0), version.parameters
        self._weights = {
            name: torch.empty_like(parameter, dtype=cast_types.get(name), requires_grad=True)
            for name, parameter in parameters.items()
        }
        self._placed: Callable[[], Version | None] = lambda: None
        """Gives the version that the weights are of, if it is still needed."""
        inputs = example.arguments["inputs"]
        self.input_gradients = [torch.empty_like(inputs)] if inputs.is_floating_point() else []
        self.gradients = [torch.empty_like(parameter, requires_grad=False) for parameter in parameters.values()]
        self._output_gradient = None if example.gradient is None else example.gradient.clone()
        self.num_bytes = _num_bytes([*self._weights.values(), *self.gradients, *self.input_gradients])
        self._put_in_place(version)
        self._free = list[_Place]()
        # Nothing here refers to the caller, so that all of this memory is free as soon as the caller forgets it.
        record = partial(self._record, recorder, compute, example, recorder.pool())
        self._spare = record(warms_up=True)
        if self.num_bytes > limit_bytes:
            raise RuntimeError(f"this takes {in_words(self.num_bytes)}, and graphs may take {in_words(limit_bytes)}")
        # The last stage goes backward at once, and needs no other place.
        most = 0 if example.gradient is None else MOST_IN_FLIGHT
        while len(self._free) < most and self.num_bytes + self._place_bytes <= limit_bytes:
            before_bytes = self.num_bytes
            self._free.append(record())
            if self.num_bytes > limit_bytes:
                # Its backward needed more of the pool than was known.
                self._free.pop()
                self.num_bytes, most = before_bytes, len(self._free)
        self.num_places = 1 + len(self._free)
        tolerance = TOLERANCE[next(iter(cast_types.values()), torch.float32)]
        self._compare([made_up(number) for number in range(self.num_places)], plain, version, tolerance)

    def has_room(self) -> bool:
        """Whether a place is free for a microbatch whose backward comes later."""
        return bool(self._free)

    def forward(self, version: Version, arguments: Arguments, *, keeps: bool) -> "CapturedGraph":
        """Compute a forward. Only with `keeps` and `has_room` may others be computed before its backward."""
        place = self._free[-1] if keeps else self._spare
        self._put_in_place(version)
        _copy(place.arguments.values(), [arguments[name] for name in place.arguments])
        place.forward()
        if keeps:
            self._free.pop()
        return CapturedGraph(self, place, version)

    def backward(self, place: _Place, version: Version, gradient: torch.Tensor | None) -> None:
        """Compute `input_gradients` and `gradients`, which stay until the next backward."""
        self._put_in_place(version)
        if self._output_gradient is not None and gradient is not None:
            self._output_gradient.copy_(gradient)
        place.backward()

    def give_back(self, place: _Place) -> None:
        if place is not self._spare:
            self._free.append(place)

    def _record(
        self, recorder: Recorder, compute: Callable[[Weights, Arguments], torch.Tensor], example: Example,
        pool: object, *, warms_up: bool = False,
    ) -> _Place:  # fmt: skip
        arguments = {name: tensor.detach().clone() for name, tensor in example.arguments.items()}
        if self.input_gradients:
            arguments["inputs"].requires_grad_()

        def forward() -> torch.Tensor:
            with torch.enable_grad():
                return compute(self._weights, arguments)

        def backward(outputs: torch.Tensor) -> None:
            wanted = [*([arguments["inputs"]] if self.input_gradients else []), *self._weights.values()]
            with torch.enable_grad():
                root = outputs if self._output_gradient is None else with_gradient(outputs, self._output_gradient)
            found = torch.autograd.grad(root, wanted, allow_unused=True, materialize_grads=True)
            _copy([*self.input_gradients, *self.gradients], found)

        if warms_up:
            recorder.warm_up(lambda: backward(forward()))
        ahead = recorder.record(forward)
        back = recorder.record(lambda: backward(ahead.result), pool)
        self._place_bytes = ahead.num_bytes + _num_bytes(arguments.values())
        self.num_bytes += self._place_bytes + back.num_bytes
        return _Place(arguments, ahead.result.detach(), ahead.replay, back.replay)

    def _put_in_place(self, version: Version) -> None:
        if self._placed() is not version:
            _copy(self._weights.values(), [version.parameters[name] for name in self._weights])
            self._placed = weakref.ref(version)

    def _compare(
        self, examples: Sequence[Example], plain: Callable[[Arguments], Graph], version: Version, tolerance: float
    ) -> None:
        """Compute microbatches at all places at once, so that one that writes to another's memory is found, too."""
        graphs = [self.forward(version, example.arguments, keeps=self.has_room()) for example in examples]
        for example, graph in zip(examples, graphs, strict=True):
            of_inputs, expected = bool(self.input_gradients), plain(example.arguments)
            _require_near([graph.outputs], [expected.outputs], tolerance)
            found, wanted = (each.gradients(example.gradient, of_inputs=of_inputs) for each in (graph, expected))
            for part in (slice(0, 1), slice(1, None)) if of_inputs else (slice(None),):
                _require_near(found[part], wanted[part], tolerance)
            graph.let_go()


class CapturedGraph(Graph):
    is_recorded = True

    def __init__(self, stage: CapturedStage, place: _Place, version: Version) -> None:
        self._stage, self._place, self._version = stage, place, version
        # Copied, because they are still on their way to the CPU when the place has its next microbatch.
        self.outputs = place.outputs.clone()

    def gradients(
        self, gradient: torch.Tensor | None, *, of_inputs: bool, of_weights: bool = True
    ) -> list[torch.Tensor]:
        self._stage.backward(self._place, self._version, gradient)
        # These are sent, likewise.
        sent = [tensor.clone() for tensor in self._stage.input_gradients if of_inputs]
        return [*sent, *(self._stage.gradients if of_weights else [])]

    def let_go(self) -> None:
        self._stage.give_back(self._place)


def _require_near(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], tolerance: float) -> None:
    with torch.no_grad():
        largest = float(torch.stack([tensor.abs().max() for tensor in expected]).max())
        differences = [(ours - theirs).abs().max() for ours, theirs in zip(found, expected, strict=True)]
        difference = float(torch.stack(differences).max())
    # What is not a number is not near, either.
    if not difference <= tolerance * largest:
        raise RuntimeError(f"what was recorded differs by {difference:.1e}, and the largest number is {largest:.1e}")


def _num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _copy(targets: Iterable[torch.Tensor], sources: Iterable[torch.Tensor]) -> None:
    """Copy tensors, all of the same types in one launch."""
    pairs: dict[tuple[torch.dtype, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        to, of = pairs.setdefault((target.dtype, source.dtype), ([], []))
        to.append(target)
        of.append(source)
    with torch.no_grad():
        for to, of in pairs.values():
            torch._foreach_copy_(to, of)
