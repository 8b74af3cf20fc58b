"""Backends of stages without servers, a function that runs a microbatch through them, and a reference in one
process."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from swarm.config import DataConfig, ModelConfig, RoundsConfig, RunConfig, StagesConfig
from swarm.machine.recording import Recorder
from swarm.model.masks import DropoutKey
from swarm.model.stage_module import StageModule
from swarm.model.stages import build_stage, build_transformer
from swarm.stage.backend import StageBackend
from swarm.stage.boundary import HIDDEN, TOKENS
from swarm.stage.buckets import Accumulated
from swarm.stage.graphs import GraphBudget
from swarm.stage.stage import weights_of
from swarm.stage.staging import Download, staging_of
from tests.support.commits import end_rounds
from tests.support.partial import partial_samples

Tensors = dict[str, torch.Tensor]

CONFIG = RunConfig(
    model=ModelConfig(num_layers=3, d_model=32, num_heads=2, vocab_size=64),
    stages=StagesConfig(num_stages=3),
    data=DataConfig(sequence_length=16, microbatch_size=2),
    rounds=RoundsConfig(setting="synchronous", round_samples=16),
)
DROPOUT = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, dropout=0.2))
DILOCO = dataclasses.replace(CONFIG, rounds=RoundsConfig(setting="diloco", round_samples=16, inner_batch_samples=2))
GPT2 = dataclasses.replace(
    CONFIG.model, norm="layer", positions="learned", max_positions=16, feed_forward="gelu", tied_embeddings=True
)
PLENTY = 1 << 30


def backend_of(
    config: RunConfig, stage: int, limit_bytes: int = PLENTY, *, fused: bool = False, compiles: bool = False,
    recorder: Recorder | None = None, device: str = "cpu",
) -> StageBackend:  # fmt: skip
    module = build_stage(config, stage, device=device, fused=fused)
    if compiles:
        assert isinstance(module, StageModule)
        module.compile_layers()
    return StageBackend(
        config=config, stage=stage, module=module, weights=weights_of(config, module, lineage="", fused=fused),
        staging=staging_of(torch.device(device)), budget=GraphBudget(limit_bytes=limit_bytes), recorder=recorder,
    )  # fmt: skip


def chain_of(config: RunConfig, limit_bytes: int = PLENTY, *, fused: bool = False) -> list[StageBackend]:
    return [backend_of(config, stage, limit_bytes, fused=fused) for stage in range(config.stages.num_stages)]


def tokens_of(number: int, config: RunConfig = CONFIG) -> torch.Tensor:
    shape = (config.data.microbatch_size, config.data.sequence_length + 1)
    generator = torch.Generator().manual_seed(number)
    return torch.randint(config.model.vocab_size, shape, generator=generator, dtype=torch.int32)


def hidden_of(number: int) -> torch.Tensor:
    return torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(number))


def inputs_of(number: int) -> dict[str, torch.Tensor]:
    """What a stage after the first receives with a microbatch."""
    return {TOKENS: tokens_of(number), HIDDEN: hidden_of(number)}


def arrived(download: Download | None) -> torch.Tensor:
    """The tensor of a download, which must have finished."""
    assert download is not None
    return download.wait()


def run_microbatch(
    chain: Sequence[StageBackend], microbatch: int, *, accumulate: bool = True, round_number: int = 0
) -> tuple[float, list[Any]]:
    """Run one microbatch through all stages. Return the loss, and what each stage accumulated."""
    config = chain[0].config
    own = partial_samples(config, microbatch) if config.data.has_targets else {TOKENS: tokens_of(microbatch, config)}
    inputs, forwards = own, []
    for backend in chain[:-1]:
        forwards.append(backend.forward(microbatch, round_number, inputs))
        inputs = {**own, HIDDEN: arrived(forwards[-1].wire_hidden)}
    loss, gradient_BTD, last = chain[-1].forward_loss(microbatch, round_number, inputs, accumulate=accumulate)
    accumulated = [last]
    for backend, forward in zip(reversed(chain[:-1]), reversed(forwards), strict=True):
        gradient_BTD, entry = backend.backward(forward, arrived(gradient_BTD), accumulate=accumulate)
        accumulated.insert(0, entry)
    return loss, accumulated


def sums_of(chain: Sequence[StageBackend]) -> dict[str, torch.Tensor]:
    return {name: value.clone() for backend in chain for name, value in backend.weights.buckets.open().sums.items()}


def reference_of(config: RunConfig, microbatches: Sequence[int]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses, and the gradient summed over all targets, of one process."""
    model = build_transformer(config, device="cpu")
    losses = []
    for microbatch in microbatches:
        key = DropoutKey(seed=config.data.seed, microbatch=microbatch)
        loss = model.loss(tokens_of(microbatch).long(), key)
        (loss * config.data.tokens_per_microbatch).backward()  # type: ignore[no-untyped-call]  # torch's
        losses.append(float(loss.detach()))
    return losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def accumulate_and_settle(backend: StageBackend, microbatch: int) -> None:
    """Accumulate and settle enough for an inner step."""
    backend.settle(begin(backend, microbatch)()[1])


