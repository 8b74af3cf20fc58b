"""A folder that is not what it says is refused with one line, before anything is written."""

import json
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from swarm.interchange.run_folder import ImportOptions, import_model
from swarm.interchange.source import Source, located
from tests.interchange.small_models import save


def _lose_a_shard(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[1].unlink()


def _truncate(folder: Path) -> None:
    path = sorted(folder.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-100])


def _lose_a_tensor(folder: Path) -> None:
    path = sorted(folder.glob("*.safetensors"))[-1]
    tensors = load_file(path)
    name = sorted(tensors)[0]
    del tensors[name]
    save_file(tensors, path)
    index = folder / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    del values["weight_map"][name]
    index.write_text(json.dumps(values))


def _add_a_tensor(folder: Path) -> None:
    path = sorted(folder.glob("*.safetensors"))[0]
    save_file({**load_file(path), "model.layers.0.mlp.experts.0.weight": torch.zeros(2)}, path)


def _pickle(folder: Path) -> None:
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    torch.save({"model.embed_tokens.weight": torch.zeros(2)}, folder / "pytorch_model.bin")


def _whole_numbers(folder: Path) -> None:
    path = sorted(folder.glob("*.safetensors"))[0]
    tensors = load_file(path)
    name = sorted(tensors)[0]
    save_file({**tensors, name: torch.zeros(tensors[name].shape, dtype=torch.int8)}, path)


def _with_index(content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "model.safetensors.index.json").write_text(content)


def _with_config(**values: object) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


