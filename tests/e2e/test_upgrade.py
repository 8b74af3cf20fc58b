"""A run goes on while it is updated from the last release to this one. Each of its 2 stages has a peer of both."""

import json
import os
import signal
import subprocess
import sys
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from peers.local.supervisor import Supervisor
from swarm.config import RunConfig, to_json
from swarm.credentials.identity import load_or_create
from swarm.types import PROTOCOLS
from tests.support.swarm import RealPeer, RealSwarm, run, wait_until, whole_lines

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]
LAST_RELEASE = Path(__file__).with_name("last_release.txt").read_text(encoding="utf-8").strip()
"""Its commit."""
PATIENCE_SECONDS = 120.0


@pytest.fixture
def last_release(tmp_path: Path) -> dict[str, str]:
    """The environment in which a program is the last release's."""
    if not (ROOT / ".git").exists():
        pytest.skip("these sources have no git history, from which the last release could be taken")
    command = ["git", "-C", str(ROOT), "archive", "--format=zip", LAST_RELEASE, "swarm", "peers"]
    archive = subprocess.run(command, capture_output=True, check=False)
    if archive.returncode:
        pytest.fail(
            f"git does not give the last release, {LAST_RELEASE} (a shallow clone lacks it: git fetch --unshallow): "
            + archive.stderr.decode().strip()
        )
    with zipfile.ZipFile(BytesIO(archive.stdout)) as files:
        files.extractall(tmp_path / "last-release")
    return {"PYTHONPATH": str(tmp_path / "last-release")}


