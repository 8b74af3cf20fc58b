"""Writes a model's folder as transformers reads it, from weights under our names.

Either the whole folder is there at the end, or nothing. It can be read without our code: it has config.json,
generation_config.json, safetensors with an index, the tokenizer's files, and a model card.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers as library
import torch
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

from swarm.config import ModelConfig, RunConfig
from swarm.config.data import CLASS
from swarm.data import tokenizer_files, tokenizers
from swarm.data.own_tokenizer import trusted
from swarm.data.tokenizer_files import TOKENIZER
from swarm.data.tokenizers import BYTES_OF_LETTERS, ByteTokenizer, Tokenizer, end_tokens
from swarm.interchange.families.family import Family, TensorRule
from swarm.interchange.families.known import GENERATION, family_of, special_token_keys
from swarm.interchange.source import parameter_shapes
from swarm.machine import json_file, tensor_file
from swarm.machine.disk import whole_folder

Load = Callable[[set[str]], Mapping[str, Tensor]]
"""Gives some parameters by their names. Blocks. Raises IntegrityError if they cannot be read."""
SHARD_BYTES = 2 << 30
"""The largest size of a file of weights, unless a single tensor is larger."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """The facts about a model's training that its card states.

    Attributes:
        round: the round at which its weights were taken.
        num_samples: the samples that the run had trained on by then.
        losses: nats per token, by the name of what was measured.
        digest: identifies these weights: before the first round it is the digest of the weights that the run begins
            with, afterwards the lineage, a hash chain over the rounds. Empty if it is not known.
    """

    round: int
    num_samples: int
    losses: Mapping[str, float]
    digest: str = ""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a model's weights come from.

    Attributes:
        load: gives parameters of the whole model, by name. If the run has adapters, their products are added.
        adapters: gives parameters of the adapters; None if the run has none.
        base_dtype: the type of the model's weights to which adapters belong; None if there are none.
        tokenizer: names the tokenizer on this machine, as `data.tokenizer` does.
    """

    config: RunConfig
    load: Load
    card: Card
    tokenizer: str
    adapters: Load | None = None
    base_dtype: torch.dtype | None = None


def export_model(
    origin: Origin, output: Path, *, dtype: torch.dtype | None = None, tokenizer: str | None = None
) -> list[Path]:
    """Write the folder, and return its files. Blocks, and has one shard in memory.

    Args:
        dtype: the type in which to store weights; None leaves them as they are, and the sum of a model and its adapters
            in the model's type.
        tokenizer: names the tokenizer, if it is not where the origin says.

    Raises:
        ValueError: no architecture of transformers computes this model, the output exists, or there is no tokenizer.
        IntegrityError: the weights cannot be read.
        OSError: the folder cannot be written.
    """
    with whole_folder(output) as folder:
        family = family_of(origin.config.model)
        spec = trusted(tokenizer, origin.tokenizer)
        tokens = special_token_keys(_with_ends(origin.config, folder, _write_tokenizer(origin.config, spec, folder)))
        dtype = _write_weights(origin, family, folder, dtype)
        json_file.write_object(folder / "config.json", _config(origin.config, family, dtype) | tokens)
        if not (folder / GENERATION).exists():
            json_file.write_object(folder / GENERATION, {"_from_model_config": True, **tokens})
        (folder / "README.md").write_text(_card(origin, family, dtype, spec), encoding="utf-8")
    return sorted(output.iterdir())


def _write_weights(origin: Origin, family: Family, folder: Path, wanted: torch.dtype | None) -> torch.dtype:
    shards, total_bytes, dtype = list[dict[str, Path]](), 0, torch.float32
    for shard in _shards(origin, family, wanted or origin.base_dtype):
        path = folder / f"shard-{len(shards)}.tmp"
        tensor_file.write(path, shard, {"format": "pt"})
        shards.append(dict.fromkeys(shard, path))
        total_bytes += sum(tensor.nbytes for tensor in shard.values())
        dtype = next(iter(shard.values())).dtype
    index: dict[str, str] = {}
    for number, shard_files in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        next(iter(shard_files.values())).rename(folder / name)
        index |= dict.fromkeys(shard_files, name)
    if len(shards) > 1:
        values = {"metadata": {"total_size": total_bytes}, "weight_map": index}
        json_file.write_object(folder / "model.safetensors.index.json", values)
    return dtype


