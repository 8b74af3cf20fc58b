"""What a run trains and how: the one document that every peer of a run shares.

The first peer reads it from TOML (or a preset) and publishes it; joiners fetch it. It is identified by the
digest of its canonical JSON. What concerns a single machine (device, port, memory) is no part of it: that
is a command's option.
"""

import dataclasses
import functools
import hashlib
import json
import math
import tomllib
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from swarm.errors import ConfigMismatch
from swarm.types import LARGEST_COUNT

_STRICT = ConfigDict(extra="forbid")

MOST_MICROBATCHES = 1 << 18
"""Of a synchronous round: peers name all that they have in one list, and take none that is longer (rpc/bounds)."""

Setting = Literal["synchronous", "diloco"]
Quorum = Literal["majority", "available"]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _is_sha256(text: str) -> bool:
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


def _require_usable(section: str, values: Any) -> None:
    """Raise ValueError for a section's number that is not finite, or beyond what messages may say."""
    for name, value in vars(values).items():
        if isinstance(value, float):
            _require(math.isfinite(value), f"{section}.{name} must be finite, not {value}")
        elif isinstance(value, int) and name != "seed":
            _require(value <= LARGEST_COUNT, f"{section}.{name} must be at most {LARGEST_COUNT}, not {value}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The transformer: decoder-only, Llama-shaped."""

    __pydantic_config__ = _STRICT

    num_layers: int = 4
    """Transformer layers over all stages."""
    d_model: int = 256
    """Width of the residual stream."""
    bottleneck_dim: int = 0
    """Columns of the residual stream that are trained, and travel between stages; the other columns are a fixed
    function of the token, which every stage computes. 0: all of them are."""
    num_heads: int = 4
    """Query heads a layer; d_model is an even multiple of it."""
    num_kv_heads: int = 0
    """Key and value heads a layer (grouped-query attention); 0 means as many as query heads."""
    d_ff: int = 0
    """Width of the SwiGLU; 0 means 8/3 of d_model, rounded up to a multiple of 32."""
    vocab_size: int = 256
    """Tokens the embedding knows; at least the tokenizer's."""
    rope_theta: float = 10_000.0
    """Base of the rotary position frequencies."""
    norm_epsilon: float = 1e-5
    """Added to the mean square in RMSNorm."""
    init_std: float = 0.02
    """Standard deviation of the initial weights; projections into the residual stream get it / sqrt(2 * num_layers)."""
    tied_embeddings: bool = False
    """Use the embedding matrix as the output head as well."""
    dropout: float = 0.0
    """Probability of zeroing, after the embedding and after each attention and feed-forward block."""
    autocast: Literal["off", "bf16"] = "off"
    """Run matrix products in bfloat16, with float32 weights and gradients."""
    gradient_checkpointing: bool = False
    """Keep only each layer's input for the backward and compute the layer again."""
    custom_class: str = ""
    """`package.module:Class` of your own model (docs/operations.md has the requirements); empty: the built-in one."""

    def __post_init__(self) -> None:
        _require_usable("model", self)
        for name in ("num_layers", "d_model", "num_heads", "vocab_size"):
            _require(getattr(self, name) >= 1, f"model.{name} must be at least 1, not {getattr(self, name)}")
        _require(self.num_kv_heads >= 0, f"model.num_kv_heads must not be negative, not {self.num_kv_heads}")
        _require(self.d_ff >= 0, f"model.d_ff must not be negative, not {self.d_ff}")
        _require(
            self.d_model % (2 * self.num_heads) == 0,
            f"model.d_model ({self.d_model}) must be an even multiple of model.num_heads ({self.num_heads})",
        )
        _require(
            self.num_heads % self.kv_heads == 0,
            f"model.num_kv_heads ({self.kv_heads}) must divide model.num_heads ({self.num_heads})",
        )
        _require(
            0 <= self.bottleneck_dim < self.d_model,
            f"model.bottleneck_dim must be at least 0 and below model.d_model ({self.d_model}), "
            f"not {self.bottleneck_dim}",
        )
        _require(
            not (self.bottleneck_dim and self.tied_embeddings),
            "model.tied_embeddings is not for model.bottleneck_dim: few columns of that embedding are trained",
        )
        _require(
            not (self.bottleneck_dim and self.custom_class),
            "model.bottleneck_dim is for the built-in model, not for a model.custom_class",
        )
        _require(0.0 <= self.dropout < 1.0, f"model.dropout must be in [0, 1), not {self.dropout}")
        for name in ("rope_theta", "norm_epsilon", "init_std"):
            _require(getattr(self, name) > 0, f"model.{name} must be positive, not {getattr(self, name)}")

    @property
    def kv_heads(self) -> int:
        """Key and value heads with the default resolved."""
        return self.num_kv_heads or self.num_heads

    @property
    def hidden_width(self) -> int:
        """Numbers a token that travel from stage to stage."""
        return self.bottleneck_dim or self.d_model

    @property
    def feed_forward_width(self) -> int:
        """d_ff with the default resolved."""
        return self.d_ff or 32 * -(-8 * self.d_model // (3 * 32))


@dataclass(frozen=True, kw_only=True)
class StagesConfig:
    """How the layers are cut into stages."""

    __pydantic_config__ = _STRICT

    num_stages: int = 3
    """Stages in the pipeline; stage 0 also holds the embedding, the last one the head and the loss."""
    layers_per_stage: tuple[int, ...] = ()
    """Layers of each stage; empty means as even as possible, the remainder to the middle stages first."""

    def __post_init__(self) -> None:
        _require_usable("stages", self)
        _require(1 <= self.num_stages <= 4096, f"stages.num_stages must be between 1 and 4096, not {self.num_stages}")
        if self.layers_per_stage:
            _require(
                len(self.layers_per_stage) == self.num_stages,
                f"stages.layers_per_stage has {len(self.layers_per_stage)} entries for {self.num_stages} stages",
            )
            _require(min(self.layers_per_stage) >= 0, "stages.layers_per_stage must not be negative")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The text, and how it becomes microbatches."""

    __pydantic_config__ = _STRICT

    dataset: str = "stdlib"
    """`stdlib`, a file, folder or glob of text, or `hf:NAME` for a Hugging Face dataset."""
    hf_config: str = ""
    """Configuration name of the Hugging Face dataset."""
    hf_split: str = "train"
    """Split of the Hugging Face dataset."""
    hf_text_field: str = "text"
    """Field of the Hugging Face dataset that holds the text."""
    tokenizer: str = "bytes"
    """`bytes`, or the path of a tokenizer.json."""
    tokenizer_identity: str = ""
    """`bytes`, or the SHA-256 of the tokenizer.json; the first peer fills it in. A trainer may have its copy at another
    path, but it has to be this one."""
    max_tokens: int = 0
    """Use at most this many tokens of the corpus; 0 means all."""
    sequence_length: int = 128
    """Tokens a sample is long."""
    microbatch_size: int = 8
    """Samples in a microbatch."""
    held_out_fraction: float = 0.02
    """Share of the corpus, taken from its end, that is never trained on."""
    seed: int = 0
    """Order of the microbatches, initial weights and dropout all follow from it."""
    digest: str = ""
    """SHA-256 of the tokens and the tokenizer; the first peer fills it in."""

    def __post_init__(self) -> None:
        _require_usable("data", self)
        _require(bool(self.dataset), "data.dataset must not be empty")
        for name in ("sequence_length", "microbatch_size"):
            _require(getattr(self, name) >= 1, f"data.{name} must be at least 1, not {getattr(self, name)}")
        _require(
            self.tokenizer_identity in ("", "bytes") or _is_sha256(self.tokenizer_identity),
            f"data.tokenizer_identity must be 'bytes' or 64 hexadecimal digits, not {self.tokenizer_identity[:80]!r}",
        )
        _require(self.max_tokens >= 0, f"data.max_tokens must not be negative, not {self.max_tokens}")
        _require(0 <= self.seed < 1 << 63, f"data.seed must be at least 0 and below 2^63, not {self.seed}")
        _require(
            0.0 < self.held_out_fraction < 1.0,
            f"data.held_out_fraction must be between 0 and 1, not {self.held_out_fraction}",
        )

    @property
    def tokens_per_microbatch(self) -> int:
        """Tokens that a microbatch predicts."""
        return self.microbatch_size * self.sequence_length


@dataclass(frozen=True, kw_only=True)
class RoundsConfig:
    """When peers that share blocks average."""

    __pydantic_config__ = _STRICT

    setting: Setting = "diloco"
    """`synchronous`: one optimizer step a round on the summed gradient, like one process. `diloco`: peers take
    inner steps of their own and average pseudo-gradients at the end of the round."""
    round_samples: int = 256
    """Samples of the whole swarm in one round (one step of the commands); a multiple of the microbatch size, and in the
    synchronous setting at most 262,144 times that."""
    inner_batch_samples: int = 16
    """DiLoCo only: samples a peer accumulates before each inner step; a multiple of the microbatch size."""
    max_staleness: int = 0
    """DiLoCo only: inner steps that a peer may take, as a rule, between a microbatch's forward and the step that uses
    its gradient. A peer computes with at most `1 + max_staleness` inner batches at once. More keep it busy over longer
    lines and in deeper pipelines, but a run learns less from each sample (docs/performance.md); a larger
    `inner_batch_samples` does the same, and costs less where the peers are few."""

    def __post_init__(self) -> None:
        _require_usable("rounds", self)
        _require(self.max_staleness >= 0, f"rounds.max_staleness must not be negative, not {self.max_staleness}")
        for name in ("round_samples", "inner_batch_samples"):
            _require(getattr(self, name) >= 1, f"rounds.{name} must be at least 1, not {getattr(self, name)}")

    @property
    def synchronous(self) -> bool:
        """Whether the swarm follows the trajectory of a single process."""
        return self.setting == "synchronous"


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW: the inner optimizer of DiLoCo, the only one of the synchronous setting."""

    __pydantic_config__ = _STRICT

    learning_rate: float = 1e-3
    """Peak learning rate."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    epsilon: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled decay, on matrices only."""
    clip_norm: float = 1.0
    """Largest norm of a gradient; 0 turns clipping off. Over the whole model in the synchronous setting, over
    a peer's stage in DiLoCo's inner steps."""
    schedule: Literal["constant", "linear", "cosine", "cosine-restarts"] = "constant"
    """Shape after the warm-up; `cosine-restarts` begins again at the peak every `restart_samples`."""
    warmup_samples: int = 0
    """Samples over which the rate rises linearly."""
    total_samples: int = 0
    """Samples at which the rate reaches its floor; needed by `linear` and `cosine`."""
    restart_samples: int = 0
    """Samples between two restarts; needed by `cosine-restarts`."""
    final_fraction: float = 0.1
    """Floor, as a share of the peak."""

    def __post_init__(self) -> None:
        _require_usable("optimizer", self)
        _require(self.learning_rate > 0, f"optimizer.learning_rate must be positive, not {self.learning_rate}")
        for name in ("beta1", "beta2"):
            _require(0 <= getattr(self, name) < 1, f"optimizer.{name} must be in [0, 1), not {getattr(self, name)}")
        _require(self.epsilon > 0, f"optimizer.epsilon must be positive, not {self.epsilon}")
        for name in ("weight_decay", "clip_norm", "warmup_samples", "total_samples", "restart_samples"):
            _require(getattr(self, name) >= 0, f"optimizer.{name} must not be negative, not {getattr(self, name)}")
        _require(
            self.schedule not in ("linear", "cosine") or self.total_samples > self.warmup_samples,
            f"optimizer.schedule = {self.schedule!r} needs optimizer.total_samples above optimizer.warmup_samples",
        )
        _require(
            self.schedule != "cosine-restarts" or self.restart_samples > 0,
            "optimizer.schedule = 'cosine-restarts' needs optimizer.restart_samples",
        )
        _require(
            0 <= self.final_fraction <= 1, f"optimizer.final_fraction must be in [0, 1], not {self.final_fraction}"
        )


@dataclass(frozen=True, kw_only=True)
class OuterConfig:
    """DiLoCo's outer optimizer: SGD with Nesterov momentum on the averaged pseudo-gradient."""

    __pydantic_config__ = _STRICT

    learning_rate: float = 0.7
    """Outer learning rate."""
    momentum: float = 0.9
    """Nesterov momentum; 0 turns it off."""

    def __post_init__(self) -> None:
        _require_usable("outer", self)
        _require(self.learning_rate > 0, f"outer.learning_rate must be positive, not {self.learning_rate}")
        _require(0 <= self.momentum < 1, f"outer.momentum must be in [0, 1), not {self.momentum}")


@dataclass(frozen=True, kw_only=True)
class AveragingConfig:
    """How the holders of a block average."""

    __pydantic_config__ = _STRICT

    codec: Literal["fp32", "fp16", "bf16", "int8", "int4", "topk", "dct-topk", "dct-lowpass"] = "fp32"
    """How contributions and results are encoded on the wire; docs/protocol.md has the layouts and sizes."""
    top_k: int = 64
    """`topk` and `dct-topk`: coefficients kept of each tile of 4096; a multiple of 4."""
    values: Literal["lut8", "2bit", "sign"] = "2bit"
    """`topk` and `dct-topk`: kept values as 8 bits by lookup table, as a sign and one of two magnitudes a tile, or as
    a sign and one magnitude a tile."""
    indices: Literal["12bit", "elias-fano"] = "elias-fano"
    """`topk` and `dct-topk`: places of the kept values as 12 bits each, or entropy-coded in a fixed size."""
    feedback_decay: float = 0.95
    """Share of the residual (what encoding dropped) that a member adds to its next contribution, with the codecs that
    drop much: `int4`, `topk`, `dct-topk`, `dct-lowpass`. 0 turns error feedback off."""
    gather_members: int = 4
    """`topk` and `dct-topk`: largest group in which every member sends its contribution to every other one. In larger
    ones each tile has an owner that sums it and encodes the sum again, with four times as many coefficients."""
    clip_to_median: float = 3.0
    """DiLoCo only: a contribution's norm is cut to so many times the median norm of the members; 0 turns it off."""
    overlap_steps: int = 5
    """DiLoCo only: inner steps a peer may take while a round is exchanged; the result is merged as soon as it is
    committed. A few cost no loss (docs/performance.md). 0: it waits, accumulating gradients."""
    num_fragments: int = 1
    """DiLoCo only: a stage is cut into so many parts, and each round averages one of them, in turn; at most as many as
    the smallest stage has layers."""
    quorum: Quorum = "available"
    """Members a round needs: more than half of those of the last committed round, or whoever is there."""

    def __post_init__(self) -> None:
        _require_usable("averaging", self)
        _require(
            4 <= self.top_k <= 1024 and self.top_k % 4 == 0,
            f"averaging.top_k must be a multiple of 4 between 4 and 1024, not {self.top_k}",
        )
        _require(
            0 <= self.feedback_decay <= 1, f"averaging.feedback_decay must be in [0, 1], not {self.feedback_decay}"
        )
        for name in ("gather_members", "num_fragments"):
            _require(getattr(self, name) >= 1, f"averaging.{name} must be at least 1, not {getattr(self, name)}")
        _require(self.overlap_steps >= 0, f"averaging.overlap_steps must not be negative, not {self.overlap_steps}")
        _require(
            self.clip_to_median == 0 or self.clip_to_median >= 1,
            f"averaging.clip_to_median must be 0 or at least 1, not {self.clip_to_median}",
        )


@dataclass(frozen=True, kw_only=True)
class WireConfig:
    """How activations and their gradients travel between stages."""

    __pydantic_config__ = _STRICT

    dtype: Literal["fp32", "bf16", "fp16", "int8"] = "fp32"
    """Numbers on the wire; computation stays as it is. `fp16`: with a scale for each tensor, so that small gradients
    survive. `int8`: a byte each, and a scale for every 128. All but `fp32` round, so that a synchronous run is that of
    one process that rounds at the same places."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run. Every field has a default, so a TOML file holds only what differs."""

    __pydantic_config__ = _STRICT

    run: str = "swarm"
    """Name of the run: letters, digits, `-` and `_`."""
    owner: str = ""
    """Locked runs: SHA-256 of the owner's public key, in hexadecimal; `swarm-peer --token` sets it. Empty: whoever
    reaches a peer may join."""
    model: ModelConfig = field(default_factory=ModelConfig)
    stages: StagesConfig = field(default_factory=StagesConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rounds: RoundsConfig = field(default_factory=RoundsConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    outer: OuterConfig = field(default_factory=OuterConfig)
    averaging: AveragingConfig = field(default_factory=AveragingConfig)
    wire: WireConfig = field(default_factory=WireConfig)

    def __post_init__(self) -> None:
        _require(
            0 < len(self.run) <= 64 and all(c.isascii() and (c.isalnum() or c in "-_") for c in self.run),
            f"run must be 1 to 64 letters, digits, '-' or '_', not {self.run!r}",
        )
        _require(
            not self.owner or _is_sha256(self.owner),
            f"owner must be the 64 hexadecimal digits that swarm-keys shows, not {self.owner[:80]!r}",
        )
        layers = self.stages.layers_per_stage
        if layers:
            _require(
                sum(layers) == self.model.num_layers,
                f"stages.layers_per_stage adds up to {sum(layers)}, model.num_layers is {self.model.num_layers}",
            )
            _require(
                layers[-1] > 0 or not self.model.bottleneck_dim,
                "stages.layers_per_stage must not end with 0 where there is a model.bottleneck_dim: what the last "
                "layer writes does not fit through it",
            )
        else:
            _require(
                self.stages.num_stages <= max(1, self.model.num_layers),
                f"stages.num_stages ({self.stages.num_stages}) must not exceed model.num_layers "
                f"({self.model.num_layers})",
            )
        _require(
            not (self.model.tied_embeddings and self.model.custom_class and self.stages.num_stages > 1),
            "model.tied_embeddings is not for a model.custom_class of several stages: it has parameters of its own",
        )
        fewest = min(layers) if layers else self.model.num_layers // self.stages.num_stages
        _require(
            self.averaging.num_fragments <= max(1, fewest),
            f"averaging.num_fragments ({self.averaging.num_fragments}) must not exceed the layers of a stage "
            f"({fewest})",
        )
        _require(
            not self.rounds.synchronous or self.averaging.num_fragments == 1,
            "averaging.num_fragments is for rounds.setting = 'diloco' only",
        )
        size = self.data.microbatch_size
        _require(
            self.rounds.round_samples % size == 0,
            f"rounds.round_samples ({self.rounds.round_samples}) must be a multiple of data.microbatch_size ({size})",
        )
        _require(
            not self.rounds.synchronous or self.microbatches_per_round <= MOST_MICROBATCHES,
            f"rounds.round_samples ({self.rounds.round_samples}) makes {self.microbatches_per_round} microbatches of "
            f"data.microbatch_size ({size}), and a synchronous round has at most {MOST_MICROBATCHES}",
        )
        _require(
            self.rounds.synchronous or self.rounds.inner_batch_samples % size == 0,
            f"rounds.inner_batch_samples ({self.rounds.inner_batch_samples}) must be a multiple of "
            f"data.microbatch_size ({size})",
        )

    @property
    def microbatches_per_round(self) -> int:
        """Microbatches of the whole swarm in one round."""
        return self.rounds.round_samples // self.data.microbatch_size

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON, in hexadecimal: the configuration's content address."""
        return hashlib.sha256(to_json(self).encode()).hexdigest()

    @functools.cached_property
    def run_id(self) -> str:
        """What separates this run from every other one, in DHT keys and in requests."""
        return f"{self.run}.{self.digest[:16]}"


_ADAPTER = TypeAdapter(RunConfig)


def from_dict(values: dict[str, Any], *, source: str) -> RunConfig:
    """Build a RunConfig from nested dictionaries.

    Raises:
        ValueError: one line naming `source`, the field and the fault, for unknown keys too.
    """
    # TOML's dates are all that JSON lacks. No field takes one, and none takes an object.
    return from_json(json.dumps(values, default=lambda date: {"date": str(date)}), source=source)


def load(path: Path) -> RunConfig:
    """Read a TOML file. Raises ValueError with one line if it is missing, unreadable or wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ValueError(f"cannot read the configuration {path}: {reason}") from None
    return from_toml(text, source=str(path))


def from_toml(text: str, *, source: str) -> RunConfig:
    """Parse TOML text. Raises ValueError with one line naming `source`."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{source} is not valid TOML: {error}") from None
    return from_dict(values, source=source)


def preset_names() -> list[str]:
    """The presets that come with the package."""
    files = resources.files("swarm.presets").iterdir()
    return sorted(entry.name.removesuffix(".toml") for entry in files if entry.name.endswith(".toml"))


def load_preset(name: str) -> RunConfig:
    """Read a preset. Raises ValueError naming the known ones."""
    if name not in preset_names():
        raise ValueError(f"unknown preset {name!r}; the presets are {', '.join(preset_names())}")
    text = resources.files("swarm.presets").joinpath(f"{name}.toml").read_text(encoding="utf-8")
    return from_toml(text, source=f"preset {name}")


def to_json(config: RunConfig) -> str:
    """The canonical form: keys sorted, no white space. Its digest identifies the configuration."""
    return json.dumps(dataclasses.asdict(config), sort_keys=True, separators=(",", ":"))


def from_json(text: str, *, source: str) -> RunConfig:
    """Read JSON, such as the canonical form that another peer published.

    No value is made to fit: `true` does not pass for 1, nor "4" for 4.

    Raises:
        ValueError: one line naming `source`, the field and the fault, for unknown keys too.
    """
    try:
        return _ADAPTER.validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "json_invalid":
            raise ValueError(f"{source} is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}") from None
        if first["type"] == "unexpected_keyword_argument":
            raise ValueError(f"{source}: unknown key {where!r}") from None
        message = first["msg"].removeprefix("Value error, ")
        # Our own messages name the field already.
        named = not where or message.startswith(where)
        raise ValueError(f"{source}: {message}" if named else f"{source}: {where}: {message}") from None


def check_same(ours: RunConfig, theirs: RunConfig) -> None:
    """Raise ConfigMismatch naming the first field in which two configurations differ."""
    for name, (here, there) in differences(ours, theirs).items():
        raise ConfigMismatch(
            f"{name} is {here!r} here and {there!r} in the run; "
            "leave --config and --preset out to use the run's own configuration"
        )


def differences(one: RunConfig, other: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Both values of every field in which two configurations differ, by `section.field`, in the order of the fields."""
    flat_one, flat_other = _flatten(dataclasses.asdict(one)), _flatten(dataclasses.asdict(other))
    return {name: (value, flat_other[name]) for name, value in flat_one.items() if value != flat_other[name]}


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat
