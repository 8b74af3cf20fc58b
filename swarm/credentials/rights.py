"""Who may do what in a locked run: the kinds of tokens, and the one table of rights. In an open run everybody may do
everything.

Calls are checked before any servicer sees them (rpc/guard.py), announcements wherever a record of the DHT is read or
stored (dht/records.py), and peers before they are called (rpc/channels.py).
"""

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Self

from cryptography.x509 import ObjectIdentifier
from cryptography.x509.oid import ExtendedKeyUsageOID

from swarm.errors import NotAllowed


class Role(StrEnum):
    """A kind of token. A new one needs a line here, and in the table of docs/security.md; all else follows."""

    may: str
    """What its holder may do, in words."""
    usages: tuple[ObjectIdentifier, ...]
    """The key usages by which a token's certificate names it, in this order. No two roles have the same."""
    _included: frozenset[str]

    PEER = (
        "peer",
        "serves stages, and all that a trainer may",
        (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH),
        "trainer",
    )
    TRAINER = "trainer", "feeds text, and watches", (ExtendedKeyUsageOID.CLIENT_AUTH,)

    def __new__(cls, name: str, may: str, usages: tuple[ObjectIdentifier, ...], *included: str) -> Self:
        role = str.__new__(cls, name)
        role._value_, role.may, role.usages = name, may, usages
        role._included = frozenset({name, *included})
        return role

    def covers(self, needed: "Role") -> bool:
        """Whether its holder may do all that the other's holder may."""
        return needed in self._included


class Who(Enum):
    MEMBERS = "whoever has a token"
    FEEDERS = "peers, and at stage 0 trainers too: later stages take activations from peers alone"
    PEERS = "whoever has a peer's token"


@dataclass(frozen=True)
class Call:
    """The right to make one call, and the name that is given in it."""

    who: Who
    sender: str = ""
    """The field with the id that the sender gives as its own, which has to be the caller's; empty if there is none."""
    is_required: bool = True
    """Whether each request has to give the id; otherwise those without the message that holds it are not checked."""


CALLS = {
    "/grpc.health.v1.Health/Check": Call(Who.MEMBERS),
    "/swarm.rpc.v1.AveragingService/Abort": Call(Who.PEERS, "peer_id"),
    "/swarm.rpc.v1.AveragingService/Average": Call(Who.PEERS, "peer_id"),
    "/swarm.rpc.v1.AveragingService/Barrier": Call(Who.PEERS, "peer_id"),
    "/swarm.rpc.v1.AveragingService/Begin": Call(Who.PEERS, "peer_id"),
    "/swarm.rpc.v1.AveragingService/Commit": Call(Who.PEERS, "peer_id"),
    "/swarm.rpc.v1.AveragingService/Download": Call(Who.PEERS, "peer_id"),
    "/swarm.rpc.v1.AveragingService/Exchange": Call(Who.PEERS, "open.peer_id", is_required=False),
    "/swarm.rpc.v1.AveragingService/Report": Call(Who.PEERS, "sender.peer_id"),
    "/swarm.rpc.v1.AveragingService/Shared": Call(Who.PEERS, "peer_id"),
    "/swarm.rpc.v1.ContentService/Tokenizer": Call(Who.MEMBERS, "peer_id"),
    "/swarm.rpc.v1.ContentService/Weights": Call(Who.PEERS, "peer_id"),
    "/swarm.rpc.v1.DirectoryService/Read": Call(Who.MEMBERS),
    "/swarm.rpc.v1.GenerationService/Generate": Call(Who.FEEDERS),
    "/swarm.rpc.v1.LeaseService/Acquire": Call(Who.MEMBERS, "trainer_id"),
    "/swarm.rpc.v1.MeetingService/Check": Call(Who.MEMBERS, "peer_id"),
    "/swarm.rpc.v1.MeetingService/Connect": Call(Who.MEMBERS),
    "/swarm.rpc.v1.MeetingService/Meet": Call(Who.MEMBERS),
    "/swarm.rpc.v1.MeetingService/Take": Call(Who.PEERS),
    "/swarm.rpc.v1.MeetingService/Wait": Call(Who.PEERS),
    "/swarm.rpc.v1.ProbeService/Probe": Call(Who.MEMBERS),
    "/swarm.rpc.v1.StageService/Describe": Call(Who.MEMBERS, "caller.peer_id", is_required=False),
    "/swarm.rpc.v1.StageService/Evaluate": Call(Who.FEEDERS),
    "/swarm.rpc.v1.StageService/Hold": Call(Who.FEEDERS),
    "/swarm.rpc.v1.StageService/Show": Call(Who.PEERS),
    "/swarm.rpc.v1.StageService/SpotCheck": Call(Who.FEEDERS),
    "/swarm.rpc.v1.StageService/Train": Call(Who.FEEDERS),
}
"""Every call there is, by its method. A server serves no others."""

ANNOUNCEMENTS = {"trainers": Who.MEMBERS}
"""Who may announce itself under a key of the DHT that ends so. Under all others (of runs, stages, claims) peers may."""

SERVING = Who.PEERS
"""Who may serve others: a caller believes nobody else's answers."""


def require_call(role: Role, method: str, stage: int) -> None:
    """Raise NotAllowed unless a member with this role may make a call at a peer of this stage."""
    who = CALLS[method].who
    if not _is_one(role, who) and not (who is Who.FEEDERS and stage == 0 and role.covers(Role.TRAINER)):
        name = method.rpartition("/")[2]
        raise NotAllowed(f"a {role}'s token does not give the right to call {name} at stage {stage}")


def require_announcement(role: Role, key: str) -> None:
    if not _is_one(role, ANNOUNCEMENTS.get(key.rpartition(".")[2], Who.PEERS)):
        raise NotAllowed(f"a {role}'s token does not give the right to announce oneself under {key}")


def require_serving(role: Role) -> None:
    if not _is_one(role, SERVING):
        raise NotAllowed(f"it has a {role}'s token")


def _is_one(role: Role, who: Who) -> bool:
    return who is Who.MEMBERS or role.covers(Role.PEER)
