"""Who may do what in a locked run: the kinds of tokens, and the one table of rights. In an open run everybody may do
everything.

Calls are checked before any servicer sees them (rpc/guard.py), announcements wherever a record of the DHT is read or
stored (dht/records.py), and peers before they are called (rpc/channels.py).
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from cryptography.x509 import ObjectIdentifier
from cryptography.x509.oid import ExtendedKeyUsageOID

from swarm.errors import NotAllowed


class Role(StrEnum):
    """A kind of token. A new one needs a line here and in the table of docs/security.md, and has the rights below whose
    lines name it, and no others."""

    may: str
    """What its holder may do, in words."""
    usages: tuple[ObjectIdentifier, ...]
    """The key usages by which a token's certificate names it, in this order. No two roles have the same."""

    PEER = (
        "peer",
        "serves stages, and all that a trainer may",
        (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH),
    )
    TRAINER = "trainer", "feeds text, and watches", (ExtendedKeyUsageOID.CLIENT_AUTH,)

    def __new__(cls, name: str, may: str, usages: tuple[ObjectIdentifier, ...]) -> Self:
        role = str.__new__(cls, name)
        role._value_, role.may, role.usages = name, may, usages
        return role


Roles = frozenset[Role]
PEERS, TRAINERS = frozenset({Role.PEER}), frozenset({Role.TRAINER})


@dataclass(frozen=True)
class Call:
    """The right to make one call, and the name that is given in it."""

    roles: Roles
    """Whose holders may make it."""
    sender: str = ""
    """The field with the id that the sender gives as its own, which has to be the caller's; empty if there is none."""
    is_required: bool = True
    """Whether each request has to give the id; otherwise those without the message that holds it are not checked."""
    at_stage_0: Roles = frozenset()
    """Whose holders may make it at stage 0 as well: later stages take activations from peers alone."""


CALLS = {
    "/grpc.health.v1.Health/Check": Call(PEERS | TRAINERS),
    "/swarm.rpc.v1.AveragingService/Abort": Call(PEERS, "peer_id"),
    "/swarm.rpc.v1.AveragingService/Average": Call(PEERS, "peer_id"),
    "/swarm.rpc.v1.AveragingService/Barrier": Call(PEERS, "peer_id"),
    "/swarm.rpc.v1.AveragingService/Begin": Call(PEERS, "peer_id"),
    "/swarm.rpc.v1.AveragingService/Commit": Call(PEERS, "peer_id"),
    "/swarm.rpc.v1.AveragingService/Download": Call(PEERS, "peer_id"),
    "/swarm.rpc.v1.AveragingService/Exchange": Call(PEERS, "open.peer_id", is_required=False),
    "/swarm.rpc.v1.AveragingService/Report": Call(PEERS, "sender.peer_id"),
    "/swarm.rpc.v1.AveragingService/Shared": Call(PEERS, "peer_id"),
    "/swarm.rpc.v1.ContentService/Tokenizer": Call(PEERS | TRAINERS, "peer_id"),
    "/swarm.rpc.v1.ContentService/Weights": Call(PEERS, "peer_id"),
    "/swarm.rpc.v1.DirectoryService/Read": Call(PEERS | TRAINERS),
    "/swarm.rpc.v1.GenerationService/Generate": Call(PEERS, at_stage_0=TRAINERS),
    "/swarm.rpc.v1.LeaseService/Acquire": Call(PEERS | TRAINERS, "trainer_id"),
    "/swarm.rpc.v1.MeetingService/Check": Call(PEERS | TRAINERS, "peer_id"),
    "/swarm.rpc.v1.MeetingService/Connect": Call(PEERS | TRAINERS),
    "/swarm.rpc.v1.MeetingService/Meet": Call(PEERS | TRAINERS),
    "/swarm.rpc.v1.MeetingService/Take": Call(PEERS),
    "/swarm.rpc.v1.MeetingService/Wait": Call(PEERS),
    "/swarm.rpc.v1.ProbeService/Probe": Call(PEERS | TRAINERS),
    "/swarm.rpc.v1.StageService/Describe": Call(PEERS | TRAINERS, "caller.peer_id", is_required=False),
    "/swarm.rpc.v1.StageService/Evaluate": Call(PEERS, at_stage_0=TRAINERS),
    "/swarm.rpc.v1.StageService/Hold": Call(PEERS, at_stage_0=TRAINERS),
    "/swarm.rpc.v1.StageService/Show": Call(PEERS),
    "/swarm.rpc.v1.StageService/SpotCheck": Call(PEERS, at_stage_0=TRAINERS),
    "/swarm.rpc.v1.StageService/Train": Call(PEERS, at_stage_0=TRAINERS),
}
"""Every call there is, by its method. A server serves no others."""

ANNOUNCEMENTS = {"trainers": PEERS | TRAINERS, "": PEERS}
"""Who may announce itself under a key of the DHT that ends so, or else (of runs, stages, claims) as the last line says.
"""

SERVING = PEERS
"""Who may serve others: a caller believes nobody else's answers."""

PROGRAMS = {
    "swarm-dashboard": PEERS | TRAINERS,
    "swarm-doctor": PEERS | TRAINERS,
    "swarm-generate": PEERS | TRAINERS,
    "swarm-keys": PEERS,
    "swarm-local": PEERS,
    "swarm-model": PEERS,
    "swarm-peer": PEERS,
    "swarm-status": PEERS | TRAINERS,
    "swarm-trainer": PEERS | TRAINERS,
}
"""With whose tokens each program can do its work. Those that enter no run are not there."""


def require_call(role: Role, method: str, stage: int) -> None:
    """Raise NotAllowed unless a member with this role may make a call at a peer of this stage."""
    call = CALLS[method]
    if role not in call.roles and not (stage == 0 and role in call.at_stage_0):
        name = method.rpartition("/")[2]
        raise NotAllowed(f"a {role}'s token does not give the right to call {name} at stage {stage}")


def require_announcement(role: Role, key: str) -> None:
    if role not in ANNOUNCEMENTS.get(key.rpartition(".")[2], ANNOUNCEMENTS[""]):
        raise NotAllowed(f"a {role}'s token does not give the right to announce oneself under {key}")


def require_serving(role: Role) -> None:
    if role not in SERVING:
        raise NotAllowed(f"it has a {role}'s token")


def require_program(role: Role, prog: str) -> None:
    """Raise ValueError unless a program can do its work with a token of this role."""
    if role not in PROGRAMS[prog]:
        needed = " or ".join(sorted(PROGRAMS[prog]))
        raise ValueError(f"the token is a {role}'s: ask the run's owner for one with --role {needed}")
