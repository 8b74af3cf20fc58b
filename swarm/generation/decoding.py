"""Decoding: computes the next positions of sequences with a module of layers, and chooses and scores their tokens.

A choice depends only on the logits, the sampling parameters and the token's position. So an interrupted text goes on
with the same tokens, even if another process computes them.

A GPU computes a position faster than Python launches its operations. So a recorder records a step of one position of
each sequence, for later ones to replay. A recording reads a module's weights where they lie, and goes when the module
goes. It fits a number of sequences and of positions that are read of each, both rounded up to powers of two.

Shape suffixes: B sequences, T positions, R numbers a token that travel, N positions whose outputs are wanted, V numbers
of an output: the vocabulary at the last stage.
"""

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from swarm.errors import in_one_line
from swarm.generation.sampling import Sampling, Scores, Scoring
from swarm.machine.out_of_memory import in_words
from swarm.machine.recording import Recorder, Recording
from swarm.model.cache import Cache, CachePool, CacheRows, KeyValueCache, PooledRows
from swarm.model.layers import seeded_generator
from swarm.model.stage_module import StageModule, autocast_dtype

logger = logging.getLogger(__name__)

_LEAST_READ = 256
"""The least number of positions that a recording reads. So few take no time worth saving."""
_SLACK, _SLACK_ROUNDED = 1e-4, 3e-2
"""By what share a recording's first outputs may differ from the plain step's: in float32, and where products are
rounded to fewer bits. There the order of sums alone makes dozens of layers differ by 1e-2."""
_ROWS = 32
"""How many positions are scored together, which takes as much memory again as their logits."""
_WARM_UP_TOKENS = (9, 7)
"""The pieces of the text that warms up: one begins it, and one goes on. torch takes different lengths for different
variables."""
NO_SCORING = Scoring(first=sys.maxsize, num_top=0)
"""Scores no token of any sequence."""


@dataclass(frozen=True, kw_only=True)
class NextPositions:
    """The next positions of one sequence, at least one.

    Attributes:
        cache: that of the earlier positions, to which these are added. Decoding.cache made it.
        hidden_1TR: what the stage before made of the tokens; None at the first stage.
        num_logits: how many of these positions' logits the last stage gives: those of the last ones.
    """

    cache: KeyValueCache
    tokens: Sequence[int]
    hidden_1TR: Tensor | None = None
    num_logits: int = 1


class _Step(NamedTuple):
    """`inputs` says what the recording reads from the same memory each time: rows_B3 (int64), with each sequence's
    start in the pool, its next position, and the token there; and from stage 1 on hidden_B1R."""

    inputs: Sequence[Tensor]
    recording: Recording[Tensor]


