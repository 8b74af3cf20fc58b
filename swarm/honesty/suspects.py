"""What the owners of parts say of the members of one block, and what follows: who is left out of a round, and who is
named as a liar.

Each owner tells every member which contributions it found out of line in its part, together with the part's sum. One
round proves nothing: the gradient of odd text is as far from the others as a lie (docs/security.md has figures). So a
member is left out once it was out of line in most of the last rounds, and by the word of most owners. These need not
find it in the same round, because a lie may be in one layer only: as long as somebody is in doubt, parts change hands
from round to round, so that other owners see that layer. An owner that accuses somebody wherever its part is, while the
others see nothing in the same places, is named itself. Knows no network and no tensors.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from swarm.honesty.comparison import Deviation

logger = logging.getLogger(__name__)

ROUNDS = 5
"""What owners say counts in this many rounds."""
LEFT_OUT_AFTER, NAMED_AFTER = 3, 4
"""In so many of these rounds a member must be out of line to be left out of the present one, and to be named."""
FORGIVEN_AFTER = 100
"""A member that was named is forgiven after so many rounds without another lie."""
FEW_ACCUSERS = 2
"""An accusation by so many owners, or fewer, may be false."""


@dataclass(eq=False)
class Suspects:
    """One member's conclusions about the other members of its block, and about itself."""

    _words: dict[str, dict[int, dict[str, str]]] = field(default_factory=dict, init=False)
    """What was said in the last rounds: by accused member, round, and owner."""
    _alone: dict[tuple[str, str], set[int]] = field(default_factory=dict, init=False)
    """By owner and accused member: the places in the order of parts where the owner has accused it with few others."""
    _left_out: dict[str, int] = field(default_factory=dict, init=False)
    """The last round of which each member was left out."""
    _lines: dict[str, tuple[int, str]] = field(default_factory=dict, init=False)
    """A line for each member that is named, and the round in which it lied last; under an empty id one about
    contributions that differ, of which nobody can say whose is wrong."""
    _false: set[str] = field(default_factory=set, init=False)
    """The owners whose word does not count any more."""

    @property
    def lines(self) -> list[str]:
        """A line for each member that was found to lie, or to accuse others falsely, and one if nobody can say who
        lies."""
        return [self._lines[peer][1] for peer in sorted(self._lines)]

    def is_named(self, peer_id: str) -> bool:
        return peer_id in self._lines

    def out_of(self, round_number: int) -> list[str]:
        """The members that are to be left out of a round."""
        return [peer for peer, number in self._left_out.items() if number == round_number]

    def in_order(self, peer_ids: Collection[str], round_number: int) -> list[str]:
        """The members in the order in which they own parts: that of their ids, and while somebody is in doubt another
        one in each round."""
        ordered = sorted(peer_ids)
        shift = round_number % len(ordered) if self._words else 0
        return ordered[shift:] + ordered[:shift]

    def judge(
        self, round_number: int, said: Mapping[str, Sequence[Deviation]], member_ids: Sequence[str]
    ) -> list[Deviation]:
        """Take in what the owners of an exchange's parts say. Returns the members that are to be left out of this
        round, with what owners say of each.

        Args:
            said: by owner, also of those that say nothing of anybody.
            member_ids: the members of the exchange, in the order of their parts.
        """
        self._forget(round_number)
        for owner, deviations in said.items():
            for each in deviations if owner not in self._false else ():
                if not each.peer_id:
                    self._note_undecided(each.reason, round_number, len(member_ids))
                elif each.peer_id in member_ids and each.peer_id != owner:
                    rounds = self._words.setdefault(each.peer_id, {})
                    rounds.setdefault(round_number, {})[owner] = each.reason
        self._find_false_accusers(round_number, said.keys(), member_ids)
        accused = [peer for peer in sorted(self._words) if round_number in self._words[peer] and peer in member_ids]
        return [found for peer in accused if (found := self._judge(peer, round_number, said.keys() - {peer}))]

    def _judge(self, peer: str, round_number: int, owners: Collection[str]) -> Deviation | None:
        rounds = self._words[peer]
        accusers = {owner for words in rounds.values() for owner in words if owner in owners}
        if len(rounds) < LEFT_OUT_AFTER or len(accusers) <= FEW_ACCUSERS or 2 * len(accusers) <= len(owners):
            return None
        reason = next(iter(rounds[round_number].values()))
        why = f"{len(accusers)} of {len(owners)} owners of other parts say so, in {len(rounds)} of the last rounds"
        why = f"{why}: {reason}"
        self._left_out[peer] = round_number
        logger.warning("the contribution of %s to round %d is out of line: %s", peer, round_number, why)
        if len(rounds) >= NAMED_AFTER:
            self._name(peer, round_number, f"{peer} lies: its contributions are out of line again and again; {why}")
        return Deviation(peer_id=peer, reason=why)

    def _find_false_accusers(self, round_number: int, owners: Collection[str], member_ids: Sequence[str]) -> None:
        """Name the owners that have accused somebody in nearly all places, each time with few others at most."""
        for peer, rounds in self._words.items():
            words = rounds.get(round_number, {})
            # Those that spoke in an earlier attempt at this round may not be there any more.
            for owner in sorted(words.keys() & set(member_ids)) if len(words) <= FEW_ACCUSERS else ():
                places = self._alone.setdefault((owner, peer), set())
                places.add(member_ids.index(owner))
                if 4 * len(places) > 3 * len(owners) > 4 * FEW_ACCUSERS:
                    self._false.add(owner)
                    line = f"{owner} lies: it says wherever its part is that {peer} is out of line ({words[owner]})"
                    self._name(owner, round_number, f"{line}, and most others see nothing there")
        for rounds in self._words.values():
            for words in rounds.values():
                for owner in words.keys() & self._false:
                    del words[owner]
        self._drop_empty()

    def _note_undecided(self, reason: str, round_number: int, num_members: int) -> None:
        what = f"the contributions to round {round_number} differ: {reason}"
        self._name("", round_number, f"{what}; among {num_members} members nobody can say whose is wrong")

    def _name(self, peer: str, round_number: int, line: str) -> None:
        if peer not in self._lines:
            logger.warning("%s", line)
        self._lines[peer] = round_number, line

    def _forget(self, round_number: int) -> None:
        for rounds in self._words.values():
            for number in [number for number in rounds if number <= round_number - ROUNDS]:
                del rounds[number]
        self._drop_empty()
        # An owner that has nothing more against a member begins anew.
        self._alone = {key: places for key, places in self._alone.items() if key[1] in self._words}
        for peer in [peer for peer, (number, _) in self._lines.items() if number <= round_number - FORGIVEN_AFTER]:
            del self._lines[peer]
            self._false.discard(peer)
        self._left_out = {peer: number for peer, number in self._left_out.items() if number == round_number}

    def _drop_empty(self) -> None:
        kept = {peer: {n: words for n, words in rounds.items() if words} for peer, rounds in self._words.items()}
        self._words = {peer: rounds for peer, rounds in kept.items() if rounds}
