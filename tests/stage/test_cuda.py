"""Stages on a GPU: they compute the same as stages on a CPU, work together with them, and leak no memory."""

import asyncio
import dataclasses
import gc
from collections.abc import Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from swarm.config import RunConfig, StagesConfig, WireConfig
from swarm.generation.sampling import Sampling
from swarm.machine.recording import recorder_of
from swarm.model.attention import attention
from swarm.model.loss import summed_loss
from swarm.model.masks import random_mask
from swarm.model.stages import build_transformer
from swarm.pipeline.swarm_engine import SwarmEngine
from swarm.stage.staging import PIECE_ELEMENTS, CudaStaging
from swarm.stage.state import digest_of
from swarm.training.samples import TOKENS
from swarm.training.scaling import squared_norm_of
from tests.support import decoding, reproducible
from tests.support.chain import DILOCO, LORA, SYNCHRONOUS, Chain, assert_close, reference, running_chain, tokens
from tests.support.chain_rounds import member_of
from tests.support.commits import end_round
from tests.support.decoding import assert_recorded_steps_are_plain, make_config
from tests.support.partial import partial_config
from tests.support.rounding import rounding_reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that PyTorch can use")

DEVICE = "cuda"
_ALL = (DEVICE, DEVICE, DEVICE)
_TWO_STAGES = dataclasses.replace(SYNCHRONOUS, stages=StagesConfig(num_stages=2))
_DROPOUT = dataclasses.replace(SYNCHRONOUS, model=dataclasses.replace(SYNCHRONOUS.model, dropout=0.2))


# -- the same numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [SYNCHRONOUS, DILOCO, LORA, partial_config(num_stages=3, rounds=SYNCHRONOUS.rounds)])
@pytest.mark.parametrize(("graph_bytes", "warms_up"), [(1 << 30, False), (0, False), (1 << 30, True)])
async def test_stages_on_a_gpu_accumulate_the_gradient_of_one_process_on_the_cpu(
    config: RunConfig, graph_bytes: int, warms_up: bool
) -> None:
    """Several microbatches are in flight. Graphs are kept, computed again, or recorded."""
    async with running_chain(config, graph_bytes=graph_bytes, devices=_ALL, warms_up=warms_up) as chain:
        losses = await chain.train_all(range(6))
        expected_losses, expected = reference(config, range(6))
        assert losses == pytest.approx(expected_losses, abs=1e-4)
        assert_close(chain.sums(), expected, 1e-4)
        chain.assert_idle()
        assert all(peer.stage.seconds_per_sample > 0 for peer in chain.peers)


def test_what_comes_over_the_network_is_uploaded_from_where_it_was_written() -> None:
    staging = CudaStaging(torch.device(DEVICE))
    received = staging.host_bytes(64).view(torch.float32)
    received.copy_(torch.arange(16))
    assert received.pin_memory().data_ptr() == received.data_ptr(), "there is nothing to copy first"
    assert torch.equal(staging.upload(received).cpu(), torch.arange(16, dtype=torch.float32))


async def test_an_evaluation_on_a_gpu_is_that_of_a_cpu() -> None:
    batch = tokens(SYNCHRONOUS, 99)
    async with running_chain(SYNCHRONOUS, devices=_ALL) as chain:
        loss = await chain.evaluate({TOKENS: batch})
    assert loss == pytest.approx(reference(SYNCHRONOUS, [99])[0][0], abs=1e-5)


_TEXT = dataclasses.replace(
    SYNCHRONOUS,
    data=dataclasses.replace(SYNCHRONOUS.data, sequence_length=96),
    # With these weights one token is far more probable than the others.
    model=dataclasses.replace(SYNCHRONOUS.model, init_std=0.2),
)
_GPT2 = dataclasses.replace(
    _TEXT.model, norm="layer", positions="learned", max_positions=96, feed_forward="gelu", tied_embeddings=True
)


