"""Peers that compile their layers train as others do, and beside others."""

from pathlib import Path

import pytest

from scripts.benches.shared.common import with_corpus
from scripts.benches.sides.reference import Reference
from swarm import config as configs
from tests.support.swarm import real_swarm

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS, SECONDS = 3, 900.0


def test_a_swarm_with_compiled_layers_follows_one_process(tmp_path: Path) -> None:
    with real_swarm(tmp_path, setting="synchronous") as swarm:
        swarm.start_seconds = SECONDS
        # With this limit some forwards are computed again.
        swarm.start_peers([0, 1], "--compile", "on", "--graph-memory-mib", "1")
        swarm.start_peers([1])
        assert swarm.wait_for_end(swarm.start_trainer("trainer", steps=STEPS), SECONDS) == 0
        losses = [row["train/loss"] for row in swarm.steps("trainer")]
    config, data = with_corpus(configs.load(swarm.config))
    reference = Reference(config, data)
    assert losses == pytest.approx([reference.step(step) for step in range(STEPS)], abs=1e-4)
