"""Numbers of things, in the singular and the plural."""

import pytest

from swarm.machine.words import counted


@pytest.mark.parametrize(
    ("number", "noun", "words"),
    [
        (0, "peer", "0 peers"),
        (1, "peer", "1 peer"),
        (2, "peer", "2 peers"),
        (12345, "microbatch", "12,345 microbatches"),
        (1, "entry", "1 entry"),
        (2, "entry", "2 entries"),
    ],
)
def test_only_one_is_singular(number: int, noun: str, words: str) -> None:
    assert counted(number, noun) == words
