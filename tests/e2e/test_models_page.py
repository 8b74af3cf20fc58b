"""docs/models.md and SKILL.md are stories that can be told: their commands are run as they stand, one after the other.

A block of code runs if the line before it is `<!-- run -->`. Of bash, each command is a process: a swarm-peer goes on
until the end, any other command has to succeed. ADDRESS is the first peer's. The model is a small one that the test
makes under the name that the page uses, and nothing is downloaded.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from peers.commands import command_line
from peers.local.supervisor import Child, Supervisor
from tests.support.swarm import wait_until, write_text
from tests.support.tokenizers import write_chat_tokenizer

ROOT = Path(__file__).parents[2]
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

    def __init__(self, folder: Path, children: Supervisor) -> None:
        self._folder = folder
        self._children = children
        self._peers: list[Child] = []
        self._environment = {
            "HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        }  # fmt: skip

    def bash(self, block: str) -> None:
        """Run a block's commands; peers stay."""
        for line in block.replace("\\\n", " ").splitlines():
            if not line.strip() or line.startswith("#"):
                continue
            line = line.replace("INVITE", self._invite) if "INVITE" in line else line
            program, *words = shlex.split(line.replace("~/", f"{self._folder}/"))
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


@pytest.fixture
def story(tmp_path: Path) -> Iterator[Story]:
    _write_model(tmp_path / "SmolLM2-135M")
    (tmp_path / "books").mkdir()
    write_text(tmp_path / "books" / "text.txt")
    with Supervisor(tmp_path / "logs") as children:
        yield Story(tmp_path, children)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("page", ["docs/models.md", "SKILL.md"])
def test_the_page_can_be_followed(page: str, story: Story) -> None:
    blocks = _BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    assert len(blocks) >= 4
    for language, block in blocks:
        if language == "python":
            story.run([sys.executable, "-c", block])
        else:
            story.bash(block)
