"""Random tokens, for measuring speed where there is no text.

Used by data/prepared. The tokens are the same on every machine.
"""

from collections.abc import Iterator

import numpy as np

from swarm.training.samples import TokenIds, token_dtype

DUMMY = "dummy"
_NUM_TOKENS = 1 << 22
_PIECE_TOKENS = 1 << 20


def random_tokens(vocab_size: int) -> Iterator[TokenIds]:
    """Yield pieces of tokens that are uniform and independent."""
    # numpy promises that this generator gives the same numbers in every release. It does not promise this for newer
    # generators.
    generator = np.random.RandomState(0)
    for _ in range(_NUM_TOKENS // _PIECE_TOKENS):
        yield generator.randint(0, vocab_size, _PIECE_TOKENS, dtype=token_dtype(vocab_size).type)