class Decoding:
    """Computes sequences side by side, because reading the weights is what takes the time."""

    def __init__(
        self, upload: Callable[[Tensor], Tensor], recorder: Recorder | None = None, *, most_positions: int = 0,
        most_recorded_bytes: int = sys.maxsize,
    ) -> None:  # fmt: skip
        """
        Args:
            upload: brings a tensor to the device.
            recorder: records steps; None where all are computed plainly.
            most_positions: the most that all sequences together will have, for a recorder.
            most_recorded_bytes: the most memory that recordings may take.
        """
        self._upload, self._recorder = upload, recorder
        self._most_recorded_bytes = most_recorded_bytes
        self._steps: WeakKeyDictionary[StageModule, dict[tuple[int, int], _Step | None]] = WeakKeyDictionary()
        """By module, number of sequences, and number of positions that are read; None if there can be no recording."""
        self._pool = None if recorder is None else CachePool(most_positions, renew=self._steps.clear)
        self._memory: object = None

    def cache(self, capacity: int) -> KeyValueCache:
        """Make the cache for a sequence of at most this many positions. Any thread may, and may let go of it."""
        return KeyValueCache(capacity, self._pool)

    def compute(
        self, module: Callable[[], StageModule], together: Sequence[NextPositions]
    ) -> list[Tensor | BaseException]:
        """Compute the next positions of one sequence, or one position of each of several.

        If that fails for several, such as for lack of memory, each is computed alone, so that an error concerns no more
        of them than it must.

        Args:
            module: gives the module, or fails.

        Returns:
            For each sequence the outputs_NV of its last positions, which are there until the next call, or the error
            with which they failed.
        """
        before = [positions.cache.num_positions for positions in together]
        try:
            return list(self._outputs(module(), together))
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            if len(together) == 1:
                return [error]
        # By now the failed computation has given its memory back.
        outputs: list[Tensor | BaseException] = []
        for positions, num_positions in zip(together, before, strict=True):
            positions.cache.rewind(num_positions)
            try:
                outputs.append(self._plainly(module(), [positions])[0])
            except BaseException as error:  # noqa: BLE001 - the caller raises it
                outputs.append(error)
        return outputs

    @torch.inference_mode()
    def warm_up(self, own: StageModule, module: Callable[[], StageModule]) -> None:
        """Compile the layers for pieces of prompts of any length, so that no text waits for it. Blocks for a minute.

        From then on `own` and its copies run what was compiled. If that fails, a line in the log says so.

        Args:
            module: gives `own`, or the copy with which texts are computed.
        """
        own.compiles_prompts, cache = True, self.cache(sum(_WARM_UP_TOKENS))
        try:
            made = module()
            device = next(made.parameters()).device
            for count in _WARM_UP_TOKENS:
                hidden = None if made.is_first else torch.zeros(1, count, made.model.hidden_width, device=device)
                self._plainly(made, [NextPositions(cache=cache, tokens=[0] * count, hidden_1TR=hidden)])
        except Exception as error:  # noqa: BLE001 - torch, Triton and compilers raise errors of many kinds
            own.compiles_prompts = False
            logger.warning("prompts are computed uncompiled, and so slower: %s", in_one_line(error))

    def _plainly(self, module: StageModule, together: Sequence[NextPositions]) -> Tensor:
        caches = [positions.cache for positions in together]
        if self._pool is not None:
            self._pool.place(caches)
        tokens_BT = self._upload(torch.tensor([positions.tokens for positions in together]))
        cache = caches[0] if len(caches) == 1 else CacheRows(caches)
        return _applied(module, tokens_BT, _hidden(together), cache, num_logits=together[0].num_logits)

    def _outputs(self, module: StageModule, together: Sequence[NextPositions]) -> Tensor:
        if self._pool is None or len(together[0].tokens) > 1:
            return self._plainly(module, together)
        caches = [positions.cache for positions in together]
        self._pool.place(caches)
        num_rows = _power_of_two(len(together))
        num_read = max(_LEAST_READ, *(_power_of_two(cache.num_positions + 1) for cache in caches))
        # The last sequence stands in for those that are missing: it is computed several times, to the same end.
        padded = [*together, *[together[-1]] * (num_rows - len(together))]
        rows = [(each.cache.start, each.cache.num_positions, each.tokens[0]) for each in padded]
        inputs = [self._upload(torch.tensor(rows)), *_hidden(padded)]
        known = self._steps.setdefault(module, {})
        if (step := known.get((num_rows, num_read))) is None:
            outputs_B1V = self._plainly(module, together)
            if (num_rows, num_read) not in known:
                known[num_rows, num_read] = self._recorded(module, self._pool, inputs, num_read, outputs_B1V)
            return outputs_B1V
        for cache in caches:
            cache.advance(1)
        for static, new in zip(step.inputs, inputs, strict=True):
            static.copy_(new)
        step.recording.replay()
        return step.recording.result[: len(together)]

    def _recorded(
        self, module: StageModule, pool: CachePool, inputs: Sequence[Tensor], num_read: int, expected_B1V: Tensor
    ) -> _Step | None:
        """Record a step that was computed plainly just now. None, and a line in the log, if it cannot be recorded, or
        computes something else."""
        assert self._recorder is not None
        starts_B, positions_B, tokens_B = inputs[0].unbind(1)

        def work() -> Tensor:
            cache = PooledRows(pool, starts_B, positions_B, num_read)
            return _applied(module, tokens_B[:, None], inputs[1:], cache)

        try:
            if not any(any(steps.values()) for steps in self._steps.values()):
                # The device takes memory back with the last recording in it.
                self._memory = self._recorder.pool()
            self._recorder.warm_up(work)
            recording = self._recorder.record(work, self._memory)
            made = (step for steps in self._steps.values() for step in steps.values() if step is not None)
            num_bytes = recording.num_bytes + sum(step.recording.num_bytes for step in made)
            if num_bytes > self._most_recorded_bytes:
                most = in_words(self._most_recorded_bytes)
                raise RuntimeError(f"recordings would take {in_words(num_bytes)}, and may take {most}")
            recording.replay()
            share = _difference(recording.result[: len(expected_B1V)], expected_B1V)
            is_exact = autocast_dtype(module.model) is None and torch.get_float32_matmul_precision() == "highest"
            if not share <= (_SLACK if is_exact else _SLACK_ROUNDED):
                raise RuntimeError(f"the recording's outputs differ by {share:.2g}")
        except Exception as error:  # noqa: BLE001 - texts go on without it
            what = f"{len(inputs[0])} texts with up to {num_read} tokens"
            logger.warning("steps of %s cannot be recorded, and take longer: %s", what, in_one_line(error))
            return None
        return _Step(inputs, recording)


