"""Members of a stage commit round after round, with the same bits, and each microbatch once."""

import asyncio
from typing import Any

import numpy as np
import pytest

from swarm.averaging.wire.transport import COMMIT
from swarm.types import PeerId
from tests.averaging.doubles import network_of, peer_id, stages, until
from tests.averaging.fake_stage import make_config
from tests.averaging.outcomes import assert_equal_and_once, expected_mean, result_vector
from tests.support.virtual_time import in_virtual_time


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("setting", ["synchronous", "diloco"])
@in_virtual_time
async def test_members_commit_the_weighted_mean_bit_identically(size: int, setting: str) -> None:
    async with network_of(make_config(setting), *range(size)) as network:
        members = stages(network, *range(size))
        # The shares are uneven, so that weights matter.
        for index in range(6):
            members[min(index // 2, size - 1) if size > 1 else 0].learn(index)
        await until(lambda: all(stage.round == 1 for stage in members))
        assert_equal_and_once(members)
        assert all(len(stage.results) == 1 for stage in members)
        np.testing.assert_allclose(result_vector(members[0]), expected_mean(*range(6)), rtol=1e-5, atol=1e-6)
        result = members[0].results[0]
        assert result.num_samples == 12
        assert result.squared_norm == pytest.approx(float((expected_mean(*range(6)) ** 2).sum()), rel=1e-5)
        assert len(set(stage.results[0].squared_norm for stage in members)) == 1
        await until(lambda: all(p.averager.num_alive == size for p in network.peers.values()))


@in_virtual_time
async def test_a_leader_that_is_left_out_may_be_back_with_what_it_has() -> None:
    async with network_of(make_config(), 1, 2) as network:
        leader, other = stages(network, 1, 2)
        leader.learn(0, 1)
        other.learn(2)
        peer = network.peers[peer_id(1)]
        await until(lambda: peer.averager.view().committed == {0, 1, 2})
        peer.averager.roster.suspicions.exclude(PeerId(peer_id(1)))
        view = peer.averager.view()
        assert view.committed == {2}
        assert view.counted == {0, 1, 2}
        assert not view.lost


@pytest.mark.parametrize("norm", [-1.0, 0.0, float("nan")])
@in_virtual_time
async def test_a_norm_that_cannot_be_is_not_clipped_by(norm: float, caplog: pytest.LogCaptureFixture) -> None:
    """The member lives on, and gets the round's result once a peer tells the truth."""
    async with network_of(make_config(), 1, 2) as network:
        members = stages(network, 1, 2)
        liar, asked = network.peers[peer_id(2)], asyncio.Event()

        async def commit(request: Any) -> Any:
            asked.set()
            request.total_squared_norm = norm
            return await liar.averager.handlers.handle(COMMIT, request)

        liar.instead["Commit"] = commit
        members[0].learn(0, 1, 2)
        members[1].learn(3, 4, 5)
        await asked.wait()
        await until(lambda: all(stage.round == 1 for stage in members))
        assert "the model's squared norm is said to be" in caplog.text
        assert {stage.results[0].total_squared_norm for stage in members} == {members[0].results[0].squared_norm}
        assert len({stage.digest for stage in members}) == 1
