"""A model of Hugging Face becomes a run, is trained by real processes, and is exported again."""

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from peers.model import program
from swarm import config as configs
from swarm.config import AveragingConfig, DataConfig, OptimizerConfig, RoundsConfig
from swarm.data import corpora, tokenizers
from swarm.data.microbatches import Microbatches
from swarm.interchange.run_folder import to_toml
from swarm.training.samples import DOCUMENTS, TARGETS, TOKENS
from tests.interchange.small_models import save
from tests.support.swarm import RealSwarm, real_swarm, run, wait_until, write_text
from tests.support.tokenizers import write_chat_tokenizer, write_tokenizer

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(180),
    # peft asks transformers by this name.
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

EVALUATED = 16


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[RealSwarm]:
    with real_swarm(tmp_path) as swarm:
        yield swarm


def _import(folder: Path, num_stages: int, *, words: bool = False, learning_rate: float = 1e-3) -> None:
    """Import a model to train it on a text, with a tokenizer of `words` or on bytes."""
    save("llama-3", folder / "model")
    text = write_text(folder / "text.txt")
    if words:
        common = Counter(re.findall(r"\w+|[^\w\s]+", text.read_text())).most_common(200)
        write_tokenizer(folder / "model" / "tokenizer.json", [word for word, _ in common])
    _make_run(folder, num_stages, "--dataset", str(text), learning_rate=learning_rate)


def _import_to_chat(folder: Path, num_stages: int) -> None:
    """Import a model that has a chat template, to train it on conversations."""
    save("llama-3", folder / "model")
    write_chat_tokenizer(folder / "model")
    rows = [{"messages": _conversation(number)} for number in range(300)]
    dataset = folder / "talks.jsonl"
    dataset.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    _make_run(folder, num_stages, "--dataset", str(dataset), "--format", "chat", sequence_length=48)


def _conversation(number: int) -> list[dict[str, str]]:
    said = {"user": f"{number} bees?", "assistant": "Buzz " * (number % 3 + 1)}
    return [{"role": role, "content": text} for role, text in said.items()]


def _make_run(
    folder: Path, num_stages: int, *dataset: str, sequence_length: int = 32, learning_rate: float = 1e-3
) -> None:
    """Import the model, and say in run.toml how it is to be trained, as a user would."""
    options = ("--stages", str(num_stages), *dataset)
    assert program.main(["import", str(folder / "model"), "--output", str(folder / "run"), *options]) == 0
    config = configs.load(folder / "run" / "run.toml")
    data = dataclasses.replace(config.data, sequence_length=sequence_length, microbatch_size=4, held_out_fraction=0.1)
    config = dataclasses.replace(
        config, data=data, rounds=RoundsConfig(setting="synchronous", round_samples=16),
        optimizer=OptimizerConfig(learning_rate=learning_rate), averaging=AveragingConfig(codec="fp32"),
    )  # fmt: skip
    (folder / "run" / "run.toml").write_text(to_toml(config), encoding="utf-8")


def _loss_in_transformers(folder: Path, data: DataConfig, cache: Path) -> float:
    return _loss_of(AutoModelForCausalLM.from_pretrained(folder), data, cache)


@torch.no_grad()
def _loss_of(model: torch.nn.Module, data: DataConfig, cache: Path) -> float:
    """The mean loss over the targets of the samples that a trainer evaluates. Each of their documents is computed
    alone."""
    model.eval()
    losses = []
    for batch in Microbatches(corpora.prepare(data, cache_dir=cache), data).held_out(EVALUATED):
        for row, tokens in enumerate(batch[TOKENS].long()):
            targets = batch[TARGETS][row] if TARGETS in batch else torch.ones_like(tokens)
            documents = batch[DOCUMENTS][row] if DOCUMENTS in batch else torch.zeros_like(tokens)
            for number in range(int(documents.max()) + 1):
                own = documents == number
                if len(tokens[own]) > 1:
                    logits = model(tokens[own][None, :-1]).logits[0]
                    each = torch.nn.functional.cross_entropy(logits, tokens[own][1:], reduction="none")
                    losses.append(each[targets[own][1:] == 1])
    return float(torch.cat(losses).mean())


def _other_machine(folder: Path, name: str) -> dict[str, str]:
    """The environment of a process that has nothing in its cache."""
    return {"XDG_CACHE_HOME": str(folder / "caches" / name)}


