"""The owner, tokens and members of a locked run, and intruders."""

import datetime
from dataclasses import replace

from swarm.credentials import certificates
from swarm.credentials.identity import Identity, generate
from swarm.credentials.rights import Role
from swarm.credentials.token import OwnerKey, Token, new_owner

NOW = datetime.datetime.now(datetime.UTC)
OWNER, STRANGER = (new_owner(NOW - datetime.timedelta(days=60)) for _ in range(2))
"""The owner's key of the run, and that of another run."""


def issue(role: Role = Role.PEER, *, by: OwnerKey = OWNER, days: float = 30.0, made: datetime.datetime = NOW) -> Token:
    """A token that was made at `made`, and is valid for this many days."""
    return by.issue(role, name="test", now=made, lifetime=datetime.timedelta(days=days))


def expired(role: Role = Role.PEER) -> Token:
    return issue(role, days=29 + 23 / 24, made=NOW - datetime.timedelta(days=30))


PEER_TOKEN, TRAINER_TOKEN = issue(), issue(Role.TRAINER)
PEER, OTHER_PEER = PEER_TOKEN.admit(generate()), PEER_TOKEN.admit(generate())
TRAINER = TRAINER_TOKEN.admit(generate())
EXPIRED = expired().admit(generate())
FOREIGN = issue(by=STRANGER).admit(generate())
"""A member of the other run."""
OPEN = generate()
"""An identity without a token."""


def as_member_of_ours(intruder: Identity) -> Identity:
    """An intruder's identity that trusts our owner, whatever its own certificates say."""
    return replace(intruder, authority=OWNER.authority)


def passed_on() -> Identity:
    """An identity whose certificate was issued with a member's certificate instead of the owner's."""
    issuer, key = certificates.load(PEER.certificate_pem), certificates.load_key(PEER.key_pem)
    return Token(certificate=issuer, key=key, owner=OWNER.certificate).admit(generate())


def promoted() -> Identity:
    """An identity with a peer's certificate that was issued with a trainer's token."""
    token = TRAINER_TOKEN
    as_peer = issue(by=OwnerKey(key=token.key, certificate=OWNER.certificate), days=1.0)
    own = replace(as_peer, key=token.key).admit(generate())
    chain_pem = certificates.first_pem(own.certificate_pem) + certificates.to_pem(token.certificate)
    return replace(own, certificate_pem=chain_pem)
