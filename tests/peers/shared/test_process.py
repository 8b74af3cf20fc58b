"""A process's environment and memory, and death with the parent."""

import os
import subprocess
import sys

import pytest

from peers.shared import process
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
