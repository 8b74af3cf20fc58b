"""Chooses which of the two settings a stage runs, by the configuration.

synchronous    stage/synchronous: a round is one optimizer step, as in one process
DiLoCo         stage/diloco: peers take inner steps by themselves, and a round averages what they learnt
"""

from torch import nn

from swarm.config import RunConfig
from swarm.events.kinds import Events
from swarm.stage.context import StageContext
from swarm.stage.diloco.setting import DilocoSetting
from swarm.stage.diloco.weights import DilocoWeights
from swarm.stage.present_round import PresentRound
from swarm.stage.records import Records
from swarm.stage.setting import Setting
from swarm.stage.synchronous.setting import SynchronousSetting
from swarm.stage.synchronous.weights import SynchronousWeights
from swarm.stage.weights import StageWeights


def weights_of(
    config: RunConfig, module: nn.Module, *, lineage: str, events: Events | None = None, fused: bool | None = None
) -> StageWeights:
    """Make a stage's weights: the module's own, at round 0.

    Args:
        fused: whether inner steps are taken in few launches, for a GPU; None: as functions.fuses says.

    Raises:
        ValueError: the stage has fewer blocks than the configuration has fragments.
    """
    if config.rounds.synchronous:
        return SynchronousWeights(config, module, lineage=lineage)
    return DilocoWeights(config, module, lineage=lineage, events=events, fused=fused)


def setting_of(context: StageContext, present_round: PresentRound, records: Records) -> Setting:
    """Make the setting for a stage with these weights."""
    weights = context.backend.weights
    if isinstance(weights, SynchronousWeights):
        return SynchronousSetting(context, weights, present_round, records.ledger)
    assert isinstance(weights, DilocoWeights), "there are two settings"
    return DilocoSetting(context, weights, present_round, records)