@pytest.mark.parametrize("config", [_TEXT, dataclasses.replace(_TEXT, model=_GPT2)], ids=["llama", "gpt2"])
@pytest.mark.parametrize("devices", [_ALL, ("cpu", DEVICE, "cpu")])
async def test_a_text_is_that_of_one_process_also_when_a_peer_dies(config: RunConfig, devices: Sequence[str]) -> None:
    prompt, greedy = [5, 9, 33, 7, 60], Sampling(temperature=0.0)
    model, written = build_transformer(config, device="cpu"), list(prompt)
    for _ in range(60):
        written.append(int(model(torch.tensor([written]))[0, -1].argmax()))
    async with running_chain(config, num_peers=(1, 2, 1), devices=devices) as chain:
        found = []
        async with aclosing(SwarmEngine(chain.trainer, config).generate(prompt, greedy, 60)) as stream:
            async for token in stream:
                found.append(token)
                if len(found) == 20:
                    await max(chain.at(1), key=lambda peer: peer.generation.counters().tokens).server.stop(0)
    assert found == written[len(prompt) :]


@pytest.mark.parametrize("compute", ["off", "bf16"])
def test_recorded_steps_of_texts_give_the_logits_of_plain_ones(compute: str) -> None:
    tolerance = 1e-4 if compute == "off" else 3e-2
    for model in ({}, {"num_kv_heads": 2}, {"bottleneck_dim": 8}):
        config = make_config(autocast=compute, **model)
        assert_recorded_steps_are_plain(
            config, lambda: recorder_of(torch.device(DEVICE)), device=DEVICE, tolerance=tolerance
        )