def test_both_releases_read_one_digest_from_a_configuration_that_uses_nothing_new(last_release: dict[str, str]) -> None:
    """What this release has added is marked ADDED."""
    reading = "import sys; from swarm.config import from_json; print(from_json(sys.stdin.read(), source='it').digest)"
    read = subprocess.run(
        [sys.executable, "-P", "-c", reading], input=to_json(RunConfig()), env=os.environ | last_release,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert read.stdout.strip() == RunConfig().digest, read.stderr


class Place(NamedTuple):
    stage: int
    is_old: bool


OLD_0, NEW_0, OLD_1, NEW_1 = (Place(stage, is_old) for stage in (0, 1) for is_old in (True, False))


class Upgrade:
    """The running peers. The last release leads stage 0, and this one stage 1."""

    def __init__(self, swarm: RealSwarm, last_release: dict[str, str]) -> None:
        self.swarm = swarm
        self.peers: dict[Place, RealPeer] = {}
        self._last_release = last_release
        self._keys: dict[Place, Path] = {}
        for leader, other in ((OLD_0, NEW_0), (NEW_1, OLD_1)):
            files = [swarm.folder / f"stage-{leader.stage}-{letter}.pem" for letter in "ab"]
            # The lower id leads.
            lower, higher = sorted(files, key=lambda file: load_or_create(file).peer_id)
            self._keys |= {leader: lower, other: higher}

    def start(self, *places: Place) -> None:
        """Start peers at once, and wait until all of them serve."""
        launched = {
            place: self.swarm.launch(
                place.stage, "--identity", str(self._keys[place]),
                environment=self._last_release if place.is_old else None,
            )
            for place in places
        }  # fmt: skip
        for place, (child, ready_file) in launched.items():
            self.peers[place] = self.swarm.arrived(child, ready_file)

    def events_of(self, place: Place) -> list[dict[str, Any]]:
        """What the process that is there now has logged."""
        path = self.swarm.events / f"{self.peers[place].child.name}.jsonl"
        return [json.loads(line) for line in whole_lines(path)]

    def wait_for_commits_of_both(self) -> None:
        """Wait until each process has committed a round with the other one of its stage."""
        for place, peer in self.peers.items():
            both = {one.ready["peer_id"] for there, one in self.peers.items() if there.stage == place.stage}

            def is_committed() -> bool:
                commits = [event for event in self.events_of(place) if event["event"] == "commit"]  # noqa: B023 - at once
                return any(set(event["members"]) == both for event in commits)  # noqa: B023 - at once

            wait_until(is_committed, PATIENCE_SECONDS, f"a round of both peers; see {peer.child.log}")

    def kill(self, place: Place) -> None:
        """Kill a peer while it has accumulated microbatches that no round counts yet."""

        def holds_something() -> bool:
            names = [event["event"] for event in self.events_of(place)]
            return "accumulate" in names[len(names) - names[::-1].index("commit") :]

        wait_until(holds_something, PATIENCE_SECONDS, "microbatches that a kill loses")
        self.swarm.kill(self.peers[place])

    def leave(self, place: Place) -> None:
        peer = self.peers.pop(place)
        self.swarm.peers.remove(peer)
        peer.child.process.send_signal(signal.SIGTERM)
        assert self.swarm.wait_for_end(peer.child) == 0

    def wait_for_line(self, line: str) -> None:
        for peer in self.peers.values():
            log = peer.child.log
            wait_until(lambda: line in log.read_text(), PATIENCE_SECONDS, f"{line!r} in {log}")  # noqa: B023 - at once

    def wait_for_tallies(self) -> None:
        """Wait until swarm-status says that all members but those of the last release have signed what they gave."""
        old = {peer.ready["peer_id"] for place, peer in self.peers.items() if place.is_old}
        new = {peer.ready["peer_id"] for place, peer in self.peers.items() if not place.is_old}

        def is_signed() -> bool:
            shown = json.loads(run("status", "--peer", self.swarm.peers[0].entry, "--contributions", "--json").stdout)
            blocks = shown["blocks"].values()
            signed, unsigned = (
                {peer for block in blocks for peer in block[by]} for by in ("signed_by", "not_signed_by")
            )
            return (signed, unsigned) == (new, old)

        wait_until(is_signed, PATIENCE_SECONDS, "signatures of all members of this release")

    def protocols(self, *, of_last_release: bool = False) -> dict[str, int]:
        """The protocol of each peer by its name, as swarm-status of a release shows it, once it shows all of them."""

        def shown() -> dict[str, int]:
            environment = self._last_release if of_last_release else None
            seen = run("status", "--peer", self.swarm.peers[0].entry, "--json", environment=environment)
            [view] = map(json.loads, seen.stdout.splitlines())
            peers = [peer for row in view["stages"] for peer in row["peers"] if peer["state"] == "serving"]
            return {peer["name"]: peer["protocol"] for peer in peers} if len(peers) == len(self.peers) else {}

        found: dict[str, int] = wait_until(shown, PATIENCE_SECONDS, "all peers in swarm-status")
        return found


def test_a_run_is_updated_peer_by_peer_and_nothing_is_lost_or_counts_twice(
    tmp_path: Path, children: Supervisor, last_release: dict[str, str]
) -> None:
    swarm = RealSwarm(tmp_path, children, setting="synchronous")
    swarm.start_seconds = swarm.end_seconds = PATIENCE_SECONDS
    upgrade = Upgrade(swarm, last_release)
    upgrade.start(OLD_0)
    trainer = swarm.start_trainer("trainer", steps=10_000)
    upgrade.start(NEW_0, OLD_1, NEW_1)
    upgrade.wait_for_commits_of_both()
    upgrade.wait_for_line(f"all train together, by protocol {PROTOCOLS.oldest}")
    upgrade.wait_for_tallies()
    spoken = {
        peer.child.name: PROTOCOLS.oldest if place.is_old else PROTOCOLS.newest for place, peer in upgrade.peers.items()
    }
    assert upgrade.protocols() == upgrade.protocols(of_last_release=True) == spoken

    upgrade.kill(OLD_1)
    upgrade.kill(NEW_0)
    upgrade.start(OLD_1, NEW_0)
    upgrade.wait_for_commits_of_both()

    for place in (OLD_1, OLD_0):
        upgrade.leave(place)
        swarm.wait_for_more("trainer", 2, PATIENCE_SECONDS)
    upgrade.wait_for_line(f"all peers in the run speak protocol {PROTOCOLS} now")
    upgrade.wait_for_tallies()
    swarm.interrupt(trainer)
    report = swarm.audit()
    assert report["proven"], report
    assert (report["duplicates"], report["missing"], report["digests_differing"]) == (0, 0, 0)
    assert report["digests_compared"] > 0
    swarm.assert_no_tracebacks()
