"""The backend of a stage that a bench trains by itself, on the CPU.

Its weights are at round 0. Used by benches and their sides that compute in their own process.
"""

from torch import nn

from swarm.config import RunConfig
from swarm.model.stages import build_stage
from swarm.stage.backend import StageBackend
from swarm.stage.graphs import GraphBudget
from swarm.stage.settings import weights_of
from swarm.stage.staging import Staging


def cpu_backend(config: RunConfig, stage: int, *, graph_bytes: int, module: nn.Module | None = None) -> StageBackend:
    """Make the backend of a stage.

    Args:
        graph_bytes: how many bytes of graphs it may keep; with 0 every forward is computed again.
        module: the stage's own module; None for a new one, as the run's seed draws it.
    """
    module = build_stage(config, stage, device="cpu") if module is None else module
    return StageBackend(
        config=config,
        stage=stage,
        module=module,
        weights=weights_of(config, module, lineage=""),
        staging=Staging(),
        budget=GraphBudget(limit_bytes=graph_bytes),
    )
