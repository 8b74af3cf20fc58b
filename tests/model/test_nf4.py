"""Frozen matrices in 4 bits: the paper's codes, and a stage that computes with them."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from swarm.config import LoraConfig, RunConfig
from swarm.model.functions import product
from swarm.model.masks import DropoutKey
from swarm.model.nf4 import BLOCK, VALUES, Nf4Matrix, num_bytes
from swarm.model.stages import build_stage, build_transformer, parameter_shapes
from swarm.stage.state import digest_of
from swarm.training.blockwise import BLOCK as SCALES_BLOCK
from swarm.training.blockwise import SIGNED
from tests.stage.backends import CONFIG, GPT2, chain_of, run_microbatch, sums_of, tokens_of

QLORA = dataclasses.replace(CONFIG, lora=LoraConfig(rank=4, base="nf4"))


def _matrix(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator) * torch.rand(shape[0], 1, generator=generator)


def _expected(weight: Tensor) -> Tensor:
    """The paper's formulas in float64."""
    values = torch.tensor(VALUES, dtype=torch.float64)
    padded = torch.nn.functional.pad(weight.double().flatten(), (0, -weight.numel() % BLOCK)).view(-1, BLOCK)
    scales = padded.abs().amax(1)
    codes = (padded[..., None] / scales.clamp(min=1e-300)[:, None, None] - values).abs().argmin(-1)
    centred, table = scales - scales.mean(), torch.from_numpy(SIGNED.values).double()
    for start in range(0, len(centred), SCALES_BLOCK):
        part = centred[start : start + SCALES_BLOCK]
        largest = part[part.abs().argmax()]
        part.copy_(table[(part[:, None] / largest - table).abs().argmin(-1)] * largest)
    return (values[codes] * (centred + scales.mean())[:, None]).flatten()[: weight.numel()].view(weight.shape)


def test_the_values_are_quantiles_of_the_normal_distribution() -> None:
    """As bitsandbytes' create_normal_map makes them."""
    offset, quantile = 0.9677083, torch.special.ndtri
    above = quantile(torch.linspace(offset, 0.5, 9, dtype=torch.float64)[:-1])
    below = -quantile(torch.linspace(offset, 0.5, 8, dtype=torch.float64)[:-1])
    expected = torch.cat((above, below, torch.zeros(1))).sort().values
    torch.testing.assert_close(torch.tensor(VALUES), (expected / expected.max()).float(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(130, 300), (7, 9), (64, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matrix_is_coded_by_the_papers_formulas(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = _matrix(*shape).to(dtype)
    dense = Nf4Matrix(weight).dense(torch.float32)
    torch.testing.assert_close(dense.double(), _expected(weight), rtol=1e-5, atol=1e-6)
    assert torch.equal(Nf4Matrix(weight).dense(torch.bfloat16), dense.bfloat16())


def test_a_matrix_takes_little_more_than_half_a_byte_a_number() -> None:
    matrix, tables = Nf4Matrix(_matrix(300, 500)), ("pairs", "scale_values")
    own = [buffer for name, buffer in matrix.named_buffers() if name not in tables]
    assert sum(buffer.nbytes for buffer in own) == num_bytes(150_000) < 0.53 * 150_000
    other = Nf4Matrix(_matrix(3, 5))
    assert all(getattr(matrix, name) is getattr(other, name) for name in tables), "all matrices have the same"
    assert not matrix.state_dict()
    assert not Nf4Matrix(torch.zeros(3, 70)).dense(torch.float32).any()


class _Devices(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Finds the devices of all that is computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self.found = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.found |= {leaf.device.type for leaf in tree_leaves((args, result)) if isinstance(leaf, Tensor)}
        return result


def test_a_matrix_on_a_gpu_takes_nothing_from_the_cpu() -> None:
    """Compiled code would copy it in each use, which no CUDA graph can do. The meta device stands in for the GPU."""
    matrix = Nf4Matrix(_matrix(5, 70)).to("meta")
    with _Devices() as devices:
        matrix.dense(torch.bfloat16)
    assert devices.found == {"meta"}


@pytest.mark.parametrize("autocast", [False, True])
def test_products_are_those_of_the_dense_matrix(autocast: bool) -> None:
    matrix, bias, hidden = Nf4Matrix(_matrix(48, 32)), torch.ones(48), _matrix(10, 32).view(2, 5, 32)
    found = []
    for weight in (matrix, matrix.dense(torch.float32)):
        leaf = hidden.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = product(leaf, weight, bias)
        found.append((output, torch.autograd.grad(output.float().square().sum(), leaf)[0]))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


def test_a_stage_holds_its_layers_matrices_in_4_bits() -> None:
    for config in (QLORA, dataclasses.replace(QLORA, model=GPT2)):
        given = {name: _matrix(*s) if len(s) > 1 else torch.ones(s) for name, s in parameter_shapes(config, 0).items()}
        for weights in (given, None):
            module = build_stage(config, 0, device="cpu", weights=weights)
            held = {name: each for name, each in module.named_modules() if isinstance(each, Nf4Matrix)}
            frozen = {name for name, each in module.named_parameters() if not each.requires_grad and each.ndim > 1}
            assert set(held) == {name for name in given if name.startswith("layers.") and given[name].ndim > 1}
            assert frozen == {name for name in given if not name.startswith("layers.") and given[name].ndim > 1}
            if weights is not None:
                assert all(torch.equal(m.dense(torch.float32), Nf4Matrix(given[n]).dense(torch.float32))
                           for n, m in held.items())  # fmt: skip


@pytest.mark.parametrize("graphs", [0, 1 << 30])
def test_a_swarm_computes_as_one_process_and_takes_gradients_out_again(graphs: int) -> None:
    model = build_transformer(QLORA, device="cpu")
    chain = chain_of(QLORA, graphs)
    losses = [run_microbatch(chain, 0)[0]]
    before = sums_of(chain)
    leaving = [run_microbatch(chain, number)[1] for number in (1, 2)]
    loss = model.loss(tokens_of(0).long(), DropoutKey(seed=QLORA.data.seed, microbatch=0))
    (loss * QLORA.data.tokens_per_microbatch).backward()  # type: ignore[no-untyped-call]  # torch's
    assert losses[0] == pytest.approx(float(loss.detach()), rel=1e-6)
    for name, value in before.items():
        expected = model.get_parameter(name).grad
        assert expected is not None
        torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)
    for stage, backend in enumerate(chain):
        backend.roll_back([entries[stage] for entries in leaving])
    assert all(torch.equal(value, before[name]) for name, value in sums_of(chain).items())


def test_the_base_is_the_same_at_every_peer_and_no_part_of_the_state() -> None:
    def states(config: RunConfig) -> list[str]:
        return [digest_of(backend.weights.state()) for backend in chain_of(config)]

    assert states(QLORA) == states(dataclasses.replace(QLORA, lora=LoraConfig(rank=4)))
    one, other = (build_stage(QLORA, 1, device="cpu") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.buffers(), other.buffers(), strict=True))
