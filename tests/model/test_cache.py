"""A pool's caches keep what is in them, and take no more room than they need."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from swarm.config import ModelConfig, RunConfig
from swarm.model.cache import CachePool, KeyValueCache, PooledRows, cache_bytes
from swarm.model.stages import build_transformer

MOST = 100
LAYERS = ("layers.0", "layers.1")


def _heads(number: int, count: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of two heads, of which the queries have four."""
    generator = torch.Generator().manual_seed(number)
    q_BHTK, k_BGTK, v_BGTK = (torch.randn(1, heads, count, 8, generator=generator) for heads in (4, 2, 2))
    return q_BHTK, k_BGTK, v_BGTK


def _attend(cache: KeyValueCache, number: int, count: int = 1) -> Tensor:
    """Attention in all layers."""
    mixed = torch.cat([cache.attend(layer, *_heads(number + place, count)) for place, layer in enumerate(LAYERS)])
    cache.advance(count)
    return mixed


def _go_on(caches: Sequence[tuple[KeyValueCache, KeyValueCache]], number: int, rng: random.Random) -> None:
    for pooled, alone in caches:
        if (left := pooled.capacity - pooled.num_positions) > 0:
            count = rng.randint(1, max(1, left // 3))
            torch.testing.assert_close(_attend(pooled, number, count), _attend(alone, number, count))


def test_caches_keep_what_is_in_them_while_others_come_and_go() -> None:
    """There is no more memory than they need together, so at times they move."""
    rng, pool = random.Random(0), CachePool(MOST)
    caches: list[tuple[KeyValueCache, KeyValueCache]] = []
    for number in range(300):
        capacity = rng.randint(1, 40)
        while sum(own.capacity for own, _ in caches) + capacity > MOST:
            caches.pop(rng.randrange(len(caches)))
        caches.append((KeyValueCache(capacity, pool), KeyValueCache(capacity)))
        pool.place([caches[-1][0]])
        _go_on(caches, number, rng)
        assert pool.num_positions <= MOST


def test_what_is_not_finite_in_a_place_does_no_harm_to_who_gets_it_next() -> None:
    pool, alone = CachePool(MOST), KeyValueCache(20)
    earlier = KeyValueCache(20, pool)
    pool.place([earlier])
    poison = torch.full((1, 2, 20, 8), float("nan"))
    for layer in LAYERS:
        earlier.attend(layer, torch.zeros(1, 4, 20, 8), poison, poison)
    del earlier
    cache = KeyValueCache(20, pool)
    pool.place([cache])
    for number in range(20):
        rows = PooledRows(pool, torch.tensor([cache.start]), torch.tensor([number]), num_read=32)
        found = torch.cat([rows.attend(layer, *_heads(number + place)) for place, layer in enumerate(LAYERS)])
        torch.testing.assert_close(found, _attend(alone, number))
    assert pool.num_positions == 20


@torch.no_grad()
def test_bytes_of_a_position_are_what_a_cache_takes_once() -> None:
    config = RunConfig(model=ModelConfig(num_layers=3, d_model=16, num_heads=4, num_kv_heads=2, vocab_size=8))
    model, pool = build_transformer(config, device="cpu"), CachePool(10)
    cache = KeyValueCache(10, pool)
    pool.place([cache])
    model(torch.tensor([[1, 2, 3]]), cache=cache)
    heads = [heads_PGK for layer in model.layers for heads_PGK in pool.heads(f"layers.{layer}")]
    assert sum(heads_PGK.nbytes for heads_PGK in heads) == 10 * cache_bytes(model.model, model.model.num_layers)
    model(torch.tensor([[4, 5]]), cache=cache)
    assert cache.num_positions == 5
    again = [heads_PGK for layer in model.layers for heads_PGK in pool.heads(f"layers.{layer}")]
    assert [heads_PGK.data_ptr() for heads_PGK in again] == [heads_PGK.data_ptr() for heads_PGK in heads]