def _escape(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"]["model.embed_tokens.weight"] = "../outside.safetensors"
    index.write_text(json.dumps(values))


def _without_head(folder: Path) -> None:
    tensors = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")


def _adapter(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")


@pytest.mark.parametrize(
    ("harm", "fault"),
    [
        (_lose_a_shard, "the shard model-0000.* is missing"),
        (_truncate, "is not a whole safetensors file"),
        (_lose_a_tensor, "no file has the tensor"),
        (_with_config(intermediate_size=96), r"is \[80, 48\], and config.json makes it \[96, 48\]"),
        (_with_config(num_hidden_layers=99_999), "config.json has 99999 layers, and the files have only"),
        (_add_a_tensor, "'model.layers.0.mlp.experts.0.weight' is no part of a LlamaForCausalLM"),
        (_with_config(tie_word_embeddings=True), "lm_head.weight' is not the embedding; tie_word_embeddings in config"),
        (_without_head, "no file has the tensor 'lm_head.weight'; .* tie_word_embeddings in .* has to be true"),
        (_adapter, "has only adapters.*swarm-model export --base MODEL"),
        (_pickle, "as a pickle, which can hold code and is never read"),
        (_whole_numbers, "is of type I8, and only F32, F16, BF16 can be read"),
        *(
            (_with_index(content), "is no index of safetensors files: it has no weight_map")
            for content in ("{}", '{"weight_map": 5}', '{"weight_map": ["a"]}', '{"weight_map": {"a": 5}}')
        ),
        (_escape, "which is not in the folder"),
        (lambda folder: (folder / "config.json").unlink(), "cannot read .*config.json: No such file"),
        *(
            (_with_config(architectures=value), "architectures is .*, and should be a list of names")
            for value in ("LlamaForCausalLM", "an old LlamaForCausalLM", 5, {"LlamaForCausalLM": 1}, [5], [["a"]])
        ),
    ],
)
def test_a_folder_with_a_fault_is_refused(harm: Callable[[Path], object], fault: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save("llama-2", folder, max_shard_size="30KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    harm(folder)
    with pytest.raises(ValueError, match=fault) as caught:
        import_model(Source(folder), tmp_path / "run", ImportOptions())
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


SIZES = {
    "llama-2": [
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "max_position_embeddings",
    ],
    "mistral": ["sliding_window"],
    "qwen2": ["sliding_window"],
    "gpt2": ["vocab_size", "n_embd", "n_layer", "n_head", "n_positions", "n_inner"],
}  # fmt: skip
"""In our own configuration 0 stands for a default, or for no bound."""


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in SIZES.items() for key in keys])
def test_a_size_that_cannot_be_is_refused(name: str, key: str, tmp_path: Path) -> None:
    save(name, tmp_path)
    before = (tmp_path / "config.json").read_text()
    for value, fault in (
        (0, "should be at least 1"), (-1, "should be at least 1"), (2**60, "is too large"), (1.5, "be of type int"),
        ("64", "be of type int"), (True, "be of type int"), ([64], "be of type int"),
    ):  # fmt: skip
        (tmp_path / "config.json").write_text(before)
        _with_config(**{key: value})(tmp_path)
        with pytest.raises(ValueError, match=f"{key} is .*{fault}"):
            Source(tmp_path)


@pytest.mark.parametrize("is_same", [True, False])
def test_a_tied_head_s_copy_may_be_left_out(is_same: bool, tmp_path: Path) -> None:
    save("llama-3", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    head = tensors["model.embed_tokens.weight"] + (0.0 if is_same else 1.0)
    save_file({**tensors, "lm_head.weight": head}, path)
    if is_same:
        assert "head.output.weight" not in Source(tmp_path).shapes
    else:
        with pytest.raises(ValueError, match=r"'lm_head.weight' is not the embedding"):
            Source(tmp_path)


def test_gpt2_s_masks_and_names_without_a_prefix_are_read(tmp_path: Path) -> None:
    """The files of the first releases are like that."""
    save("gpt2", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    save_file({**tensors, "h.0.attn.bias": torch.ones(1, 1, 64, 64)}, path)
    source = Source(tmp_path)
    found = dict(source.tensors(set(source.shapes)))
    assert found.keys() == source.shapes.keys()
    assert torch.equal(found["layers.1.attention.k.weight"], tensors["h.1.attn.c_attn.weight"].t()[48:96])


def test_an_index_that_an_earlier_save_left_beside_the_weights_is_not_read(tmp_path: Path) -> None:
    """transformers removes the shards of an earlier save, and not their index."""
    model = save("llama-2", tmp_path, max_shard_size="30KB")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert Source(tmp_path).files == [tmp_path / "model.safetensors"]


def _stand_in_for_the_hub(there: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository with these texts, each of which passes for 1.5 GB, and its folder in the library's cache."""

    def download(name: str, *, allow_patterns: list[str], revision: str | None) -> str:
        assert revision in (None, folder.name)
        for file in (file for file in there if any(fnmatch(file, pattern) for pattern in allow_patterns)):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(there[file])
        return str(folder)

    class Api:
        def get_paths_info(self, name: str, paths: list[str], *, revision: str) -> list[SimpleNamespace]:
            assert revision == folder.name
            return [SimpleNamespace(path=path, size=1_500_000_000) for path in paths if path in there]

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)


@pytest.mark.parametrize(
    ("files", "named", "taken"),
    [
        (["model.safetensors"], (), ["model.safetensors"]),
        (["1.safetensors", "2.safetensors", "consolidated.safetensors"], (1, 2), ["1.safetensors", "2.safetensors"]),
        (["1.safetensors", "model.safetensors"], (1, 2), ["model.safetensors"]),
    ],
)
def test_of_a_model_on_the_hub_only_what_is_read_is_downloaded(
    files: list[str], named: tuple[int, ...], taken: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {name: "{}" for name in ("config.json", "tokenizer.json", "original/params.json", "trainer_state.json")}
    there |= {f"{folder}{name}": "" for folder in ("", "fp16/", "onnx/", "checkpoint-500/") for name in files}
    if named:
        weight_map = {str(number): f"{number}.safetensors" for number in named}
        there["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map})
    _stand_in_for_the_hub(there, tmp_path / "cache" / "c0ffee", monkeypatch)
    said = list[str]()
    folder, name = located("me/mine", said.append)
    beside = ["config.json", "tokenizer.json", *(["model.safetensors.index.json"] if named else [])]
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*.*")) == sorted([*beside, *taken])
    assert name == "me-mine"
    assert f"{1.5 * len(taken):.1f} GB" in said[-1]
    said.clear()
    located("me/mine", said.append)
    assert "GB" not in " ".join(said)
