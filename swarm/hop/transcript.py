"""All positions of one session so far, and which of them the computing peer has. They are kept until the session ends.

Used by swarm.hop.continuation: a peer that takes the place of another one is sent all of them again.
"""

from swarm.errors import PeerUnavailable
from swarm.hop.session import PIECE_BYTES, PIECE_TOKENS, Piece, Token


class Transcript:
    """The positions that one session has handed on."""

    def __init__(self, *, vocab_size: int, writes_itself: bool) -> None:
        """
        Args:
            writes_itself: whether the peer goes on from its own tokens. Peers of stage 0 do; later stages wait for the
                hidden states of each token.
        """
        self._vocab_size = vocab_size
        self._writes_itself = writes_itself
        self._pieces: list[Piece] = []
        self._num_positions = 0
        """The number of positions in all pieces."""
        self._num_sent = 0
        """How many of the pieces have been sent to the peer that computes now."""
        self._awaits_token = False

    def add(self, piece: Piece, *, sample: bool) -> None:
        """Add the next positions.

        Args:
            sample: whether the token after these positions is wanted.
        """
        self._append(piece)
        self._awaits_token = sample

    def _append(self, piece: Piece) -> None:
        self._pieces.append(piece)
        self._num_positions += len(piece.tokens)

    @property
    def is_sent(self) -> bool:
        """Whether the present peer has been sent all positions."""
        return self._num_sent == len(self._pieces)

    def next_pieces(self) -> tuple[list[Piece], bool]:
        """Return the next pieces for the present peer, and whether the token after them is wanted. There are as many
        pieces as may be computed together and fit into one message. They count as sent from now on."""
        taken: list[Piece] = []
        num_tokens = num_bytes = 0
        for piece in self._pieces[self._num_sent :]:
            num_tokens += len(piece.tokens)
            num_bytes += len(piece.hidden)
            if taken and (num_tokens > PIECE_TOKENS or num_bytes > PIECE_BYTES):
                break
            taken.append(piece)
        self._num_sent += len(taken)
        return taken, self.is_sent and self._awaits_token

    def begin_again(self) -> None:
        """Note that another peer computes from now on, which has been sent nothing."""
        self._num_sent = 0

    def answered(self, token: Token) -> None:
        """Note a token from the present peer. Raises PeerUnavailable if its position is not the next one."""
        expected = self._num_positions if self._awaits_token else None
        if token.position != expected or token.token >= self._vocab_size:
            raise PeerUnavailable(f"token {token.token} for position {token.position}, where {expected} is awaited")
        self._awaits_token = self._writes_itself
        if self._writes_itself:
            # The present peer continues from this token by itself. Another peer would have to be sent it.
            self._append(Piece((token.token,)))
            self._num_sent += 1
