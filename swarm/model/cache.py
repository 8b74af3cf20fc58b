"""Keys and values of the positions of texts that have been computed.

Caches of several texts may be in one pool, whose tensors stay where they are, for steps that are recorded. A text has
the positions from its `start` on, as many as it may ever need, until nothing refers to its cache any more. It writes to
no others, and reads none that it has not written.

Shape suffixes: P positions of a pool, B texts, T positions, S positions that are read of each text, H query heads, G
key and value heads, K head width.
"""

from collections.abc import Callable, Sequence
from typing import Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from swarm.config import ModelConfig
from swarm.model.attention import attention


def cache_bytes(model: ModelConfig, num_layers: int) -> int:
    """The bytes of one position's keys and values in `num_layers` layers, in float32."""
    return 2 * num_layers * model.kv_heads * model.width_of_heads * torch.float32.itemsize


class Cache(Protocol):
    """The caches of one text or of several, for the positions of each that are computed next."""

    def next_positions(self, count: int, device: torch.device) -> Tensor:
        """These positions: [T], or [B, T] if texts differ."""

    def advance(self, count: int) -> None:
        """Note that every layer now has these positions."""

    def attend(self, layer: str, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
        """Attention of these positions to all cached ones and to each other; their keys and values are cached."""


class CachePool:
    """The memory of caches. `num_positions` is for how many positions there is memory."""

    def __init__(self, most_positions: int, renew: Callable[[], None] = lambda: None) -> None:
        """`most_positions` is the most that all texts together will need. There is memory for fewer at first. `renew`
        is called when there is too little, before tensors with more replace all that there are."""
        self.num_positions = 0
        self._most_positions, self._renew = most_positions, renew
        self._placed: WeakSet[KeyValueCache] = WeakSet()
        self._layers: dict[str, tuple[Tensor, ...]] = {}

    def place(self, caches: "Sequence[KeyValueCache]") -> None:
        """Give caches their positions, unless they have them. What others have may move."""
        for cache in caches:
            if cache not in self._placed:
                cache.start = self._find(cache.capacity)
                self._placed.add(cache)

    def heads(self, layer: str, *new_BGTK: Tensor) -> tuple[Tensor, ...]:
        """The keys_PGK and values_PGK of a layer, of these tensors' types. Its memory is taken with the first call."""
        if layer not in self._layers:
            shapes = [(self.num_positions, new.shape[1], new.shape[3]) for new in new_BGTK]
            self._layers[layer] = tuple(new.new_empty(shape) for new, shape in zip(new_BGTK, shapes, strict=True))
        return self._layers[layer]

    def _find(self, count: int) -> int:
        """The first of `count` positions that no cache has, after as many changes as it takes."""
        end, placed = 0, sorted(self._placed, key=lambda cache: cache.start)
        for cache in placed:
            if cache.start - end >= count:
                return end
            end = cache.start + cache.capacity
        if self.num_positions - end < count:
            end = self._pack(placed)
        if self.num_positions - end < count:
            self._grow(max(end + count, min(2 * self.num_positions, self._most_positions)))
        return end

    def _pack(self, placed: "Sequence[KeyValueCache]") -> int:
        """Move all caches to the front, and return the position behind them."""
        end = 0
        for cache in placed:
            old, new = (slice(start, start + cache.num_positions) for start in (cache.start, end))
            for heads_PGK in [heads for pair in self._layers.values() for heads in pair] if old != new else ():
                heads_PGK[new] = heads_PGK[old].clone()
            cache.start = end
            end += cache.capacity
        return end

    def _grow(self, num_positions: int) -> None:
        self._renew()
        for layer, pair in self._layers.items():
            larger = tuple(heads_PGK.new_empty((num_positions, *heads_PGK.shape[1:])) for heads_PGK in pair)
            for new, old in zip(larger, pair, strict=True):
                new[: self.num_positions] = old[: self.num_positions]
            self._layers[layer] = larger
        self.num_positions = num_positions


class KeyValueCache:
    """The cache of one text.

    Attributes:
        capacity: the most positions that fit.
        num_positions: how many positions are cached in every layer.
        start: where they begin in the pool; -1 until they are placed.
    """

    def __init__(self, capacity: int, pool: CachePool | None = None) -> None:
        """`pool` places the cache before the first position is computed; None for memory of its own."""
        self.capacity = capacity
        self.num_positions, self.start = 0, -1
        self._pool = pool or CachePool(capacity)
        if pool is None:
            self._pool.place([self])

    def next_positions(self, count: int, device: torch.device) -> Tensor:
        return torch.arange(self.num_positions, self.num_positions + count, device=device)

    def advance(self, count: int) -> None:
        assert self.num_positions + count <= self.capacity, "the cache is full"
        self.num_positions += count

    def rewind(self, num_positions: int) -> None:
        """Forget all positions but the first ones, for example those of a computation that failed half-way."""
        assert num_positions <= self.num_positions
        self.num_positions = num_positions

    def attend(self, layer: str, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
        heads, end = self.add(layer, k_BGTK, v_BGTK), self.start + self.num_positions + k_BGTK.shape[2]
        k_BGSK, v_BGSK = (heads_PGK[None, self.start : end].transpose(1, 2) for heads_PGK in heads)
        return attention(q_BHTK, k_BGSK, v_BGSK)

    def earlier(self, layer: str) -> tuple[Tensor, ...]:
        """The keys_SGK and values_SGK of a layer's cached positions; empty if there are none."""
        end = self.start + self.num_positions
        heads = self._pool.heads(layer) if self.num_positions else ()
        return tuple(heads_PGK[self.start : end] for heads_PGK in heads)

    def add(self, layer: str, k_BGTK: Tensor, v_BGTK: Tensor) -> tuple[Tensor, ...]:
        """Cache the keys and values of the next positions. Returns those of all positions of the pool."""
        first, end = self.start + self.num_positions, self.start + self.num_positions + k_BGTK.shape[2]
        assert self.start >= 0, "the cache has no memory"
        assert len(k_BGTK) == 1, "each text has a cache of its own"
        assert end <= self.start + self.capacity, "the cache is full"
        heads = self._pool.heads(layer, k_BGTK, v_BGTK)
        for heads_PGK, new_BGTK in zip(heads, (k_BGTK, v_BGTK), strict=True):
            heads_PGK[first:end] = new_BGTK[0].transpose(0, 1)
        return heads


class LayerPiece:
    """The next positions of one text in one layer, for compiled code, which cannot follow a cache that grows: it reads
    the keys_SGK and values_SGK of the earlier positions, if there are any, and leaves those of the next ones as `new`,
    for KeyValueCache.add."""

    def __init__(self, earlier: tuple[Tensor, ...]) -> None:
        self.earlier = earlier
        self.new: tuple[Tensor, ...] = ()

    def attend(self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
        self.new = k_BGTK, v_BGTK
        if self.earlier:
            earlier_k_SGK, earlier_v_SGK = self.earlier
            k_BGTK = torch.cat((earlier_k_SGK[None].transpose(1, 2), k_BGTK), dim=2)
            v_BGTK = torch.cat((earlier_v_SGK[None].transpose(1, 2), v_BGTK), dim=2)
        return attention(q_BHTK, k_BGTK, v_BGTK)


class CacheRows:
    """The caches of several texts that are computed side by side, one for each row; their lengths may differ."""

    def __init__(self, caches: Sequence[KeyValueCache]) -> None:
        self._caches = caches

    def next_positions(self, count: int, device: torch.device) -> Tensor:
        return torch.stack([cache.next_positions(count, device) for cache in self._caches])

    def advance(self, count: int) -> None:
        for cache in self._caches:
            cache.advance(count)

    def attend(self, layer: str, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
        rows = zip(*(heads.chunk(len(self._caches)) for heads in (q_BHTK, k_BGTK, v_BGTK)), strict=True)
        return torch.cat([cache.attend(layer, *row) for cache, row in zip(self._caches, rows, strict=True)])


class PooledRows:
    """The caches of several texts, for one position of each. Tensors say which, so what is recorded with some holds for
    any."""

    def __init__(self, pool: CachePool, starts_B: Tensor, positions_B: Tensor, num_read: int) -> None:
        """`num_read` says how many positions are read of each text: more than any of these positions."""
        self._pool = pool
        self._positions_B1 = positions_B[:, None]
        self._places_B = starts_B + positions_B
        offsets_S = torch.arange(num_read, device=positions_B.device)
        self._mask_B11S = (offsets_S <= self._positions_B1)[:, None, None]
        # A mask does not hide what is not finite. So the newest position is read in the place of later ones.
        self._read_BS = starts_B[:, None] + torch.minimum(offsets_S, self._positions_B1)

    def next_positions(self, count: int, device: torch.device) -> Tensor:
        return self._positions_B1

    def advance(self, count: int) -> None:
        """Does nothing: whoever has the caches tells them."""

    def attend(self, layer: str, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
        heads = self._pool.heads(layer, k_BGTK, v_BGTK)
        for heads_PGK, new_BGTK in zip(heads, (k_BGTK, v_BGTK), strict=True):
            heads_PGK.index_copy_(0, self._places_B, new_BGTK[:, :, 0])
        k_BGSK, v_BGSK = (heads_PGK[self._read_BS].transpose(1, 2) for heads_PGK in heads)
        return attention(q_BHTK, k_BGSK, v_BGSK, self._mask_B11S)
