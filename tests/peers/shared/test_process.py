"""A process's environment and memory, and death with the parent."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from peers.shared import process
from peers.shared.process import cache_folder
from tests.support.processes import wait_until_gone


def test_environment_keeps_what_the_user_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPC_VERBOSITY", "DEBUG")
    monkeypatch.delenv("GRPC_ENABLE_FORK_SUPPORT", raising=False)
    process.prepare_environment()
    assert os.environ["GRPC_VERBOSITY"] == "DEBUG"
    assert os.environ["GRPC_ENABLE_FORK_SUPPORT"] == "0"


def test_as_many_files_may_be_open_as_the_system_allows() -> None:
    program = (
        "import resource\nfrom peers.shared import process\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 900))\nprocess.allow_open_files()\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))\nprocess.allow_open_files()\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split("\n")[:2] == ["(900, 900)", "(100, 100)"]


_FAULTS_OF_THIRD_TURN = """
import resource, threading
from peers.shared import process

process.keep_freed_memory()

def turn():
    # Like a microbatch's gradients and a round's vector of them: there at the same time, then all freed.
    kept = [bytearray(size) for size in [8_000_000] * 16 + [128_000_000]]

def turns():
    global faults
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        turn()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

thread = threading.Thread(target=turns)
thread.start()
thread.join()
print(faults)
"""


def test_what_a_microbatch_leaves_is_there_for_the_next_one_unless_the_user_says_otherwise() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}

    def faults(settings: dict[str, str]) -> int:
        command = [sys.executable, "-c", _FAULTS_OF_THIRD_TURN]
        return int(subprocess.run(command, env=environment | settings, capture_output=True, check=True).stdout)

    num_pages = 2 * 16 * 8_000_000 // 4096
    assert faults({}) < num_pages / 10
    assert faults({"MALLOC_TRIM_THRESHOLD_": "131072"}) > num_pages / 2


def test_child_dies_with_its_parent() -> None:
    program = (
        "import subprocess; from peers.shared.process import die_with_parent\n"
        "child = subprocess.Popen(['sleep', '60'], preexec_fn=die_with_parent(), start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
        "input()"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    wait_until_gone(child)


# -- the user's folders and keys ---------------------------------------------------------------------------------------


def test_keys_and_texts_are_kept_where_the_user_says_or_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/swarm")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/home/y")
    assert cache_folder() == Path("/home/y/.cache/swarm")


def test_without_a_home_the_user_has_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # As where HOME is not set and the user has no entry.
    with pytest.raises(ValueError, match="there is no home directory: say in XDG_CACHE_HOME"):
        cache_folder()
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/swarm")


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*process.KEYS, "LD_PRELOAD"):
        # The key is set first, so that it is undone at the end, whatever is set meanwhile.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    "line",
    [
        "HF_TOKEN=hf_abc=",
        "export HF_TOKEN = hf_abc=  # mine",
        'HF_TOKEN="hf_abc="',
        "  HF_TOKEN='hf_abc=' # mine",
        "# keys\n\nLD_PRELOAD=evil.so\nHF_TOKEN=hf_abc=\nnonsense",
    ],
)
def test_a_key_is_read_and_nothing_else(line: str, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text(line + "\nWANDB_API_KEY=0123#4\n")
    process.read_dotenv(tmp_path / ".env")
    assert os.environ["HF_TOKEN"] == "hf_abc="
    assert os.environ["WANDB_API_KEY"] == "0123#4"
    assert "LD_PRELOAD" not in os.environ


def test_the_environment_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "own")
    (tmp_path / ".env").write_text("HF_TOKEN=other\n")
    process.read_dotenv(tmp_path / ".env")
    assert os.environ["HF_TOKEN"] == "own"


def test_no_file_is_no_fault(tmp_path: Path) -> None:
    process.read_dotenv(tmp_path / ".env")
    process.read_dotenv(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    process.read_dotenv(tmp_path / "pipe")
    assert "HF_TOKEN" not in os.environ


@pytest.mark.parametrize("value", ["", "# none", '"secret', "se cret", '""', "gehe\u00efm"])
def test_a_bad_value_is_one_line_that_does_not_tell_it(value: str, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text(f"A=1\nHF_TOKEN={value}\n")
    with pytest.raises(ValueError, match=r"\.env, line 2: HF_TOKEN has no key") as caught:
        process.read_dotenv(tmp_path / ".env")
    assert "cret" not in str(caught.value)
    assert "HF_TOKEN" not in os.environ


def test_a_file_that_is_no_text_is_one_line(tmp_path: Path) -> None:
    (tmp_path / ".env").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="it is not UTF-8 text"):
        process.read_dotenv(tmp_path / ".env")
