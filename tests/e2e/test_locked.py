"""A locked run of two stages. Members join with the command lines that the first peer prints, and strangers cannot
join."""

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from peers.commands import command_line
from peers.local.supervisor import Child
from swarm.credentials.rights import Role
from tests.support import locked
from tests.support.swarm import RealSwarm, real_swarm, run_all, wait_until, whole_lines

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

PEER_TOKEN, TRAINER_TOKEN = str(locked.PEER_TOKEN), str(locked.TRAINER_TOKEN)


def _printed(swarm: RealSwarm, which: str) -> list[str]:
    """The arguments in the command line for this program, as the first peer prints it."""
    log = swarm.folder / "logs" / "peer-1.log"
    lines = [line for line in whole_lines(log) if line.strip().startswith(f"{which}:")]
    return lines[0].split()[2:]


def _start_trainer(swarm: RealSwarm, name: str, *, steps: int) -> Child:
    """Start a trainer by the line that the first peer prints."""
    line = [word.replace("#TOKEN", f"#{TRAINER_TOKEN}") for word in _printed(swarm, "train")]
    options = ["--steps", str(steps), "--output", str(swarm.folder / name), "--evaluation-samples", "16"]
    return swarm.children.start(name, command_line("trainer", [*line, *options]))


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealSwarm]:
    """The peer that began the run, and one that has joined by the line that this peer prints."""
    with real_swarm(tmp_path_factory.mktemp("locked")) as swarm:
        swarm.start_peers([0], "--token", PEER_TOKEN)
        ready = swarm.folder / "second.json"
        line = [word.replace("#TOKEN", f"#{PEER_TOKEN}") for word in _printed(swarm, "join")]
        own = ["--host", "127.0.0.1", "--threads", "1", "--identity", str(swarm.folder / "second.pem")]
        second = swarm.children.start("second", command_line("peer", [*line, *own, "--ready-file", str(ready)]))
        wait_until(ready.exists, 60.0, f"the second peer to serve; see {second.log}")
        yield swarm


def test_a_peer_and_a_trainer_join_by_the_printed_lines(swarm: RealSwarm) -> None:
    assert swarm.wait_for_end(_start_trainer(swarm, "trainer", steps=6)) == 0
    steps = swarm.steps("trainer")
    assert len(steps) == 6
    assert steps[-1]["train/loss"] < steps[0]["train/loss"]
    assert "this run is locked by owner" in (swarm.folder / "logs" / "second.log").read_text()


def test_strangers_are_refused_in_one_line(swarm: RealSwarm, tmp_path: Path) -> None:
    foreign = str(locked.issue(by=locked.STRANGER))
    told = {
        swarm.address: "is locked: ask its owner for a token",
        f"{swarm.address}#{foreign}": "the token is for the run of owner",
    }
    own = ["peer", "--stage", "1", "--host", "127.0.0.1"]
    keys = (str(tmp_path / f"{number}.pem") for number in range(len(told)))
    results = run_all(
        *([*own, "--identity", key, "--initial-peers", address] for key, address in zip(keys, told, strict=True))
    )
    for result, expected in zip(results, told.values(), strict=True):
        assert result.returncode == 2
        assert expected in result.stderr
        assert len(result.stderr.splitlines()) == 1, result.stderr


def test_whoever_has_a_token_sees_the_members_and_nobody_else(swarm: RealSwarm) -> None:
    line = [word.replace("#TOKEN", f"#{TRAINER_TOKEN}") for word in _printed(swarm, "watch") if word != "--watch"]
    through_dht = ["--initial-peers", f"{swarm.address}#{TRAINER_TOKEN}"]
    for result in run_all(*(["status", *where, "--json"] for where in (line, through_dht))):
        assert result.returncode == 0, result.stderr
        assert '"state": "serving"' in result.stdout
        assert "unreachable" not in result.stdout
        assert [len(stage["peers"]) for stage in json.loads(result.stdout)["stages"]] == [1, 1]


def test_whoever_has_no_token_or_a_wrong_one_sees_nothing(swarm: RealSwarm) -> None:
    entry = swarm.peers[0].entry
    told = {
        entry: "is locked: ask its owner for a token",
        f"{entry}#{locked.issue(by=locked.STRANGER)}": "no peer of the run answers",
    }
    results = run_all(*(["status", "--peer", address, "--json"] for address in told))
    for result, expected in zip(results, told.values(), strict=True):
        assert result.returncode in (1, 2)
        assert expected in result.stderr
        assert len(result.stderr.splitlines()) == 1, result.stderr


