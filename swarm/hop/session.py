"""The data of a session that travels from stage to stage: its order, and the next positions.

Used by both ends of swarm.hop's session calls. Immutable, and the same at every stage. When a peer fails, another peer
begins the session again from this data, and goes on with the same tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from swarm.errors import MalformedMessage
from swarm.generation.sampling import Sampling
from swarm.rpc.v1 import generation_pb2 as pb

PIECE_TOKENS = 256
"""Most positions that are computed together, so that other work gets its turn between the pieces of a long prompt."""
PIECE_BYTES = 4 << 20
"""Most bytes of hidden states in one message, unless one position has more."""
LONGEST_SEED = 40
"""The most digits of a seed."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """The text that a session has to write: its length, and how its tokens are sampled.

    Attributes:
        sampling: how tokens are chosen.
        num_positions: how many tokens the prompt and the text after it have.
        vocab_size: the number of tokens in the vocabulary; every token is below it.
    """

    sampling: Sampling
    num_positions: int
    vocab_size: int


class Piece(NamedTuple):
    """The next positions: their tokens, and from stage 1 on their hidden states as they travel."""

    tokens: Sequence[int]
    hidden: bytes = b""


class Token(NamedTuple):
    """A token that was sampled, and how many tokens come before it."""

    position: int
    token: int


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
    except ValueError as error:
        raise MalformedMessage(f"sampling: {error}") from None
    return Order(sampling=sampling, num_positions=opening.num_positions, vocab_size=vocab_size)


def pack_pieces(pieces: Iterable[Piece]) -> list[pb.Piece]:
    """The pieces in their wire form."""
    return [pb.Piece(tokens=piece.tokens, hidden=piece.hidden) for piece in pieces]


def unpack_pieces(packed: Iterable[pb.Piece]) -> list[Piece]:
    """The pieces in a message, unchecked."""
    return [Piece(tuple(piece.tokens), piece.hidden) for piece in packed]
