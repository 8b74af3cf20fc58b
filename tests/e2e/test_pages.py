"""README.md, docs/models.md and SKILL.md are stories that can be told: their commands are run as they stand, one after
the other.

A block of code runs if the line before it is `<!-- run -->`. Of bash, each command is a process: a swarm-peer goes on
until the end, any other command has to succeed. INVITE is the first peer's. The model is a small one that the test
makes under the name that the page uses. README.md's comes from a hub on loopback, into an empty cache.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from peers.commands import command_line
from peers.local.supervisor import Child, Supervisor
from tests.support.hub_server import hub_of
from tests.support.swarm import wait_until, write_text
from tests.support.tokenizers import write_chat_tokenizer

ROOT = Path(__file__).parents[2]
NAME = "HuggingFaceTB/SmolLM2-135M"
_BLOCK = re.compile(r"^<!-- run -->\n```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_INVITE = re.compile(r"join:   swarm-peer (swarm://\S+)")


def _write_model(folder: Path) -> None:
    """A Llama for bytes and the tokens of a chat, which learns a little within 10 steps."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=258, max_position_embeddings=32, bos_token_id=None, eos_token_id=None, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    write_chat_tokenizer(folder)


class Story:
    """The reader's terminal, and the swarm behind it."""

    def __init__(self, folder: Path, children: Supervisor, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._children = children
        self._peers: list[Child] = []
        own = {"HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
        self._environment = own | dict(environment)

    def bash(self, block: str) -> None:
        """Run a block's commands; peers stay."""
        for line in block.replace("\\\n", " ").splitlines():
            if not line.strip() or line.startswith("#"):
                continue
            line = line.replace("INVITE", self._invite) if "INVITE" in line else line
            program, *words = shlex.split(line.replace("~/", f"{self._folder}/"), comments=True)
            command = command_line(program.removeprefix("swarm-"), words)
            if program == "swarm-peer":
                self._serve(command)
            else:
                self.run(command)

    def run(self, command: list[str]) -> None:
        """Run a command to its end."""
        result = subprocess.run(
            command, cwd=self._folder, env={**os.environ, **self._environment}, capture_output=True, text=True,
            timeout=200, check=False,
        )  # fmt: skip
        assert result.returncode == 0, f"{command}\n{result.stderr}"

    def _serve(self, command: list[str]) -> None:
        name = f"peer-{len(self._peers)}"
        in_folder = ["env", "-C", str(self._folder), *command]
        peer = self._children.start(name, in_folder, environment=self._environment)
        self._peers.append(peer)
        wait_until(lambda: _INVITE.search(peer.log.read_text()), 60.0, f"{name} to serve; see {peer.log}")

    @property
    def _invite(self) -> str:
        found = _INVITE.search(self._peers[0].log.read_text())
        assert found is not None
        return found[1]


@contextmanager
def told(folder: Path, **environment: str) -> Iterator[Story]:
    """The reader has some books."""
    (folder / "books").mkdir()
    write_text(folder / "books" / "text.txt")
    with Supervisor(folder / "logs") as children:
        yield Story(folder, children, environment)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("page", ["docs/models.md", "SKILL.md"])
def test_the_page_can_be_followed(page: str, tmp_path: Path) -> None:
    _write_model(tmp_path / "SmolLM2-135M")
    blocks = _BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    assert len(blocks) >= 4
    with told(tmp_path, HF_HUB_OFFLINE="1") as story:
        for language, block in blocks:
            if language == "python":
                story.run([sys.executable, "-c", block])
            else:
                story.bash(block)


def _write_published(folder: Path) -> None:
    """SmolLM2-135M as the hub has it, with fewer and smaller layers, tokens and positions, and files nobody needs."""
    published = json.loads((ROOT / "tests/interchange/published.json").read_text())["found"][NAME]
    small = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 3, "vocab_size": 4915}
    config = published | small | {"num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": 64}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**config)).to(torch.bfloat16).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    write_chat_tokenizer(folder)
    (folder / "onnx").mkdir()
    for unneeded in ("README.md", "onnx/model.onnx", "pytorch_model.bin"):
        (folder / unneeded).write_text("nobody reads this")


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(500)
def test_the_first_example_works_as_written_from_an_empty_cache(tmp_path: Path) -> None:
    _write_published(tmp_path / "published")
    ((_, block),) = _BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert f"--model {NAME} " in block
    (home := tmp_path / "home").mkdir()
    with hub_of(NAME, tmp_path / "published") as hub, told(home, HF_ENDPOINT=hub.endpoint) as story:
        # A hundred steps would take long, and two show the same.
        story.bash(block.replace("--steps 100", "--steps 2"))
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= hub.downloaded
    assert not hub.downloaded & {"README.md", "onnx/model.onnx", "pytorch_model.bin"}
    tokens = AutoTokenizer.from_pretrained(home / "out")("It was", return_tensors="pt")
    assert AutoModelForCausalLM.from_pretrained(home / "out")(**tokens).logits.isfinite().all()
    assert json.loads((home / "swarm-output" / "summary.json").read_text())["final_loss"] > 0
