"""How many operators does a GPU's thread launch for a microbatch, and for an inner step?

They are counted by torch's dispatcher on the CPU, with the operations for a GPU (swarm/model/functions.py), uncompiled.
Views, allocations and reads of one number launch nothing. An operator over a list of tensors counts once.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from scripts.benches.shared.common import OutputOptions, require_multiple, run_of, say
from swarm.machine.recording import Recorder, Recording
from swarm.model.stages import build_stage
from swarm.stage.backend import StageBackend
from swarm.stage.boundary import TOKENS
from swarm.stage.graphs import GraphBudget
from swarm.stage.stage import weights_of
from swarm.stage.staging import Staging

_Result = TypeVar("_Result")

SAMPLES = 8

WITHOUT_LAUNCH = ("aten.empty", "aten.new_empty", "aten._unsafe_view", "aten.promote_types", "aten._local_scalar_dense")
"""Operators that launch nothing, besides those that only return a view."""


@dataclass(frozen=True, kw_only=True)
class Options(OutputOptions):
    """Count the operators of a microbatch and of an inner step."""

    d_model: int = 768
    """Width of the model; a multiple of 64."""
    layers: int = 12
    """Layers of the model, which is one stage."""
    vocab_size: int = 50_304
    """Its vocabulary."""
    sequence_length: int = 1024
    """Tokens of each of a microbatch's eight samples."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_multiple("d-model", self.d_model, 64)


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aliases = [result.alias_info for result in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        if not is_view and not str(func).startswith(WITHOUT_LAUNCH):
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def run(options: Options) -> dict[str, Any]:
    library = _fused_norms_of_a_gpu()
    tokens = torch.randint(options.vocab_size, (SAMPLES, options.sequence_length + 1))
    inputs = {TOKENS: tokens.int()}
    counts = dict[str, int]()
    for optimizer in ("adamw", "muon"):
        backend = _backend(options, optimizer)
        # The first step makes the optimizer's state.
        _, first_step = _microbatch(backend, 0, inputs)
        first_step()
        say(f"{optimizer}: one microbatch of warm-up")
        with Launches() as launches:
            _, step = _microbatch(backend, 1, inputs)
        counts["launches_per_microbatch"] = launches.counts.total()
        say(f"a microbatch: {launches.counts.total()} launches, of which {launches.counts.most_common(8)}")
        with Launches() as launches:
            step()
        counts["launches_per_inner_step" if optimizer == "adamw" else "launches_per_muon_step"] = (
            launches.counts.total()
        )
        say(f"a step of {optimizer}: {launches.counts.total()} launches, of which {launches.counts.most_common(8)}")
    recorder = _Once()
    backend = _backend(options, "adamw", recorder)
    backend.warm_up()
    before = recorder.num_replays
    with Launches() as launches:
        _microbatch(backend, 1, inputs)
    counts["launches_captured"] = launches.counts.total() + recorder.num_replays - before
    say(f"a captured microbatch: {counts['launches_captured']} launches, besides {launches.counts.most_common(8)}")
    del library
    return dict(counts)


def _microbatch(
    backend: StageBackend, number: int, inputs: dict[str, torch.Tensor]
) -> tuple[float, Callable[[], None]]:
    """Compute a microbatch. Returns its loss, and a function that acknowledges it, so that its step is taken."""
    loss, _, accumulated = backend.forward_loss(number, 0, inputs, accumulate=True)
    assert accumulated is not None
    return loss, lambda: backend.settle(accumulated)


class _Once(Recorder):
    """Computes what it records once, and then only counts: the numbers stay those of the microbatch that warms up."""

    def __init__(self) -> None:
        self.num_replays = 0

    def pool(self) -> object:
        return None

    def warm_up(self, work: Callable[[], object]) -> None:
        pass

    def record(self, work: Callable[[], _Result], pool: object | None = None) -> Recording[_Result]:
        return Recording(replay=self._replay, result=work(), num_bytes=0)

    def _replay(self) -> None:
        self.num_replays += 1


def _backend(options: Options, optimizer: Literal["adamw", "muon"], recorder: Recorder | None = None) -> StageBackend:
    config = run_of(
        "launches", width=options.d_model, layers=options.layers, setting="diloco",
        length=options.sequence_length, microbatch=SAMPLES, round_samples=10 * SAMPLES,
        rounds={"inner_batch_samples": SAMPLES}, optimizer={"name": optimizer},
        model={"vocab_size": options.vocab_size, "autocast": "bf16"},
    )  # fmt: skip
    module = build_stage(config, 0, device="cpu", fused=True)
    weights, budget = weights_of(config, module, lineage="", fused=True), GraphBudget(limit_bytes=1 << 40)
    return StageBackend(
        config=config, stage=0, module=module, weights=weights, staging=Staging(), budget=budget, recorder=recorder
    )


def _fused_norms_of_a_gpu() -> torch.library.Library:
    """Give this process's CPU the two operators with which torch computes RMSNorm on a GPU. There it is composed of a
    dozen operators otherwise. Dropping the returned object takes them away again."""

    def forward(
        hidden: torch.Tensor, shape: list[int], weight: torch.Tensor, epsilon: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scale = (hidden.square().mean(-1, keepdim=True) + epsilon).rsqrt()
        return hidden * scale * weight, scale

    def backward(
        gradient: torch.Tensor, hidden: torch.Tensor, shape: list[int], scale: torch.Tensor, weight: torch.Tensor,
        wanted: list[bool],
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        normed, weighted = hidden * scale, gradient * weight
        mean = (weighted * normed).mean(-1, keepdim=True)
        return scale * (weighted - normed * mean), (gradient * normed).flatten(0, -2).sum(0)

    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]  # torch's
    library.impl("_fused_rms_norm", forward, "CPU")  # type: ignore[no-untyped-call]
    library.impl("_fused_rms_norm_backward", backward, "CPU")  # type: ignore[no-untyped-call]
    return library
