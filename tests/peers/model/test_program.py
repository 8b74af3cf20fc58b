"""swarm-model: what it says, makes and refuses."""

import dataclasses
import json
import re
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from peers.generate import program as generate
from peers.model import program as model
from peers.shared import stopping
from swarm import config as configs
from swarm.checkpoint import file
from swarm.checkpoint.file import Header
from swarm.config import LoraConfig, StagesConfig
from swarm.errors import IntegrityError
from swarm.interchange import run_folder
from swarm.interchange.adapter import WEIGHTS
from swarm.interchange.source import parameter_shapes
from swarm.model.stages import build_stage, trained_shapes
from tests.checkpoint.states import CONFIG, cut, write_cut
from tests.interchange.small_models import save
from tests.support.tokenizers import write_tokenizer


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert model.main(arguments) == 0
    return capsys.readouterr().out


def test_a_model_is_imported_shown_and_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save("gpt2", tmp_path / "in")
    changed = ("--stages", "3", "--set", "optimizer.learning_rate=3e-5")
    made = _run(capsys, "import", str(tmp_path / "in"), "--output", str(tmp_path / "run"), *changed)
    assert configs.load(tmp_path / "run" / "run.toml").optimizer.learning_rate == 3e-5
    assert "swarm-peer --model" in made
    shown = _run(capsys, "show", str(tmp_path / "run"))
    assert "GPT2LMHeadModel" in shown
    weights = configs.load(tmp_path / "run" / "run.toml").model.weights
    assert re.search(rf"^digest +{weights}$", shown, re.MULTILINE)
    assert f"{sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(tmp_path / 'in').parameters()):,}" in shown
    _run(capsys, "export", "--model", str(tmp_path / "run"), "--output", str(tmp_path / "out"))
    before, after = (tmp_path / folder / "model.safetensors" for folder in ("in", "out"))
    assert before.read_bytes() == after.read_bytes()


def _lose_a_shard(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[1].unlink()


def _truncate(folder: Path) -> None:
    path = sorted(folder.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-9])


def _pickle(folder: Path) -> None:
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    torch.save({"lm_head.weight": torch.zeros(2)}, folder / "pytorch_model.bin")


def _set(**values: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **values}))

    return change


def _beside(name: str, content: str) -> Callable[[Path], None]:
    """Write a tokenizer, and another file that belongs to it."""

    def write(folder: Path) -> None:
        write_tokenizer(folder / "tokenizer.json", ["one", "two"])
        (folder / name).write_text(content)

    return write


def _large_tokenizer(folder: Path) -> None:
    write_tokenizer(folder / "tokenizer.json", [f"word{number}" for number in range(300)])


