"""Announcements in the local network: which are believed, and which run a program takes."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from zeroconf import ServiceStateChange

from peers.doctor.options import DoctorOptions
from peers.generate.options import GenerateOptions
from peers.model.options import ExportModelOptions
from peers.shared import lan
from swarm import config as configs
from swarm.credentials.identity import generate
from swarm.errors import PeerUnavailable
from swarm.rpc.entry import Entry
from swarm.rpc.invite import Invite
from swarm.types import PeerId
from tests.support.shown_run import shown_run

NODE = "/ip4/127.0.0.1/tcp/4001/p2p/12D3KooWQfGkQq4wGkyNqHUBd7HScWJGfNYsPzRUnGwkKDUdJhqZ"
RUN, OTHER_RUN = "tiny.0123456789abcdef", "small.fedcba9876543210"
PEERS = ["ab" * 20, "cd" * 20, "ef" * 20]


def _invite(run: str, *hosts: str, peer: int = 0, is_locked: bool = False) -> Invite:
    return Invite.fitting(run, [Entry.at(PeerId(PEERS[peer]), host, 5001) for host in hosts], is_locked=is_locked)


def _encoded(text: str | None) -> bytes | None:
    return None if text is None else text.encode()


def test_what_is_announced_is_read_as_an_invite_is() -> None:
    invite = _invite(RUN, "192.0.2.1", is_locked=True)
    assert lan.claimed({b"run": RUN.encode(), b"invite": str(invite).encode()}) == (RUN, invite)


@pytest.mark.parametrize(
    ("run", "invite"),
    [
        (RUN, None),
        (RUN, ""),
        (None, str(_invite(RUN, "192.0.2.1"))),
        (RUN, str(_invite(OTHER_RUN, "192.0.2.1"))),
        (RUN, str(_invite(RUN, "192.0.2.1"))[:-1]),
        (RUN, "/etc/passwd"),
        (RUN, "@/etc/passwd"),
        (RUN, "swarm://1\x1b[2J"),
        ("tiny\x1b[2J.0123456789abcdef", str(_invite(RUN, "192.0.2.1"))),
        ("t" * 65 + ".0123456789abcdef", str(_invite(RUN, "192.0.2.1"))),
        ("\u0661.0123456789abcdef", str(_invite(RUN, "192.0.2.1"))),
    ],
)
def test_nonsense_is_passed_over(run: str | None, invite: str | None) -> None:
    properties = {b"run": _encoded(run), b"invite": _encoded(invite)}
    assert lan.claimed(properties) is None


def test_of_one_run_all_announced_peers_are_entered_at_and_a_liar_hides_none() -> None:
    lie = _invite(RUN, *(f"198.51.100.{number}" for number in range(9)), peer=2, is_locked=True)
    honest = [_invite(RUN, f"192.0.2.{number}", peer=number) for number in range(2)]
    [(name, merged)] = lan.merged((RUN, invite) for invite in (lie, *honest)).items()
    assert name == RUN
    assert {entry for invite in honest for entry in invite.entries} < set(merged.entries)
    assert len(merged.entries) <= lan.MOST_ENTRIES
    assert not merged.is_locked
    assert Invite.parse(str(merged)) == merged


async def test_an_announcement_without_a_name_ends_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """zeroconf passes on what others announce unchecked, and raises an error when it is asked about that."""
    names = ["x._other._tcp.local.", f"{'x' * 64}.{lan.SERVICE}", ""]

    class Network:
        zeroconf = None

        async def async_close(self) -> None: ...

    class Browser:
        def __init__(self, zeroconf: Any, service_type: str, handlers: list[Callable[..., None]]) -> None:
            for name in names:
                handlers[0](zeroconf, service_type, name, ServiceStateChange.Added)

        async def async_cancel(self) -> None: ...

    monkeypatch.setattr("zeroconf.asyncio.AsyncZeroconf", lambda **_: Network())
    monkeypatch.setattr("zeroconf.asyncio.AsyncServiceBrowser", Browser)
    monkeypatch.setattr(lan, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(lan, "SAY_SECONDS", 0.01)
    assert await lan.find() == {}


def test_the_only_run_is_taken_and_of_several_the_user_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {RUN: _invite(RUN, "192.0.2.1")}

    async def find() -> dict[str, Invite]:
        return dict(runs)

    async def answering(runs: Mapping[str, Invite], *, insecure: bool) -> dict[str, Invite]:
        return dict(runs)

    monkeypatch.setattr(lan, "find", find)
    monkeypatch.setattr(lan, "answering", answering)
    assert lan.found_invite(insecure=False) == str(runs[RUN])
    assert lan.found_invites(insecure=False) == [str(runs[RUN])]
    assert lan.with_invite(DoctorOptions(lan=True)) == DoctorOptions(invite=str(runs[RUN]))
    assert lan.with_invite(DoctorOptions(invite="swarm://x")) == DoctorOptions(invite="swarm://x")
    runs[OTHER_RUN] = _invite(OTHER_RUN, "192.0.2.2")
    both = f"{OTHER_RUN}: {runs[OTHER_RUN]}, {RUN}: {runs[RUN]}"
    with pytest.raises(ValueError, match=f"^several runs are in this network; give one of .*{re.escape(both)}$"):
        lan.found_invite(insecure=False)
    assert lan.found_invites(insecure=False) == [str(runs[OTHER_RUN]), str(runs[RUN])]
    runs.clear()
    with pytest.raises(PeerUnavailable, match=r"^no run was found in this network in 5 s: start one of its peers with"):
        lan.found_invite(insecure=False)


async def test_runs_of_which_no_peer_answers_are_left_out() -> None:
    """A false announcement has an address at which there is no peer, or peers of another run."""
    config = configs.load_preset("tiny")
    async with shown_run(config, generate(), NODE) as shown:
        real = Invite.fitting(config.run_id, [shown.entry], is_locked=False)
        runs = {
            config.run_id: real,
            RUN: _invite(RUN, "127.0.0.1"),
            OTHER_RUN: Invite.fitting(OTHER_RUN, [shown.entry], is_locked=False),
        }
        assert await lan.answering(runs, insecure=False) == {config.run_id: real}


@pytest.mark.parametrize("insecure", [False, True])
async def test_a_run_without_tls_is_found_by_those_who_want_one_and_named_to_others(
    caplog: pytest.LogCaptureFixture, *, insecure: bool
) -> None:
    config, other = configs.load_preset("tiny"), dataclasses.replace(configs.load_preset("tiny"), run="plain")
    async with shown_run(config, generate(), NODE) as safe, shown_run(other, generate(), NODE, insecure=True) as plain:
        runs = {
            shown.config.run_id: Invite.fitting(shown.config.run_id, [shown.entry], is_locked=False)
            for shown in (safe, plain)
        }
        wanted, left_out = (other, config) if insecure else (config, other)
        assert await lan.answering(runs, insecure=insecure) == {wanted.run_id: runs[wanted.run_id]}
        [line] = [record.message for record in caplog.records if "as well" in record.message]
        assert line.startswith(f"run {left_out.run_id} is in this network as well, ")
        assert "--insecure" in line


@pytest.mark.parametrize(
    ("options", "given"),
    [(DoctorOptions, {}), (GenerateOptions, {"prompt": "x"}), (ExportModelOptions, {"output": Path("out")})],
)
def test_an_invite_beside_the_local_network_is_refused(options: Callable[..., object], given: dict[str, Any]) -> None:
    options(lan=True, **given)
    with pytest.raises(ValueError, match=r"INVITE(,| and) --lan"):
        options(invite="swarm://x", lan=True, **given)
