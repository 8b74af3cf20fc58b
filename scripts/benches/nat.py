"""Peers behind routers: how soon do they serve, by which way are they reached, and how fast is it?

Each arrangement is a small internet of network namespaces. `hop_ratio_to_direct` is the rate of pieces of 1 MiB on the
way to the peer, over the rate to a public peer. Needs root, iproute2 and nftables.
"""

import json
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.commands import command_line
from peers.local.supervisor import Child, Supervisor, last_line
from scripts.benches.shared.common import OutputOptions, say, side, workplace
from scripts.benches.shared.internet import KINDS, Host, Internet, missing
from swarm.errors import DeadlineExceeded

PAIRS = ("ipv6+dual-stack", "restricted+restricted", "symmetric+restricted", "symmetric+symmetric")
MEET = "meet:"
AT_MEET = ("meet:restricted+restricted",)
MEGABITS = 50  # Rate of every line, per second
START_SECONDS = 60.0  # Longest wait until a process is useful


@dataclass(frozen=True, kw_only=True)
class Options(OutputOptions):
    """Measure peers behind routers."""

    arrangements: tuple[str, ...] = (*KINDS, *PAIRS, *AT_MEET)
    """How the peer is connected, and after a plus its caller, which otherwise has a public address: none, full-cone,
    restricted, symmetric, cgnat, udp-blocked, ipv6, dual-stack. After `meet:` no peer has a public address: the run is
    begun from where the caller is, at a swarm-meet of which one port is open."""
    seconds: float = 8.0
    """How many seconds pieces are sent on each way."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for arrangement in self.arrangements:
            if not set(arrangement.removeprefix(MEET).split("+")) <= set(KINDS) or arrangement.count("+") > 1:
                raise ValueError(f"--arrangements knows no {arrangement!r}; the kinds are {', '.join(KINDS)}")


def run(options: Options) -> dict[str, Any]:
    """Measure all arrangements, and return their figures. Raises OSError if this machine cannot have network
    namespaces."""
    if lack := missing():
        raise OSError(f"no network namespaces: {lack}")
    results: dict[str, Any] = {}
    for arrangement in options.arrangements:
        peer_kind, _, caller_kind = arrangement.removeprefix(MEET).partition("+")
        with workplace("nat") as (folder, children), Internet() as internet:
            world = _World(Hosted(children, folder), internet, peer_kind, caller_kind or "none")
            serves_seconds = world.serves_seconds(at_meet=arrangement.startswith(MEET))
            results[arrangement] = {"serves_seconds": serves_seconds, **world.line(options)}
        say(f"{arrangement}: {results[arrangement]}")
    return results


@dataclass(frozen=True)
class Hosted:
    """Programs on the hosts of a small internet, each peer with files of its own in one folder."""

    children: Supervisor
    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)  # Environment variables, added to this process's own

    def start(self, host: Host, name: str, program: str, options: Sequence[object]) -> Child:
        command = host.command(command_line(program, list(map(str, options))))
        return self.children.start(name, command, environment=self.environment)

    def peer(self, host: Host, name: str, options: Sequence[object]) -> Child:
        """Start a peer on a host without waiting; once it serves, its `ready` file exists."""
        own = ["--name", name, "--identity", self.folder / f"{name}.pem", "--threads", "1", "--device", "cpu"]
        events = self.folder / "events"
        files = ["--ready-file", self.ready(name), "--events", events / f"{name}.jsonl"]
        events.mkdir(exist_ok=True)
        return self.start(host, name, "peer", [*options, *own, *files])

    def ready(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def serving_peer(self, host: Host, name: str, options: Sequence[object]) -> Child:
        """Start a peer on a host, and wait until it serves. Raises DeadlineExceeded if that takes a minute."""
        child = self.peer(host, name, options)
        wait_for(child, self.ready(name).exists)
        return child


def invite_of(peer: Child) -> str:
    return next(line.split()[2] for line in peer.log.read_text().splitlines() if "join:" in line)


def wait_for(child: Child, is_there: Callable[[], object], *, seconds: float = START_SECONDS) -> None:
    """Wait until `is_there` is true, which the child has to bring about. Raises DeadlineExceeded, with the child's last
    line."""
    deadline = time.monotonic() + seconds
    while not is_there():
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"waited {seconds:.0f} s for {child.name}, which said: {last_line(child.log)}")
        time.sleep(0.05)


class _World:
    def __init__(self, hosted: Hosted, internet: Internet, peer_kind: str, caller_kind: str) -> None:
        self._hosted = hosted
        self._internet = internet
        self._public, self._other_public = internet.public_host(), internet.public_host()
        self._peer, self._caller = internet.host(peer_kind), internet.host(caller_kind)
        self._is_direct = peer_kind == "none"
        self._has_ipv4 = "ipv6" not in (peer_kind, caller_kind)

    def serves_seconds(self, *, at_meet: bool) -> float:
        meet = self._meet() if at_meet else None
        begins = [] if meet is None else ["--meet", meet.log.read_text().split("--meet ")[1].split()[0]]
        where = self._public if meet is None else self._caller
        first = self._hosted.serving_peer(where, "first", ["--preset", "tiny", "--stages", 1, *begins])
        began_at = time.monotonic()
        second = self._hosted.serving_peer(self._peer, "second", [invite_of(first)])
        seconds = time.monotonic() - began_at
        for child in filter(None, (second, first, meet)):
            self._hosted.children.kill9(child)
        return seconds

    def _meet(self) -> Child:
        host = self._internet.public_host()
        self._internet.close_but(host, 443)
        own = ["--announce", host.address, "--identity", self._hosted.folder / "meet.pem"]
        child = self._hosted.start(host, "meet", "meet", own)
        wait_for(child, lambda: "begin a run:" in child.log.read_text())
        return child

    def line(self, options: Options) -> dict[str, Any]:
        """The way on which pieces reach the peer, and their rate compared with the rate to a public peer."""
        for host in (self._public, self._other_public, self._peer, self._caller):
            self._internet.limit(host, MEGABITS)
        points = [host.address if self._has_ipv4 else host.address6 for host in (self._public, self._other_public)]
        entry = self._first_line(self._public, "meet", [points[0]])
        direct = self._first_line(self._other_public, "serve", [points[1]])
        where = [] if self._is_direct else [entry]
        record = self._first_line(self._peer, "serve", [self._peer.address, *where])
        there, baseline = (self._call(to, options.seconds) for to in (record, direct))
        return {
            "way": there["way"],
            "hop_ratio_to_direct": there["bytes_per_second"] / baseline["bytes_per_second"],
            "bytes_per_second": there["bytes_per_second"],
        }

    def _first_line(self, host: Host, role: str, arguments: Sequence[str]) -> str:
        name = f"{role}-{host.namespace}"
        child = self._hosted.children.start(name, host.command(side("nat_echo", role, *arguments)))
        wait_for(child, lambda: "\n" in child.log.read_text())
        return child.log.read_text().splitlines()[0]

    def _call(self, record: str, seconds: float) -> dict[str, Any]:
        command = self._caller.command(side("nat_echo", "call", record, seconds))
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds + START_SECONDS)
        if done.returncode:
            raise OSError(f"the caller failed: {done.stderr.strip()[-400:]}")
        figures: dict[str, Any] = json.loads(done.stdout)
        return figures
