"""A session: its order and next positions, as they travel from stage to stage, and one peer's part in it.

When a peer fails, another peer begins the session again from the same data, and goes on with the same tokens.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from swarm.errors import MalformedMessage, PeerUnavailable, SwarmError
from swarm.generation.sampling import Sampling, Scores, Scoring, require_few
from swarm.hop.retries import HopContext
from swarm.rpc.ask import Stream
from swarm.rpc.v1 import generation_pb2 as pb
from swarm.rpc.v1.generation_pb2_grpc import GenerationServiceStub
from swarm.types import LARGEST_STAGE, PeerId, PeerRecord

PIECE_TOKENS = 256
"""Most positions that are computed together, so that other work gets its turn between the pieces of a long prompt."""
PIECE_BYTES = 4 << 20
"""Most bytes of hidden states in one message, unless one position has more."""
_LEAST_LOGPROB, _ROUNDED = -1e9, 1e-3
"""Every score is between these: the logarithm of a probability is never positive, but for rounding."""
LONGEST_SEED = 40


@dataclass(frozen=True, kw_only=True)
class Order:
    """The text that a session has to write.

    The prompt and the text after it have `num_positions` tokens. If the prompt has all of them, the session ends with
    the token after it. Every token is below `vocab_size`. Without `scoring` no token is scored. `path` is one of the
    run's.
    """

    sampling: Sampling
    num_positions: int
    vocab_size: int
    scoring: Scoring | None = None
    path: int = 0

    def __post_init__(self) -> None:
        if self.scoring is not None:
            require_few(self.scoring.num_scores(self.num_positions + 1))
            if self.scoring.num_top > self.vocab_size:
                raise ValueError(f"there are only {self.vocab_size} tokens")


class Piece(NamedTuple):
    """The next positions: their tokens, and from stage 1 on their hidden states as they travel."""

    tokens: Sequence[int]
    hidden: bytes = b""


class Token(NamedTuple):
    """A token that was sampled, how many tokens come before it, and the newest scores up to its own, if wanted."""

    position: int
    token: int
    scores: Scores | None = None


def pieces_of(prompt: Sequence[int]) -> list[Piece]:
    return [Piece(prompt[start : start + PIECE_TOKENS]) for start in range(0, len(prompt), PIECE_TOKENS)]


def pack_sampling(sampling: Sampling) -> pb.Sampling:
    packed = pb.Sampling()
    for name, value in vars(sampling).items():
        setattr(packed, name, type(getattr(packed, name))(value))  # a seed of any size travels as text
    return packed


def unpack_order(opening: pb.SessionOpen, *, vocab_size: int) -> Order:
    """The order of a session that is opened. Raises MalformedMessage."""
    packed = opening.sampling
    try:
        if len(packed.seed) > LONGEST_SEED:
            raise ValueError(f"the seed has more than {LONGEST_SEED} digits")
        values = {name: type(default)(getattr(packed, name)) for name, default in vars(Sampling()).items()}
        sampling = Sampling(**values)
        scoring = None
        if opening.HasField("scoring"):
            scoring = Scoring(first=opening.scoring.first, num_top=opening.scoring.num_top)
        return Order(
            sampling=sampling, num_positions=opening.num_positions, vocab_size=vocab_size, scoring=scoring,
            path=opening.address.path,
        )  # fmt: skip
    except ValueError as error:
        raise MalformedMessage(f"sampling: {error}") from None


def pack_token(token: Token) -> pb.Sampled:
    sampled = pb.Sampled(position=token.position, token=token.token)
    if token.scores is not None:
        sampled.logprobs.extend(token.scores.logprobs)
        sampled.top.extend(token.scores.top)
        sampled.top_logprobs.extend(token.scores.top_logprobs)
    return sampled


def unpack_token(packed: pb.Sampled, order: Order) -> Token:
    """The token in a message, of which only the scores are checked. Raises PeerUnavailable."""
    scoring, num_scored = order.scoring, len(packed.logprobs)
    most = 0 if scoring is None else max(0, packed.position + 1 - scoring.first)
    num_top = 0 if scoring is None else num_scored * scoring.num_top
    if num_scored > most or len(packed.top) != num_top or len(packed.top_logprobs) != num_top:
        raise PeerUnavailable(f"{num_scored} scores, with {len(packed.top)} of the likeliest tokens: others are wanted")
    if not all(_LEAST_LOGPROB < logprob < _ROUNDED for logprob in (*packed.logprobs, *packed.top_logprobs)):
        raise PeerUnavailable("a score that is no logarithm of a probability")
    if any(token >= order.vocab_size for token in packed.top):
        raise PeerUnavailable("a score for a token that is not in the vocabulary")
    if scoring is None:
        return Token(packed.position, packed.token)
    scores = Scores(scoring)
    scores.extend(packed.logprobs, packed.top, packed.top_logprobs)
    return Token(packed.position, packed.token, scores)


def unpack_pieces(packed: Iterable[pb.Piece]) -> list[Piece]:
    """The pieces in a message, unchecked."""
    return [Piece(tuple(piece.tokens), piece.hidden) for piece in packed]


class SessionCall:
    """A stream to one peer, and the rounds whose weights are used there and at all later stages. Its errors are those
    of swarm.errors, and end the stream."""

    def __init__(
        self, stream: Stream, peer: PeerRecord, order: Order, rounds: Sequence[int], silence_seconds: float
    ) -> None:
        self.peer = peer
        self._order = order
        self.rounds = tuple(rounds)
        self._stream = stream
        self._silence_seconds = silence_seconds
        self._failed: SwarmError | None = None

    @property
    def peer_id(self) -> PeerId:
        return PeerId(self.peer.peer_id)

    @property
    def is_open(self) -> bool:
        return not self._stream.has_ended

    async def send(self, pieces: Sequence[Piece] = (), *, sample: bool = False) -> None:
        """Send the next positions, or none as a sign of life. Only one task may do so at a time."""
        packed = [pb.Piece(tokens=piece.tokens, hidden=piece.hidden) for piece in pieces]
        try:
            async with self._stream as stream:
                await stream.write(pb.GenerateRequest(pieces=packed, sample=sample), self._silence_seconds)
        except SwarmError as error:
            self._failed = error
            raise

    async def token(self) -> Token:
        """Wait for the next token. Raises PeerUnavailable if the peer gives no sign of life."""
        try:
            async with self._stream as stream:
                while True:
                    reply = await stream.read(self._silence_seconds)
                    if reply.HasField("sampled"):
                        return unpack_token(reply.sampled, self._order)
        except asyncio.CancelledError:
            # When `send` fails it ends the stream, which the task that reads sees as a cancellation.
            task = asyncio.current_task()
            if self._failed is None or (task is not None and task.cancelling()):
                raise
            raise self._failed from None

    def close(self) -> None:
        self._stream.cancel()


async def open_session(
    context: HopContext, record: PeerRecord, order: Order, *, rounds: Sequence[int], newest_round: int | None,
    standby: bool, piece_bytes: int,
) -> SessionCall:  # fmt: skip
    """Ask a peer, and through it the later stages, to take a session, or, with `standby`, only to hold the round's
    weights for now.

    `rounds` are those of the stage and all later ones, if the session has begun with them. Otherwise `newest_round` is
    that of the stage before; None for stage 0. A piece has `piece_bytes` of hidden states at most, on which depends
    what a slow line is given. Raises Overloaded if the peer has no room for one more, RoundMismatch if it no longer has
    that round's weights, and whatever else `translate` gives.
    """
    opening = pb.SessionOpen(
        address=context.address(order.path), rounds=rounds, newest_round=newest_round,
        num_positions=order.num_positions, sampling=pack_sampling(order.sampling), standby=standby,
    )  # fmt: skip
    if order.scoring is not None:
        opening.scoring.CopyFrom(pb.Scoring(first=order.scoring.first, num_top=order.scoring.num_top))
    patience = context.patience(record, piece_bytes)
    stub: Any = context.own(record) or GenerationServiceStub(context.channels.channel(record, bulk=patience.is_needed))
    silence_seconds = context.limits.silence_seconds + patience.more_seconds
    async with Stream(stub.Generate()) as stream:
        await stream.write(pb.GenerateRequest(open=opening), context.limits.open_seconds + patience.more_seconds)
        # The peer gives signs of life while it opens the session at later stages.
        while not (reply := await stream.read(silence_seconds)).HasField("opened"):
            if reply.HasField("sampled"):
                raise PeerUnavailable("a token came before the session was opened")
        if not reply.opened.rounds:
            raise PeerUnavailable("an answer without the rounds that are used")
    rounds_of_later = reply.opened.rounds[: LARGEST_STAGE + 1 - context.block.stage]
    return SessionCall(stream, record, order, rounds_of_later, silence_seconds)