@pytest.mark.parametrize(
    ("harm", "fault"),
    [
        (_lose_a_shard, "is missing; download the model again"),
        (_truncate, "it is not a whole safetensors file"),
        (_set(architectures=["MambaForCausalLM"]), "the architecture 'MambaForCausalLM' is not supported"),
        (_pickle, "as a pickle, which can hold code and is never read"),
        (_set(intermediate_size=96), "and config.json makes it [96, 48]"),
        (_large_tokenizer, "is smaller than the tokenizer's (301)"),
        (_beside("special_tokens_map.json", "{"), "special_tokens_map.json: it "),
        *(
            (_beside(name, "[]"), f"{name}: it ")
            for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json")
        ),
        (_beside("chat_template.jinja", "{% if x %}"), "the chat template is not valid"),
        (_beside("chat_template.jinja", "{{ raise_exception('no') }}"), "cannot render these messages: no"),
        (_beside("tokenizer_config.json", '{"chat_template": "{{ messages[7].content[0] }}"}'), "cannot render"),
        (_beside("tokenizer_config.json", '{"chat_template": 5}'), "is no text of at most 1 MiB"),
    ],
)
def test_a_model_that_cannot_be_imported_is_one_line_and_nothing_is_written(
    harm: Callable[[Path], None], fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save("llama-2", tmp_path / "in", max_shard_size="30KB")
    harm(tmp_path / "in")
    capsys.readouterr()
    arguments = ["import", str(tmp_path / "in"), "--output", str(tmp_path / "run")]
    assert stopping.run_program("swarm-model", lambda: model.main(arguments)) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("LlamaForCausalLM")]
    assert len(errors) == 1
    assert errors[0].startswith("swarm-model: error: ")
    assert fault in errors[0]
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_the_card_has_the_losses_that_were_measured_by_then(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, vocab_size=256))
    (tmp_path / "checkpoints").mkdir()
    write_cut(tmp_path / "checkpoints", cut(2, config), num_rounds=2)
    rows = [
        {"step": 0, "event": "training begins"},
        {"step": 1, "train/loss": 3.5, "val/loss": 3.25, "val/loss/books": 3.125},
        {"step": 2, "train/loss": 3.0, "val/loss": None},
        {"step": 3, "train/loss": 2.0, "val/loss": 2.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    where = ["--checkpoint", str(tmp_path / "checkpoints"), "--output", str(tmp_path / "out")]
    _run(capsys, "export", *where, "--metrics", str(tmp_path))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| Loss, training, at round 2 | 3.0000 nats a token |" in card
    assert "| Loss, held-out, at round 1 | 3.2500 nats a token |" in card
    assert "| Loss, held-out, books, at round 1 | 3.1250 nats a token |" in card
    assert "2.0000" not in card
    where[-1] = str(tmp_path / "none")
    none = ("{", "[]", "[" * 100_000, '{"train/loss": 1.5, "step": Infinity}')
    for content, fault in (("{}", "has no losses"), *((content, "is no metrics.jsonl") for content in none)):
        (tmp_path / "metrics.jsonl").write_text(content)
        with pytest.raises(ValueError, match=fault):
            model.main(["export", *where, "--metrics", str(tmp_path / "metrics.jsonl")])
    with pytest.raises(ValueError, match="No such file"):
        model.main(["export", *where, "--metrics", str(tmp_path / "none")])


@pytest.mark.parametrize("dtype", ["keep", "bf16"])
def test_checkpoints_of_any_cut_are_exported(dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, vocab_size=256))
    (tmp_path / "checkpoints").mkdir()
    write_cut(tmp_path / "checkpoints", cut(2, config), num_rounds=1)
    write_cut(tmp_path / "checkpoints", cut(2, config), num_rounds=2)
    shown = _run(capsys, "show", str(tmp_path / "checkpoints"))
    assert "LlamaForCausalLM" in shown
    said = _run(
        capsys, "export", "--checkpoint", str(tmp_path / "checkpoints"), "--round", "1", "--dtype", dtype,
        "--output", str(tmp_path / "out"),
    )  # fmt: skip
    assert "round 1" in said
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.dtype == (torch.float32 if dtype == "keep" else torch.bfloat16)


def test_adapters_are_shown_and_exported_by_themselves_and_merged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lora = LoraConfig(rank=2, alpha=3.0, targets=("q_proj", "up_proj"))
    config = dataclasses.replace(CONFIG, lora=lora, model=dataclasses.replace(CONFIG.model, vocab_size=256))
    (tmp_path / "checkpoints").mkdir()
    write_cut(tmp_path / "checkpoints", cut(2, config), num_rounds=3)
    checkpoints = ("--checkpoint", str(tmp_path / "checkpoints"))
    shown = _run(capsys, "show", str(tmp_path / "checkpoints"))
    assert "rank 2, alpha 3, dropout 0, q_proj, up_proj" in shown
    # In each of four layers: rank times inputs and outputs of two matrices; the feed-forward block is 64 wide.
    assert f"{4 * 2 * (16 + 16 + 16 + 64):,} parameters, of adapters" in shown
    _run(capsys, "export", *checkpoints, "--output", str(tmp_path / "merged"))
    assert "PeftModel" in _run(capsys, "export", *checkpoints, "--adapter", "--output", str(tmp_path / "adapter"))
    assert "would go to" in _run(capsys, "push", str(tmp_path / "adapter"), "me/mine", "--dry-run")
    merged, adapter = load_file(tmp_path / "merged" / "model.safetensors"), load_file(tmp_path / "adapter" / WEIGHTS)
    base = build_stage(cut(1, config), 0, device="cpu").get_parameter("layers.3.attention.q.weight")
    name = "model.layers.3.self_attn.q_proj"
    a, b = (adapter[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    torch.testing.assert_close(merged[f"{name}.weight"], base.float() + 1.5 * b @ a)
    plain = tmp_path / "plain"
    plain.mkdir()
    write_cut(plain, cut(2), num_rounds=1)
    with pytest.raises(ValueError, match="export it without --adapter"):
        model.main(["export", "--checkpoint", str(plain), "--adapter", "--output", str(tmp_path / "none")])
    with pytest.raises(ValueError, match="has no adapters to merge"):
        model.main(["export", "--checkpoint", str(plain), "--merged", "--output", str(tmp_path / "none")])


def test_adapters_are_merged_into_any_folder_from_which_their_run_could_begin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model's folder as it came from Hugging Face, or a run folder; another model is told by its digest."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save("llama-2", tmp_path / "in", torch.bfloat16)
    save("llama-linear", tmp_path / "other")
    _run(capsys, "import", str(tmp_path / "in"), "--output", str(tmp_path / "run"))
    (tmp_path / "checkpoints").mkdir()
    begun = run_folder.load_config(tmp_path / "run").begun()
    config = dataclasses.replace(begun, lora=LoraConfig(rank=2, targets=("q_proj",)), stages=StagesConfig(num_stages=1))
    header = Header(config=config, stage=0, round=1, run_samples=16, lineage="", highest_microbatch=7, state_digest="")
    adapters = {f"anchor/{name}": torch.randn(shape) for name, shape in trained_shapes(config, 0).items()}
    file.write(tmp_path / "checkpoints", header, adapters, owner="test")
    export = ["export", "--checkpoint", str(tmp_path / "checkpoints"), "--output"]
    for base in ("in", "run"):
        _run(capsys, *export, str(tmp_path / f"{base}-merged"), "--base", str(tmp_path / base))
    of_folder, of_run = (load_file(tmp_path / f"{base}-merged" / "model.safetensors") for base in ("in", "run"))
    assert all(torch.equal(of_folder[name], tensor) for name, tensor in of_run.items())
    assert {tensor.dtype for tensor in of_run.values()} == {torch.bfloat16}
    for base, named in (("in", str((tmp_path / "in").resolve())), ("run", None)):
        _run(capsys, *export, str(tmp_path / f"{base}-adapter"), "--adapter", "--base", str(tmp_path / base))
        values = json.loads((tmp_path / f"{base}-adapter" / "adapter_config.json").read_text())
        assert values["base_model_name_or_path"] == named
    with pytest.raises(ValueError, match="has only adapters"):
        generate.main(["--model", str(tmp_path / "in-adapter"), "--prompt", "a"])
    written = list[str]()
    for base in ("in", "run"):
        generate.main(["--checkpoint", export[2], "--base", str(tmp_path / base), "--prompt", "a", "--max-tokens", "5"])
        written.append(capsys.readouterr().out)
    assert written[0] == written[1]
    with pytest.raises(IntegrityError, match="has other weights"):
        model.main([*export, str(tmp_path / "none"), "--base", str(tmp_path / "other")])
    with pytest.raises(ValueError, match="there is no such folder"):
        model.main([*export, str(tmp_path / "none"), "--base", str(tmp_path / "nowhere")])
    assert not (tmp_path / "none").exists()


def test_nothing_is_made_within_what_it_is_made_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """This also holds if a link names the source or the output."""
    save("llama-2", tmp_path / "in")
    (tmp_path / "link").symlink_to(tmp_path / "in")
    _run(capsys, "import", str(tmp_path / "in"), "--output", str(tmp_path / "run"))
    (tmp_path / "checkpoints").mkdir()
    write_cut(tmp_path / "checkpoints", cut(1), num_rounds=1)
    before = sorted(tmp_path.rglob("*"))
    for arguments in (
        ["import", "in", "--output", "in/run"],
        ["import", "link", "--output", "in/run"],
        ["export", "--model", "run", "--output", "run/weights/out"],
        ["export", "--checkpoint", "checkpoints", "--output", "checkpoints/../checkpoints/out"],
        ["export", "--checkpoint", "checkpoints", "--base", "in", "--output", "link/out"],
    ):
        whole = [
            word if word.startswith("-") or number == 0 else str(tmp_path / word)
            for number, word in enumerate(arguments)
        ]
        with pytest.raises(ValueError, match=r"lies in .*, which it is made from: name a folder elsewhere"):
            model.main(whole)
    assert sorted(tmp_path.rglob("*")) == before


def test_where_something_is_nothing_is_begun(tmp_path: Path) -> None:
    """No peer is asked for weights either: the invite leads nowhere."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    for source in ("--checkpoint", "--initial-peers"):
        with pytest.raises(ValueError, match="is there already"):
            model.main(["export", source, "/nowhere", "--output", str(tmp_path / "out")])


def test_checkpoints_that_are_replaced_while_they_are_read_are_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints, read_header = tmp_path / "checkpoints", file.read_header
    checkpoints.mkdir()
    old, rounds = write_cut(checkpoints, cut(2), num_rounds=1), iter([2, 3])

    def replaced_before(*arguments: Any) -> Header:
        nonlocal old
        if number := next(rounds, None):
            new = write_cut(checkpoints, cut(2), num_rounds=number)
            for path in old:
                path.unlink()
            old = new
        return read_header(*arguments)

    monkeypatch.setattr(file, "read_header", replaced_before)
    said = _run(capsys, "export", "--checkpoint", str(checkpoints), "--output", str(tmp_path / "out"))
    assert "out: round 3 of the run" in said


def test_a_stage_without_a_checkpoint_is_said(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    write_cut(checkpoints, cut(3), num_rounds=1)
    next(checkpoints.glob("stage-1-*")).unlink()
    with pytest.raises(IntegrityError, match="has no sound checkpoints with all of the model"):
        model.main(["export", "--checkpoint", str(checkpoints), "--output", str(tmp_path / "out")])


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (
            ["export", "--output", "out"],
            "give one of INVITE, --lan, --initial-peers ADDRESS, --checkpoint DIR and --model DIR",
        ),
        (
            ["export", "--output", "out", "--model", "run", "--checkpoint", "c"],
            "not both --checkpoint DIR and --model DIR",
        ),
        (["export", "--output", "out", "--model", "run", "--round", "3"], "--round needs INVITE or --checkpoint"),
        (["export", "--output", "out", "--model", "run", "--adapter"], "need INVITE or --checkpoint DIR"),
        (["export", "--output", "out", "--checkpoint", "c", "--adapter", "--merged"], "--adapter excludes"),
        (["export", "--output", "out", "--model", "run", "--insecure"], "--insecure belong to a running swarm"),
        (["melt"], "give one of import, export, route, show, push"),
    ],
)
def test_bad_command_lines_are_one_line(arguments: list[str], fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = model.main(arguments)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    assert code == 2
    said = capsys.readouterr().err
    assert fault in said
    assert said.count("\n") == 1


def test_a_folder_to_which_no_checkpoint_was_written_yet_is_called_that(tmp_path: Path) -> None:
    begun = tmp_path / "checkpoints"
    (begun / "tokenizer").mkdir(parents=True)
    (begun / "tokenizer" / "tokenizer.json").write_text("{}")
    out = ("--output", str(tmp_path / "out"))
    for arguments in (["show", str(begun)], ["export", "--checkpoint", str(begun), *out]):
        with pytest.raises(IntegrityError, match="no checkpoint yet: a swarm-peer writes one every 10 rounds, or as"):
            model.main(arguments)
    for arguments in (["show", str(tmp_path / "no")], ["export", "--checkpoint", str(tmp_path / "no"), *out]):
        with pytest.raises(ValueError, match="no: there is no such folder"):
            model.main(arguments)


def test_a_round_that_is_not_there_is_said_with_those_that_are(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    for rounds in (1, 2):
        write_cut(checkpoints, cut(2), num_rounds=rounds)
    with pytest.raises(IntegrityError, match=r"of round 99 with all of the model; those there are of round 1, 2$"):
        model.main(["export", "--checkpoint", str(checkpoints), "--round", "99", "--output", str(tmp_path / "out")])


class _Hub:
    """Stands in for huggingface_hub's client; an account is `me`."""

    def __init__(self, asked: list[str], uploaded: set[str]) -> None:
        self._asked = asked
        self._uploaded = uploaded

    def create_repo(self, repo_id: str, **_: object) -> huggingface_hub.RepoUrl:
        whole = repo_id if "/" in repo_id else f"me/{repo_id}"
        return huggingface_hub.RepoUrl(f"https://huggingface.co/{whole}")

    def upload_folder(self, *, repo_id: str, folder_path: Path, allow_patterns: list[str] | None = None) -> None:
        self._asked.append(repo_id)
        files = {str(path.relative_to(folder_path)) for path in folder_path.rglob("*") if path.is_file()}
        self._uploaded |= {file for file in files if any(fnmatch(file, name) for name in allow_patterns or ["*"])}


def test_a_repository_without_an_account_is_one_of_the_token_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save("llama-2", tmp_path)
    (tmp_path / "checkpoint-500").mkdir()
    for name in ("checkpoint-500/model.safetensors", "notes[1].txt"):
        (tmp_path / name).write_text("mine")
    asked, uploaded = list[str](), set[str]()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: _Hub(asked, uploaded))
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
    assert "would go to https://huggingface.co/YOUR-ACCOUNT/mine" in _run(
        capsys, "push", str(tmp_path), "mine", "--dry-run"
    )
    assert _run(capsys, "push", str(tmp_path), "mine").endswith("https://huggingface.co/me/mine\n")
    assert _run(capsys, "push", str(tmp_path), "you/mine").endswith("https://huggingface.co/you/mine\n")
    assert asked == ["me/mine", "you/mine"]
    listed = _run(capsys, "push", str(tmp_path), "mine", "--dry-run").splitlines()[:-1]
    assert {line.split()[0] for line in listed} == uploaded
    assert "notes[1].txt" in uploaded
    for name in ("a/b/c", "a b"):
        with pytest.raises(ValueError, match=f"'{name}'"):
            model.main(["push", str(tmp_path), name, "--dry-run"])


def test_what_is_no_export_is_not_pushed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no exported model"):
        model.main(["push", str(tmp_path), "me/mine"])


def test_a_push_without_a_token_says_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save("llama-2", tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    assert "would go to https://huggingface.co/me/mine" in _run(capsys, "push", str(tmp_path), "me/mine", "--dry-run")
    with pytest.raises(ValueError, match="there is no token for the hub"):
        model.main(["push", str(tmp_path), "me/mine"])


SIZES = {"gpt2-124m": 124.4, "gpt2-355m": 354.8, "llama-124m": 123.5}
SIZES |= {"shakespeare": 10.8, "shakespeare-cpu": 0.8, "tinystories": 15.2}


@pytest.mark.parametrize(("preset", "millions"), SIZES.items())
def test_presets_have_as_many_parameters_as_they_are_called(preset: str, millions: float) -> None:
    shapes = parameter_shapes(configs.load_preset(preset).model)
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) / 1e6 == pytest.approx(millions, abs=0.1)
