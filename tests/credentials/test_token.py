"""Join tokens and the owner's key that issues them: written down, read again, kept private."""

import datetime
import stat
from pathlib import Path

import pytest

from swarm.credentials.rights import Role
from swarm.credentials.token import PREFIX, OwnerKey, Token
from tests.support import locked
from tests.support.locked import NOW, OWNER

DAY = datetime.timedelta(days=1)
WHOLE = str(locked.PEER_TOKEN)


def test_a_token_survives_being_written_down() -> None:
    token = OWNER.issue(Role.TRAINER, name="Ada", now=NOW, lifetime=3 * DAY)
    again = Token.parse(f" {token}\n")
    assert str(again) == str(token)
    assert (again.role, again.name, again.authority) == (Role.TRAINER, "Ada", OWNER.authority)
    assert again.expires_at == int((NOW + 3 * DAY).timestamp())
    assert set(str(token)) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")
    assert len(str(token)) < 1300


def _halves() -> str:
    """A key together with another key's certificate."""
    ours, theirs = str(locked.issue()), str(locked.issue())
    return ours[: len(PREFIX) + 43] + theirs[len(PREFIX) + 43 :]


@pytest.mark.parametrize(
    "text",
    ["", "token", PREFIX, PREFIX + "AAAA", WHOLE[:-1], WHOLE[:400], WHOLE[1:], WHOLE + "A", _halves(),
     f"{WHOLE[:500]}!{WHOLE[501:]}", WHOLE[:600] + ("A" if WHOLE[600] != "A" else "B") + WHOLE[601:]],
)  # fmt: skip
def test_what_is_no_token_is_one_line_without_the_secret(text: str) -> None:
    with pytest.raises(ValueError, match=r"^that is no join token: copy all of .*$") as caught:
        Token.parse(text)
    assert len(str(caught.value)) < 150


def test_the_owners_key_is_private_and_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "owner.pem"
    OWNER.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = OwnerKey.load(path)
    assert again.authority == OWNER.authority
    again.authority.member(
        again.issue(Role.PEER, name="x", now=NOW, lifetime=DAY).admit(locked.OPEN).certificate_pem, NOW.timestamp()
    )
    with pytest.raises(FileExistsError, match="is there already"):
        OWNER.save(path)


def test_what_is_no_owners_key_is_one_line(tmp_path: Path) -> None:
    for number, content in enumerate([b"", b"hello", b"\xff\x00", str(locked.PEER_TOKEN).encode()]):
        path = tmp_path / f"{number}.pem"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"is not an owner's key"):
            OwnerKey.load(path)


def test_no_token_outlives_its_owner() -> None:
    with pytest.raises(ValueError, match="the owner's key holds until"):
        OWNER.issue(Role.PEER, name="x", now=NOW, lifetime=4000 * DAY)
    for name in ("", "n" * 65, "swarm-owner"):
        with pytest.raises(ValueError, match="1 to 64 characters"):
            OWNER.issue(Role.PEER, name=name, now=NOW, lifetime=DAY)
