"""Reads a RunConfig from TOML, JSON or a preset, changes settings by name, and compares configurations.

A fault is a ValueError of one line.
"""

import dataclasses
import difflib
import json
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from swarm.config.run import RunConfig, to_json
from swarm.errors import ConfigMismatch

_ADAPTER = TypeAdapter(RunConfig)


def from_dict(values: dict[str, Any], *, source: str) -> RunConfig:
    """Build a RunConfig from nested dictionaries. Raises ValueError, of one line which names `source`, the field and
    the fault, for unknown keys too."""
    # TOML has dates and JSON has none. No field takes a date, so it becomes an object, which every field refuses.
    return from_json(json.dumps(values, default=lambda date: {"date": str(date)}), source=source)


def load(path: Path) -> RunConfig:
    """Read a TOML file. Raises ValueError with one line if it is missing, unreadable or wrong."""
    try:
        # Editors on Windows may begin a file with a byte order mark, which TOML does not know.
        text = path.read_text(encoding="utf-8-sig")
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
    except RecursionError:
        raise ValueError(f"{source} is not valid TOML: it is nested too deeply") from None
    return from_dict(values, source=source)


def with_settings(config: RunConfig, settings: Sequence[str]) -> RunConfig:
    """Change settings of a configuration, each given as `section.key=value`. They are checked together.

    A value is written as in TOML; what is none in TOML is a string, so that a word needs no quotes.

    Raises:
        ValueError: one line that names the setting and the fault, for unknown keys too.
    """
    values = json.loads(to_json(config))
    for setting in settings:
        name, equals, text = setting.partition("=")
        section, _, key = name.strip().rpartition(".")
        place = values.setdefault(section, {}) if section else values
        if not equals or not key or not isinstance(place, dict):
            raise ValueError(f"--set takes SECTION.KEY=VALUE, such as optimizer.learning_rate=1e-4, not {setting!r}")
        try:
            found = tomllib.loads(f"value = {text}")
        except (tomllib.TOMLDecodeError, RecursionError):
            found = {}
        if found.keys() != {"value"} and text.strip()[:1] in ("[", "{", '"', "'"):
            raise ValueError(f"--set {name.strip()}: {text.strip()[:80]} is not valid TOML")
        place[key] = found["value"] if found.keys() == {"value"} else text.strip()
    return from_dict(values, source="--set") if settings else config


def preset_names() -> list[str]:
    files = resources.files("swarm.presets").iterdir()
    return sorted(entry.name.removesuffix(".toml") for entry in files if entry.name.endswith(".toml"))


@dataclass(frozen=True)
class Preset:
    """A preset's file.

    Attributes:
        values: its settings, by section and key.
        begins_with: the model of the hub with which its runs begin; empty if their weights are drawn.
        needs_text: which text the user has to name; empty if the settings name one.
    """

    name: str
    values: dict[str, Any]
    begins_with: str
    needs_text: str

    @property
    def settings(self) -> tuple[str, ...]:
        """Its settings as `with_settings` takes them, for a run that begins with another configuration."""
        sections = [("", {"run": self.values["run"]}), *((f"{k}.", v) for k, v in self.values.items() if k != "run")]
        # JSON's scalars and arrays are TOML's as well.
        return tuple(f"{at}{key}={json.dumps(value)}" for at, section in sections for key, value in section.items())


def read_preset(name: str) -> Preset:
    """Read a preset's file. Raises ValueError naming the known ones."""
    if name not in preset_names():
        raise ValueError(f"unknown preset {name!r}; the presets are {', '.join(preset_names())}")
    values = tomllib.loads(resources.files("swarm.presets").joinpath(f"{name}.toml").read_text(encoding="utf-8"))
    begins_with, needs_text = values.pop("begins_with", ""), values.pop("needs_text", "")
    return Preset(name, values, begins_with, needs_text)


