"""The committed rounds of all blocks: which microbatches each counts, and what is found wrong with them.

As soon as the contributions of all members of a round are there, their microbatches are merged into ranges of ids.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace

from swarm.audit.holdings import Closing
from swarm.audit.id_set import IdSet
from swarm.events import Commit
from swarm.types import TRAINER_STAGE, Block

Ballot = tuple[int, str]
"""An attempt: its number, and its leader's peer id."""
MAX_LINES = 1000
"""Violations that are kept word for word: if a file is missing, there is one for every round."""
_NAMED = 8
TRAINER_BLOCK = Block(TRAINER_STAGE)
"""Takes the place of a block for what trainers log."""


@dataclass
class Findings:
    duplicates: int = 0
    """Microbatches that count once more than they should, added up over blocks and fragments."""
    missing: int = 0
    """Synchronous: microbatches that a committed round lacks, added up over the blocks."""
    rolled_back: int = 0
    digests_compared: int = 0
    digests_differing: int = 0
    events: int = 0
    num_violations: int = 0
    violations: list[str] = field(default_factory=list)
    liars: dict[str, dict[str, str]] = field(default_factory=dict)
    """By member that is named as a liar: the files that name it, each with its reason. That refutes nothing."""

    def violation(
        self, what: str, *, block: Block, round: int | None = None, microbatches: Collection[int] = (),
        files: Collection[str] = (),
    ) -> None:  # fmt: skip
        """Note something that refutes the run, or leaves it unproven."""
        self.num_violations += 1
        if len(self.violations) >= MAX_LINES:
            return
        place = ["trainer" if block == TRAINER_BLOCK else f"stage {block}"]
        if round is not None:
            place.append(f"round {round}")
        if microbatches:
            named = sorted(microbatches)
            some = ", ".join(map(str, named[:_NAMED])) + (f" and {len(named) - _NAMED} more" if named[_NAMED:] else "")
            place.append(f"microbatch {some}")
        behind = f" ({', '.join(sorted(files))})" if files else ""
        self.violations.append(f"{', '.join(place)}: {what}{behind}")


@dataclass(frozen=True, kw_only=True, eq=False)
class Contribution:
    """What one member contributed to one attempt, according to its own events.

    Attributes:
        parent: the lineage that the attempt's result would follow.
        most_samples: how many of its samples can count towards a round.
        monotonic: when the member promised the attempt, or had the result.
        members: those of the result that it prepared; none of a promise.
    """

    block: Block
    round: int
    parent: str
    peer: str
    ballot: Ballot
    closing: Closing
    most_samples: int
    file: str
    boot: str
    monotonic: float
    members: tuple[str, ...] = ()

    @property
    def counted_samples(self) -> int:
        return min(self.closing.round_samples, self.most_samples)


@dataclass(eq=False, kw_only=True)
class CommittedRound:
    """A committed round of one block on one branch. `microbatches` is None until all contributions are there."""

    block: Block
    event: Commit
    findings: Findings
    files: set[str] = field(default_factory=set)
    microbatches: IdSet | None = None
    num_replayed: int = 0
    ballot: Ballot | None = None
    tallies: set[tuple[int, str]] = field(default_factory=set)
    """What peers have as the tally after it: the first round in that, and its digest."""
    committed_at: dict[str, float] = field(default_factory=dict)
    """For each boot of a machine, the time of the first commit there."""
    prepared_at: dict[str, float] = field(default_factory=dict)
    """For each boot of a machine, the time at which the last member there had the result."""

    @property
    def number(self) -> int:
        return self.event.round

    def violation(self, what: str, microbatches: Collection[int] = (), files: Collection[str] = ()) -> None:
        """Note something that refutes the round. Its line names `files`, or else all files that mention the round."""
        files = files or self.files
        self.findings.violation(what, microbatches=microbatches, block=self.block, round=self.number, files=files)


