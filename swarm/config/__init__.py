"""A run's configuration: the sections of the TOML file, run.py for the whole, reading.py to read it."""

from swarm.config.amendments import Amendment, Timeline
from swarm.config.data import DataConfig
from swarm.config.lora import LoraConfig
from swarm.config.model import ModelConfig
from swarm.config.optimizer import OptimizerConfig
from swarm.config.reading import (
    Preset,
    allowed_changes,
    check_same,
    differences,
    forbidden_changes,
    from_dict,
    from_json,
    from_toml,
    load,
    load_preset,
    preset_names,
    read_preset,
    with_settings,
)
from swarm.config.rounds import AveragingConfig, OuterConfig, Quorum, RoundsConfig, Setting
from swarm.config.run import RunConfig, to_json
from swarm.config.sizes import TextSize
from swarm.config.stages import StagesConfig, WireConfig

__all__ = [
    "Amendment",
    "AveragingConfig",
    "DataConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimizerConfig",
    "OuterConfig",
    "Preset",
    "Quorum",
    "RoundsConfig",
    "RunConfig",
    "Setting",
    "StagesConfig",
    "TextSize",
    "Timeline",
    "WireConfig",
    "allowed_changes",
    "check_same",
    "differences",
    "forbidden_changes",
    "from_dict",
    "from_json",
    "from_toml",
    "load",
    "load_preset",
    "preset_names",
    "read_preset",
    "to_json",
    "with_settings",
]
