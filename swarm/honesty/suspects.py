"""What the owners of parts say of the members of one block, and what follows: who is left out of a round, and who is
named as a liar.

Each owner tells every member which contributions it found out of line in its part, together with the part's sum. One
round proves little: the gradient of odd text is as far from the others as a lie (docs/security.md has figures). Only
what no honest contribution is, by the word of most other owners, is left out at once, and nobody is named for it. What
most have found by computing is left out at once as well, and its member named. Else a member is left out once it was
out of line in most of the last rounds, at one place of the vector or by the word of many owners, and if most owners
have said so by then. They need not all find it in the same round, because a lie may be in one layer only: as long as
somebody is in doubt, parts change hands from round to round, so that other owners see that layer. By chance an honest
member is out of line at one place now and at another one later, which counts for nothing. Where an owner accuses
somebody round after round wherever its part is, while the others see nothing in the same places, a line names both:
either may be lying, the owner to all, or the other one to this owner alone. Knows no network and no tensors.
"""

import logging
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain

from swarm.honesty.comparison import Deviation
from swarm.training.complaints import FEW_ACCUSERS, Complaints, Named, Word

logger = logging.getLogger(__name__)

ROUNDS = 5
"""What owners say counts in this many rounds."""
DOUBTED_AFTER, LEFT_OUT_AFTER, NAMED_AFTER = 2, 3, 4
"""In so many of these rounds a member must be out of line for parts to change hands, to be left out of the present one,
and to be named."""
MANY_WORDS, MOST_OF_A_ROUND = 10, 3
"""So many words of owners, of which so many of each round count, must be about a member in these rounds to name it. If
there are fewer, it is named only if it is out of line at one place in all of these rounds, but for one in which it
owned that place itself."""
FORGIVEN_AFTER = 100
"""A member that was named is forgiven after so many rounds without another lie."""
ALONE_ROUNDS = 8
"""For so many rounds in a row an owner must accuse a member, with few others, for a line to name both."""
MOST_SHOWN = 8
"""In a line, the most of those that accuse somebody."""
LARGE_PART = 1.5
"""Who owns so many times as much as its even part may see what others do not."""


@dataclass(eq=False)
class _Words:
    """What owners said of one member in one round.

    Attributes:
        own_part: the member's own.
        by_owner: each one's part, and its reason.
        clear_to: the owners to which it is clear.
        num_owners: those that could have said it.
    """

    own_part: slice
    by_owner: dict[str, tuple[slice, str]] = field(default_factory=dict)
    clear_to: set[str] = field(default_factory=set)
    num_owners: int = 0

    @property
    def are_by_many(self) -> bool:
        """Whether at least a third of the owners say it, and more than a few."""
        return len(self.by_owner) > FEW_ACCUSERS and 3 * len(self.by_owner) >= self.num_owners

    def are_about(self, place: int) -> bool:
        """Whether they say that the member was out of line there: as the owner of that place does, or many do."""
        return self.are_by_many or any(_has(part, place) for part, _ in self.by_owner.values())


_Verdict = tuple[Deviation, Named | None]
"""A member that is to be left out of a round, with the reason, and what it is named for if it is."""


def _has(part: slice, place: int) -> bool:
    return bool(part.start <= place < part.stop)


@dataclass(eq=False)
class _Alone:
    """The rounds in a row in which an owner has accused a member, with few others.

    Attributes:
        places: where its part was, as an index among the parts.
        accusers: all that accused the member in these rounds.
    """

    rounds: set[int] = field(default_factory=set)
    places: set[int] = field(default_factory=set)
    accusers: set[str] = field(default_factory=set)


def _agreement(place: int, rounds: Collection[_Words]) -> tuple[int, bool]:
    """In how many of the rounds a member was out of line at a place, and whether in all in which others owned it."""
    num_rounds = sum(words.are_about(place) for words in rounds)
    num_unknown = sum(_has(words.own_part, place) and not words.are_about(place) for words in rounds)
    return num_rounds, num_rounds >= NAMED_AFTER and num_rounds + num_unknown == ROUNDS


