"""The tokens with which the processes of a locked run have joined it, as its owner asks the run for them."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from peers.shared.network import Membership
from peers.shared.token_option import read_token
from swarm.credentials.authority import is_token_id, token_id
from swarm.credentials.token import PREFIX, OwnerKey
from swarm.errors import NotAllowed


@dataclass(frozen=True, kw_only=True)
class TokenInUse:
    """A token with which processes have joined a run.

    Attributes:
        digits: see authority.token_id.
        bearers: the names of these processes.
    """

    name: str
    role: str
    digits: str
    bearers: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name} ({self.digits}), a {self.role}'s: {', '.join(self.bearers)}"


async def tokens_of(member: Membership) -> list[TokenInUse]:
    """The tokens with which the peers and trainers of a locked run have joined, without those that are revoked. Raises
    PeerUnavailable."""
    bearers: dict[tuple[str, str, str], list[str]] = {}
    for name, chain_pem in await member.directory.members(member.blocks):
        assert member.identity.authority is not None, "only a locked run's owner looks for tokens"
        with contextlib.suppress(NotAllowed):
            one = member.identity.authority.member(chain_pem, member.clock.time())
            bearers.setdefault((one.token_name, one.role, token_id(chain_pem)), []).append(name)
    return [
        TokenInUse(name=name, role=role, digits=digits, bearers=tuple(sorted(names)))
        for (name, role, digits), names in sorted(bearers.items())
    ]


def digits_of(text: str, owner: OwnerKey, in_use: Sequence[TokenInUse]) -> str:
    """The digits of the token that --revoke names. Raises ValueError if it names none, several, or another owner's."""
    if text.startswith((PREFIX, "@")):
        token = read_token(text)
        if token.authority.fingerprint != owner.authority.fingerprint:
            raise ValueError(f"the token {token.name!r} is of owner {token.authority.fingerprint[:16]}: not this run's")
        return token.token_id
    if is_token_id(text):
        return text
    named = [token.digits for token in in_use if token.name == text]
    if len(named) == 1:
        return named[0]
    number = f"{len(named)} tokens in use have" if named else "no token in use has"
    listed = "; ".join(map(str, in_use)) or "none"
    raise ValueError(f"{number} the name {text!r}: give the digits of one, or the token itself; in use are {listed}")
