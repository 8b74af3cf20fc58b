"""The options of swarm-peer, for the program itself and for those that start it.

It imports neither torch nor hivemind, because swarm-local, which starts peers, needs neither.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import tyro

from peers.reach.listen import PortOptions
from peers.shared import logs
from peers.shared import option_types as takes
from peers.shared.run_options import CheckpointOptions, InviteOption, SettingsOption, TextOptions, joins
from peers.shared.stage_choice import StageChoice, StagesOrAuto
from swarm.rpc.endpoint import ip_of

DEFAULT_REBALANCE_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class PeerOptions(CheckpointOptions, TextOptions, PortOptions):
    """Serve one stage of a run, or adjacent ones."""

    invite: InviteOption = None
    """The invite to a run that is there already, swarm://..., as every swarm-peer prints it; without one a new run
    begins."""
    lan: bool = False
    """Announce the run's invite in the local network, for those that look for it with --lan. Without INVITE and without
    a new run's options, first take the run that another peer announces there. Needs the extra lan."""
    stage: StagesOrAuto | None = None
    """Stage to serve, from 0, or adjacent ones (1-3) or all, and to stay there. auto takes those for which
    there is room and with which the pipeline is fastest, and moves when others are better; where stages have variants,
    one of each, along a path. Left out, it is auto with an invite, and else 0, also where others serve that already. Of
    a stage that was named all variants are served, or one (2.1)."""
    path: Annotated[int, takes.whole(0, 1023)] | None = None
    """In a run whose stages have variants: serve only those on this path, from 0. With it --stage is all if it is left
    out."""
    rebalance_every: Annotated[float, takes.number(0, 10**6)] | None = None
    """Seconds between two checks whether other stages need this peer more, 60 if left out; with 0 it never moves.
    Only with --stage auto."""
    initial_peers: tuple[str, ...] = ()
    """DHT addresses of peers that are there already, instead of an invite."""
    meet: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """PEER_ID@HOST:PORT of a swarm-meet, as it prints that: a new run begins there, and its peers need no address that
    others reach. May be given several times."""
    token: str | None = None
    """A peer's token, or @FILE: a new run that is begun with one is locked, and one is needed to join it. It may also
    come with the invite (INVITE#TOKEN), with an address (ADDRESS#TOKEN), or in SWARM_TOKEN."""
    allow_class: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """The run's model.custom_class, as MODULE:CLASS: joining a run that has one, this machine imports and runs it. May
    be given several times, for paths with classes of their own."""
    config: takes.File | None = None
    """TOML file of a new run."""
    model: takes.FolderOrName | None = None
    """A new run begins with this model: a folder made by swarm-model import, a model's folder of Hugging Face, or its
    name on the hub. With an INVITE, a stage that no peer holds yet gets its weights from it."""
    preset: str | None = None
    """Configuration of a new run that comes with swarm: tiny, small, shakespeare, gpt2-124m, smollm2, llama-1b-lora and
    others (docs/models.md). For one that begins with a model, --model may name your own copy."""
    stages: takes.Stages | None = None
    """Number of stages of a new run, instead of the configuration's."""
    steps: takes.Positive | None = None
    """Steps, counted from its very first, for which a new run is planned: the learning rate falls to its end over them,
    unless the configuration has a schedule. Trainers may stop earlier or go on."""
    lora_rank: takes.LoraRank | None = None
    """Train adapters (LoRA) of this rank in a new run, and leave the model's own weights as they are; 0 trains those.
    This and the next three options replace the configuration's values."""
    lora_alpha: Annotated[float, takes.number(0, 10**6, above=True)] | None = None
    """An adapter's output is multiplied by this over the rank."""
    lora_dropout: Annotated[float, takes.number(0, 1, below=True)] | None = None
    """Probability with which each input of an adapter is zeroed."""
    lora_targets: Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="STR [STR ...]")] = None
    """Matrices of each layer that have an adapter: q_proj, v_proj, ..., of a GPT-2 c_attn, ..., or all-linear."""
    set: SettingsOption = ()
    device: str = "auto"
    """cpu, cuda, cuda:1, ... or mps; auto takes a GPU if there is one. Of several GPUs it takes the one with the most
    free memory, as cuda does; for several stages it takes all that nobody else uses. Several stages are spread over
    several devices, which may be named: cuda:0,cuda:1."""
    memory: takes.Memory | None = None
    """Memory of the device that this peer may have, such as 20GiB, instead of what is free. It takes no stage that
    needs more, and graphs get half of what is left beside the stage's weights and optimizer."""
    anchors: takes.Folder | None = None
    """Folder on whose disk this peer keeps what DiLoCo needs once a round, the weights that began it and the outer
    momentum: 12 bytes a parameter, in files without names that are mapped to memory. Left out, they are in RAM."""
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Type of matrix products here; weights are kept in fp32. Left out, it is what model.autocast of the run says."""
    threads: takes.Threads = 0
    """CPU threads for computing; 0 leaves the choice to PyTorch."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile layers (torch.compile) before the peer serves, which takes a minute the first time. auto does so on a
    CUDA GPU. Not for runs with dropout. Unless it is off, a CUDA GPU also computes by CUDA graphs."""
    peak_tflops: Annotated[float, takes.number(0, 10**6)] = 0.0
    """TFLOP/s that the device manages at best in the type of matrix products, for the figure of its utilisation; 0
    takes the maker's for common GPUs."""
    host: str = ""
    """IP address to listen on; left out, all of this machine's, of IPv4 and IPv6."""
    port: takes.Port = 0
    """TCP port for tensors (gRPC); 0 takes a free one."""
    dht_port: takes.Port = 0
    """TCP port for the DHT; 0 takes a free one. With the same number as --port one port does for both, at the cost of
    some CPU for all that goes through it."""
    announce: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """HOST[:PORT] at which others reach this machine's --port, once for each such address, the best first. Without
    PORT it has the same number, and HOST counts for the DHT as well. Left out, the machine's own addresses are
    announced, first the one on the way to the peers that it joins."""
    announce_dht: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """HOST[:PORT] at which others reach this machine's --dht-port, likewise."""
    no_port_mapping: bool = False
    """Ask no router to forward the ports. Otherwise, if others do not reach this peer, its router is asked to forward
    both while the peer is there."""
    identity: takes.File | None = None
    """File with this peer's key, made if missing; by default one per stage in ~/.cache/swarm."""
    name: takes.Name = ""
    """What others see; by default host name and process id."""
    max_in_flight: Annotated[int, takes.whole(0, 1 << 16)] = 0
    """Microbatches to work on at once; 0 takes two more than there are stages, and more where links are so long or slow
    that these do not keep the peer busy."""
    graph_memory_mib: takes.Mebibytes | None = None
    """Memory for what backward needs of forward; beyond it forwards are computed again. Left out, it is half of the GPU
    memory, or a quarter of the RAM, that is free beside the stage's weights and optimizer."""
    max_sessions: Annotated[int, takes.whole(0, 1 << 16)] = 64
    """Texts that are written with this peer's help at one time; 0 for none."""
    session_memory_mib: takes.Mebibytes = 1024
    """Memory for the keys and values of these texts, and on a GPU as much again for recorded steps. Besides, up to
    three earlier rounds' weights are held for them."""
    relay_mbit: Annotated[int, takes.whole(0, 10**6)] = 200
    """Megabits per second that this peer carries at most for peers that others do not reach; 0 carries nothing."""
    insecure: bool = False
    """Speak plain TCP instead of TLS: for debugging, and for the whole run or not at all."""
    resume: takes.Folder | None = None
    """Go on from the newest checkpoint in this folder, unless peers that hold the stage are there."""
    resume_round: takes.Count | None = None
    """Go on from the checkpoint of this round instead."""
    start_over: bool = False
    """Where no peer holds the stage of a run that has gone on, and there is no checkpoint, begin it again from initial
    weights; what it had learnt is gone."""
    metrics_port: takes.Port | None = None
    """Answer at this port, at /metrics, with this process's figures for Prometheus; 0 takes a free one. Needs the extra
    metrics."""
    metrics_host: str = "127.0.0.1"
    """Address of --metrics-port: Prometheus on another machine needs 0.0.0.0, say."""
    dashboard_port: takes.Port | None = None
    """Show the run at this port as a page in the browser, as swarm-dashboard does, for as long as this peer is there;
    0 takes a free one. Needs the extra serve."""
    dashboard_host: str = "127.0.0.1"
    """IP address of --dashboard-port: with 0.0.0.0, say, other machines see the page, too. SWARM_VIEW_TOKEN holds what
    they must enter; a locked run is shown to them only with such a token."""
    events: takes.File | None = None
    """Append what this peer does with each microbatch and round to this file, for swarm-status --audit."""
    ready_file: takes.File | None = None
    """Write a JSON object with this peer's addresses here once it serves."""
    log_level: logs.LogLevel = "info"

    def __post_init__(self) -> None:
        if self.rebalance_every is not None and self.span != "auto":
            raise ValueError("--rebalance-every needs --stage auto: at a stage that it was given a peer stays")
        if self.path is not None and (self.stage == "auto" or (self.stage and self.stage.variant is not None)):
            raise ValueError(f"--path says which variants are served: --stage {self.stage} does not go with it")
        if self.config is not None and (self.preset or self.model) is not None:
            raise ValueError("--config, --preset and --model exclude each other")
        if not self.names_a_run and not self.joins and not self.lan:
            raise ValueError(
                "a new run needs --preset NAME, --config FILE or --model DIR; to join one, give its INVITE"
            )
        text = self.dataset or self.validation or self.tokenizer or self.max_tokens
        if not self.names_a_run and (text or self.stages or self.steps or self.set):
            raise ValueError(
                "--dataset, --validation, --tokenizer, --max-tokens, --stages, --steps and --set belong to a new run: "
                "--preset, --config or --model"
            )
        if not self.names_a_run and self.lora_options:
            raise ValueError("--lora-rank and the like belong to a new run's --preset, --config or --model")
        shared = [] if self.shares_port else ["dht_port"]
        takes.require_distinct_ports(self, ["port", *shared, "metrics_port", "dashboard_port"])
        super().__post_init__()
        if self.meet and self.insecure:
            raise ValueError("--meet needs TLS: leave --insecure out")
        self.require_heard()
        if any(outside.port for outside in self.outside) and not (self.announce_dht or self.shares_port):
            raise ValueError(
                "--announce HOST:PORT is for gRPC alone: give --announce-dht HOST:PORT for the DHT as well"
            )
        if self.host and ip_of(self.host) is None:
            raise ValueError(f"--host {self.host} is no IP address of this machine: it takes an address, not a name")
        if self.resume_round is not None and self.resume is None:
            raise ValueError("--resume-round needs --resume DIR")

    @property
    def names_a_run(self) -> bool:
        """Whether the options name a new run's configuration. With an INVITE, --model names only the joiner's copy."""
        return bool(self.config or self.preset or (self.model and not self.joins))

    @property
    def joins(self) -> bool:
        """Whether the options name a run to join. Raises ValueError if they name it in both ways."""
        return joins(self)

    @property
    def seeks(self) -> bool:
        return self.lan and not self.names_a_run and not self.joins

    @property
    def span(self) -> StageChoice | Literal["auto"]:
        if self.path is not None:
            stages = self.stage if isinstance(self.stage, StageChoice) else StageChoice()
            return replace(stages, path=self.path)
        if self.stage is not None:
            return self.stage
        return "auto" if self.invite is not None or self.seeks else StageChoice(0, 0)

    @property
    def serves_one(self) -> bool:
        """Whether it is sure, before the run is known, that the peer serves one stage at a time."""
        return self.span == "auto" or self.span.first == self.span.last

    @property
    def lora_options(self) -> dict[str, Any]:
        values = {name: getattr(self, f"lora_{name}") for name in ("rank", "alpha", "dropout", "targets")}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def label(self) -> str:
        """The name of the peer's key file; also its name in the log if --name is left out and its stages are fixed."""
        return "auto" if self.span == "auto" else self.span.label

    @property
    def rebalance_seconds(self) -> float:
        """Time between two checks whether another stage needs this peer more; 0 never moves."""
        if self.span != "auto":
            return 0.0
        return DEFAULT_REBALANCE_SECONDS if self.rebalance_every is None else self.rebalance_every
