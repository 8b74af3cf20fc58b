"""Invites: what they hold, how long they are, and how a damaged one is refused."""

import random
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.rpc.entry import Entry
from swarm.rpc.invite import LONGEST, SCHEME, Invite
from swarm.types import PeerId

RUN = "tiny.0123456789abcdef"
IDS = [PeerId(f"{number:040x}") for number in (0, 1 << 150, (1 << 160) - 1)]
IPV4 = [Entry(peer_id, f"203.0.113.{number}:40001") for number, peer_id in enumerate(IDS)]
IPV6 = Entry(IDS[0], "[2001:db8:1:2:3:4:5:6]:40001")

_HOSTS = st.one_of(
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(lambda address: f"[{address}]"),
    st.lists(
        st.text(string.ascii_lowercase + string.digits + "-", min_size=1, max_size=20), min_size=1, max_size=3
    ).map(".".join),
)
_ENTRIES = st.builds(
    lambda number, host, port: Entry(PeerId(f"{number:040x}"), f"{host}:{port}"),
    st.integers(0, (1 << 160) - 1), _HOSTS, st.integers(1, 65535),
)  # fmt: skip


@given(st.lists(_ENTRIES, min_size=1, max_size=4, unique=True), st.booleans())
def test_what_is_printed_can_be_read(entries: list[Entry], is_locked: bool) -> None:
    invite = Invite.fitting(RUN, entries, is_locked=is_locked)
    assert Invite.parse(str(invite)) == invite
    assert invite.is_locked is is_locked
    assert invite.entries[0] == entries[0]
    assert invite.is_to(RUN)
    assert not invite.is_to("tiny.0123456789abcdee")
    assert len(invite.entries) == 1 or len(str(invite)) <= LONGEST


@pytest.mark.parametrize(
    ("entries", "fitting"),
    [
        (IPV4, IPV4[:2]),
        ([IPV4[0], IPV6], [IPV4[0], IPV6]),
        ([IPV6, IPV4[0]], [IPV6, IPV4[0]]),
        ([IPV4[0], IPV4[0]], [IPV4[0]]),
        ([Entry(IDS[0], f"{'peer' * 20}.example.org:1"), *IPV4], [Entry(IDS[0], f"{'peer' * 20}.example.org:1")]),
        ([IPV4[0], Entry(IDS[1], f"{'peer' * 40}.example.org:1"), IPV4[2]], [IPV4[0], IPV4[2]]),
    ],
    ids=[
        "two of three peers",
        "two addresses",
        "the other way",
        "nothing twice",
        "a long name",
        "one that is too long",
    ],
)
def test_it_holds_as_much_as_fits(entries: list[Entry], fitting: list[Entry]) -> None:
    invite = Invite.fitting(RUN, entries, is_locked=False)
    assert list(invite.entries) == fitting
    assert len(str(invite)) <= LONGEST or len(fitting) == 1


def test_any_damage_is_noticed() -> None:
    whole, rng = str(Invite.fitting(RUN, IPV4, is_locked=True)), random.Random(0)
    digits = string.ascii_letters + string.digits
    damaged = [whole[:length] for length in range(len(SCHEME), len(whole))]
    for place in range(len(SCHEME) + 1, len(whole)):
        other = rng.choice([digit for digit in digits if digit != whole[place]])
        damaged.append(whole[:place] + other + whole[place + 1 :])
    damaged += [f"{whole}{2_000_000 * 'x'}"]  # which takes for ever to decode
    damaged += [f"{whole}x", whole.lower(), f"{whole}.", whole[: len(SCHEME)] + "x" + whole[len(SCHEME) + 1 :]]
    for text in damaged:
        with pytest.raises(ValueError, match=r"^the invite is cut off or mistyped: copy the whole word again"):
            Invite.parse(text)


def test_one_of_another_version_says_so() -> None:
    text = str(Invite.fitting(RUN, IPV4, is_locked=False)).replace(f"{SCHEME}1", f"{SCHEME}2")
    with pytest.raises(ValueError, match="the invite is of version 2, and this software reads version 1"):
        Invite.parse(text)


@pytest.mark.parametrize("fault", ["a flag", "no peer", "half a peer", "no port", "no name"])
def test_one_that_says_what_is_not_known_is_told_from_a_damaged_one(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = bytes.fromhex(IDS[1])
    packed = {
        "no peer": b"", "half a peer": peer[:7], "no port": peer + bytes([0, 1, 2, 3, 4, 0, 0]),
        "no name": peer + b"\2",
    }  # fmt: skip
    invite = Invite.fitting(RUN, IPV4, is_locked=False)
    if fault == "a flag":
        monkeypatch.setattr("swarm.rpc.invite._LOCKED", 2)
        invite = Invite.fitting(RUN, IPV4, is_locked=True)
        text = str(invite)
        monkeypatch.undo()
    else:
        monkeypatch.setattr("swarm.rpc.invite._packed", lambda entries: packed[fault])
        text = str(invite)
    with pytest.raises(ValueError, match="the invite has something that this software does not know"):
        Invite.parse(text)
