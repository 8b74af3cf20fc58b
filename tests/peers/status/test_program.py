"""swarm-status through a peer: what it shows, what it refuses, and what it does without."""

import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from peers.shared import stopping
from peers.shared.process import EXIT_FAILURE, EXIT_USAGE
from peers.status import program as status
from peers.status.view import SwarmView
from swarm import config as configs
from swarm.credentials.identity import generate
from swarm.dht import keys
from swarm.dht.directory import Directory
from swarm.dht.lookup import DirectoryServicer
from swarm.errors import PeerUnavailable
from swarm.events import OutOfLine
from swarm.machine.clock import SystemClock
from swarm.rpc import tls
from swarm.rpc.entry import Entry
from swarm.rpc.serving import SERVER_OPTIONS, bind_server
from swarm.rpc.v1.directory_pb2_grpc import add_DirectoryServiceServicer_to_server
from swarm.types import PeerRecord, PeerState, RunRecord, TrainerRecord
from tests.audit.honest import HonestRun, edit
from tests.support.memory_store import MemoryStore

CONFIG = configs.load_preset("tiny")
HEAVY = ("torch", "hivemind", "numpy", "scipy", "matplotlib")
PROGRAM = f"""
import sys
from peers.status import program as status
status.main(sys.argv[1:])
print([name for name in {HEAVY} if name in sys.modules])
"""


@pytest.fixture
async def entry() -> AsyncIterator[Entry]:
    """A peer that announces itself and a trainer, and gives out both records; it serves nothing else."""
    own, clock = generate(), SystemClock()
    dht = MemoryStore(clock)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    run_keys = keys.of_run(CONFIG.run_id, CONFIG.blocks)
    add_DirectoryServiceServicer_to_server(DirectoryServicer(store=dht, keys=run_keys, clock=clock), server)
    port = bind_server(server, "127.0.0.1", 0, tls.server_credentials(own))
    await server.start()
    directory = Directory(dht, own, CONFIG.run_id, clock)
    await directory.announce(RunRecord(peer_id=own.peer_id, config_json=configs.to_json(CONFIG)), 100.0)
    peer = PeerRecord(
        peer_id=own.peer_id, name="first", announced_at=clock.time(), stage=0, endpoint=f"127.0.0.1:{port}",
        certificate_pem=own.certificate_pem, state=PeerState.SERVING, round=7,
    )  # fmt: skip
    await directory.announce(peer, 100.0)
    trainer = TrainerRecord(peer_id=own.peer_id, name="reader", announced_at=clock.time(), step=5)
    await directory.announce(trainer, 100.0)
    yield Entry(own.peer_id, peer.endpoint)
    await server.stop(None)


async def test_it_imports_neither_torch_nor_hivemind(entry: Entry) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, "--peer", str(entry), "--json", stdout=asyncio.subprocess.PIPE
    )
    stdout, _ = await process.communicate()
    shown, imported = stdout.decode().splitlines()
    assert imported == "[]"
    view: dict[str, Any] = json.loads(shown)
    assert view["run"] == CONFIG.run_id
    assert [len(row["peers"]) for row in view["stages"]] == [1, *[0] * (CONFIG.stages.num_stages - 1)]
    peer = view["stages"][0]["peers"][0]
    assert (peer["name"], peer["state"], peer["round"]) == ("first", "unreachable", 7)
    assert [(trainer["name"], trainer["step"]) for trainer in view["trainers"]] == [("reader", 5)]


async def test_watching_goes_on_after_a_look_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    seen, fault = SwarmView(run="x"), PeerUnavailable("nobody answers")
    outcomes: list[SwarmView | PeerUnavailable] = [seen, fault, fault, seen, seen, fault, seen]
    shown: list[Sequence[SwarmView]] = []
    is_done = asyncio.Event()

    async def view() -> list[SwarmView]:
        if not outcomes:
            is_done.set()
            await asyncio.Event().wait()
        if isinstance(outcome := outcomes.pop(0), PeerUnavailable):
            raise outcome
        return [outcome]

    watching = asyncio.create_task(status.watch(view, shown.append, 0.0))
    await asyncio.wait([watching, asyncio.create_task(is_done.wait())], return_when=asyncio.FIRST_COMPLETED)
    assert not watching.done()
    watching.cancel()
    assert shown == [[seen]] * 4
    assert caplog.messages == ["the swarm cannot be seen, looking again: nobody answers"] * 2


def test_a_refuted_run_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = HonestRun(tmp_path)
    run.round(0)
    edit(tmp_path / "peer-1b.jsonl", lambda lines: [line for line in lines if line.get("microbatch") != 3])
    arguments = ["--json", "--audit", *map(str, run.files)]
    assert status.main(arguments) == 1
    (line,) = capsys.readouterr().out.splitlines()
    report = json.loads(line)
    assert report["missing"] == 1
    assert not report["proven"]
    assert report["violations"]
    names = {"duplicates", "missing", "replayed", "rolled_back", "lost_share", "rounds_committed", "rounds_aborted"}
    assert names | {"digests_compared", "digests_differing"} <= report.keys()
    assert status.main(["--audit", *map(str, run.files)]) == 1
    out = capsys.readouterr().out
    assert "stage 1, round 0, microbatch 3: missing in a committed round" in out


def test_who_is_named_in_event_logs_is_shown_and_refutes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = HonestRun(tmp_path)
    run.round(0)
    for peer in ("peer-0a", "peer-0b"):
        for is_named in (False, True):
            run.write(peer, OutOfLine(round=1, peer="liar", reason=f"{peer} found [that]", is_named=is_named))
    run.write("peer-1a", OutOfLine(round=1, peer="honest", reason="odd text", is_named=False))
    assert status.main(["--audit", *map(str, run.files)]) == 0
    named = "liar is named as a liar in peer-0a.jsonl, peer-0b.jsonl: stage 0, round 1: peer-0b found [that]"
    assert named in capsys.readouterr().out.splitlines()
    status.main(["--json", "--audit", *map(str, run.files)])
    assert list(json.loads(capsys.readouterr().out)["liars"]) == ["liar"]


def test_a_missing_trainers_file_is_no_proof(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = HonestRun(tmp_path, "diloco")
    run.round(0)
    files = [str(path) for path in run.files if path.name != "trainer.jsonl"]
    assert status.main(["--audit", *files]) == EXIT_FAILURE
    assert capsys.readouterr().out.splitlines()[-1] == "refuted: 1 violation"


def test_what_is_no_event_log_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.jsonl").write_text("what?\n")
    arguments = ["--audit", str(tmp_path / "x.jsonl")]
    assert stopping.run_program("swarm-status", lambda: status.main(arguments)) == EXIT_USAGE
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert stopping.run_program("swarm-status", lambda: status.main(["--audit", str(tmp_path / "none")])) == 1
    assert "none: No such file or directory" in capsys.readouterr().err
