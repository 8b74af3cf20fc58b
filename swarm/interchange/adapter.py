"""Writes a run's adapters as a folder that peft reads.

    adapter_config.json           rank, alpha and targets, under the names of the model's family
    adapter_model.safetensors     the two thin matrices of every target
    README.md

Either the whole folder is there at the end, or nothing. It does not contain the model to which the adapters belong.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swarm.config import RunConfig
from swarm.interchange.export import Load, Origin, card_text
from swarm.interchange.families.family import Family, TensorRule
from swarm.interchange.families.known import family_of
from swarm.interchange.source import parameter_shapes
from swarm.machine import json_file, tensor_file
from swarm.machine.disk import whole_folder
from swarm.model.adapters import AdapterNames, adapter_names

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def export_adapter(
    origin: Origin, output: Path, dtype: torch.dtype | None = None, *, base: str | None = None
) -> list[Path]:
    """Write the folder, and return its files. Blocks.

    Args:
        base: the name or folder of the model to which the adapters belong, as transformers loads it, if it is known.
        dtype: the type in which to store the adapters; None leaves them in float32.

    Raises:
        ValueError: the run has no adapters, transformers has no such architecture, or the output exists.
        OSError: the folder cannot be written.
    """
    if origin.adapters is None:
        raise ValueError("this run trains the model's own weights, and has no adapters: export it without --adapter")
    config = origin.config
    with whole_folder(output) as folder:
        adapted = peft_modules(config)
        tensors = {
            f"base_model.model.{module}.{part}.weight": tensor.to(dtype or tensor.dtype)
            for module, adapters in adapted.items()
            for part, tensor in _theirs(adapters, origin.adapters).items()
        }
        tensor_file.write(folder / WEIGHTS, tensors, {"format": "pt"})
        values = _config(config, family_of(config.model), adapted) | {"base_model_name_or_path": base}
        json_file.write_object(folder / CONFIG, values)
        (folder / "README.md").write_text(_card(origin, base), encoding="utf-8")
    return sorted(output.iterdir())


def peft_modules(config: RunConfig) -> dict[str, list[AdapterNames]]:
    """Our adapters, by transformers' name of the module that they belong to.

    A module may have several of our adapters, if its matrix has ours one below the other. Raises ValueError if
    transformers has no such architecture.
    """
    names = adapter_names(config)
    rules = family_of(config.model).tensors(config.model, parameter_shapes(config.model))
    return {_module(rule): [names[name] for name in rule.ours] for rule in rules if rule.ours[0] in names}


def _module(rule: TensorRule) -> str:
    return rule.theirs.removesuffix(".weight")


def _theirs(adapters: list[AdapterNames], load: Load) -> dict[str, Tensor]:
    """The two matrices of one module's adapter: our adapters share lora_A, and have lora_B one below the other."""
    (a,) = {adapter.a for adapter in adapters}
    ours = load({a, *(adapter.b for adapter in adapters)})
    return {"lora_A": ours[a].clone(), "lora_B": torch.cat([ours[adapter.b] for adapter in adapters])}


def _config(config: RunConfig, family: Family, adapted: dict[str, list[AdapterNames]]) -> dict[str, Any]:
    lora = config.lora
    rules = family.tensors(config.model, parameter_shapes(config.model))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted({module.rpartition(".")[2] for module in adapted}),
        "fan_in_fan_out": any(rule.transposed for rule in rules if _module(rule) in adapted),
        "bias": "none",
        "inference_mode": True,
    }


def _card(origin: Origin, base: str | None) -> str:
    config, lora, card = origin.config, origin.config.lora, origin.card
    rows = {
        "Run": f"`{config.run_id}`",
        "Round": str(card.round),
        "Rank, alpha": f"{lora.rank}, {lora.alpha:g}",
        "Matrices": ", ".join(lora.targets),
        "Weights of the model": f"`{config.model.weights}`" if config.model.weights else "random",
    }
    code = (
        "from peft import PeftModel\nfrom transformers import AutoModelForCausalLM\n\n"
        'model = AutoModelForCausalLM.from_pretrained("MODEL")\nmodel = PeftModel.from_pretrained(model, "PATH")\n'
    ).replace("MODEL", base or "MODEL")
    return card_text("peft", config.run, "Adapters, trained", rows, code)
