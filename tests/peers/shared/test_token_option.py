"""Where a program's token comes from, and what is said about a wrong one."""

from pathlib import Path

import pytest

from peers.shared.stopping import FAREWELL_SECONDS
from peers.shared.token_option import find_token
from tests.support import locked
from tests.support.manual_clock import ManualClock

PEER, TRAINER = str(locked.PEER_TOKEN), str(locked.TRAINER_TOKEN)
ADDRESSES = ("/ip4/192.0.2.1/tcp/1/p2p/X", "/ip4/192.0.2.2/tcp/1/p2p/Y")
CLOCK = ManualClock(locked.NOW.timestamp())


def _find(
    option: str | None, *addresses: str, environment: dict[str, str] | None = None, prog: str = "swarm-peer",
    insecure: bool = False,
) -> tuple[tuple[str, ...], str]:  # fmt: skip
    found, token = find_token(option, addresses, environment or {}, prog=prog, insecure=insecure, clock=CLOCK)
    return found, str(token or "")


def test_wrong_tokens_are_one_line(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="bring different tokens"):
        _find(PEER, f"{ADDRESSES[0]}#{TRAINER}")
    with pytest.raises(ValueError, match=r"^the token expired on \d+-\d+-\d+ \d+:\d+ UTC: ask the run's owner"):
        _find(str(locked.expired()))
    with pytest.raises(ValueError, match="the token is about to end, at"):
        _find(str(locked.issue(days=(FAREWELL_SECONDS - 1) / 86_400)))
    with pytest.raises(ValueError, match="the token is a trainer's"):
        _find(TRAINER)
    with pytest.raises(ValueError, match="--insecure leaves nothing locked"):
        _find(PEER, insecure=True)
    for text in ("nonsense", f"@{binary}"):
        with pytest.raises(ValueError, match="that is no join token"):
            _find(text)
    with pytest.raises(OSError, match="missing"):
        _find(f"@{tmp_path / 'missing'}")


def test_an_empty_token_is_not_the_same_as_none() -> None:
    """If the shell variable with the token is not set, the owner must not begin an open run by mistake."""
    rest = " is empty: it takes a token; for an open run leave it out$"
    with pytest.raises(ValueError, match=f"^--token{rest}"):
        _find("", *ADDRESSES)
    with pytest.raises(ValueError, match=f"^--token{rest}"):
        _find("", f"{ADDRESSES[0]}#{PEER}", environment={"SWARM_TOKEN": PEER})
    with pytest.raises(ValueError, match=f"^what follows {ADDRESSES[1]}#{rest}"):
        _find(None, ADDRESSES[0], f"{ADDRESSES[1]}#", environment={"SWARM_TOKEN": PEER})
    with pytest.raises(ValueError, match=f"^SWARM_TOKEN{rest}"):
        _find(None, *ADDRESSES, environment={"SWARM_TOKEN": ""})
    assert _find(PEER, environment={"SWARM_TOKEN": ""}) == ((), PEER)
