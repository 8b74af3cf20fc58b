"""A swarm that trains adapters: they are all that its peers average, and give to joiners."""

import dataclasses
from pathlib import Path

import pytest

from swarm.config import AveragingConfig, RunConfig
from swarm.model.adapters import trained_parameters
from swarm.model.stages import build_stage, parameter_shapes
from tests.support.chain import DILOCO, LORA
from tests.support.whole_swarm import whole_swarm

STEPS = 3
_DILOCO = dataclasses.replace(DILOCO, lora=LORA.lora)


@pytest.mark.parametrize("config", [LORA, _DILOCO], ids=["synchronous", "diloco"])
async def test_adapters_are_all_that_is_averaged_and_downloaded(config: RunConfig, tmp_path: Path) -> None:
    config = dataclasses.replace(config, averaging=AveragingConfig(codec="fp32"))
    module = build_stage(config, 1, device="cpu")
    num_trained = sum(parameter.numel() for parameter in trained_parameters(module).values())
    num_frozen = sum(shape.numel() for shape in parameter_shapes(config, 1).values())
    async with whole_swarm(config, tmp_path / "events", num_peers=(1, 2, 1)) as swarm:
        await swarm.train(STEPS)
        members = [peer.server.member for peer in swarm.peers if peer.stage == 1 and peer.server is not None]
        rounds = [report for member in members for report in member.reports if report.num_members == 2]
        assert rounds
        for report in rounds:
            # Half of the contribution goes to the other member, and half of the result.
            assert 0 < report.bytes_sent < 1.2 * 4 * num_trained < 4 * num_frozen
        joiner = await swarm.start(1)
        assert joiner.server is not None
        snapshot = await joiner.server.member.snapshot()
        assert snapshot.round >= STEPS
        assert {name.split("/")[1] for name in snapshot.tensors} == trained_parameters(module).keys()
        assert (await members[0].snapshot()).digest == snapshot.digest
