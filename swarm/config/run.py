"""RunConfig: what a run trains and how. All peers of the run share this document.

The first peer reads it from TOML (reading.py) and publishes it; joiners fetch it. It is identified by the digest of its
canonical JSON. Settings of a single machine (device, port, memory) are options of a command instead. Here the sections
are put together, and checked against each other.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

from swarm.config.checks import ADDED, AMENDABLE, MAY_CHANGE, STRICT, is_sha256, may_change, require
from swarm.config.data import DataConfig
from swarm.config.lora import LoraConfig
from swarm.config.model import ModelConfig
from swarm.config.optimizer import OptimizerConfig
from swarm.config.rounds import AveragingConfig, OuterConfig, RoundsConfig
from swarm.config.sizes import PLENTY, TextSize, sized, sizes_of
from swarm.config.stages import StagesConfig, WireConfig
from swarm.credentials.authority import TOKEN_DIGITS, is_token_id
from swarm.machine.words import counted
from swarm.types import Block

MOST_MICROBATCHES = 1 << 18
"""The most microbatches of a synchronous round: peers name all that they have in one list, and refuse a longer list
(rpc/bounds)."""
MUON_TOKENS_PER_COLUMN = 8
"""Muon is the default if an inner step has at least this many tokens for each column of the model."""

RATE, FINE_TUNING_RATE, LORA_RATE = 1e-3, 2e-5, 2e-4
"""Peak learning rates where none is given: for drawn weights, for a model that is trained further, and for adapters."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run. Every field has a default, so a TOML file holds only what differs."""

    __pydantic_config__ = STRICT

    run: str = "swarm"
    """Name of the run: letters, digits, `-` and `_`."""
    owner: str = field(default="", metadata=MAY_CHANGE)
    """Locked runs: SHA-256 of the owner's public key, in hexadecimal; `swarm-peer --token` sets it. Empty:
    every machine that reaches a peer may join."""
    revoked: tuple[str, ...] = field(default=(), metadata={**MAY_CHANGE, **ADDED, **AMENDABLE})
    """Locked runs: the tokens that let nobody in any more, each by the 16 digits that `swarm-keys show` prints. The
    owner adds some while the run trains, by `swarm-keys amend --revoke`."""
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    stages: StagesConfig = field(
        # The shards of `parallel` blocks are added up at the ends of stages, so another cut would make another model.
        # Variants of a stage have the layers of that stage.
        default_factory=StagesConfig,
        metadata=may_change(lambda run: "parallel" not in run.model.types_of_blocks and not run.stages.variants),
    )
    data: DataConfig = field(default_factory=DataConfig)
    rounds: RoundsConfig = field(default_factory=RoundsConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig, metadata=MAY_CHANGE)
    outer: OuterConfig = field(default_factory=OuterConfig, metadata=MAY_CHANGE)
    averaging: AveragingConfig = field(default_factory=AveragingConfig, metadata=MAY_CHANGE)
    wire: WireConfig = field(default_factory=WireConfig, metadata=MAY_CHANGE)

    def __post_init__(self) -> None:
        require(
            0 < len(self.run) <= 64 and all(c.isascii() and (c.isalnum() or c in "-_") for c in self.run),
            f"run must be 1 to 64 letters, digits, '-' or '_', not {self.run!r}",
        )
        require(
            not self.owner or is_sha256(self.owner),
            f"owner must be the 64 hexadecimal digits that swarm-keys shows, not {self.owner[:80]!r}",
        )
        require(
            all(is_token_id(token) for token in self.revoked),
            f"revoked names each token by the {TOKEN_DIGITS} digits that `swarm-keys show` prints",
        )
        self.lora.check_model(self.model)
        self._check_layers()
        self._check_samples()

    def _check_layers(self) -> None:
        model, num_stages, layers = self.model, self.stages.num_stages, self.stages.layers_per_stage
        if layers:
            require(
                sum(layers) == model.num_layers,
                f"stages.layers_per_stage adds up to {sum(layers)}, model.num_layers is {model.num_layers}",
            )
            require(
                layers[-1] > 0 or not model.bottleneck_dim,
                "stages.layers_per_stage must not end with 0 where there is a model.bottleneck_dim: what the last "
                "layer writes does not fit through it",
            )
        else:
            require(
                num_stages <= model.num_layers,
                f"stages.num_stages ({num_stages}) must not exceed model.num_layers ({model.num_layers})",
            )
        require(
            not (model.tied_embeddings and model.custom_class and num_stages > 1),
            "model.tied_embeddings is not for a model.custom_class of several stages: it has parameters of its own",
        )
        require(
            not (self.data.is_packed and model.custom_class),
            "data.packing is not for a model.custom_class, which would not keep documents apart: set it to false",
        )
        if not isinstance(model.custom_class, str):
            require(any(self.classes.values()), "model.custom_class names no class: leave it out")
        require(
            model.max_positions == 0 or self.data.sequence_length <= model.max_positions,
            f"data.sequence_length ({self.data.sequence_length}) must not exceed model.max_positions "
            f"({model.max_positions})",
        )
        require(
            not (model.tied_embeddings and num_stages > 1 and self.stages.variants)
            or self.stages.variants[0] == self.stages.variants[-1] == 1,
            "model.tied_embeddings needs one variant of the first stage and one of the last: these share parameters",
        )
        elsewhere = sorted({*self.stage_ends} - {*(model.bottleneck_layers or self.stage_ends)})
        require(
            not elsewhere,
            f"stages.layers_per_stage would end stages after layers {', '.join(map(str, elsewhere))}, and this model's "
            f"stages end after layers {', '.join(map(str, model.bottleneck_layers))} only (model.bottleneck_layers)",
        )
        fewest = min(layers) if layers else model.num_layers // num_stages
        require(
            fewest > 0 or not self.lora.is_on,
            "stages.layers_per_stage must not have a 0 with lora: a stage without layers has nothing to train",
        )
        num_fragments = self.averaging.num_fragments
        require(
            num_fragments <= max(1, fewest),
            f"averaging.num_fragments ({num_fragments}) must not exceed the layers of a stage ({fewest})",
        )
        require(
            not self.rounds.synchronous or num_fragments == 1,
            "averaging.num_fragments is for rounds.setting = 'diloco' only",
        )
        require(
            not self.rounds.synchronous or self.averaging.group_size == 0,
            "averaging.group_size is for rounds.setting = 'diloco' only: a synchronous round needs all its "
            "microbatches, also those of a group that fails",
        )

    def _check_samples(self) -> None:
        rounds, size = self.rounds, self.data.microbatch_size
        if self.lacks_sizes:
            return
        require(
            rounds.round_samples % size == 0,
            f"rounds.round_samples ({rounds.round_samples}) must be a multiple of data.microbatch_size ({size})",
        )
        require(
            len(self.data.paths) in (0, len(self.paths)),
            f"data.paths names {len(self.data.paths)} datasets, and the run has {counted(len(self.paths), 'path')}: "
            "each needs one",
        )
        require(
            self.microbatches_per_round % len(self.paths) == 0,
            f"rounds.round_samples ({rounds.round_samples}) makes {self.microbatches_per_round} microbatches, and "
            f"these must be a multiple of the {len(self.paths)} paths",
        )
        if rounds.synchronous:
            require(
                self.microbatches_per_round <= MOST_MICROBATCHES,
                f"rounds.round_samples ({rounds.round_samples}) makes {self.microbatches_per_round} microbatches of "
                f"data.microbatch_size ({size}), and a synchronous round has at most {MOST_MICROBATCHES}",
            )
        else:
            require(
                rounds.inner_batch_samples % size == 0,
                f"rounds.inner_batch_samples ({rounds.inner_batch_samples}) must be a multiple of "
                f"data.microbatch_size ({size})",
            )

    @functools.cached_property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks of the run, in the order of the pipeline."""
        return tuple(sorted({Block(stage, variant) for path in self.paths for stage, variant in enumerate(path)}))

    @property
    def uncut(self) -> "RunConfig":
        """The configuration of a run with the same model in one stage, without variants."""
        data = dataclasses.replace(self.data, paths=(), dataset=self.data.datasets)
        return dataclasses.replace(self, stages=StagesConfig(num_stages=1), data=data)

    @functools.cached_property
    def classes(self) -> Mapping[Block, str]:
        """The `package.module:Class` that makes each block; empty for the built-in one."""
        return self.stages.classes(self.model.custom_class)

    @property
    def own_classes(self) -> tuple[str, ...]:
        """All classes of the users' own."""
        return tuple(sorted({*self.classes.values()} - {""}))

    # -- paths -------------------------------------------------------------------------------------------------------

    @property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """The variants that each path leads through. A run without variants has one path."""
        return self.stages.all_paths

    def path_of(self, microbatch: int) -> int:
        return microbatch % len(self.paths)

    def blocks_of(self, path: int) -> tuple[Block, ...]:
        return tuple(Block(stage, variant) for stage, variant in enumerate(self.paths[path]))

    def paths_through(self, block: Block) -> tuple[int, ...]:
        return tuple(path for path, variants in enumerate(self.paths) if variants[block.stage] == block.variant)

    def neighbours(self, block: Block, step: Literal[-1, 1]) -> tuple[Block, ...]:
        """The blocks that come right behind (1) or before (-1) a block on the paths through it."""
        stage = block.stage + step
        if not 0 <= stage < self.stages.num_stages:
            return ()
        return tuple(sorted({Block(stage, self.paths[path][stage]) for path in self.paths_through(block)}))

    def share_of(self, block: Block) -> Fraction:
        return Fraction(len(self.paths_through(block)), len(self.paths))

    # -- rounds ------------------------------------------------------------------------------------------------------

    @property
    def stage_ends(self) -> tuple[int, ...]:
        """The numbers of layers after which the stages end, without the last one's."""
        return self.stages.ends(self.model.num_layers)

    @property
    def lacks_sizes(self) -> bool:
        """Whether sizes of samples, microbatches or rounds are left out, or the places of learned bottlenecks, which
        `begun` fills in."""
        return not all(getattr(getattr(self, section), field) for section, field in sizes_of(self))

    @property
    def microbatches_per_round(self) -> int:
        return self.rounds.round_samples // self.data.microbatch_size

    def indices_after(self, run_samples: int, block: Block) -> range:
        """Synchronous: the indices of a round's microbatches, those of other paths among them. Before the round the
        block has had `run_samples` samples. So rounds follow one another without a gap, whatever size each has."""
        first = int(run_samples / (self.share_of(block) * self.data.microbatch_size))
        return range(first, first + self.microbatches_per_round)

    def microbatches_after(self, run_samples: int, block: Block) -> Collection[int]:
        """Those of `indices_after` that a round consists of at a block, in ascending order."""
        indices = self.indices_after(run_samples, block)
        if len(self.paths) == 1:
            return indices
        paths = {*self.paths_through(block)}
        # A dict, because callers look for many indices in it.
        return dict.fromkeys(index for index in indices if self.path_of(index) in paths)

    def round_samples_of(self, block: Block) -> int:
        """How many samples a round has at a block: its share of `rounds.round_samples`."""
        return int(self.rounds.round_samples * self.share_of(block))

    def begun(self, num_steps: int | None = None, text: TextSize = PLENTY) -> "RunConfig":
        """The configuration with which a run begins: what was left open of its sizes, the learning rate and the wire is
        filled in. `num_steps` are the steps that the run is planned for, if that is known. `text` is the size of its
        text, if sizes are left open. Raises ValueError if a setting is given that needs another one."""
        # Not checked before, because a program sets one field after the other.
        require(
            self.lora.base == "as-is" or self.lora.is_on,
            f"lora.base = {self.lora.base!r} is for adapters: give lora.rank as well",
        )
        if self.lacks_sizes:
            return sized(self, text).begun(num_steps)
        optimizer = self.optimizer
        if num_steps is not None and optimizer.schedule == "auto" and not optimizer.total_samples:
            optimizer = dataclasses.replace(optimizer, total_samples=num_steps * self.rounds.round_samples)
        filled = dataclasses.replace(self, optimizer=optimizer).gradient_step
        wire = self.wire
        if wire.dtype == "auto":
            wire = dataclasses.replace(wire, dtype="fp32" if self.rounds.synchronous else "bf16")
        return dataclasses.replace(self, optimizer=dataclasses.replace(filled, name=optimizer.name), wire=wire)

    @functools.cached_property
    def gradient_step(self) -> OptimizerConfig:
        """The configuration of the optimizer that steps along gradients, with all that was left out filled in.

        Muon learns more from each sample. But its step takes some 30 d operations for each element of a d x d matrix,
        while training takes 6 for each token (docs/operations.md). In the synchronous setting it takes more, because
        its products are exact. Models that are imported were usually trained with AdamW, and adapters are usually
        trained with it too.
        """
        given, name = self.optimizer, self.optimizer.name
        from_drawn_weights = not self.model.weights and not self.lora.is_on
        if name == "auto":
            tokens_per_step = self.rounds.inner_batch_samples * self.data.sequence_length
            pays = not self.rounds.synchronous and tokens_per_step >= MUON_TOKENS_PER_COLUMN * self.model.d_model
            name = "muon" if from_drawn_weights and pays else "adamw"
        usual = LORA_RATE if self.lora.is_on else FINE_TUNING_RATE if self.model.weights else RATE
        warmup_samples = given.warmup_samples
        if warmup_samples < 0:
            tuned = given.total_samples // 20 if given.total_samples else self.rounds.round_samples
            warmup_samples = 0 if from_drawn_weights else tuned
        schedule = given.schedule
        if schedule == "auto":
            schedule = "cosine" if given.total_samples else "constant"
        rate = given.learning_rate or usual
        return dataclasses.replace(
            given, name=name, learning_rate=rate, warmup_samples=warmup_samples, schedule=schedule
        )

    @property
    def outer_step(self) -> OuterConfig:
        return self.outer.of(self.rounds)

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON, in hexadecimal: the configuration's content address."""
        return hashlib.sha256(to_json(self).encode()).hexdigest()

    @functools.cached_property
    def run_id(self) -> str:
        """The run's id, in DHT keys and in requests: its name, and the beginning of the configuration's digest."""
        return f"{self.run}.{self.digest[:16]}"


def to_json(config: RunConfig) -> str:
    """The canonical form: keys sorted, no white space, ADDED fields left out that have their defaults. Its digest
    identifies the configuration."""
    return json.dumps(_stated(config), sort_keys=True, separators=(",", ":"))


def _stated(part: Any) -> dict[str, Any]:
    """What the canonical form says of a configuration, or of a section of it."""
    usual, stated = type(part)(), dict[str, Any]()
    for each in dataclasses.fields(part):
        value = getattr(part, each.name)
        if "is_added" not in each.metadata or value != getattr(usual, each.name):
            stated[each.name] = _stated(value) if dataclasses.is_dataclass(value) else value
    return stated
