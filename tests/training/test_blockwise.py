"""Numbers in 8 bits are the paper's, and stay the same bits however often they are read and written."""

import math

import numpy as np
import pytest
import torch

from swarm.training.blockwise import BLOCK, LEAST, SIGNED, UNSIGNED, Packed, Table

CPU = torch.device("cpu")


def _numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Numbers of many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * 10.0 ** (4 * torch.rand(shape, generator=generator) - 4)


def _packed(numbers: torch.Tensor, table: Table) -> Packed:
    packed = Packed(table, numbers.shape, CPU)
    packed.pack(numbers)
    return packed


def _codes(packed: Packed) -> list[torch.Tensor]:
    return [tensor.clone() for row in packed.rows() for tensor in row]


@pytest.mark.parametrize("signed", [True, False])
def test_the_values_are_those_of_bitsandbytes(signed: bool) -> None:
    """The function create_dynamic_map of its functional.py, in few lines."""
    values = [0.0, 1.0]
    for exponent in range(7):
        edges = np.linspace(0.1, 1, 2**exponent * (1 if signed else 2) + 1)
        middles = 10.0 ** (exponent - 6) * (edges[:-1] + edges[1:]) / 2
        values += [*middles, *(-middles if signed else [])]
    np.testing.assert_allclose((SIGNED if signed else UNSIGNED).values, sorted(values), rtol=1e-6)


@pytest.mark.parametrize("shape", [(3, BLOCK), (5, 77), (1, 2)])
@pytest.mark.parametrize("table", [SIGNED, UNSIGNED], ids=["signed", "unsigned"])
def test_every_number_gets_its_nearest_code_in_float64(table: Table, shape: tuple[int, int]) -> None:
    numbers = _numbers(*shape) if table.signed else _numbers(*shape) ** 2
    found = _packed(numbers, table).unpacked().flatten().double().numpy()
    flat = numbers.flatten().double().numpy()
    for start in range(0, len(flat), BLOCK):
        block = flat[start : start + BLOCK]
        levels = table.values.astype(np.float64) * block[np.abs(block).argmax()]
        nearest = np.abs(block[:, None] - levels).min(axis=1)
        if not table.signed:
            # What is above 0 stays above it.
            nearest = np.maximum(nearest, np.where(block < levels[1], levels[1] - block, 0.0))
        np.testing.assert_allclose(np.abs(found[start : start + BLOCK] - block), nearest, rtol=1e-2, atol=1e-12)


@pytest.mark.parametrize("table", [SIGNED, UNSIGNED], ids=["signed", "unsigned"])
def test_what_was_read_is_written_with_the_same_bits(table: Table) -> None:
    numbers = _numbers(70, BLOCK + 9)
    numbers[3] *= 1e-28  # Blocks that become 0, and some that do not
    numbers[4] *= 1e-22
    packed = _packed(numbers if table.signed else numbers**2, table)
    read = packed.unpacked()
    packed_again = _packed(read, table)
    assert torch.equal(packed_again.unpacked(), read)
    assert all(map(torch.equal, _codes(packed), _codes(packed_again)))


def test_the_largest_number_of_a_block_is_exact_with_its_sign() -> None:
    numbers = torch.tensor([[0.1, -0.7, 0.3], [0.7, -0.7, 0.0]])
    for row in numbers:
        read = _packed(row[None], SIGNED).unpacked()[0]
        assert read.abs().max() == torch.tensor(0.7)
        assert read[1 if row[0] < 0.5 else 0] == (-0.7 if row[0] < 0.5 else 0.7)


def test_a_second_moment_above_0_never_becomes_0() -> None:
    read = _packed(torch.tensor([[1.0, 1e-30, 0.0]]), UNSIGNED).unpacked()
    assert read[0, 1] > 0 == read[0, 2]


def test_tiny_blocks_become_0_and_what_is_not_finite_is_not_hidden() -> None:
    assert not _packed(torch.full((1, 8), LEAST / 2), SIGNED).unpacked().any()
    assert not Packed(SIGNED, torch.Size((3, 100)), CPU).unpacked().any()
    for number in (math.nan, math.inf):
        read = _packed(torch.tensor([[1.0, number, 2.0]]), SIGNED).unpacked()
        assert read.isnan().any()


def test_a_gpus_operations_give_the_same_bits() -> None:
    for table in (SIGNED, UNSIGNED):
        numbers = _numbers(40, BLOCK) if table.signed else _numbers(40, BLOCK) ** 2
        packed = _packed(numbers, table)
        codes, scales = torch.empty(numbers.shape, dtype=torch.uint8), torch.empty(len(numbers), 1)
        table.encode(numbers, codes, scales)
        assert all(map(torch.equal, _codes(packed), (codes, scales)))
        assert torch.equal(table.decode(codes, scales), packed.unpacked())


def test_a_number_takes_little_more_than_a_byte() -> None:
    held = sum(tensor.nbytes for row in Packed(SIGNED, torch.Size((100, 1000)), CPU).rows() for tensor in row)
    assert held == Packed.num_bytes(100_000) < 1.02 * 100_000
