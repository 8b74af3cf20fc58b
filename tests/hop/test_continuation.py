"""Which positions of a session are sent to which peer, and which tokens may come back."""

import pytest

from swarm.errors import PeerUnavailable
from swarm.hop.continuation import Transcript
from swarm.hop.session import PIECE_BYTES, PIECE_TOKENS, Piece, Token


def test_positions_go_to_a_peer_once_in_messages_of_limited_size_and_to_the_next_peer_again() -> None:
    transcript = Transcript(vocab_size=9, writes_itself=False)
    long, large, small = Piece((1,) * PIECE_TOKENS), Piece((2,), bytes(PIECE_BYTES)), Piece((3,), b"x")
    for piece in (long, large, small):
        transcript.add(piece, sample=piece is small)
    assert transcript.next_pieces() == ([long], False)
    assert transcript.next_pieces() == ([large], False)
    assert transcript.next_pieces() == ([small], True), "only the last message asks for a token"
    assert transcript.is_sent
    transcript.begin_again()
    assert not transcript.is_sent
    assert transcript.next_pieces() == ([long], False)


def test_a_peer_of_stage_0_goes_on_from_its_own_tokens_which_another_peer_would_be_sent() -> None:
    transcript = Transcript(vocab_size=9, writes_itself=True)
    transcript.add(Piece((4, 5)), sample=True)
    transcript.next_pieces()
    transcript.answered(Token(position=2, token=6))
    transcript.answered(Token(position=3, token=7))
    assert transcript.is_sent
    transcript.begin_again()
    assert transcript.next_pieces() == ([Piece((4, 5)), Piece((6,)), Piece((7,))], True)


@pytest.mark.parametrize("token", [Token(position=1, token=6), Token(position=3, token=6), Token(position=2, token=9)])
def test_a_token_for_another_position_or_beyond_the_vocabulary_is_refused(token: Token) -> None:
    transcript = Transcript(vocab_size=9, writes_itself=False)
    transcript.add(Piece((4, 5)), sample=True)
    with pytest.raises(PeerUnavailable, match="where 2 is awaited"):
        transcript.answered(token)


def test_after_its_token_a_later_stage_waits_for_more_positions() -> None:
    transcript = Transcript(vocab_size=9, writes_itself=False)
    transcript.add(Piece((4, 5)), sample=True)
    transcript.answered(Token(position=2, token=6))
    with pytest.raises(PeerUnavailable, match="where None is awaited"):
        transcript.answered(Token(position=3, token=6))