@pytest.mark.slow
def test_the_owner_amends_the_run_while_it_goes_on(swarm: RealSwarm, tmp_path: Path) -> None:
    keys = {"ours": locked.OWNER, "another's": locked.STRANGER}
    for name, key in keys.items():
        key.save(tmp_path / name)
    (invite, *_) = _printed(swarm, "join")
    amend = ["keys", "amend", str(tmp_path / "ours"), invite, "--set"]
    (told,) = run_all([*amend, "optimizer.learning_rate=7e-4"])
    refused, near, foreign = run_all(
        [*amend, "model.d_model=64"], [*amend, "optimizer.learning_rate=1", "--at-round", "1"],
        ["keys", "amend", str(tmp_path / "another's"), invite, "--set", "optimizer.learning_rate=1"],
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    assert "amendment 1: optimizer.learning_rate=7e-4 from round" in told.stdout
    assert "all peers know of it" in told.stdout
    assert foreign.returncode in (1, 2)
    assert foreign.stderr.splitlines()[-1].startswith("swarm-keys: error: no peer of the run answers"), foreign.stderr
    assert refused.returncode in (1, 2)
    assert len(refused.stderr.splitlines()) == 1, refused.stderr
    assert "model.d_model cannot be amended" in refused.stderr
    assert "is too near" in near.stderr
    assert swarm.wait_for_end(_start_trainer(swarm, "later", steps=14)) == 0
    rates = [step["train/learning_rate"] for step in swarm.steps("later")]
    assert rates[-1] == pytest.approx(7e-4)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_owner_amends_the_text_while_a_trainer_is_at_work(swarm: RealSwarm, tmp_path: Path) -> None:
    locked.OWNER.save(tmp_path / "owner.pem")
    other = tmp_path / "other.txt"
    other.write_text("abracadabra " * 2_000, encoding="utf-8")  # Soon learnt by heart, which the first text is not
    trainer = _start_trainer(swarm, "at-work", steps=1_000)
    before = swarm.wait_for_steps("at-work", 2)[-1]["train/loss"]
    (invite, *_) = _printed(swarm, "join")
    amend = ["keys", "amend", str(tmp_path / "owner.pem"), invite, "--set", f"data.dataset={other}"]
    (told,) = run_all(amend)
    assert told.returncode == 0, told.stderr
    assert "all peers know of it" in told.stdout

    def is_learnt() -> bool:
        return bool(swarm.steps("at-work")[-1]["train/loss"] < before / 4)

    # The amendment is in force some ninety rounds later, so that all have heard of it.
    wait_until(is_learnt, 240.0, f"the new text to be learnt; see {trainer.log}")
    swarm.interrupt(trainer)
    swarm.assert_no_tracebacks()


@pytest.mark.slow
def test_whose_token_the_owner_revokes_leaves_and_does_not_come_back(swarm: RealSwarm, tmp_path: Path) -> None:
    locked.OWNER.save(tmp_path / "owner.pem")
    bob = locked.OWNER.issue(Role.PEER, name="bob", now=locked.NOW, lifetime=timedelta(days=1))
    (invite, *_) = _printed(swarm, "join")
    own = ["--host", "127.0.0.1", "--threads", "1", "--token", str(bob)]
    ready = tmp_path / "bob.json"
    line = [invite.replace("#TOKEN", ""), *own, "--identity", str(tmp_path / "bob.pem"), "--ready-file", str(ready)]
    peer = swarm.children.start("bob", command_line("peer", line))
    wait_until(ready.exists, 60.0, f"bob's peer to serve; see {peer.log}")
    asked, at = ["keys", "tokens", str(tmp_path / "owner.pem"), invite], ["keys", "amend", str(tmp_path / "owner.pem")]
    (listed,) = run_all(asked)
    assert f"bob ({bob.token_id}), a peer's: " in listed.stdout, listed.stderr
    unknown, told = run_all([*at, invite, "--revoke", "eve"], [*at, invite, "--revoke", "bob"])
    assert "no token in use has the name 'eve'" in unknown.stderr
    assert told.returncode == 0, told.stderr
    assert "all peers know of it" in told.stdout
    assert swarm.wait_for_end(peer) == 0
    (said,) = [one for one in whole_lines(peer.log) if " ERROR " in one or "revoked the token" in one]
    assert "the run's owner has revoked the token 'bob' of" in said
    assert "Traceback" not in peer.log.read_text()
    again = [["peer", invite.replace("#TOKEN", ""), *own, "--identity", str(tmp_path / "again.pem")]]
    again += [["status", invite.replace("#TOKEN", ""), "--token", str(bob)]]
    *refused, seen = run_all(*again, asked)
    for result in refused:
        assert result.returncode == 1
        assert len(result.stderr.splitlines()) == 1, result.stderr
        assert "has revoked the token 'bob'" in result.stderr
    assert seen.returncode == 0
    assert "bob" not in seen.stdout