def _most_agreement(rounds: Collection[_Words]) -> tuple[int, bool]:
    """The same at the place at which the member was out of line in the most rounds."""
    places = {part.start for words in rounds for part, _ in words.by_owner.values()}
    return max(_agreement(place, rounds) for place in places)


@dataclass(eq=False)
class Suspects:
    """One member's conclusions about the other members of its block, and about itself."""

    _words: dict[str, dict[int, _Words]] = field(default_factory=dict, init=False)
    """What was said in the last rounds, by accused member and round."""
    _alone: dict[tuple[str, str], _Alone] = field(default_factory=dict, init=False)
    """By owner and accused member."""
    _computed: dict[str, dict[str, dict[int, Deviation]]] = field(default_factory=dict, init=False)
    """By accused member, owner and round, what the owner said that it had found by computing."""
    _left_out: dict[str, int] = field(default_factory=dict, init=False)
    """The last round of which each member was left out."""
    _disputes: dict[tuple[str, str], Named] = field(default_factory=dict, init=False)
    """By owner and accused member, of which one must be lying."""
    _named: dict[str, Named] = field(default_factory=dict, init=False)
    """By member; under an empty id a line about contributions that differ, of which nobody can say whose is wrong."""

    @property
    def lines(self) -> list[str]:
        """A line for each member that was found to lie, and those about lies of which nobody can say whose they are."""
        named = [self._named[peer].line for peer in sorted(self._named)]
        return named + [self._disputes[pair].line for pair in sorted(self._disputes)]

    def is_named(self, peer_id: str) -> bool:
        return peer_id in self._named

    def complaints(self, own_id: str) -> Complaints:
        """What the member of this id has found out of line itself, as an owner, and whom it names."""
        words = [
            Word(peer, number, part.start, part.stop, reason)
            for peer, rounds in self._words.items()
            for number, words in rounds.items()
            for owner, (part, reason) in words.by_owner.items()
            if owner == own_id
        ]
        return Complaints(words=tuple(words), named={peer: each for peer, each in self._named.items() if peer})

    def take_over(self, named: Mapping[str, Named]) -> None:
        """Name whom most members of a round name, by their signed word."""
        for peer, each in named.items():
            if peer not in self._named or each.round > self._named[peer].round:
                self._name(peer, each)

    def evidence(self, peer_id: str) -> list[str]:
        """What owners have said of a member in the last rounds, a line each: the round, the owner, the place of its
        part in the vector, and what it found."""
        return [
            f"round {number}, {owner} of [{part.start}, {part.stop}): {reason}"
            for number, words in sorted(self._words.get(peer_id, {}).items())
            for owner, (part, reason) in sorted(words.by_owner.items())
        ]

    def out_of(self, round_number: int) -> list[str]:
        """The members that are to be left out of a round."""
        return [peer for peer, number in self._left_out.items() if number == round_number]

    def in_order(self, peer_ids: Collection[str], round_number: int) -> list[str]:
        """The members in the order in which they own parts: that of their ids, and another one in each round while
        somebody is in doubt. One round's words are no doubt yet: most are chance, and an owner that keeps its part sees
        whether somebody gives again what it gave before."""
        ordered = sorted(peer_ids)
        is_doubted = any(_most_agreement(rounds.values())[0] >= DOUBTED_AFTER for rounds in self._words.values())
        # Where others lie in a part, the sum of its owner looks wrong as well. So no owner keeps its part then.
        shift = 1 + round_number % max(1, len(ordered) - 1) if is_doubted or self._computed else 0
        return ordered[shift:] + ordered[:shift]

    def judge(
        self, round_number: int, said: Mapping[str, Sequence[Deviation]], parts: Mapping[str, slice]
    ) -> list[Deviation]:
        """Take in what the owners of an exchange's parts say. Returns the members that are to be left out of this
        round, with what owners say of each.

        Args:
            said: by owner, also of those that say nothing of anybody.
            parts: the part of the vector of which each member of the exchange speaks, in the order of the parts.
        """
        self._forget(round_number, len(parts))
        for owner, deviations in said.items():
            for each in deviations:
                if each.is_computed:
                    if each.peer_id in parts:
                        rounds_of = self._computed.setdefault(each.peer_id, {}).setdefault(owner, {})
                        if round_number not in rounds_of or each.is_clear:
                            rounds_of[round_number] = each
                elif not each.peer_id:
                    self._note_undecided(each.reason, round_number, len(parts))
                elif each.peer_id in parts and each.peer_id != owner and owner in parts:
                    rounds = self._words.setdefault(each.peer_id, {})
                    words = rounds.setdefault(round_number, _Words(own_part=parts[each.peer_id]))
                    words.by_owner[owner] = parts[owner], each.reason
                    if each.is_clear:
                        words.clear_to.add(owner)
        accused = [peer for peer in sorted(self._words) if round_number in self._words[peer] and peer in parts]
        for peer in accused:
            words = self._words[peer][round_number]
            words.num_owners = max(words.num_owners, len(said.keys() - {peer}))
        self._note_disputes(round_number, said.keys(), parts)
        wrong = {each.peer_id for words in said.values() for each in words if each.is_computed}
        members = parts.keys()
        found = [
            verdict for peer in sorted(wrong & members)
            if (verdict := self._judge_computed(peer, round_number, members))
        ]  # fmt: skip
        others = [peer for peer in accused if all(out.peer_id != peer for out, _ in found)]
        found += [verdict for peer in others if (verdict := self._judge(peer, round_number, members - {peer}))]
        num_gone = sum(number == round_number for peer, number in self._left_out.items() if peer not in parts)
        if found and 2 * (num_gone + len(found)) >= num_gone + len(parts):
            logger.warning(
                "round %d has %d members, and as many as %d are said to be out of line: no more of them are left out, "
                "since the others would be no majority that can commit it",
                round_number, num_gone + len(parts), num_gone + len(found),
            )  # fmt: skip
            return []
        for out, named in found:
            self._left_out[out.peer_id] = round_number
            logger.warning(
                "the contribution of %s to round %d is out of line: %s", out.peer_id, round_number, out.reason
            )
            if named is not None:
                self._name(out.peer_id, named)
        return [out for out, _ in found]

    def _judge_computed(self, peer: str, round_number: int, members: Set[str]) -> _Verdict | None:
        """A member is left out, and named at once, if most others have found by computing that it answers or
        contributes wrongly: that does not happen by chance. A peer that starts again may contradict itself in one
        round. So who has only contradicted itself is named once most have found it even without that round."""
        others = members - {peer}
        found = {owner: rounds for owner, rounds in sorted(self._computed.get(peer, {}).items()) if owner in others}
        if len(found) < FEW_ACCUSERS or 2 * len(found) <= len(others):
            return None
        reason = min(each.reason for rounds in found.values() for each in rounds.values())
        why = f"{len(found)} of {len(others)} others have found it by computing: {reason}"
        found_out = Deviation(peer_id=peer, reason=why, is_computed=True)
        num_sure = min(
            sum(any(each.is_clear or number != odd for number, each in rounds.items()) for rounds in found.values())
            for odd in {number for rounds in found.values() for number in rounds}
        )  # fmt: skip
        if 2 * num_sure <= len(others):
            return found_out, None
        by = ", ".join(accuser[:8] for accuser in sorted(found)[:MOST_SHOWN])
        line = f"{peer} lies: its answers or its contributions are wrong, by the word of {by} in round {round_number}"
        return found_out, Named(round_number, f"{line}; {why}")

    def _judge(self, peer: str, round_number: int, others: Set[str]) -> _Verdict | None:
        rounds = self._words[peer]
        said = [*chain.from_iterable(words.by_owner.items() for words in rounds.values())]
        accusers = {owner for owner, _ in said if owner in others}
        num_rounds, is_always = _most_agreement(rounds.values())
        words = rounds[round_number]
        if num_rounds < LEFT_OUT_AFTER:
            accusers = words.clear_to & others
        if len(accusers) <= FEW_ACCUSERS or 2 * len(accusers) <= len(others):
            return None
        _, reason = next(iter(words.by_owner.values()))
        why = f"{len(accusers)} of {len(others)} others say so, in {num_rounds} of the last rounds"
        why, named = f"{why}: {reason}", None
        num_words = sum(min(MOST_OF_A_ROUND, len(words.by_owner)) for words in rounds.values())
        if is_always or (num_rounds >= NAMED_AFTER and num_words >= MANY_WORDS):
            by = ", ".join(accuser[:8] for accuser in sorted(accusers)[:MOST_SHOWN])
            line = f"{peer} lies: its contributions are out of line again and again, by the word of {by}"
            named = Named(round_number, f"{line} until round {round_number}; {why}")
        return Deviation(peer_id=peer, reason=why), named

    def _note_disputes(self, round_number: int, owners: Set[str], parts: Mapping[str, slice]) -> None:
        """Note the owners that have accused somebody for many rounds in nearly all places, with few others at most."""
        large = LARGE_PART * max(part.stop for part in parts.values()) / len(parts)
        order = list(parts)
        for peer, rounds in self._words.items():
            words = rounds[round_number].by_owner if round_number in rounds else {}
            for owner in sorted(owners & parts.keys() - {peer}) if peer in parts else ():
                alone = self._alone.setdefault((owner, peer), _Alone())
                alone.accusers |= words.keys()
                if owner not in words or len(alone.accusers) > FEW_ACCUSERS:
                    del self._alone[owner, peer]
                elif parts[owner].stop - parts[owner].start < large:
                    alone.rounds.add(round_number)
                    alone.places.add(order.index(owner))
                    is_everywhere = len(alone.rounds) >= ALONE_ROUNDS and 4 * len(alone.places) >= 3 * len(owners)
                    if is_everywhere and (owner, peer) not in self._disputes:
                        line = f"{owner} says wherever its part is that {peer} is out of line"
                        line = f"{line} ({words[owner][1]}), and most others see nothing there: one of the two lies"
                        logger.warning("%s", line)
                        self._disputes[owner, peer] = Named(round_number, line)

    def _note_undecided(self, reason: str, round_number: int, num_members: int) -> None:
        what = f"the contributions to round {round_number} differ: {reason}"
        self._name("", Named(round_number, f"{what}; among {num_members} members nobody can say whose is wrong"))

    def _name(self, peer: str, named: Named) -> None:
        if peer not in self._named:
            logger.warning("%s", named.line)
        self._named[peer] = named

    def _forget(self, round_number: int, num_members: int) -> None:
        self._words = {
            peer: recent
            for peer, rounds in self._words.items()
            if (recent := {number: words for number, words in rounds.items() if number > round_number - ROUNDS})
        }
        # What is wrong at one place each owner finds in its turn, as parts change hands.
        oldest = round_number - max(ROUNDS, num_members)
        self._computed = {
            peer: kept
            for peer, owners in self._computed.items()
            if (kept := {
                owner: now for owner, rounds in owners.items()
                if (now := {number: each for number, each in rounds.items() if number > oldest})
            })
        }  # fmt: skip
        # An owner that has nothing more against a member begins anew.
        self._alone = {key: places for key, places in self._alone.items() if key[1] in self._words}
        self._named = {peer: each for peer, each in self._named.items() if each.round > round_number - FORGIVEN_AFTER}
        self._disputes = {pair: it for pair, it in self._disputes.items() if it.round > round_number - FORGIVEN_AFTER}
        self._left_out = {peer: number for peer, number in self._left_out.items() if number == round_number}
