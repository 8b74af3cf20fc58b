"""A model of transformers with peft's adapters. The bench `parity` compares it with a swarm that trains adapters.

Importing it takes seconds, so it is imported only where it is needed.
"""

import dataclasses
from pathlib import Path

import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from scripts.benches.shared.theirs import loss_of
from scripts.benches.sides.reference import Model
from swarm.config import RunConfig
from swarm.interchange.adapter import peft_modules
from swarm.interchange.run_folder import ImportOptions, import_model
from swarm.interchange.source import Source
from swarm.model.adapters import trained_parameters
from swarm.model.stages import build_transformer
from swarm.training.samples import TOKENS

MODEL, RUN = "model", "run"  # Two folders: the model as transformers writes it, and as swarm-model imports it


def with_model(config: RunConfig, folder: Path) -> RunConfig:
    """Make a Llama with the configuration's sizes and random weights. Return the configuration that begins with it."""
    sizes = LlamaConfig(
        vocab_size=config.model.vocab_size, hidden_size=config.model.d_model,
        intermediate_size=3 * config.model.d_model, num_hidden_layers=config.model.num_layers,
        num_attention_heads=config.model.num_heads, max_position_embeddings=config.data.sequence_length,
        # The range is large, so that adapters have something to learn although the frozen weights are random.
        initializer_range=0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(sizes).save_pretrained(folder / MODEL)
    options = ImportOptions(num_stages=config.stages.num_stages)
    imported = import_model(Source(folder / MODEL), folder / RUN, options)
    return dataclasses.replace(config, model=imported.model)


def peft_model(config: RunConfig, folder: Path) -> Model:
    """The model of `with_model`, with the run's adapters as peft's layers, which have the run's initial values."""
    lora = config.lora
    peft_config = PeftConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    base = AutoModelForCausalLM.from_pretrained(folder / MODEL, dtype=torch.float32)
    theirs = get_peft_model(base, peft_config)
    initial, parameters = trained_parameters(build_transformer(config, device="cpu")), dict[str, nn.Parameter]()
    for name, adapters in peft_modules(config).items():
        (ours,) = adapters
        layer = theirs.base_model.model.get_submodule(name)
        parameters[ours.a] = layer.lora_A["default"].weight
        parameters[ours.b] = layer.lora_B["default"].weight
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(initial[name])
    return Model(
        summed_loss=lambda batch, _: loss_of(theirs, batch[TOKENS].long(), reduction="sum"), parameters=parameters
    )
