"""A real swarm whose machines are network namespaces: each process runs on a host of a small internet."""

import json
import time
from pathlib import Path

from peers.commands import command_line
from peers.local.supervisor import Child, Supervisor
from scripts.benches.shared.internet import Host
from tests.support.swarm import RealPeer, RealSwarm, wait_until, whole_lines


class NatSwarm(RealSwarm):
    """Peers and trainers on hosts of a small internet. They get the invite that the first peer prints, and but for the
    first one no option with an address."""

    start_seconds = end_seconds = 300.0

    def __init__(self, folder: Path, children: Supervisor, *, num_stages: int, setting: str = "synchronous") -> None:
        super().__init__(folder, children, setting=setting)
        self.config.write_text(self.config.read_text().replace("num_stages = 2", f"num_stages = {num_stages}"))
        self.begin_at: str | None = None
        """What a swarm-meet prints as its address, if the run is begun there."""
        self.first_options: list[str] = []
        """Further options of the first peer."""
        self.options: list[str] = []
        """Further options of each peer."""
        self.serves_seconds: list[float] = []
        """How long each peer took until it served."""

    @property
    def invite(self) -> str:
        """The invite as the first peer prints it."""
        lines = whole_lines(self.peers[0].child.log)
        return next(line.split()[2] for line in lines if line.strip().startswith("join:"))

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
        child = self.children.start(name, host.command(command_line("peer", [*where, *own, *logs])))
        wait_until(ready.exists, self.start_seconds, f"{name} to serve; see {child.log}")
        self.serves_seconds.append(time.monotonic() - began_at)
        peer = RealPeer(child=child, stage=stage, ready=json.loads(ready.read_text()))
        self.peers.append(peer)
        return peer

    def start_trainer_on(self, host: Host, name: str, *, steps: int) -> Child:
        """Start a trainer on a host; its figures go to `folder/name`."""
        own = ["--steps", str(steps), "--output", str(self.folder / name), "--name", name, "--evaluate-every", "0"]
        logs = ["--evaluation-samples", "16", "--events", str(self.events / f"{name}.jsonl")]
        return self.children.start(name, host.command(command_line("trainer", [self.invite, *own, *logs])))

    def status_from(self, host: Host) -> dict[str, dict[str, object]]:
        """The figures that swarm-status shows of each peer when it runs on this host, by the peer's name."""
        log = self.folder / "logs" / "status.log"
        log.unlink(missing_ok=True)
        child = self.children.start("status", host.command(command_line("status", [self.invite, "--json"])))
        assert self.wait_for_end(child) == 0, log.read_text()
        view = json.loads(whole_lines(log)[-1])
        return {peer["name"]: peer for stage in view["stages"] for peer in stage["peers"]}

    def answers_from(self, host: Host) -> dict[str, dict[str, object]]:
        """Wait until all peers that were started answer, and return the same figures as `status_from`."""

        def answers() -> dict[str, dict[str, object]] | None:
            rows = self.status_from(host)
            answer = all(rows.get(peer.child.name, {}).get("state") == "serving" for peer in self.peers)
            return rows if answer else None

        rows: dict[str, dict[str, object]] = wait_until(answers, self.end_seconds, "all peers to answer")
        return rows