def begin(backend: StageBackend, number: int, round_number: int = 0) -> Callable[[], tuple[Tensors, Accumulated]]:
    """Compute a forward. Returns its backward, which gives what is sent, and what was accumulated. The last stage does
    both then."""
    width, is_chat = backend.config.model.hidden_width, backend.config.data.has_targets
    samples = partial_samples(backend.config, number) if is_chat else {TOKENS: tokens_of(number)}
    inputs = {**samples, HIDDEN: hidden_of(number)[..., :width]}

    def last() -> tuple[Tensors, Accumulated]:
        loss, answer, entry = backend.forward_loss(number, round_number, inputs, accumulate=True)
        assert entry is not None
        return {"loss": torch.tensor(loss), "answer": arrived(answer)}, entry

    if backend.is_last:
        return last
    forward = backend.forward(number, round_number, inputs)
    hidden = arrived(forward.wire_hidden)

    def backward() -> tuple[Tensors, Accumulated]:
        answer, entry = backend.backward(forward, hidden_of(100 + number)[..., :width], accumulate=True)
        assert entry is not None
        return {"hidden": hidden} | ({} if answer is None else {"answer": arrived(answer)}), entry

    return backward


def _step(backend: StageBackend) -> None:
    """Take a step with two microbatches: an inner step, or a round's."""
    before = backend.weights.version
    for number in (1, 2):
        accumulate_and_settle(backend, number)
    if backend.config.rounds.synchronous:
        end_rounds([backend.weights], num_samples=4)
    assert backend.weights.version is not before


def story(backend: StageBackend) -> Tensors:
    """Two microbatches in flight with a step between them, of which one is rolled back after another step."""
    first = begin(backend, 7)
    _step(backend)
    second = begin(backend, 8, backend.weights.round.number)
    found, leaving = first()
    bucket = leaving.bucket
    story = {f"first {name}": value for name, value in found.items()}
    story |= {f"first's {name}": value.clone() for name, value in bucket.sums.items()}
    found, _ = second()
    story |= {f"second {name}": value for name, value in found.items()}
    story |= {f"both's {name}": value.clone() for name, value in bucket.sums.items()}
    backend.roll_back([leaving])
    return story | {f"second's {name}": value.clone() for name, value in bucket.sums.items()}


def require_near(found: Tensors, expected: Tensors, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    # In bfloat16 a sum of small numbers has the rounding of the larger ones that it was made of.
    least = 0.0 if tolerance < 1e-3 else 1.0
    for name, value in expected.items():
        largest = max(least, float(value.abs().max()))
        torch.testing.assert_close(found[name], value, rtol=0, atol=tolerance * largest, msg=name)
