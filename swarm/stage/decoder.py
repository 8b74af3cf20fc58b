"""Computes the next positions of sessions on the compute thread, with the keys and values of earlier positions.

Single tokens of several waiting sessions are computed together as one batch: the time goes into
reading the weights, and is the same for one token and for several. A longer piece is a task of its own, so that
training has its turn after it. No graph is made, and no gradient is computed.

Shapes: B sessions, T positions, R numbers a token that travel, V vocabulary.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

import torch

from swarm.config import RunConfig
from swarm.generation.decoding import Decoding, NextPositions, Scorer, choose
from swarm.generation.sampling import BYTES_OF_SCORE
from swarm.hop.session import Order, Piece, Token
from swarm.model.cache import KeyValueCache, cache_bytes
from swarm.model.stage_module import StageModule
from swarm.model.stages import layer_ranges
from swarm.rpc.wire import DTYPES, require_in_range
from swarm.stage.backend import StageBackend
from swarm.stage.boundary import HIDDEN
from swarm.stage.held_rounds import HeldRound
from swarm.stage.runtime import Priority, Runtime


@dataclass(eq=False)
class Computed:
    order: Order
    held: HeldRound
    cache: KeyValueCache
    scorer: Scorer
    """Used at the last stage."""
    next_round: int = 0
    """The round whose weights the next stage uses."""


@dataclass(eq=False)
class _Step:
    computed: Computed
    tokens: list[int]
    hidden: Sequence[Piece]
    sample: bool
    future: "Future[Piece | Token | None]" = field(default_factory=Future)


class Decoder:
    def __init__(self, backend: StageBackend, runtime: Runtime, *, most_bytes: int) -> None:
        """All sessions together will take `most_bytes` at most, as session_bytes counts them, and recordings as much
        again."""
        self._module = backend.module
        self._is_first, self._is_last = backend.stage == 0, backend.is_last
        self._boundary_in = backend.boundary_in
        self._staging = backend.staging
        self._device = backend.weights.device
        self._runtime = runtime
        most_positions = most_bytes // _position_bytes(backend.config, backend.stage)
        self._decoding = Decoding(
            backend.staging.upload, backend.recorder, most_positions=most_positions, most_recorded_bytes=most_bytes
        )
        self._waiting: deque[_Step] = deque()

    def cache(self, order: Order) -> KeyValueCache:
        return self._decoding.cache(order.num_positions)

    def warm_up(self, held: HeldRound) -> None:
        """Compile the layers for pieces of prompts, if layers are compiled here. For the compute thread. `held` has the
        stage's weights."""
        if isinstance(own := self._module, StageModule) and own.compiles:
            self._decoding.warm_up(own, partial(held.module, own, self._device))

    async def compute(self, computed: Computed, pieces: Sequence[Piece], *, sample: bool) -> Piece | Token | None:
        """Compute the next positions of a session, at least one.

        Returns:
            The piece for the next stage. At the last stage it is the token after these positions, or None if `sample`
            is False.

        Raises:
            MalformedMessage: hidden states hold numbers out of range.
        Cancellation drops the positions whose computation has not begun.
        """
        tokens = [token for piece in pieces for token in piece.tokens]
        step = _Step(computed, tokens, pieces, sample)
        if len(tokens) > 1:
            self._runtime.submit(lambda: self._run([step]), priority=Priority.GENERATION)
        else:
            self._waiting.append(step)
            # The first of these tasks that gets its turn computes all waiting steps.
            self._runtime.submit(self._run_waiting, priority=Priority.GENERATION)
        return await asyncio.wrap_future(step.future)

    # -- on the compute thread -----------------------------------------------------------------------------------------

    def _run_waiting(self) -> None:
        steps = [self._waiting.popleft() for _ in range(len(self._waiting))]
        steps.sort(key=lambda step: step.computed.held.number)
        for _, together in groupby(steps, key=lambda step: step.computed.held):
            self._run(list(together))

    @torch.inference_mode()
    def _run(self, steps: list[_Step]) -> None:
        wanted = [step for step in steps if step.future.set_running_or_notify_cancel()]
        together = {step: positions for step in wanted if (positions := self._positions(step)) is not None}
        if not together:
            return
        assert isinstance(self._module, StageModule), "no session is taken for another one"
        module = partial(wanted[0].computed.held.module, self._module, self._device)
        outputs = self._decoding.compute(module, list(together.values()))
        for step, output in zip(together, outputs, strict=True):
            self._answer(step, output)

    def _positions(self, step: _Step) -> NextPositions | None:
        """What is to be computed for a step. If its input makes no sense, None, and the step's caller gets the
        error."""
        try:
            hidden = None if self._is_first else torch.cat([self._decode(step, piece) for piece in step.hidden], dim=1)
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            step.future.set_exception(error)
            return None
        num_logits = step.computed.scorer.num_logits(len(step.tokens))
        return NextPositions(cache=step.computed.cache, tokens=step.tokens, hidden_1TR=hidden, num_logits=num_logits)

    def _decode(self, step: _Step, piece: Piece) -> torch.Tensor:
        boundary = self._boundary_in(step.computed.held.number)
        spec = boundary.spec(1, len(piece.tokens))
        wire = torch.frombuffer(bytearray(piece.hidden), dtype=DTYPES[spec.encoding]).reshape(spec.shape)
        require_in_range(HIDDEN, wire, spec.encoding)
        return boundary.decode(wire, 1, len(piece.tokens), self._staging)

    def _answer(self, step: _Step, output_NV: torch.Tensor | BaseException) -> None:
        if isinstance(output_NV, BaseException):
            step.future.set_exception(output_NV)
            return
        try:
            answer = self._chosen(step, output_NV) if self._is_last else self._encode(step, output_NV)
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            step.future.set_exception(error)
        else:
            step.future.set_result(answer)

    def _chosen(self, step: _Step, logits_NV: torch.Tensor) -> Token | None:
        order, scorer = step.computed.order, step.computed.scorer
        scorer.add_positions(step.tokens, logits_NV)
        if not step.sample:
            return None
        position = step.computed.cache.num_positions
        token = choose(logits_NV[-1], order.sampling, position)
        scorer.add_chosen(token)
        return Token(position, token, scorer.take())

    def _encode(self, step: _Step, output_TR: torch.Tensor) -> Piece:
        boundary = self._boundary_in(step.computed.next_round)
        wire = boundary.encode(output_TR[None], self._staging).wait().contiguous()
        return Piece(step.tokens, wire.reshape(-1).view(torch.uint8).numpy().tobytes())


def session_bytes(config: RunConfig, stage: int, order: Order) -> int:
    """The most bytes that a session takes at a stage: keys and values and the hidden states that it sends on, all in
    float32, and scores."""
    num_scores = 0 if order.scoring is None else order.scoring.num_scores(order.num_positions)
    return order.num_positions * _position_bytes(config, stage) + num_scores * BYTES_OF_SCORE


def _position_bytes(config: RunConfig, stage: int) -> int:
    return cache_bytes(config.model, len(layer_ranges(config)[stage])) + 4 * config.model.hidden_width
