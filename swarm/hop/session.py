"""The data of a session that travels from stage to stage: its order, and the next positions.

Used by both ends of swarm.hop's session calls. Immutable, and the same at every stage. When a peer fails, another peer
begins the session again from this data, and goes on with the same tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from swarm.errors import MalformedMessage, PeerUnavailable
from swarm.generation.sampling import Sampling, Scores, Scoring, require_few
from swarm.rpc.v1 import generation_pb2 as pb

PIECE_TOKENS = 256
"""Most positions that are computed together, so that other work gets its turn between the pieces of a long prompt."""
PIECE_BYTES = 4 << 20
"""Most bytes of hidden states in one message, unless one position has more."""
_LEAST_LOGPROB, _ROUNDED = -1e9, 1e-3
"""Every score is between these: the logarithm of a probability is never positive, but for rounding."""
LONGEST_SEED = 40
"""The most digits of a seed."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """The text that a session has to write: its length, how its tokens are sampled, and which are scored.

    Attributes:
        sampling: how tokens are chosen.
        num_positions: how many tokens the prompt and the text after it have. If the prompt has all of them, the session
            ends with the token after it.
        vocab_size: the number of tokens in the vocabulary; every token is below it.
        scoring: None if no token is scored.
    """

    sampling: Sampling
    num_positions: int
    vocab_size: int
    scoring: Scoring | None = None

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
    """Cut a prompt into the pieces in which it is computed."""
    return [Piece(prompt[start : start + PIECE_TOKENS]) for start in range(0, len(prompt), PIECE_TOKENS)]


def pack_sampling(sampling: Sampling) -> pb.Sampling:
    """The sampling in its wire form."""
    return pb.Sampling(
        temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, seed=str(sampling.seed)
    )


def unpack_order(opening: pb.SessionOpen, *, vocab_size: int) -> Order:
    """The order of a session that is opened. Raises MalformedMessage."""
    packed = opening.sampling
    try:
        if len(packed.seed) > LONGEST_SEED:
            raise ValueError(f"the seed has more than {LONGEST_SEED} digits")
        sampling = Sampling(
            temperature=packed.temperature, top_p=packed.top_p, top_k=packed.top_k, seed=int(packed.seed)
        )
        scoring = None
        if opening.HasField("scoring"):
            scoring = Scoring(first=opening.scoring.first, num_top=opening.scoring.num_top)
        return Order(sampling=sampling, num_positions=opening.num_positions, vocab_size=vocab_size, scoring=scoring)
    except ValueError as error:
        raise MalformedMessage(f"sampling: {error}") from None


def pack_token(token: Token) -> pb.Sampled:
    """The token in its wire form."""
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


def pack_pieces(pieces: Iterable[Piece]) -> list[pb.Piece]:
    """The pieces in their wire form."""
    return [pb.Piece(tokens=piece.tokens, hidden=piece.hidden) for piece in pieces]


def unpack_pieces(packed: Iterable[pb.Piece]) -> list[Piece]:
    """The pieces in a message, unchecked."""
    return [Piece(tuple(piece.tokens), piece.hidden) for piece in packed]