# The same as in test_backend_compiled.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("compute", ["off", "bf16"])
def test_compiled_prompts_of_any_length_give_the_logits_of_plain_ones(compute: str) -> None:
    tolerance = 1e-4 if compute == "off" else 3e-2
    config = make_config(autocast=compute, num_kv_heads=2)
    plain, compiled = (
        decoding.Chain(config, DEVICE, lambda: recorder_of(torch.device(DEVICE)), compiles=compiles)
        for compiles in (False, True)
    )
    for sequence, counts in enumerate([(9, 9, 1, 5), (2, 30, 64, 3), (256, 20, 2)]):
        for chain in (plain, compiled):
            chain.begin(sequence, decoding.LONGEST)
        for count in counts:
            (expected,), (found,) = (chain.compute([sequence], count) for chain in (plain, compiled))
            assert float((found - expected).norm()) <= tolerance * float(expected.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_of_a_large_vocabulary_takes_a_part_of_its_logits_memory(dtype: torch.dtype) -> None:
    """The vocabulary is 128,000 at 4,096 positions. Loss and gradients are those of float64 on the same GPU."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    shape: dict[str, Any] = {"device": DEVICE, "generator": generator}
    hidden_BTD = torch.randn(4, 1024, 256, **shape).requires_grad_()
    weight_VD = (0.1 * torch.randn(128_000, 256, **shape)).requires_grad_()
    targets_BT = torch.randint(128_000, (4, 1024), **shape)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.autocast(DEVICE, torch.bfloat16, enabled=dtype is torch.bfloat16):
        loss = summed_loss(hidden_BTD, weight_VD, targets_BT)
    gradients = torch.autograd.grad(loss, (hidden_BTD, weight_VD))
    peak_bytes = torch.cuda.max_memory_allocated() - before
    assert peak_bytes < 0.25 * 4 * 4096 * 128_000 + 2 * weight_VD.nbytes
    exact = [hidden_BTD.detach().double().requires_grad_(), weight_VD.detach().double().requires_grad_()]
    exact_loss = functional.cross_entropy((exact[0] @ exact[1].T).flatten(0, 1), targets_BT.flatten(), reduction="sum")
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    assert loss.item() == pytest.approx(exact_loss.item(), rel=tolerance)
    for gradient, expected in zip(gradients, torch.autograd.grad(exact_loss, exact), strict=True):
        assert float((gradient - expected).norm() / expected.norm()) < tolerance


async def test_rolling_back_on_a_gpu_brings_the_sum_back() -> None:
    """There is dropout, and its masks are the same as in the first computation."""
    async with running_chain(_DROPOUT, devices=_ALL) as chain:
        await chain.train_all([0, 1])
        before = chain.sums()
        reply = await chain.train(2)
        assert chain.num_samples() == [6, 6, 6]
        for peer in chain.peers:
            async with peer.stage.changing_state():
                pass  # Entering this rolls back all that is unfinished.
        reply.close()
        assert chain.num_samples() == [4, 4, 4]
        assert_close(chain.sums(), before, 1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
async def test_bf16_products_are_near_those_of_float32(checkpointing: bool) -> None:
    model = dataclasses.replace(SYNCHRONOUS.model, autocast="bf16", gradient_checkpointing=checkpointing)
    config = dataclasses.replace(SYNCHRONOUS, model=model)
    async with running_chain(config, devices=_ALL) as chain:
        losses = await chain.train_all(range(6))
        expected_losses, expected = reference(SYNCHRONOUS, range(6))
        assert losses == pytest.approx(expected_losses, rel=1e-2)
        assert losses != pytest.approx(expected_losses, rel=1e-7), "something rounds"
        for name, value in chain.sums().items():
            assert value.dtype is torch.float32
            assert float((value - expected[name]).norm()) <= 0.05 * float(expected[name].norm()), name


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "int8"])
@pytest.mark.parametrize("devices", [("cpu", DEVICE, "cpu"), (DEVICE, "cpu", DEVICE)])
async def test_what_travels_is_the_same_from_and_to_either(dtype: Any, devices: Sequence[str]) -> None:
    config = dataclasses.replace(SYNCHRONOUS, wire=WireConfig(dtype=dtype))
    async with running_chain(config, devices=devices) as chain:
        losses = await chain.train_all(range(4))
        expected_losses, expected = rounding_reference(config, range(4))
        assert losses == pytest.approx(expected_losses, rel=1e-3)
        for name, value in chain.sums().items():
            # A number between two representable ones may be rounded to either of them if additions have another order.
            assert float((value - expected[name]).norm()) <= 5e-3 * float(expected[name].norm()), name


@pytest.mark.parametrize("shape", [(3, 5, 7), (8, 512, 1024)])
def test_a_gpu_draws_the_masks_of_a_cpu(shape: tuple[int, ...]) -> None:
    masks = [random_mask(shape, 0.1, torch.device(device), 0, 17, "layers.1.attention") for device in ("cpu", DEVICE)]
    assert torch.equal(masks[0], masks[1].cpu())


async def test_a_swarm_of_both_trains_to_the_same_losses() -> None:
    """Four synchronous rounds of two stages."""
    losses = []
    for devices in (("cpu", "cpu"), ("cpu", DEVICE)):
        async with running_chain(_TWO_STAGES, num_peers=(1, 1), devices=devices) as chain:
            losses.append([await _round(chain, number) for number in range(4)])
            chain.assert_idle()
    assert losses[1] == pytest.approx(losses[0], abs=1e-3)
    untrained = reference(_TWO_STAGES, range(24, 32))[0]
    assert abs(losses[0][3] - sum(untrained) / 8) > 0.01, "else the steps would not matter"


async def _round(chain: Chain, number: int) -> float:
    """Train a round's microbatches, and take the step. Return the mean loss."""
    losses = await chain.train_all(range(8 * number, 8 * number + 8), round_number=number)
    closings = [await peer.runtime.control(peer.weights.contribute) for peer in chain.peers]
    squared_norm = sum(squared_norm_of(closing.tensors.values()) for closing in closings)
    for peer, closing in zip(chain.peers, closings, strict=True):
        commit = partial(end_round, peer.weights, closing.tensors, total_squared_norm=squared_norm)
        await peer.runtime.control(commit)
        member_of(peer).round_began()
    return sum(losses) / len(losses)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_queries_take_a_kernel_that_writes_no_square(dtype: torch.dtype) -> None:
    """The context refuses the kernel that writes one."""
    q, k, v = (torch.randn(2, heads, 512, 64, device=DEVICE, dtype=dtype, requires_grad=True) for heads in (8, 2, 2))
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        torch.autograd.backward(attention(q, k, v).sum())
    assert k.grad is not None
    assert k.grad.shape == k.shape


def test_optimizers_on_a_gpu_take_the_steps_of_a_cpu_to_the_bit() -> None:
    assert reproducible.of_arithmetic(torch.device(DEVICE)) == reproducible.of_arithmetic()


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("graph_bytes", "warms_up"), [(1 << 30, False), (0, False), (1 << 30, True)])
async def test_microbatches_leave_no_memory_behind(graph_bytes: int, warms_up: bool) -> None:
    async with running_chain(SYNCHRONOUS, graph_bytes=graph_bytes, devices=_ALL, warms_up=warms_up) as chain:
        # The first microbatches allocate the libraries' own buffers, which stay.
        await chain.train_all(range(4))
        before = _allocated_bytes()
        await chain.train_all(range(4, 8))
        assert _allocated_bytes() == before