class CommittedRounds:
    def __init__(self) -> None:
        self.findings = Findings()
        self.rounds: dict[tuple[Block, str], CommittedRound] = {}
        """The committed rounds by block and by the lineage to which each led."""
        self._offers: dict[tuple[Block, str], dict[tuple[Ballot, str], Contribution]] = defaultdict(dict)
        """Contributions that members promised to attempts, whether these succeeded or not. By block and parent, then by
        attempt and member."""
        self._waiting: dict[tuple[Block, str, str], dict[str, Contribution]] = defaultdict(dict)
        """Contributions to results that no file has been seen to commit yet, by block, parent and result."""
        self._unmerged: dict[tuple[Block, str, str], CommittedRound] = {}
        self._first_microbatches: dict[tuple[Block, str], int] = {}
        """Synchronous, once an amendment has changed the size of rounds: the first microbatch of the round that follows
        from a state, by block and lineage."""
        self._states: dict[tuple[Block, str], tuple[str, str]] = {}
        """The digest of each state, and the first file that gave it, by block and lineage."""
        self._ballots: dict[tuple[Block, str], set[Ballot]] = defaultdict(set)
        self._given_up: dict[tuple[Block, str], set[Ballot]] = defaultdict(set)
        self.renamed: dict[tuple[Block, str], str] = {}
        """The old lineage of a state that goes on under a new one (from a checkpoint), by block and new lineage."""
        self.beginnings: set[tuple[Block, str]] = set()
        """Stages with the lineages that peers began with: initial ones, and those of checkpoints."""
        self._held: list[tuple[Block, int, int, IdSet]] = []
        self.acknowledged_by_trainers = IdSet()
        self.acknowledged_by_stages = IdSet()

    # -- what the files tell -------------------------------------------------------------------------------------------

    def acknowledged(self, microbatch: int, *, by_trainer: bool) -> None:
        (self.acknowledged_by_trainers if by_trainer else self.acknowledged_by_stages).add(microbatch)

    def begun(self, block: Block, parent: str, ballot: Ballot) -> None:
        self._ballots[block, parent].add(ballot)

    def given_up(self, block: Block, parent: str, ballot: Ballot) -> None:
        self._given_up[block, parent].add(ballot)

    def offered(self, offer: Contribution) -> None:
        """Note what a member promised to contribute to an attempt, in place of an earlier promise to the same one."""
        self._offers[offer.block, offer.parent][offer.ballot, offer.peer] = offer

    def prepared(self, contribution: Contribution, digest: str) -> None:
        """Note that a member prepared a result, made of its own contribution and those of the other members."""
        key = contribution.block, contribution.parent, digest
        self._waiting[key][contribution.peer] = contribution
        self._merge(key)

    def committed(self, block: Block, event: Commit, *, file: str, at: tuple[str, float] | None) -> None:
        """Note that a peer applied a result `at` a boot's monotonic time; None if it does not matter when."""
        known = self.rounds.get((block, event.lineage))
        if known is None:
            known = self.rounds[block, event.lineage] = CommittedRound(block=block, event=event, findings=self.findings)
            key = block, event.parent, event.digest
            self._unmerged[key] = known
            self._merge(key)
        # Releases that keep no tally leave out what each member gave.
        if event.given and not known.event.given:
            known.event = replace(known.event, given=event.given)
        same = "parent", "round", "samples", "next_microbatch", *(("given",) if event.given else ())
        if any(getattr(known.event, name) != getattr(event, name) for name in same):
            files = [file, *known.files]
            what = "two peers give one lineage different contents"
            self.findings.violation(what, block=block, round=event.round, files=files)
        known.files.add(file)
        self.began(block, event.lineage, event.next_microbatch)
        if event.tally:
            known.tallies.add((event.tally_since, event.tally))
        if at is not None:
            boot, monotonic = at
            known.committed_at[boot] = min(monotonic, known.committed_at.get(boot, monotonic))

    def began(self, block: Block, lineage: str, first_microbatch: int | None) -> None:
        """Note with which microbatch the round begins that follows from a state, if it is another one than usual."""
        if first_microbatch is not None:
            self._first_microbatches.setdefault((block, lineage), first_microbatch)

    def entered(self, block: Block, lineage: str, *, renamed_from: str | None, is_beginning: bool) -> None:
        """Note that a peer installed a whole state. `renamed_from` is the lineage that this one continues under another
        name. `is_beginning` says whether the state is an initial one or a checkpoint's, and no other peer's."""
        if is_beginning:
            self.beginnings.add((block, renamed_from or lineage))
        if renamed_from is not None:
            self.renamed[block, lineage] = renamed_from

    def stood(self, block: Block, round_number: int, lineage: str, digest: str, file: str) -> None:
        first, first_file = self._states.setdefault((block, lineage), (digest, file))
        if (first, first_file) == (digest, file):
            return  # The same process gave this digest, or an earlier process in the same file.
        self.findings.digests_compared += 1
        if first != digest:
            self.findings.digests_differing += 1
            digests = f"{digest[:12]} at one peer and {first[:12]} at another"
            what = f"the state of lineage {lineage[:12]} has the digest {digests}"
            self.findings.violation(what, block=block, round=round_number, files=[file, first_file])

    def held(self, block: Block, fragment: int, round_number: int, microbatches: Collection[int]) -> None:
        """Note that a process ended at this round with microbatches that no round had taken yet."""
        if microbatches:
            self._held.append((block, fragment, round_number, IdSet(microbatches)))

    # -- merging -------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Count the contributions of members that never got the result of their exchange, by what they had promised.
        Call it once all files are read."""
        for (block, parent, digest), round_ in list(self._unmerged.items()):
            if not (given := self._waiting.get((block, parent, digest))):
                continue
            one = next(iter(given.values()))
            for peer in set(round_.event.members) - given.keys():
                if offer := self._offers[block, parent].get((one.ballot, peer)):
                    self.prepared(replace(offer, members=one.members), digest)

    def _merge(self, key: tuple[Block, str, str]) -> None:
        round_, given = self._unmerged.get(key), self._waiting.get(key, {})
        if round_ is None or not given.keys() >= set(round_.event.members):
            return
        del self._unmerged[key], self._waiting[key]
        members = [given[peer] for peer in round_.event.members]
        self._check_members(round_, members)
        # Offers to other attempts stay: they may be of another branch, which is committed as well.
        merged, offers = {member.ballot for member in members}, self._offers[key[:2]]
        for place in [place for place in offers if place[0] in merged]:
            del offers[place]
        count: Counter[int] = Counter()
        for member in members:
            count.update(member.closing.counts)
        twice = [index for index, times in count.items() if times > 1]
        if twice:
            self.findings.duplicates += sum(count[index] - 1 for index in twice)
            files = [member.file for member in members if any(index in member.closing.counts for index in twice)]
            round_.violation("counts more than once in the round", twice, files)
        round_.microbatches = IdSet(count)
        round_.num_replayed = len(frozenset[int]().union(*(member.closing.replays for member in members)))
        round_.ballot = min(member.ballot for member in members)
        round_.prepared_at = _latest(members)

    def _check_members(self, round_: CommittedRound, members: Collection[Contribution]) -> None:
        event = round_.event
        samples = sum(given.counted_samples for given in members)
        if samples != event.samples:
            what = f"is said to be of {event.samples} samples, and its members gave {samples}"
            round_.violation(what)
        for given, stated in zip(members, event.given, strict=False):
            if stated[0] != given.counted_samples:
                what = f"its tally has {stated[0]} samples of {given.peer[:8]}, which gave {given.counted_samples}"
                round_.violation(what, files=[given.file])
        for given in members:
            if given.members != event.members or given.round != event.round:
                what = "a member prepared it for another round or group"
                round_.violation(what, files=[given.file])
        if len({given.closing.fragment for given in members}) > 1:
            files = [given.file for given in members]
            round_.violation("its members gave different fragments", files=files)

    # -- readings, once all is read ------------------------------------------------------------------------------------

    def unmerged(self) -> Iterator[tuple[CommittedRound, list[str]]]:
        """Rounds for which some members' contributions are in no file, and these members."""
        for key, round_ in self._unmerged.items():
            given = self._waiting.get(key, {})
            yield round_, [peer for peer in round_.event.members if peer not in given]

    def decided(self) -> Iterator[tuple[Block, int, dict[str, float]]]:
        """Yield every result that all of its members held, committed or not: its block, its round, and for each boot of
        a machine the time from which they held it."""
        for round_ in self.rounds.values():
            yield round_.block, round_.number, round_.prepared_at
        for given in self._waiting.values():
            first = next(iter(given.values()))
            if given.keys() >= set(first.members):
                yield first.block, first.round, _latest(given.values())

    def indices(self, round_: CommittedRound, usual_size: int) -> range:
        """Synchronous: the microbatches that a round has to consist of, those of other paths among them."""
        first = self._first_microbatches.get((round_.block, round_.event.parent), round_.number * usual_size)
        end = round_.event.next_microbatch
        return range(first, (round_.number + 1) * usual_size if end is None else end)

    def held_back(self, block: Block, fragment: int, since_round: int) -> IdSet:
        """The microbatches of `held` that processes ended with at this round or later."""
        ids = IdSet()
        for held_block, held_fragment, round_number, microbatches in self._held:
            if (held_block, held_fragment) == (block, fragment) and round_number >= since_round:
                ids.update(microbatches)
        return ids

    def num_aborted(self) -> int:
        """Attempts that came to nothing: those before a round's commit, and all those of rounds that were given up."""
        committed = {(r.block, r.event.parent): r.ballot for r in self.rounds.values()}
        total = 0
        for key, ballots in self._ballots.items():
            if key not in committed:
                total += len(ballots & self._given_up[key])
            elif (ballot := committed[key]) is not None:
                total += sum(other < ballot for other in ballots)
        return total

    def is_first_attempt(self, round_: CommittedRound) -> bool:
        ballots = self._ballots[round_.block, round_.event.parent]
        return round_.ballot is not None and round_.ballot == min(ballots, default=round_.ballot)


def _latest(members: Iterable[Contribution]) -> dict[str, float]:
    """The latest time of each boot."""
    latest: dict[str, float] = {}
    for member in members:
        latest[member.boot] = max(member.monotonic, latest.get(member.boot, member.monotonic))
    return latest
