"""A process's environment and memory, and death with the parent."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from peers.shared import process
from tests.support.processes import wait_until_gone


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


@pytest.mark.parametrize("value", ["", "# none", '"secret', "se cret", '""', "gehe\u00efm"])
def test_a_bad_value_is_one_line_that_does_not_tell_it(value: str, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text(f"A=1\nHF_TOKEN={value}\n")
    with pytest.raises(ValueError, match=r"\.env, line 2: HF_TOKEN has no key") as caught:
        process.read_dotenv(tmp_path / ".env")
    assert "cret" not in str(caught.value)
    assert "HF_TOKEN" not in os.environ