def _train(swarm: RealSwarm, num_stages: int, steps: int, *options: str) -> None:
    """Train with a first peer that has the model, and these options, and others that have nothing, as if they were on
    other machines."""
    folder = swarm.folder
    swarm.model = folder / "run"
    checkpoints = ("--checkpoint", str(folder / "checkpoints"), "--checkpoint-every", "1")
    swarm.start_peers([0], *checkpoints, *options)
    bare = _other_machine(folder, "peers")
    swarm.start_peers(range(1, num_stages), *checkpoints, environment=bare)
    trainer = swarm.start_trainer("train", steps=steps, environment=_other_machine(folder, "trainer"))
    assert swarm.wait_for_end(trainer) == 0
    losses = [row["train/loss"] for row in swarm.steps("train")]
    assert losses[-1] < losses[0] - 0.3


def _wait_for_checkpoints(folder: Path, round_number: int, num_stages: int) -> None:
    """Wait until all stages have written a round's checkpoints, which they do while training goes on."""
    pattern = f"stage-*.round-{round_number}.safetensors"
    wait_until(lambda: len([*folder.glob(pattern)]) == num_stages, 30.0, "the last round's checkpoints")


def _export(swarm: RealSwarm, num_stages: int, steps: int) -> Path:
    """Export the model from the checkpoints of the last round; gives the folder."""
    output = swarm.folder / "out"
    checkpoints = swarm.folder / "checkpoints"
    _wait_for_checkpoints(checkpoints, steps, num_stages)
    options = ("--output", str(output), "--round", str(steps), "--metrics", str(swarm.folder / "train"))
    assert program.main(["export", "--checkpoint", str(checkpoints), *options]) == 0
    data = configs.load(swarm.folder / "run" / "run.toml").data
    expected = json.loads((swarm.folder / "train" / "summary.json").read_text())["validation_loss"]
    assert _loss_in_transformers(output, data, swarm.folder / "cache") == pytest.approx(expected, abs=1e-4)
    card = (output / "README.md").read_text()
    assert f"| Round | {steps} |" in card
    assert f"| Tokens seen | {steps * 16 * data.sequence_length:,} |" in card
    assert f"| Loss, held-out, at round {steps} | {expected:.4f} nats a token |" in card
    return output


def test_a_model_comes_in_is_trained_and_goes_out(swarm: RealSwarm) -> None:
    """Peers without the model get their stage's weights from a peer that has it, and all peers get the tokenizer from
    each other."""
    _import(swarm.folder, 2, words=True)
    _train(swarm, 2, 6)
    out = _export(swarm, 2, 6)
    words = "import json"
    expected = tokenizers.load(str(swarm.folder / "model")).encode(words).tolist()
    assert AutoTokenizer.from_pretrained(out)(words)["input_ids"] == expected
    assert 0 not in expected
    # An export from the swarm itself has the same bits, also on a machine that has nothing.
    live = swarm.folder / "live"
    where = ("--initial-peers", swarm.address, "--metrics", str(swarm.folder / "train"))
    result = run("model", "export", *where, "--output", str(live), environment=_other_machine(swarm.folder, "export"))
    assert result.returncode == 0, result.stderr
    assert (live / "README.md").read_text() == (out / "README.md").read_text()
    assert {path.name: path.read_bytes() for path in live.iterdir()} == {
        path.name: path.read_bytes() for path in out.iterdir()
    }


@pytest.mark.slow
def test_likewise_with_conversations(swarm: RealSwarm) -> None:
    """Only what the assistant says is learnt, and evaluated."""
    _import_to_chat(swarm.folder, 2)
    _train(swarm, 2, 6)
    _export(swarm, 2, 6)
    before, after = (AutoTokenizer.from_pretrained(swarm.folder / name) for name in ("model", "out"))
    talk = _conversation(1)
    assert after.apply_chat_template(talk, tokenize=False) == before.apply_chat_template(talk, tokenize=False)


def test_adapters_learn_beside_a_model_and_go_home(swarm: RealSwarm) -> None:
    """Peers that have no copy of the model are given its frozen weights by those that have."""
    num_stages, steps = 2, 6
    _import(swarm.folder, num_stages, learning_rate=1e-2)
    _train(swarm, num_stages, steps, "--lora-rank", "8", "--lora-alpha", "32")
    folder = swarm.folder
    expected = json.loads((folder / "train" / "summary.json").read_text())["validation_loss"]
    data = configs.load(folder / "run" / "run.toml").data
    _wait_for_checkpoints(folder / "checkpoints", steps, num_stages)
    export = ("export", "--checkpoint", str(folder / "checkpoints"), "--round", str(steps))
    assert program.main([*export, "--adapter", "--output", str(folder / "adapter")]) == 0
    assert program.main([*export, "--base", str(folder / "run"), "--output", str(folder / "out")]) == 0
    assert _loss_in_transformers(folder / "out", data, folder / "cache") == pytest.approx(expected, abs=1e-4)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder / "model"), folder / "adapter")
    assert _loss_of(model, data, folder / "cache") == pytest.approx(expected, abs=1e-4)
    assert expected < _loss_in_transformers(folder / "model", data, folder / "cache") - 0.3
