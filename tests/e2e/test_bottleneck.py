"""A real run whose stages hand on few numbers, through an anchored bottleneck."""

from pathlib import Path

import pytest

from peers.local.supervisor import Supervisor
from swarm.checkpoint import file
from tests.support.swarm import RealSwarm, run, run_all, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]
ANCHORED = {
    "d_model = 32": 'd_model = 32\nbottleneck = "anchored"\nbottleneck_dim = 4',
    "round_samples = 64": "round_samples = 32",
}
STEPS = 24


def test_a_run_outlives_a_kill_and_its_checkpoints_write_what_its_peers_write(
    tmp_path: Path, children: Supervisor
) -> None:
    swarm = RealSwarm(tmp_path, children, setting="synchronous", changes=ANCHORED)
    kept = ["--checkpoint", str(tmp_path / "checkpoints"), "--checkpoint-every", "1"]
    swarm.start_peers([0], *kept)
    killed, _ = swarm.start_peers([1, 1], *kept)
    trainer = swarm.start_trainer("trainer", steps=STEPS)
    swarm.wait_for_steps("trainer", 4)
    swarm.kill(killed)
    swarm.wait_for_more("trainer", 2)
    again = swarm.arrived(*swarm.launch(1, *kept, "--identity", str(tmp_path / f"{killed.child.name}.pem")))
    assert again.ready["peer_id"] == killed.ready["peer_id"]
    assert swarm.wait_for_end(trainer) == 0
    losses = [row["train/loss"] for row in swarm.steps("trainer")]
    assert len(losses) == STEPS
    assert losses[-1] < 0.8 * losses[0]

    names = [file.FileName(round=STEPS, num_stages=2, stage=stage) for stage in range(2)]
    paths = [tmp_path / "checkpoints" / str(name) for name in names]
    wait_until(lambda: all(path.exists() for path in paths), 60.0, "checkpoints of the last round")
    encoder, decoder = "layers.0.encoder.weight", "layers.1.decoder.weight"
    held = [file.load(path, [name]) for path, name in zip(paths, (encoder, decoder), strict=True)]
    assert held[0][f"anchor/{encoder}"].shape == (4, 32)
    assert held[0][f"anchor/{encoder}"].any(), "it begins as zeros, and is trained"
    assert held[1][f"anchor/{decoder}"].shape == (32, 32)
    asked = ("--prompt", "import ", "--temperature", "0", "--max-tokens", "20")
    told, alone = run_all(
        ("generate", "--initial-peers", swarm.address, *asked),
        ("generate", "--checkpoint", str(tmp_path / "checkpoints"), *asked),
    )
    assert (told.returncode, told.stdout) == (0, alone.stdout), told.stderr
    refused = run("model", "export", "--initial-peers", swarm.address, "--output", str(tmp_path / "out"))
    assert refused.returncode == 2
    assert refused.stderr == (
        "swarm-model: error: a model with a model.bottleneck_dim has no counterpart in transformers\n"
    )
    swarm.assert_proven()
    swarm.assert_no_tracebacks()
