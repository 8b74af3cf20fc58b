"""Which peers are members of a locked run, by certificates alone."""

import pytest

from swarm.credentials import certificates
from swarm.credentials.identity import generate
from swarm.credentials.rights import Role
from swarm.errors import NotAllowed
from tests.support import locked
from tests.support.locked import OWNER, PEER, PEER_TOKEN, TRAINER

NOW = locked.NOW.timestamp()
DAY = 86_400.0


def test_a_token_makes_members_of_any_number_of_keys() -> None:
    for role, token in ((Role.PEER, PEER_TOKEN), (Role.TRAINER, locked.TRAINER_TOKEN)):
        for identity in (generate(), generate()):
            admitted = token.admit(identity)
            member = OWNER.authority.member(admitted.certificate_pem, NOW)
            assert (member.peer_id, member.role) == (identity.peer_id, role)
            assert admitted.peer_id == identity.peer_id == certificates.peer_id_of(admitted.certificate_pem)


def test_membership_ends_with_the_token() -> None:
    member = OWNER.authority.member(PEER.certificate_pem, NOW + 29.9 * DAY)
    assert member.expires_at == PEER_TOKEN.expires_at
    for when in (NOW + 30.1 * DAY, NOW - 2 * DAY, float("nan")):
        with pytest.raises(NotAllowed, match="has expired, or a clock is wrong"):
            OWNER.authority.member(PEER.certificate_pem, when)


TOKEN_ALONE = certificates.to_pem(PEER_TOKEN.certificate)
OWN_ALONE = certificates.first_pem(PEER.certificate_pem)


@pytest.mark.parametrize(
    "chain_pem",
    [
        "",
        "no certificate",
        locked.OPEN.certificate_pem,
        locked.OPEN.certificate_pem + TOKEN_ALONE,
        locked.FOREIGN.certificate_pem,
        OWN_ALONE,
        TOKEN_ALONE,
        TOKEN_ALONE + TOKEN_ALONE,
        TOKEN_ALONE + OWNER.authority.certificate_pem,
        OWN_ALONE + TOKEN_ALONE + OWNER.authority.certificate_pem,
        OWN_ALONE + certificates.to_pem(locked.TRAINER_TOKEN.certificate),
        certificates.first_pem(TRAINER.certificate_pem) + TOKEN_ALONE,
        OWN_ALONE + OWNER.authority.certificate_pem,
        locked.passed_on().certificate_pem,
        TOKEN_ALONE + OWN_ALONE,
    ],
)
def test_nobody_else_is_a_member(chain_pem: str) -> None:
    with pytest.raises(NotAllowed):
        OWNER.authority.member(chain_pem, NOW)


def test_a_trainer_cannot_make_itself_a_peer() -> None:
    assert OWNER.authority.member(locked.promoted().certificate_pem, NOW).role is Role.TRAINER


def test_a_revoked_token_makes_no_members_and_others_of_its_name_do() -> None:
    token, same_name = locked.issue(), locked.issue()
    ours, theirs = OWNER.authority, token.authority
    first, second = token.admit(generate()), token.admit(generate())
    ours.revoke([token.token_id])
    for one in (first, second):
        assert ours.has_revoked(one.certificate_pem)
        with pytest.raises(NotAllowed, match=f"has revoked the token 'test' of {one.peer_id[:8]}"):
            ours.member(one.certificate_pem, NOW)
        assert theirs.member(one.certificate_pem, NOW).peer_id == one.peer_id, "who has not heard of it lets them in"
    other = same_name.admit(generate())
    assert ours.member(other.certificate_pem, NOW).token_name == "test"
    assert not ours.has_revoked(locked.OPEN.certificate_pem)
    assert ours == OWNER.authority
