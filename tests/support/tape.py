"""Recordings on the CPU that behave like CUDA graphs, for tests of what is recorded on a GPU.

A tape has each of torch's operators with its tensors, which it keeps. To replay it is to call the operators again and
to write their results to the same memory. As in a CUDA graph, Python does not run again, numbers are those of the
recording, results have no values before the first replay, and nothing may be read while it is recorded. A replay writes
NaN to what other recordings of its pool made, but for the results that a CUDA graph would keep.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from swarm.machine.recording import Recorder, Recording

_Result = TypeVar("_Result")

_READS = ("aten._local_scalar_dense", "aten.equal", "aten.is_nonzero", "aten.nonzero")
"""Operators that wait for the device, for which a CUDA graph cannot be made."""


def _tensors(tree: object) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """The operators that ran while it was entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self.made: list[torch.Tensor] = []
        """Results that have memory of their own."""
        self.results = set[int]()
        """The addresses of what the recorded function returned."""
        self.num_replays = 0
        self._operators: list[tuple[Any, Any, Any, list[torch.Tensor | None]]] = []

    @property
    def num_bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.made)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith(_READS):
            raise RuntimeError(f"{func}: operation not permitted while recording")
        kwargs = kwargs or {}
        given = {_address(tensor) for tensor in _tensors((args, kwargs))}
        result = func(*args, **kwargs)
        # A view of what was given, or what was given itself, needs no copy.
        own = [None if _address(tensor) in given else tensor for tensor in _tensors(result)]
        self.made += [tensor for tensor in own if tensor is not None]
        if not str(func).startswith(("aten.empty", "aten.new_empty")):
            self._operators.append((func, args, kwargs, own))
        return result

    def replay(self) -> None:
        self.num_replays += 1
        with torch._C._AutoDispatchBelowAutograd():
            for func, args, kwargs, own in self._operators:
                for tensor, new in zip(own, list(_tensors(func(*args, **kwargs))), strict=True):
                    if tensor is not None:
                        tensor.data.copy_(new)

    def spoil(self, *, but_results: bool) -> None:
        for tensor in self.made:
            if tensor.is_floating_point() and not (but_results and _address(tensor) in self.results):
                tensor.data.fill_(float("nan"))


class TapeRecorder(Recorder):
    """Records tapes.

    Attributes:
        tapes: all of them, in the order of their recording.
    """

    def __init__(self) -> None:
        self.tapes: list[Tape] = []

    @property
    def num_replays(self) -> int:
        return sum(tape.num_replays for tape in self.tapes)

    def pool(self) -> object:
        return list[Tape]()

    def warm_up(self, work: Callable[[], object]) -> None:
        work()

    def record(self, work: Callable[[], _Result], pool: object | None = None) -> Recording[_Result]:
        tape, tapes = Tape(), [] if pool is None else pool
        assert isinstance(tapes, list)
        with tape:
            result = work()
        tape.results = {_address(tensor) for tensor in _tensors(result)}
        tape.spoil(but_results=False)
        place = len(tapes)
        tapes.append(tape)
        self.tapes.append(tape)

        def replay() -> None:
            for number, other in enumerate(tapes):
                if other is not tape:
                    other.spoil(but_results=number < place)
            tape.replay()

        return Recording(replay=replay, result=result, num_bytes=tape.num_bytes)
