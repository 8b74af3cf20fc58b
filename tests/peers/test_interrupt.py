"""Ctrl-C and SIGTERM while a program prepares its text, or a peer joins: both take for ever here."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.swarm import CONFIG, wait_until, write_text

SLOW_TOKENIZER = """
import signal, sys, time
# What starts tests in the background may have them ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
from peers import commands
from swarm.data.tokenizers import ByteTokenizer

def encode(self, text):
    for _ in range(3000):
        time.sleep(0.01)

ByteTokenizer.encode = encode
"""
PEER = "commands.peer()"
NODE = """
import asyncio, dataclasses
from pathlib import Path
from swarm import config as configs
from swarm.dht import node

class Node:
    def addresses(self):
        return ["/ip4/127.0.0.1/tcp/1/p2p/x"]

    async def store(self, *arguments, **options):
        return True

    def shutdown(self):
        print("node ends", flush=True)

async def agree_on_config(*arguments, **options):
    config = configs.load(Path("run.toml"))
    data = dataclasses.replace(config.data, digest="some other text's", tokenizer_identity=ByteTokenizer.identity)
    return dataclasses.replace(config, data=data)

node.start = lambda **arguments: Node()
"""
TRAINER = f"""{NODE}
from peers.shared import reader

reader.agree_on_config = agree_on_config
commands.trainer()
"""
JOINING_PEER = f"""{NODE}
from peers.shared.network import KnownPeers
from peers.stage_peer import program as stage_peer

async def look_first(*arguments, **options):
    print("looks", flush=True)
    await asyncio.Event().wait()

stage_peer.agree_on_config = agree_on_config
KnownPeers.look_first = look_first
commands.peer()
"""


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    dataset = write_text(tmp_path / "text.txt")
    (tmp_path / "run.toml").write_text(CONFIG.format(dataset=dataset, setting="diloco"), encoding="utf-8")

    def start(program: str, *arguments: str) -> subprocess.Popen[str]:
        root = str(Path(__file__).parents[2])
        return subprocess.Popen(
            [sys.executable, "-c", SLOW_TOKENIZER + program, *arguments],
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": root}, cwd=tmp_path,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    return start


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("program", "arguments", "said"),
    [(PEER, ["--config", "run.toml"], ""), (TRAINER, ["--initial-peers", "x"], "node ends\n")],
    ids=["peer", "trainer"],
)
def test_it_ends_at_once_and_leaves_nothing(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path, program: str, arguments: list[str], said: str,
    number: signal.Signals,
) -> None:  # fmt: skip
    process = start(program, *arguments)
    corpora = tmp_path / "cache" / "swarm" / "corpora"
    try:
        wait_until(lambda: list(corpora.glob(".preparing-*/*.tokens")), 60, "the text to be prepared")
        process.send_signal(number)
        output, errors = process.communicate(timeout=10)
    finally:
        process.kill()
    assert process.returncode == 130
    assert errors.endswith(": interrupted\n")
    assert len(errors.splitlines()) == 1
    assert output == said
    assert not list(corpora.iterdir())


@pytest.mark.parametrize(
    ("number", "exit_code", "said"),
    [(signal.SIGINT, 130, "node ends\n"), (signal.SIGTERM, -signal.SIGTERM, "")],
)
def test_a_peer_that_looks_for_others_ends_at_once(
    start: Callable[..., subprocess.Popen[str]], number: signal.Signals, exit_code: int, said: str
) -> None:
    process = start(JOINING_PEER, "--initial-peers", "x")
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "looks\n"
        process.send_signal(number)
        output, errors = process.communicate(timeout=10)
    finally:
        process.kill()
    assert (process.returncode, output) == (exit_code, said)
    assert len(errors.splitlines()) <= 1
