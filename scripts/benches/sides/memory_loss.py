"""A process with a last stage. It measures the peak memory of a microbatch there.

    python -m scripts.benches.sides.memory_loss FOLDER

Started by the memory bench. Module, weights and computation are those of a peer, without its network. The microbatch
goes forward and backward once. Writes `loss.json` to FOLDER.
"""

import sys
from pathlib import Path

import torch

from scripts.benches.shared.backend import cpu_backend
from scripts.benches.shared.common import write_json
from scripts.benches.shared.proc import forget_peak, peak_bytes, resident_bytes
from scripts.benches.sides.memory_stage import warm_up
from swarm import config as configs
from swarm.config import RunConfig
from swarm.stage.boundary import HIDDEN, TOKENS, request_specs

LAST_STAGE = 1


def measure(config: RunConfig) -> dict[str, float]:
    """Train one microbatch. Return the peak bytes beyond what the stage holds, and the loss."""
    backend = cpu_backend(config, LAST_STAGE, graph_bytes=0)
    specs = request_specs(config, LAST_STAGE)
    tokens_BT1 = torch.randint(config.model.vocab_size, specs[TOKENS].shape, dtype=torch.int32)
    inputs = {TOKENS: tokens_BT1, HIDDEN: torch.randn(specs[HIDDEN].shape)}
    before_bytes = resident_bytes()
    forget_peak()
    loss, _, _ = backend.forward_loss(0, 0, inputs, accumulate=True)
    return {"peak": peak_bytes() - before_bytes, "loss": loss}


if __name__ == "__main__":
    torch.set_num_threads(1)
    warm_up()
    folder = Path(sys.argv[1])
    write_json(folder / "loss.json", measure(configs.load(folder / "run.toml")))
