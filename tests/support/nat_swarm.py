"""A real swarm whose machines are network namespaces: each process runs on a host of a small internet."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from peers.commands import command_line
from peers.local.supervisor import Child, Supervisor
from scripts.benches.shared.internet import Host, missing
from tests.support.swarm import RealPeer, RealSwarm, wait_until, whole_lines

INTERNET = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(missing()), reason=missing() or "everything is there"),
]  # fmt: skip
"""Marks of tests with such a swarm, besides e2e: scripts/test looks for that word in their files."""


class NatSwarm(RealSwarm):
    """Peers and trainers on hosts of a small internet. They get the invite that the first peer prints, and but for the
    first one no option with an address."""

    start_seconds = end_seconds = 300.0

    def __init__(self, folder: Path, children: Supervisor, *, num_stages: int) -> None:
        changes = {"num_stages = 2": f"num_stages = {num_stages}"}
        super().__init__(folder, children, setting="synchronous", changes=changes)
        self.begin_at: str | None = None  # What a swarm-meet prints as its address, if the run is begun there
        self.first_options: list[str] = []  # Further options of the first peer
        self.options: list[str] = []  # Further options of each peer
        self.serves_seconds: list[float] = []  # How long each peer took until it served

    @property
    def invite(self) -> str:
        """The invite as the first peer prints it."""
        lines = whole_lines(self.peers[0].child.log)
        return next(line.split()[2] for line in lines if line.strip().startswith("join:"))

    def start_on(self, host: Host, name: str, program: str, *arguments: str) -> Child:
        return self.children.start(name, host.command(command_line(program, arguments)))

    def start_peer_on(self, host: Host, stage: int, *, found_by_lan: bool = False) -> RealPeer:
        """Start a peer, by its invite or without any in the local network, and wait until it serves."""
        name = f"peer-{len(self.peers) + 1}"
        ready = self.folder / f"{name}.json"
        where = ["--config", str(self.config)] if not self.peers else [] if found_by_lan else [self.invite]
        where += ["--lan"] if found_by_lan else []
        if not self.peers:
            where += [*(["--meet", self.begin_at] if self.begin_at is not None else []), *self.first_options]
        own = [*self.options, "--stage", str(stage), "--name", name, "--identity", str(self.folder / f"{name}.pem")]
        logs = ["--ready-file", str(ready), "--events", str(self.events / f"{name}.jsonl"), "--threads", "1"]
        began_at = time.monotonic()
        peer = self.arrived(self.start_on(host, name, "peer", *where, *own, *logs), ready)
        self.serves_seconds.append(time.monotonic() - began_at)
        return peer

    def start_trainer_on(self, host: Host, steps: int = 100_000, *, where: Sequence[str] = ()) -> Child:
        """Start a trainer on a host; its figures go to `folder/trainer`."""
        own = ["--steps", str(steps), "--output", str(self.folder / "trainer"), "--name", "trainer"]
        logs = ["--evaluate-every", "0", "--evaluation-samples", "16", "--events", str(self.events / "trainer.jsonl")]
        return self.start_on(host, "trainer", "trainer", *(where or [self.invite]), *own, *logs)

    def train_on(self, host: Host, steps: int, *, where: Sequence[str] = ()) -> None:
        """Let a trainer take this many steps, and end."""
        assert self.wait_for_end(self.start_trainer_on(host, steps, where=where)) == 0

    def status_from(self, host: Host) -> dict[str, dict[str, Any]]:
        """The figures that swarm-status shows of each peer when it runs on this host, by the peer's name."""
        log = self.folder / "logs" / "status.log"
        log.unlink(missing_ok=True)
        assert self.wait_for_end(self.start_on(host, "status", "status", self.invite, "--json")) == 0, log.read_text()
        view = json.loads(whole_lines(log)[-1])
        return {peer["name"]: peer for stage in view["stages"] for peer in stage["peers"]}

    def answers_from(self, host: Host) -> dict[str, dict[str, Any]]:
        """Wait until all peers that were started answer, and return the same figures as `status_from`."""

        def answers() -> dict[str, dict[str, Any]] | None:
            rows = self.status_from(host)
            answer = all(rows.get(peer.child.name, {}).get("state") == "serving" for peer in self.peers)
            return rows if answer else None

        rows: dict[str, dict[str, Any]] = wait_until(answers, self.end_seconds, "all peers to answer")
        return rows
