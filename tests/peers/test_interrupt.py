"""Ctrl-C and SIGTERM at any moment: while a program starts, prepares its text, or joins; and readers that go away."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.swarm import CONFIG, wait_until, write_text

SLOW_TOKENIZER = """
import signal, sys, time
# A program that starts tests in the background may have them ignore SIGINT.
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
import asyncio, contextlib, dataclasses
from pathlib import Path
from swarm import config as configs
from swarm.dht import node

class Node:
    port = 1

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

@contextlib.asynccontextmanager
async def as_client(*arguments):
    joined = Node()
    try:
        yield joined
    finally:
        joined.shutdown()

node.start, node.as_client = lambda **arguments: Node(), as_client
"""
TRAINER = f"""{NODE}
from peers.shared import entrance

entrance.agree_on_config = agree_on_config
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


@pytest.mark.parametrize(
    ("program", "arguments", "said", "number"),
    [
        (PEER, ["--config", "run.toml"], "", signal.SIGINT),
        pytest.param(TRAINER, ["--initial-peers", "x"], "node ends\n", signal.SIGTERM, marks=pytest.mark.slow),
    ],
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
    assert process.returncode == 128 + number
    assert errors.endswith(f": {'interrupted' if number == signal.SIGINT else 'terminated'}\n")
    assert len(errors.splitlines()) == 1
    assert output == said
    # The lock stays, because another process may wait for it.
    assert [path.suffix for path in corpora.iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("number", "exit_code", "said"),
    [(signal.SIGINT, 130, "node ends\n"), pytest.param(signal.SIGTERM, -signal.SIGTERM, "", marks=pytest.mark.slow)],
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


PROGRAMS = ["peer", "trainer", "status", "keys", "local", "doctor", "dashboard", "generate", "model"]
INTERRUPTED_AT = """
import os, signal, sys
# A program that starts tests in the background may have them ignore SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)

class Interrupt:
    def find_spec(name, path, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt)
from peers import commands
sys.argv = ["swarm-x", *{arguments!r}]
commands.{program}()
"""


def _interrupt_at_import(program: str, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = INTERRUPTED_AT.format(program=program, module=module, arguments=arguments)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("program", ["peer", "keys", "model"])
def test_ctrl_c_in_a_program_s_first_imports_ends_it_without_a_word(program: str) -> None:
    """A KeyboardInterrupt there would be a traceback."""
    ended = _interrupt_at_import(program, "peers.shared.cli")
    assert (ended.returncode, ended.stderr, ended.stdout) == (130, "", "")


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_ctrl_c_at_any_moment_of_a_start_is_one_line_at_most(program: str, tmp_path: Path) -> None:
    script = "import signal; signal.signal(2, signal.default_int_handler); print(flush=True)\n"
    script += f"from peers import commands; commands.{program}()"
    for tenths in range(1, 30, 2):
        process = subprocess.Popen(
            [sys.executable, "-c", script, f"swarm://1x{tenths}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, cwd=tmp_path,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(tenths / 10)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=20)
        finally:
            process.kill()
        assert "Traceback" not in errors, tenths
        assert len(errors.splitlines()) <= 1, tenths
        if process.returncode not in (1, 2):  # It had found out by then that there is no such run.
            assert process.returncode == 130, tenths


def _ends_unread(script: str, first: str) -> bool:
    """Whether a script ends as it should if nothing reads its output beyond how it begins."""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(len(first)) == first.encode()
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == b""
    return process.returncode == 128 + signal.SIGPIPE


def test_a_reader_that_goes_away_ends_a_program_without_a_word(tmp_path: Path) -> None:
    """The same holds for a program that prints from a task, so that its error is in an ExceptionGroup."""
    script = """
import asyncio, sys
from peers.shared import stopping
from peers.status.live_table import Screen

async def watch():
    screen = Screen()
    while True:
        screen.print("a look " * 10)
        await asyncio.sleep(0)

async def main():
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(watch())

sys.exit(stopping.run_program("swarm-x", lambda: asyncio.run(main())))
"""
    assert _ends_unread(script, "a look")
