"""The tally of a block: what each peer has given to its committed rounds, since the run began.

Every member of a round adds the same numbers to the tally, which is a part of the block's state like its lineage, and
signs what comes of it, together with what it holds against others (complaints). Whoever has a tally from a peer or a
checkpoint can check by whom it is signed. Only what members said is in it: that somebody computed what it gave is not
proven.
"""

import base64
import dataclasses
import hashlib
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, Self

from swarm.credentials import certificates
from swarm.errors import IntegrityError
from swarm.training.complaints import FEW_ACCUSERS, Complaints, Named
from swarm.types import LARGEST_COUNT, Block

MOST_PEERS = 1000
"""Of more peers, those that have given the least are counted together, under OTHERS."""
OTHERS = "others"
LONGEST = 4 << 20
"""The most characters of a tally's text."""


class Given(NamedTuple):
    """What a peer has given: samples that count, the targets in them, the bytes that it sent for averages, and the
    number of rounds in which it was a member."""

    samples: int = 0
    targets: int = 0
    num_bytes: int = 0
    rounds: int = 0

    def plus(self, other: "Given") -> "Given":
        return Given(*(min(LARGEST_COUNT, a + b) for a, b in zip(self, other, strict=True)))


NOTHING_GIVEN = Given()


class Signature(NamedTuple):
    """A signature, the public key of the signer as a point (credentials/certificates), the digest of the tally that it
    has signed, and the text of its complaints, which it has signed with that; empty if it has none."""

    point: bytes
    signature: bytes
    digest: str
    complaints: str = ""

    @property
    def peer_id(self) -> str:
        """Of the signer; empty if there is no such key."""
        try:
            return certificates.fingerprint_of(certificates.key_at(self.point))[:40]
        except ValueError:
            return ""


Sign = Callable[[bytes], tuple[bytes, bytes]]
"""Signs a message: returns the point of the signer's public key, and the signature."""


@dataclass(frozen=True, kw_only=True)
class Tally:
    """A block's tally after a round.

    Attributes:
        since: the first round that is counted.
        round: the last one; -1 if none is.
        parent: the lineage before that round.
        result: the digest of its result.
        members: its members.
        peers: what each peer has given, by id.
        signatures: by the id of a member of the last round, as they came. `signers` tells which of them hold.
    """

    since: int = 0
    round: int = -1
    parent: str = ""
    result: str = ""
    members: tuple[str, ...] = ()
    peers: Mapping[str, Given] = field(default_factory=dict)
    signatures: Mapping[str, Signature] = field(default_factory=dict)

    def after(self, number: int, *, parent: str, result: str, given: Mapping[str, Given]) -> "Tally":
        """The tally after one more round, unsigned. If the round does not follow the last one, counting begins anew
        with it; if nobody says what was given to it, after it."""
        if not given:
            return EMPTY
        follows = number == self.round + 1
        peers = dict(self.peers) if follows else {}
        for peer_id, gave in given.items():
            peers[peer_id] = peers.get(peer_id, NOTHING_GIVEN).plus(gave)
        return Tally(
            since=self.since if follows else number, round=number, parent=parent, result=result,
            members=tuple(sorted(given)), peers=_bounded(peers),
        )  # fmt: skip

    @property
    def digest(self) -> str:
        """Covers all but the signatures, and the last round's lineage and result, which event logs have beside it."""
        rows = dict(sorted(self.peers.items()))
        return hashlib.sha256(json.dumps([self.since, self.round, self.members, rows]).encode()).hexdigest()

    # -- signatures --------------------------------------------------------------------------------------------------

    def sign(self, sign: Sign, run_id: str, block: Block, complaints: str = "") -> Signature:
        return Signature(*sign(self._statement(run_id, block, self.digest, complaints)), self.digest, complaints)

    def _statement(self, run_id: str, block: Block, digest: str, complaints: str) -> bytes:
        words = ["swarm tally", run_id, str(block), self.parent, self.result, digest]
        return json.dumps(words + [complaints] * bool(complaints)).encode()

    def _holds(self, signature: Signature, run_id: str, block: Block) -> bool:
        statement = self._statement(run_id, block, signature.digest, signature.complaints)
        return _is_signed(statement, signature.point, signature.signature)

    def settled(self, signatures: Iterable[Signature], run_id: str, block: Block) -> "Tally":
        """The tally with its members' signatures. If at least half of them have signed one and the same other tally, or
        several, nobody can say which is right, so counting begins anew. Blocks if some have."""
        own, by_id = self.digest, {each.peer_id: each for each in signatures}
        by_id = {peer_id: each for peer_id, each in by_id.items() if peer_id in self.members}
        others = [each for each in by_id.values() if each.digest != own and self._holds(each, run_id, block)]
        if others and 2 * len(others) >= len(self.members):
            return EMPTY
        return dataclasses.replace(self, signatures={p: each for p, each in by_id.items() if each.digest == own})

    def signers(self, run_id: str, block: Block) -> set[str]:
        own = self.digest
        return {
            peer_id
            for peer_id, each in self.signatures.items()
            if peer_id in self.members and (each.peer_id, each.digest) == (peer_id, own)
            and self._holds(each, run_id, block)
        }  # fmt: skip

    def is_signed_by_most(self, run_id: str, block: Block) -> bool:
        return 2 * len(self.signers(run_id, block)) > len(self.members)

    # -- complaints --------------------------------------------------------------------------------------------------

    def complaints(self, signers: Collection[str]) -> dict[str, Complaints]:
        """What those of these signers hold against others that hold anything."""
        said = {peer_id: self.signatures[peer_id].complaints for peer_id in sorted(signers)}
        return {peer_id: Complaints.read(text) for peer_id, text in said.items() if text}

    def named_by(self, complaints: Mapping[str, Complaints]) -> dict[str, Named]:
        """Whom most members of the last round name, by the complaints of some. Of what they say of one, that with the
        median round counts."""
        found: dict[str, list[Named]] = defaultdict(list)
        for each in complaints.values():
            for peer_id, named in each.named.items():
                if named.round <= self.round:
                    found[peer_id].append(named)
        return {
            peer_id: statistics.median_low(told)
            for peer_id, told in found.items()
            if len(told) > FEW_ACCUSERS and 2 * len(told) > len(self.members)
        }

    def named(self, signatures: Iterable[Signature], run_id: str, block: Block) -> dict[str, Named]:
        """Whom most members name, by those of these signatures that hold, though they be over other tallies. Blocks if
        some have complaints."""
        held = {
            each.peer_id: Complaints.read(each.complaints)
            for each in signatures
            if each.complaints and each.peer_id in self.members and self._holds(each, run_id, block)
        }
        return self.named_by(held)

    # -- as text -----------------------------------------------------------------------------------------------------

    def to_text(self) -> str:
        signatures = {
            peer: [_text(each.point), _text(each.signature), each.complaints] for peer, each in self.signatures.items()
        }
        return json.dumps(vars(self) | {"signatures": signatures}, separators=(",", ":"))

    @classmethod
    def read(cls, text: str) -> Self:
        """The inverse of `to_text`. Raises IntegrityError for anything else."""
        try:
            if len(text) > LONGEST:
                raise ValueError
            values: dict[str, Any] = json.loads(text)
            tally = cls(
                since=int(values["since"]), round=int(values["round"]), parent=_word(values["parent"]),
                result=_word(values["result"]), members=tuple(map(_word, values["members"])),
                peers={_word(peer): _given(row) for peer, row in values["peers"].items()},
            )  # fmt: skip
            if not 0 <= tally.since <= tally.round + 1:
                raise ValueError
            own, signed = tally.digest, values["signatures"].items()
            signatures = {
                str(peer): Signature(_bytes(point), _bytes(made), own, str(complaints))
                for peer, (point, made, complaints) in signed
            }
            return dataclasses.replace(tally, signatures=signatures)
        except (ValueError, OverflowError, KeyError, TypeError, AttributeError, RecursionError):
            raise IntegrityError("what was said to be a tally is none") from None


