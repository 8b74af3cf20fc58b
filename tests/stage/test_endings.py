"""A computation whose call ends after all other tasks of its peer have ended."""

import pytest

from swarm.errors import NotReady
from swarm.training.samples import Microbatch
from tests.support.chain import ANY_HOP, SYNCHRONOUS, running_chain, samples_of

pytestmark = ANY_HOP


async def test_a_call_that_outlives_its_peer_neither_fails_nor_begins_anything() -> None:
    async with running_chain(SYNCHRONOUS) as chain:
        stage = chain.peers[0].stage
        await chain.train(0)
        entry = stage.ledger.find(0)
        assert entry is not None
        assert entry.computation is not None
        computation = entry.computation
    # The peer's tasks have ended. gRPC may end the call only now.
    stage.endings.abandon(computation, computation.subscriber)
    next_one = Microbatch(index=1, round=0, num_samples=SYNCHRONOUS.data.microbatch_size)
    with pytest.raises(NotReady, match="stopping"):
        stage.begin(next_one, samples_of(SYNCHRONOUS, 1), {}, object())