def _shards(origin: Origin, family: Family, dtype: torch.dtype | None) -> Iterator[dict[str, Tensor]]:
    model = origin.config.model
    shard: dict[str, Tensor] = {}
    num_bytes = 0
    own, shapes = parameter_shapes(model), parameter_shapes(family.with_biases(model))
    zeros = {name: shape for name, shape in shapes.items() if name not in own}
    for rule in family.tensors(model, shapes):
        tensor = _theirs(rule, origin, zeros, dtype)
        if shard and num_bytes + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard, num_bytes = {}, 0
        shard[rule.theirs] = tensor
        num_bytes += tensor.nbytes
    yield shard


def _theirs(
    rule: TensorRule, origin: Origin, zeros: Mapping[str, tuple[int, ...]], dtype: torch.dtype | None
) -> Tensor:
    ours = origin.load({*rule.ours} - zeros.keys())
    tensor = torch.cat([torch.zeros(zeros[name]) if name in zeros else ours[name] for name in rule.ours])
    if rule.transposed:
        tensor = tensor.t()
    # It is cloned, because safetensors refuses tensors of one file that share memory.
    return tensor.to(dtype or tensor.dtype).contiguous().clone()


def _config(config: RunConfig, family: Family, dtype: torch.dtype) -> dict[str, Any]:
    model = config.model
    values = family.write(model)
    if not model.max_positions:
        values["max_position_embeddings"] = config.data.sequence_length
    name = str(dtype).removeprefix("torch.")
    return {"architectures": [family.architecture], "model_type": family.model_type, "torch_dtype": name, **values}


def _with_ends(config: RunConfig, folder: Path, tokenizer: Tokenizer) -> ModelConfig:
    """The model with all its end tokens, because transformers needs their numbers: those that it names, and the one
    with which the run has texts end."""
    model = config.model
    found = end_tokens(model, [folder], tokenizer, format=config.data.format)
    missing = sorted(token for token in found - {*model.eos_token_ids} if token < model.vocab_size)
    return dataclasses.replace(model, eos_token_ids=(*model.eos_token_ids, *missing))


def _write_tokenizer(config: RunConfig, spec: str, folder: Path) -> Tokenizer:
    data = dataclasses.replace(config.data, tokenizer=spec)
    if spec == ByteTokenizer.identity:
        tokenizer: Tokenizer = ByteTokenizer()
        _byte_tokenizer().save(str(folder / TOKENIZER))
    else:
        tokenizer = tokenizers.load_for_run(data, vocab_size=config.model.vocab_size)
        if not tokenizer_files.has_files(spec):
            return tokenizer
        tokenizer_files.read(tokenizer_files.located(spec)).write(folder)
    if not (folder / "tokenizer_config.json").exists():
        json_file.write_object(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    return tokenizer


def _byte_tokenizer() -> library.Tokenizer:
    """A tokenizer.json whose tokens are the 256 bytes, each under its own number."""
    tokenizer = library.Tokenizer(models.BPE(vocab=BYTES_OF_LETTERS, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _card(origin: Origin, family: Family, dtype: torch.dtype, tokenizer: str) -> str:
    config, card = origin.config, origin.card
    texts = ", ".join(f"`{dataset}`" for dataset in config.data.datasets)
    rows = {
        "Run": f"`{config.run_id}`",
        "Round": str(card.round),
        **({"Digest": f"`{card.digest}`"} if card.digest else {}),
        "Tokens seen": f"{card.num_samples * config.data.sequence_length:,}",
        "Text": f"{texts}, digest `{config.data.digest or 'not known'}`",
        "Weights at the beginning": f"`{config.model.weights}`" if config.model.weights else "random",
        "Architecture": f"{family.architecture}, {str(dtype).removeprefix('torch.')}",
        **{name: f"{loss:.4f} nats a token" for name, loss in card.losses.items()},
    }
    loads = 'tokenizer = AutoTokenizer.from_pretrained("PATH")'
    if tokenizer.startswith(CLASS):
        module, _, name = tokenizer.removeprefix(CLASS).partition(":")
        loads = f"from {module} import {name}  # not in this folder\n\ntokenizer = {name}()"
    code = (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("PATH")\n{loads}\n'
    )
    return card_text("transformers", config.run, "Trained", rows, code)


def card_text(library_name: str, title: str, beginning: str, rows: Mapping[str, str], code: str) -> str:
    """A model card: what was made, a table, and the code that loads it with a library."""
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return (
        f"---\nlibrary_name: {library_name}\npipeline_tag: text-generation\n---\n\n"
        f"# {title}\n\n{beginning} with Swarm by machines of several people together.\n\n"
        f"| | |\n|---|---|\n{table}\n\n```python\n{code}```\n"
    )
