"""The owner of a locked run, as a root certificate with which members check who else is a member, and by which token.

Only certificates decide, and a list of the tokens that the owner has revoked: no other machine is asked.
"""

import datetime
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache

from cryptography import x509
from cryptography.x509 import verification

from swarm.credentials import certificates
from swarm.credentials.rights import Role
from swarm.errors import IntegrityError, NotAllowed
from swarm.types import PeerId

TOKEN_DIGITS = 16
"""How many of the first digits of its fingerprint name a token."""


@lru_cache(maxsize=4096)
def bearer_of(chain_pem: str) -> str | None:
    """The fingerprint of the token that issued the first certificate of a chain; None if no token did.

    Whether the token is one of the run's is not checked.
    """
    try:
        _, *issuers = certificates.load_all(chain_pem)
        return certificates.fingerprint(issuers[0]) if issuers else None
    except IntegrityError:
        return None


def token_id(chain_pem: str) -> str:
    """The digits by which a run's configuration names the token that issued the first certificate of a chain; empty if
    no token did."""
    return (bearer_of(chain_pem) or "")[:TOKEN_DIGITS]


def is_token_id(text: str) -> bool:
    return len(text) == TOKEN_DIGITS and set(text) <= set("0123456789abcdef")


def role_of(token_certificate: x509.Certificate) -> Role:
    """The role that a token's certificate gives its holder. Raises IntegrityError if it names none."""
    with suppress(*certificates.FAULTS):
        usages = list(token_certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
        for role in Role:
            if usages == list(role.usages):
                return role
    raise IntegrityError("a token's certificate names no role")


@dataclass(frozen=True, kw_only=True)
class Member:
    peer_id: PeerId
    role: Role
    begins_at: float
    """Seconds since the epoch."""
    expires_at: float
    """When the member's token expires, in seconds since the epoch."""
    token_name: str


@dataclass(frozen=True)
class Authority:
    """The owner of a locked run, as its members know it."""

    certificate_pem: str
    """The owner's certificate, the root of every chain."""
    _revoked: set[str] = field(default_factory=set, init=False, repr=False, compare=False)

    @property
    def fingerprint(self) -> str:
        """The digest of the owner's key, which is the configuration's `owner`."""
        return _fingerprint(self.certificate_pem)

    def revoke(self, tokens: Iterable[str]) -> None:
        """From now on nobody is a member by these tokens, which are named by `token_id`. May be called in any
        thread."""
        self._revoked.update(tokens)

    def has_revoked(self, chain_pem: str) -> bool:
        """Whether the token that issued the first certificate of a chain is revoked."""
        return bool(self._revoked) and token_id(chain_pem) in self._revoked

    def member(self, chain_pem: str, now: float) -> Member:
        """Return the member to which a chain of certificates (its own, then the token's) belongs. `now` is seconds
        since the epoch. Raises NotAllowed if the text is no such chain, or another owner's, or one that is not valid
        now, or whose token is revoked.
        """
        member = _verified(self.certificate_pem, chain_pem)
        if self.has_revoked(chain_pem):
            raise NotAllowed(f"the run's owner has revoked the token {member.token_name!r} of {member.peer_id[:8]}")
        # The comparison is written with "not", so that it refuses NaN too.
        if not member.begins_at <= now <= member.expires_at:
            raise NotAllowed(f"the token of {member.peer_id[:8]} has expired, or a clock is wrong")
        return member


class Owners(Authority):
    """The owners of several locked runs: a member of one of these runs is a member here.

    `certificate_pem` holds the certificates of all of them. There is no fingerprint.
    """

    def member(self, chain_pem: str, now: float) -> Member:
        """As Authority.member: the member of whichever of these owners vouches for the chain."""
        fault = NotAllowed("no certificate of any owner's run that is served here")
        for owner in certificates.load_all(self.certificate_pem):
            try:
                return Authority(certificates.to_pem(owner)).member(chain_pem, now)
            except NotAllowed as error:
                fault = error
        raise fault


@lru_cache(maxsize=16)
def _fingerprint(certificate_pem: str) -> str:
    return certificates.fingerprint(certificates.load(certificate_pem))


# Cached because every call and every reading of the DHT asks again, and nothing but the time differs.
@lru_cache(maxsize=4096)
def _verified(owner_pem: str, chain_pem: str) -> Member:
    try:
        chain = certificates.load_all(chain_pem)
        if len(chain) != 2:
            raise NotAllowed("no certificate that a token issued: this run is locked, and a token is needed to join")
        own, token = chain
        owner = certificates.load(owner_pem)
        begins_at = max(certificate.not_valid_before_utc for certificate in (own, token, owner))
        expires_at = min(certificate.not_valid_after_utc for certificate in (own, token, owner))
        if begins_at > expires_at:
            raise NotAllowed("a certificate that is never valid")
        _verify_chain(owner, own, token, begins_at)
        return Member(
            peer_id=certificates.peer_id_of(chain_pem),
            role=role_of(token),
            begins_at=begins_at.timestamp(),
            expires_at=expires_at.timestamp(),
            token_name=certificates.common_name(token),
        )
    except (IntegrityError, *certificates.FAULTS) as error:
        raise NotAllowed(f"no certificate of this run: {error}") from None


def _verify_chain(
    owner: x509.Certificate, own: x509.Certificate, token: x509.Certificate, at: datetime.datetime
) -> None:
    policy = verification.PolicyBuilder().store(verification.Store([owner])).time(at).max_chain_depth(1)
    try:
        policy.build_client_verifier().verify(own, [token])
    except (verification.VerificationError, *certificates.FAULTS):
        raise NotAllowed("a certificate that this run's owner did not vouch for") from None
