"""The tally: what it adds up, who has signed it, and what is read of a text that others give."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from swarm.credentials.identity import Identity, generate
from swarm.errors import IntegrityError
from swarm.training.complaints import Complaints, Named
from swarm.training.tally import EMPTY, MOST_PEERS, OTHERS, Given, Signature, Tally, by_peer, total
from swarm.types import Block

RUN, BLOCK = "run.0123", Block(1)
ANN, BOB, CAT, DAN = (generate() for _ in range(4))
LIAR = "f" * 40


def _rounds(*given: dict[str, Given], first: int = 0) -> Tally:
    tally = EMPTY
    for number, gave in enumerate(given, start=first):
        tally = tally.after(number, parent=f"lineage {number}", result=f"digest {number}", given=gave)
    return tally


def _signatures(tally: Tally, *signers: Identity) -> list[Signature]:
    return [tally.sign(signer.sign_with_point, RUN, BLOCK) for signer in signers]


def _signed(tally: Tally, *signers: Identity) -> Tally:
    return tally.settled(_signatures(tally, *signers), RUN, BLOCK)


def _of(*members: Identity, samples: int = 6) -> Tally:
    return _rounds({member.peer_id: Given(samples, 10 * samples, 100, 1) for member in members})


def test_rounds_add_up_and_a_gap_begins_anew() -> None:
    tally = _rounds({"a": Given(6, 60, 100, 1), "b": Given(2, 20, 50, 1)}, {"a": Given(8, 80, 100, 1)})
    assert tally.peers == {"a": Given(14, 140, 200, 2), "b": Given(2, 20, 50, 1)}
    assert (tally.since, tally.round) == (0, 1)
    later = tally.after(5, parent="", result="", given={"c": Given(1, 1, 1, 1)})
    assert (later.since, later.round, later.peers) == (5, 5, {"c": Given(1, 1, 1, 1)})
    other = _rounds({"a": Given(6, 60, 100, 1), "b": Given(3, 20, 50, 1)}, {"a": Given(8, 80, 100, 1)})
    assert tally.digest != other.digest


def test_a_round_of_which_nobody_says_what_was_given_ends_the_count() -> None:
    assert _of(ANN).after(1, parent="", result="", given={}) == EMPTY


def test_it_is_read_as_it_was_written() -> None:
    tally = _signed(_of(ANN, BOB), ANN, BOB)
    assert Tally.read(tally.to_text()) == tally
    assert Tally.read(EMPTY.to_text()) == EMPTY


def test_only_members_signatures_over_this_very_tally_hold() -> None:
    tally = _signed(_of(ANN, BOB, CAT), ANN, BOB, DAN)
    assert tally.signers(RUN, BLOCK) == {ANN.peer_id, BOB.peer_id}
    assert tally.signers("another", BLOCK) == tally.signers(RUN, Block(2)) == set()
    assert tally.is_signed_by_most(RUN, BLOCK)
    assert not _signed(_of(ANN, BOB), ANN, DAN).is_signed_by_most(RUN, BLOCK)
    text = json.loads(tally.to_text())
    text["peers"][ANN.peer_id][0] += 1
    assert Tally.read(json.dumps(text)).signers(RUN, BLOCK) == set()
    text = json.loads(tally.to_text())
    text["members"] = [ANN.peer_id]
    assert Tally.read(json.dumps(text)).signers(RUN, BLOCK) == set()
    text = json.loads(tally.to_text())
    text["signatures"][BOB.peer_id] = text["signatures"][ANN.peer_id]
    assert Tally.read(json.dumps(text)).signers(RUN, BLOCK) == {ANN.peer_id}


def test_counting_begins_anew_where_half_of_the_members_have_signed_others() -> None:
    tally, other, third = (
        _of(ANN, BOB, CAT, DAN),
        _of(ANN, BOB, CAT, DAN, samples=7),
        _of(ANN, BOB, CAT, DAN, samples=8),
    )
    own = _signatures(tally, ANN)
    assert tally.settled([*own, *_signatures(other, BOB)], RUN, BLOCK).signers(RUN, BLOCK) == {ANN.peer_id}
    assert tally.settled([*own, *_signatures(other, BOB), *_signatures(third, CAT)], RUN, BLOCK) == EMPTY
    assert tally.settled([*own, *_signatures(other, BOB, BOB)], RUN, BLOCK) != EMPTY, "each member has one voice"
    strangers = [generate() for _ in range(4)]
    assert tally.settled([*own, *_signatures(other, *strangers)], RUN, BLOCK) != EMPTY
    claimed = [each._replace(digest=other.digest) for each in _signatures(third, BOB, CAT, DAN)]
    assert tally.settled([*own, *claimed], RUN, BLOCK) != EMPTY, "what a signature is about is not believed unchecked"


def _named(tally: Tally, run: str = RUN, block: Block = BLOCK) -> dict[str, Named]:
    return tally.named(tally.signatures.values(), run, block)


def _telling(told: dict[Identity, str]) -> Tally:
    """A tally after round 0 that four have signed, with the complaints of some of them."""
    tally = _of(ANN, BOB, CAT, DAN)
    signatures = [
        tally.sign(signer.sign_with_point, RUN, BLOCK, told.get(signer, "")) for signer in (ANN, BOB, CAT, DAN)
    ]
    return tally.settled(signatures, RUN, BLOCK)


def _naming(round_number: int = 0, line: str = "it lies") -> str:
    return Complaints(named={LIAR: Named(round_number, line)}).to_text()


def test_whom_most_members_name_is_named() -> None:
    assert _named(_telling({ANN: _naming(), BOB: _naming()})) == {}
    tally = Tally.read(_telling(dict.fromkeys((ANN, BOB, CAT), _naming())).to_text())
    assert _named(tally) == {LIAR: Named(0, "it lies")}
    assert _named(tally, "another") == _named(tally, block=Block(2)) == {}
    assert _named(_telling(dict.fromkeys((ANN, BOB, CAT), "no complaint"))) == {}


def test_few_name_nobody_even_if_they_are_most() -> None:
    tally = _of(ANN, BOB)
    signed = [tally.sign(signer.sign_with_point, RUN, BLOCK, _naming()) for signer in (ANN, BOB)]
    assert _named(tally.settled(signed, RUN, BLOCK)) == {}


def test_complaints_that_were_changed_after_they_were_signed_do_not_count() -> None:
    tally = _telling({ANN: _naming(), BOB: _naming()})
    text = json.loads(tally.to_text())
    text["signatures"][CAT.peer_id][2] = _naming()
    forged = Tally.read(json.dumps(text))
    assert CAT.peer_id not in forged.signers(RUN, BLOCK)
    assert _named(forged) == {}


def test_of_differing_complaints_the_middle_one_counts_and_none_about_the_future() -> None:
    tally = _rounds(*[{str(member.peer_id): Given(1, 1, 1, 1) for member in (ANN, BOB, CAT, DAN)}] * 10)
    told = {ANN: _naming(2), BOB: _naming(5, "five"), CAT: _naming(9), DAN: _naming(10)}
    signed = [tally.sign(signer.sign_with_point, RUN, BLOCK, said) for signer, said in told.items()]
    assert _named(tally.settled(signed, RUN, BLOCK)) == {LIAR: Named(5, "five")}


@pytest.mark.parametrize(
    "spoil",
    [
        lambda values: values.pop("peers"),
        lambda values: values["peers"].update(a=[1, 2, 3]),
        lambda values: values["peers"].update(a=[-1, 0, 0, 0]),
        lambda values: values["peers"].update(a=[1 << 60, 0, 0, 0]),
        lambda values: values["peers"].update(a=None),
        lambda values: values["signatures"].update(a=["!", "!"]),
        lambda values: values.update(round="x"),
        lambda values: values.update(since=float("inf")),
        lambda values: values["peers"].update(a=[float("inf"), 0, 0, 0]),
        lambda values: values["peers"].update({"\x1b[2J": [1, 1, 1, 1]}),
        lambda values: values.update(members=["\x1b[2J"]),
        lambda values: values.update(members=[3]),
        lambda values: values.update(parent="\ud800"),
        lambda values: values.update(result="\ud800"),
        lambda values: values.update(signatures=3),
    ],
)
def test_what_is_no_tally_is_refused(spoil: Callable[[dict[str, Any]], Any]) -> None:
    values = json.loads(EMPTY.to_text())
    spoil(values)
    for text in (json.dumps(values), "", "[]", "[" * 100_000):
        with pytest.raises(IntegrityError, match="is none"):
            Tally.read(text)


def test_of_very_many_peers_those_that_gave_least_are_counted_together() -> None:
    given = {f"{number:040x}": Given(number, number, 1, 1) for number in range(1, MOST_PEERS + 51)}
    tally = _rounds(given, {"new": Given(10_000, 1, 1, 1)})
    assert len(tally.peers) <= MOST_PEERS + 1
    assert tally.peers["new"].samples == 10_000
    assert sum(gave.samples for gave in tally.peers.values()) == sum(g.samples for g in given.values()) + 10_000
    assert tally.peers[OTHERS].rounds == 51


def test_blocks_are_put_together_by_peer() -> None:
    one, two = _rounds({"a": Given(1, 2, 3, 1), "b": Given(9, 2, 3, 1)}), _rounds({"a": Given(10, 20, 30, 1)})
    found = by_peer({Block(0): one, Block(1): two})
    assert list(found) == ["a", "b"]
    assert total(found["a"]) == Given(11, 22, 33, 2)
    assert list(found["a"]) == [Block(0), Block(1)]