EMPTY = Tally()


@lru_cache(maxsize=256)
def _is_signed(statement: bytes, point: bytes, signature: bytes) -> bool:
    """Remembered, because a commit asks twice about members with complaints: for the tally, and for whom they name."""
    try:
        certificates.verify(certificates.key_at(point), statement, signature)
    except (ValueError, IntegrityError):
        return False
    return True


def by_peer(tallies: Mapping[Block, Tally]) -> dict[str, dict[Block, Given]]:
    """What each peer has given, at each block; those that have given the most samples come first."""
    found: dict[str, dict[Block, Given]] = {}
    for block, tally in sorted(tallies.items()):
        for peer_id, gave in tally.peers.items():
            found.setdefault(peer_id, {})[block] = gave
    return dict(sorted(found.items(), key=lambda item: (-total(item[1]).samples, item[0])))


def total(given: Mapping[Block, Given]) -> Given:
    """Over all blocks. A sample that passes through two blocks of a peer counts at each of them."""
    summed = NOTHING_GIVEN
    for gave in given.values():
        summed = summed.plus(gave)
    return summed


def _bounded(peers: dict[str, Given]) -> dict[str, Given]:
    most_first = sorted(peers.items(), key=lambda item: (item[0] == OTHERS, item[1], item[0]), reverse=True)
    # OTHERS comes first, and does not count.
    most = MOST_PEERS + (OTHERS in peers)
    kept = dict(most_first[:most])
    for _, gave in most_first[most:]:
        kept[OTHERS] = kept.get(OTHERS, NOTHING_GIVEN).plus(gave)
    return kept


def _given(row: Any) -> Given:
    given = Given(*map(int, row))
    if len(row) != len(given) or not all(0 <= number <= LARGEST_COUNT for number in given):
        raise ValueError
    return given


def _word(text: str) -> str:
    """An id or a digest, which is hashed, and shown to people. Raises ValueError for what can be none."""
    if not (text.isascii() and text.isprintable()):
        raise ValueError
    return text


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
