"""Processes with too little memory. Wherever memory runs out, the process prints a line and ends, and the run goes
on."""

import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from peers.commands import command_line
from tests.support.swarm import RealSwarm, real_swarm, wait_until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(180),
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere RLIMIT_AS limits nothing"),
]

MIB = 1 << 20


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[RealSwarm]:
    """Activations that do not fit into what a process happens to have free."""
    changes = {
        "d_model = 32": "d_model = 128", "sequence_length = 32": "sequence_length = 512",
        "microbatch_size = 4": "microbatch_size = 8",
    }  # fmt: skip
    with real_swarm(tmp_path, changes=changes) as swarm:
        yield swarm


def _run(program: str, *arguments: str, limit_mib: int) -> subprocess.CompletedProcess[str]:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (limit_mib * MIB, limit_mib * MIB))

    return subprocess.run(
        command_line(program, arguments), capture_output=True, text=True, timeout=60, check=False, preexec_fn=limit
    )


@pytest.mark.parametrize(
    ("program", "arguments", "limit_mib"),
    [
        ("peer", ["--preset", "tiny"], 300),
        ("trainer", ["--steps", "1", "--initial-peers", "/ip4/127.0.0.1/tcp/1/p2p/Qm"], 950),
    ],
)
def test_no_memory_for_the_libraries_is_one_line(program: str, arguments: list[str], limit_mib: int) -> None:
    result = _run(program, *arguments, limit_mib=limit_mib)
    assert result.returncode == 1
    assert result.stderr == (
        f"swarm-{program}: error: out of memory: no room for 1000.0 MiB; this process may have {limit_mib}.0 MiB of "
        "addresses (ulimit -v, prlimit --as): allow it more\n"
    )


def test_no_memory_for_the_stage_ends_with_a_line(swarm: RealSwarm) -> None:
    text = swarm.config.read_text(encoding="utf-8").replace("d_model = 128", "d_model = 8192")
    swarm.config.write_text(text, encoding="utf-8")
    result = _run("peer", "--config", str(swarm.config), "--threads", "1", "--device", "cpu", limit_mib=1200)
    assert result.returncode == 2
    error = result.stderr.splitlines()[-1]
    assert "stage 0 takes 48.1 GiB or more" in error
    assert "take a run with more stages, or another --device" in error


# Where memory ends inside gRPC or another library's own code, the process may abort before anybody can say why.
@pytest.mark.slow
def test_a_peer_whose_memory_runs_out_leaves_with_a_line_and_the_run_goes_on(swarm: RealSwarm) -> None:
    swarm.start_peers([0])
    _, poor, _ = swarm.start_peers([1, 1, 0])
    # From now on the process may not have more memory than when it begins to serve.
    pages = int(Path(f"/proc/{poor.child.pid}/statm").read_text().split()[0])
    limit = pages * resource.getpagesize()
    resource.prlimit(poor.child.pid, resource.RLIMIT_AS, (limit, limit))
    trainer = swarm.start_trainer("trainer", steps=2)
    codes = {}

    def has_ended() -> bool:
        codes.update({exit_.name: exit_.returncode for exit_ in swarm.children.exits()})
        return poor.child.name in codes

    wait_until(has_ended, 90.0, f"the peer without memory to leave; see {poor.child.log}")
    log = poor.child.log.read_text(encoding="utf-8")
    assert codes[poor.child.name] == 1, log
    assert "Traceback" not in log
    assert "internal error" not in log
    last = log.splitlines()[-1]
    # Memory runs out at a microbatch, or at a step.
    assert last.startswith(("swarm-peer: error: stage 1 ran out of memory", "swarm-peer: error: out of memory")), log
    if trainer.name not in codes:
        assert swarm.wait_for_end(trainer) == 0
    assert len(swarm.steps("trainer")) == 2