def _allocated_bytes() -> int:
    """The bytes of the GPU that living tensors take."""
    gc.collect()
    torch.cuda.synchronize()
    # Memory that another queue used counts as allocated until torch checks that the queue is done.
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def _delay() -> None:
    """Let the current queue do nothing for a tenth of a second."""
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]  # torch's


def test_results_pass_through_pinned_memory_and_stay_in_ordinary_memory() -> None:
    _delay()  # A copy that does not wait for what computes it is made before.
    download = CudaStaging(torch.device(DEVICE)).download(torch.arange(1000.0, device=DEVICE))
    assert download._tensor.is_pinned()
    arrived = download.wait()
    assert not arrived.is_pinned()
    assert torch.equal(arrived, torch.arange(1000.0))


def test_memory_is_not_used_again_while_a_copy_is_on_its_way() -> None:
    """All tensors have the same size, and none is kept."""
    staging = CudaStaging(torch.device(DEVICE))
    with torch.cuda.stream(staging._uploads):
        _delay()
    uploaded = [staging.upload(torch.full((1 << 18,), float(number))) for number in range(8)]
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(uploaded))
    total = torch.zeros(1 << 18, device=DEVICE)
    _delay()
    for number in range(8):
        total += staging.upload(torch.full((1 << 18,), float(number)))
    assert bool((total == sum(range(8))).all())
    kept = []
    for number in range(8):
        staging.download(torch.full((1 << 18,), -1.0, device=DEVICE))
        with torch.cuda.stream(staging._downloads):
            _delay()
        kept.append(staging.download(torch.full((1 << 18,), float(number), device=DEVICE)))
    assert all(bool((download.wait() == number).all()) for number, download in enumerate(kept))


async def test_a_state_is_read_as_the_queued_work_leaves_it_on_another_thread() -> None:
    staging = CudaStaging(torch.device(DEVICE))
    size = 2 * PIECE_ELEMENTS + 3
    state = {"moment": torch.zeros(size, device=DEVICE), "step": torch.tensor(7.0)}
    _delay()
    state["moment"] += torch.arange(size, device=DEVICE)
    reader = staging.reader()
    expected = {"moment": torch.arange(size, dtype=torch.float32), "step": torch.tensor(7.0)}
    assert await asyncio.to_thread(digest_of, state, reader) == digest_of(expected)
    copy = await asyncio.to_thread(reader.copy, state["moment"])
    assert torch.equal(copy, expected["moment"])
    assert not copy.is_pinned()