def load_preset(name: str) -> RunConfig:
    """The configuration of a preset whose weights are drawn. Raises ValueError naming the known ones."""
    preset = read_preset(name)
    if preset.begins_with:
        raise ValueError(f"preset {name} begins with a model, {preset.begins_with}")
    return from_dict(preset.values, source=f"preset {name}")


def from_json(text: str, *, source: str, if_unknown: str = "") -> RunConfig:
    """Read JSON, such as the canonical form that another peer published.

    No value is converted: `true` is not taken for 1, and "4" is not taken for 4. `if_unknown` is what the error advises
    for an unknown key, if not the known ones, and for a word that is none of the known ones.

    Raises:
        ValueError: one line naming `source`, the field and the fault, for unknown keys too.
    """
    try:
        return _ADAPTER.validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        # Section, field and list index are kept. Other parts of the location name the type that did not fit.
        where = ".".join(str(part) for n, part in enumerate(first["loc"]) if n < 2 or isinstance(part, int))
        if first["type"] == "json_invalid":
            raise ValueError(f"{source} is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}") from None
        if first["type"] == "unexpected_keyword_argument":
            raise ValueError(f"{source}: unknown key {where!r}; {if_unknown or _meant(where)}") from None
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "literal_error" and if_unknown:
            message += f"; {if_unknown}"
        # Our own messages name the field already.
        named = not where or message.startswith(where)
        raise ValueError(f"{source}: {message}" if named else f"{source}: {where}: {message}") from None


def _meant(where: str) -> str:
    """What an unknown key was perhaps meant to be, or which there are."""
    names = [field.name for field in dataclasses.fields(RunConfig)]
    sections = {name: sorted(own) for name, own in dataclasses.asdict(RunConfig()).items() if isinstance(own, dict)}
    section, _, key = where[:100].rpartition(".")
    known = sections.get(section, names)
    prefix = f"{section}." if section in sections else ""
    near = [f"{other}.{key}" for other, keys in sections.items() if key in keys]
    near = near or [prefix + name for name in difflib.get_close_matches(key, known, n=2)]
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"{section if prefix else 'a configuration'} has {', '.join(known)}"


# -- how two configurations differ -------------------------------------------------------------------------------------


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
        flat |= _flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


# -- what may change when a run goes on from a checkpoint --------------------------------------------------------------

Difference = tuple[Any, Any]
"""The checkpoint's value of a field, and that of the run which goes on from it."""


def forbidden_changes(checkpoint: RunConfig, run: RunConfig) -> dict[str, Difference]:
    """The differences that make the checkpoint one of another run, by field."""
    return _changes(checkpoint, run, are_allowed=False)


def allowed_changes(checkpoint: RunConfig, run: RunConfig) -> dict[str, Difference]:
    """All differences that are not forbidden, by field."""
    return _changes(checkpoint, run, are_allowed=True)


def _changes(checkpoint: RunConfig, run: RunConfig, *, are_allowed: bool) -> dict[str, Difference]:
    # Values that [outer] leaves out, and `auto`, are replaced by what they stand for, because earlier releases wrote
    # the actual values.
    whole = (
        dataclasses.replace(each, outer=each.outer_step, optimizer=each.gradient_step) for each in (checkpoint, run)
    )
    found = {name: (pair, _rule(name, run)) for name, pair in differences(*whole).items()}
    return {name: pair for name, (pair, rule) in found.items() if rule is not None and rule(run) is are_allowed}


def _rule(name: str, run: RunConfig) -> Callable[[RunConfig], bool] | None:
    """When a field may change, by the mark at it or its section (config/checks). None: another value is no change."""
    marks: dict[str, Any] = {"may_change": lambda run: False}
    part: Any = run
    for step in name.split("."):
        marks |= next(each.metadata for each in dataclasses.fields(part) if each.name == step)
        part = getattr(part, step)
    rule: Callable[[RunConfig], bool] | None = marks["may_change"]
    return rule
