"""An import is a run that swarm-peer can begin, and its weights are checked one by one."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from swarm.config import RunConfig
from swarm.errors import IntegrityError
from swarm.interchange import weights
from swarm.interchange.run_folder import ImportOptions, import_model, load_config, open_weights
from swarm.interchange.source import Source
from tests.interchange.importing import write_model
from tests.interchange.small_models import save
from tests.support.tokenizers import write_tokenizer


def _import(tmp_path: Path, name: str = "llama-2", options: ImportOptions | None = None) -> RunConfig:
    save(name, tmp_path / "model")
    return import_model(Source(tmp_path / "model"), tmp_path / "run", options or ImportOptions())


def test_what_the_configuration_cannot_name_is_refused(tmp_path: Path) -> None:
    """Names of files may be any bytes, but TOML is UTF-8."""
    save("llama-2", tmp_path / "model")
    write_tokenizer(tmp_path / "model" / "tokenizer.json", ["one"])
    for output, dataset in (("run", "a\udcff.txt"), ("run\udcff", "stdlib")):
        with pytest.raises(ValueError, match=r"udcff.* is no UTF-8 text, and run\.toml has to name it"):
            import_model(Source(tmp_path / "model"), tmp_path / output, ImportOptions(dataset=(dataset,)))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_run_folder_makes_nobody_import_code(tmp_path: Path) -> None:
    """It may come from others."""
    _import(tmp_path, options=ImportOptions(dataset=("hf:theirs",)))
    file = tmp_path / "run" / "run.toml"
    assert load_config(tmp_path / "run").data.dataset == "hf:theirs"
    file.write_text(file.read_text().replace("hf:theirs", "class:theirs:Rows"))
    with pytest.raises(ValueError, match=r"run\.toml must not name 'class:theirs:Rows': give it with --dataset"):
        load_config(tmp_path / "run")


def test_what_no_run_could_begin_with_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "model", width=64)
    config = tmp_path / "model" / "config.json"
    small = Source(tmp_path / "model")
    small.model = dataclasses.replace(small.model, vocab_size=255)
    for source, options, fault in (
        (
            small,
            ImportOptions(),
            r"has no tokenizer.json, and without one a run reads bytes.* of 255 is too small \(256\)",
        ),
        (Source(tmp_path / "model"), ImportOptions(dataset=("stdlib", "nofile")), "'nofile' does not exist; give"),
        (Source(tmp_path / "model"), ImportOptions(dataset=(f"{tmp_path}/*.none",)), "names no file that can be read"),
        (Source(tmp_path / "model"), ImportOptions(dataset=("class:no:Rows",)), "'class:no:Rows': give it with"),
    ):
        with pytest.raises(ValueError, match=fault):
            import_model(source, tmp_path / "run", options)
        assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert config.is_file()
    import_model(Source(tmp_path / "model"), tmp_path / "run", ImportOptions(dataset=("hf:not/asked",)))


def test_an_import_that_fails_leaves_nothing(tmp_path: Path) -> None:
    model = save("llama-2", tmp_path / "model")
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[0, 0] = torch.nan
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(IntegrityError, match=r"layers.2.feed_forward.up.weight holds NaN"):
        import_model(Source(tmp_path / "model"), tmp_path / "run", ImportOptions())
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_damage_is_found_in_the_tensor_that_has_it(tmp_path: Path) -> None:
    config = _import(tmp_path)
    path = tmp_path / "run" / "weights" / "layers.1.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    found = open_weights(tmp_path / "run", config)
    found.load({"layers.0.attention.q.weight", "layers.2.attention.q.weight"})
    with pytest.raises(IntegrityError, match=r"is not what the run begins with: layers.1"):
        found.load(found.index.entries.keys())


def test_an_altered_index_is_another_model(tmp_path: Path) -> None:
    config = _import(tmp_path)
    index = tmp_path / "run" / "weights" / "index.json"
    before = index.read_text()
    digest = before.partition('"sha256":["')[2][:64]
    index.write_text(before.replace(digest, digest[::-1]))
    with pytest.raises(IntegrityError, match="has other weights"):
        open_weights(tmp_path / "run", config)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"tensors": 3}', '{"tensors": {"a": {}}}'])
def test_an_index_that_is_none_is_said(text: str, tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(IntegrityError, match="is damaged"):
        weights.open_folder(tmp_path)


@pytest.mark.slow
def test_memory_is_bounded_by_a_shard_and_a_layer(tmp_path: Path) -> None:
    """A model of 24 layers in files of a layer or two each: what is held at once is far from all of it."""
    model_bytes, shard_bytes = write_model(tmp_path / "model")
    script = Path(__file__).with_name("importing.py")
    result = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, check=True, timeout=120
    )
    # Memory for a shard, of which the kernel may map more than is read, for a layer, and some more.
    layer_bytes = model_bytes // 24
    assert 0 < int(result.stdout) < shard_bytes + 2 * layer_bytes < model_bytes / 5