def _applied(
    module: StageModule, tokens_BT: Tensor, hidden: Sequence[Tensor], cache: Cache, *, num_logits: int = 1
) -> Tensor:
    inputs = hidden[0] if hidden else tokens_BT
    outputs_BNV: Tensor = module(inputs, tokens_BT=tokens_BT, cache=cache, num_logits=num_logits)
    return outputs_BNV


def _hidden(together: Sequence[NextPositions]) -> list[Tensor]:
    """The hidden states of all sequences in one tensor; nothing at the first stage."""
    hidden = [positions.hidden_1TR for positions in together if positions.hidden_1TR is not None]
    return [torch.cat(hidden)] if hidden else []


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def _difference(outputs_B1V: Tensor, expected_B1V: Tensor) -> float:
    """The largest difference of a sequence's outputs, as a share of what is expected; NaN if it is not finite."""
    norm_B1, difference_B1 = (tensor.norm(dim=-1) for tensor in (expected_B1V, outputs_B1V - expected_B1V))
    return float((difference_B1 / norm_B1.clamp(min=torch.finfo(norm_B1.dtype).tiny)).max())


# -- the next token ----------------------------------------------------------------------------------------------------


def choose(logits_V: Tensor, sampling: Sampling, position: int) -> int:
    """The token at a position, from the logits of the position before it.

    This sorts where the logits are, and computes in float64 on the CPU. Of tokens with equal logits, the lower one
    counts as the likelier.
    """
    if sampling.temperature == 0.0:
        return int(logits_V.argmax())
    sorted_V, tokens_V = logits_V.detach().sort(descending=True, stable=True)
    sorted_V = sorted_V.cpu().double()
    # The largest logit becomes 0. So even at a very low temperature the others become at worst -inf, and never NaN.
    sorted_V = (sorted_V - sorted_V[0]) / sampling.temperature
    if sampling.top_k:
        sorted_V = sorted_V[: sampling.top_k]
    cumulated_V = sorted_V.softmax(-1).cumsum(-1)
    # Keep the likeliest tokens until their probabilities reach top_p, but at least one.
    num_kept = int((cumulated_V < sampling.top_p).sum()) + 1
    cumulated_V = cumulated_V[:num_kept]
    generator = seeded_generator(torch.device("cpu"), "sample", sampling.seed, position)
    drawn = torch.rand((), dtype=torch.float64, generator=generator) * cumulated_V[-1]
    index = min(int(torch.searchsorted(cumulated_V, drawn, right=True)), len(cumulated_V) - 1)
    return int(tokens_V[index])


class Scorer:
    def __init__(self, scoring: Scoring) -> None:
        self._scoring = scoring
        self._scores = Scores(scoring)
        self._num_positions = 0
        self._last_V: Tensor | None = None
        """What the score of the next token follows from, if that one is wanted."""

    def num_logits(self, count: int) -> int:
        """How many of the next positions' logits are needed: those of the last ones."""
        return min(count, max(1, self._num_positions + count - self._scoring.first + 1))

    def add_positions(self, tokens_T: Sequence[int], logits_NV: Tensor) -> None:
        """Score the tokens of the next positions. `logits_NV` are those of the last `num_logits` of these positions."""
        before_NV = logits_NV[:-1] if self._last_V is None else torch.cat([self._last_V[None], logits_NV[:-1]])
        self._score(tokens_T[len(tokens_T) - len(before_NV) :], before_NV)
        self._num_positions += len(tokens_T)
        self._last_V = logits_NV[-1].clone() if self._num_positions >= self._scoring.first else None

    def add_chosen(self, token: int) -> None:
        if self._last_V is not None:
            self._score([token], self._last_V[None])
            self._last_V = None

    def take(self) -> Scores:
        taken, self._scores = self._scores, Scores(self._scoring)
        return taken

    def _score(self, tokens_N: Sequence[int], logits_NV: Tensor) -> None:
        for start in range(0, len(tokens_N), _ROWS):
            logprobs_NV = logits_NV[start : start + _ROWS].log_softmax(-1)
            own_N1 = torch.tensor(tokens_N[start : start + _ROWS], device=logprobs_NV.device)[:, None]
            values_NK, top_NK = logprobs_NV.topk(self._scoring.num_top)
            self._scores.extend(
                logprobs_NV.gather(1, own_N1)[:, 0].tolist(), top_NK.flatten().tolist(), values_NK.flatten().tolist()
            )
