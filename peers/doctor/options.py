"""The options of swarm-doctor."""

from dataclasses import dataclass

import tyro

from peers.reach.listen import PortOptions
from peers.shared import logs
from peers.shared import option_types as takes
from peers.shared.run_options import InviteOption, KeepingOptions
from peers.shared.stage_choice import StagesOrAuto

_OF_A_RUN = (
    "token", "stage", "allow_class", "host", "port", "dht_port", "announce", "announce_dht", "checkpoint",
    "keep_checkpoints", "insecure",
)  # fmt: skip
"""Options that say nothing about a run that does not exist yet."""


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(KeepingOptions, PortOptions):
    """Say whether this machine can serve a stage, and what stands in the way. The options are those of swarm-peer."""

    invite: InviteOption = None
    """The invite to the run, swarm://..., as every swarm-peer prints it; without one only this machine is checked."""
    lan: bool = False
    """Instead of an INVITE: the run that a peer announces in this network with --lan. Needs the extra lan."""
    token: str | None = None
    """Token of a locked run, or @FILE; it may also come with the invite (INVITE#TOKEN), or in SWARM_TOKEN."""
    stage: StagesOrAuto = "auto"
    """Stage that the peer is to serve, or adjacent ones (1-3), or all."""
    allow_class: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """The run's model.custom_class, as MODULE:CLASS: this machine imports it, and measures what it takes. May be given
    several times."""
    device: str = "auto"
    """Device that the peer is to compute on."""
    memory: takes.Memory | None = None
    """Memory of the device that the peer is to have, such as 20GiB, instead of what is free."""
    host: str = ""
    """IP address to listen on; left out, all of this machine's."""
    port: takes.Port = 0
    """TCP port for tensors (gRPC)."""
    dht_port: takes.Port = 0
    """TCP port for the DHT, which may be the same."""
    announce: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """HOST[:PORT] at which others are to reach --port, once for each such address."""
    announce_dht: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """HOST[:PORT] at which others are to reach --dht-port, likewise."""
    model: takes.FolderOrName | None = None
    """Instead of a run: say what a run with this model would take, for each stage, here and on common GPUs, and for how
    long. A folder, or a name on the hub, of which only the configuration is downloaded."""
    preset: str | None = None
    """The same for a run with this preset."""
    config: takes.File | None = None
    """The same for a run with this configuration."""
    set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Any setting of that run: SECTION.KEY=VALUE; may be given several times."""
    stages: takes.Stages | None = None
    """Number of that run's stages."""
    lora_rank: takes.LoraRank | None = None
    """Rank of that run's adapters (LoRA)."""
    peers: takes.Positive = 1
    """How many peers each stage of that run has."""
    json: bool = False
    """Print one line of JSON instead of a line for each check."""
    insecure: bool = False
    """Look at a run whose peers were started with --insecure."""
    log_level: logs.LogLevel = "warning"

    def __post_init__(self) -> None:
        sources = [self.invite, self.preset or self.model, self.config]
        if sum(source is not None for source in sources) + self.lan > 1:
            raise ValueError("INVITE, --lan, --model, --preset and --config exclude each other")
        if not self.plans and (self.set or self.stages is not None or self.lora_rank is not None or self.peers != 1):
            raise ValueError("--set, --stages, --lora-rank and --peers belong to --model, --preset or --config")
        self.require_heard()
        if self.plans:
            for name in _OF_A_RUN:
                if getattr(self, name) != getattr(type(self), name):
                    raise ValueError(
                        f"{takes.as_typed(name)} belongs to a run that is there, not to --model, --preset or --config"
                    )

    @property
    def plans(self) -> bool:
        return any(source is not None for source in (self.model, self.preset, self.config))

    @property
    def initial_peers(self) -> tuple[str, ...]:
        """Always empty: swarm-doctor finds the run through the peers that an invite names, and does not enter the
        DHT."""
        return ()
