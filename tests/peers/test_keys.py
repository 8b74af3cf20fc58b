"""swarm-keys: what it writes, prints and refuses."""

import contextlib
import dataclasses
import datetime
import itertools
import re
import stat
from pathlib import Path

import pytest

from peers import keys
from peers.shared.network import Membership
from peers.shared.token_option import find_token
from swarm.config import load_preset
from swarm.credentials.identity import generate
from swarm.credentials.rights import PROGRAMS, Role
from swarm.credentials.token import Token
from swarm.errors import PeerUnavailable
from swarm.machine.clock import SystemClock
from swarm.types import PeerRecord, PeerState, TrainerRecord
from tests.support import locked
from tests.support.manual_clock import ManualClock
from tests.support.memory_store import MemoryStore


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert keys.main(arguments) == 0
    return capsys.readouterr().out


def test_an_owner_issues_tokens_that_say_what_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "owner.pem"
    made = _run(capsys, "new", str(file))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for role in Role:
        printed = _run(capsys, "issue", str(file), "--role", role, "--expires", "12h", "--name", "Ada").strip()
        token = Token.parse(printed)
        assert token.role is role
        shown = _run(capsys, "show", printed)
        assert f"Ada: a {role}'s token of owner {token.authority.fingerprint}" in shown
        assert token.authority.fingerprint in made
        assert "holds until" in shown
        assert printed[60:90] not in shown


@pytest.mark.parametrize(("role", "prog"), list(itertools.product(Role, PROGRAMS)))
def test_a_token_joins_where_its_role_is_one_that_the_program_can_work_with(role: Role, prog: str) -> None:
    clock, token = ManualClock(locked.NOW.timestamp()), str(locked.issue(role))
    serves = prog in ("swarm-peer", "swarm-local", "swarm-model", "swarm-keys")
    refusal = pytest.raises(ValueError, match=f"a {role}'s.* --role peer$")
    with refusal if serves and role is Role.TRAINER else contextlib.nullcontext():
        find_token(token, (), {}, prog=prog, insecure=False, clock=clock)


@pytest.mark.parametrize("expires", ["", "d", "0d", "-1d", "1", "1w", "1.5h", "99999999d", "²d"])
def test_lifetimes_are_numbers_and_units(tmp_path: Path, capsys: pytest.CaptureFixture[str], expires: str) -> None:
    with pytest.raises(SystemExit):
        keys.main(["issue", str(tmp_path / "x"), "--role", "peer", f"--expires={expires}"])
    assert "--expires takes a number and d, h or m" in capsys.readouterr().err


def test_faults_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert keys.main(["frob"]) == 2
    assert keys.main([]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2
    with pytest.raises(SystemExit):
        keys.main(["issue", str(tmp_path / "x")])
    assert "missing --role" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError):
        keys.main(["issue", str(tmp_path / "missing"), "--role", "peer"])
    with pytest.raises(ValueError, match="that is no join token"):
        keys.main(["show", "nonsense"])
    (tmp_path / "there").write_text("")
    with pytest.raises(FileExistsError):
        keys.main(["new", str(tmp_path / "there")])


async def test_the_owner_sees_which_tokens_are_in_use_and_names_those_to_revoke(tmp_path: Path) -> None:
    clock = SystemClock()
    store, run = MemoryStore(clock), dataclasses.replace(load_preset("tiny"), owner=locked.OWNER.authority.fingerprint)

    def enter(token: Token) -> Membership:
        return Membership.enter(run, store, token.admit(generate()), clock, insecure=False)

    def issue(name: str, role: Role = Role.PEER) -> Token:
        return locked.OWNER.issue(role, name=name, now=locked.NOW, lifetime=datetime.timedelta(days=1))

    ada, bob, other_bob = issue("ada"), issue("bob"), issue("bob", Role.TRAINER)
    for name, token in (("pc", ada), ("attic", ada), ("laptop", bob)):
        peer = enter(token)
        record = PeerRecord(
            peer_id=peer.peer_id, name=name, announced_at=clock.time(), stage=0, endpoint="192.0.2.1:1",
            certificate_pem=peer.identity.certificate_pem, state=PeerState.SERVING,
        )  # fmt: skip
        await peer.directory.announce(record, 100)
    trainer = enter(other_bob)
    await trainer.directory.announce(
        TrainerRecord(peer_id=trainer.peer_id, name="feeder", announced_at=clock.time(), step=0), 100
    )
    in_use = await keys.tokens_of(enter(issue("owner")))
    assert list(map(str, in_use)) == [
        f"ada ({ada.token_id}), a peer's: attic, pc",
        f"bob ({bob.token_id}), a peer's: laptop",
        f"bob ({other_bob.token_id}), a trainer's: feeder",
    ]
    (tmp_path / "token").write_text(str(ada))
    for text in ("ada", ada.token_id, str(ada), f"@{tmp_path / 'token'}"):
        assert keys.digits_of(text, locked.OWNER, in_use) == ada.token_id
    for text, complaint in {
        "eve": "no token in use has the name 'eve': give the digits of one, or the token itself; in use are ada (",
        "bob": "2 tokens in use have the name 'bob': give the digits of one",
        str(locked.issue(by=locked.STRANGER)): "not this run's",
    }.items():
        with pytest.raises(ValueError, match=re.escape(complaint)):
            keys.digits_of(text, locked.OWNER, in_use)


@pytest.mark.parametrize("protocol", [12, 13])
async def test_what_trainers_apply_is_amended_only_where_all_of_them_can(protocol: int) -> None:
    clock = SystemClock()
    run = dataclasses.replace(load_preset("tiny"), owner=locked.OWNER.authority.fingerprint)
    member = Membership.enter(run, MemoryStore(clock), locked.PEER, clock, insecure=False)
    record = TrainerRecord(
        peer_id=member.peer_id, name="old", announced_at=clock.time(), protocol_version=protocol, oldest_protocol=12
    )
    await member.directory.announce(record, 100)
    await keys.require_trainers(member, ["optimizer.learning_rate=1"])
    refused = pytest.raises(PeerUnavailable, match=r"^old run a release whose trainers know no amendments$")
    with refused if protocol == 12 else contextlib.nullcontext():
        await keys.require_trainers(member, ["data.weights=[1, 2]"])
