"""What owners of parts say of others, and who is left out and named for it."""

import itertools
import random
from collections.abc import Mapping, Sequence

import pytest

from swarm.honesty.comparison import Deviation
from swarm.honesty.suspects import ALONE_ROUNDS, FORGIVEN_AFTER, LEFT_OUT_AFTER, NAMED_AFTER, ROUNDS, Suspects
from swarm.training.complaints import Complaints, Word

MEMBERS = ["a", "b", "c", "d", "e", "f"]


def parts_of(order: Sequence[str], sizes: Mapping[str, int] | None = None) -> dict[str, slice]:
    """The parts of members in that order: of 100 elements each, but for those in `sizes`."""
    ends = [*itertools.accumulate((sizes or {}).get(member, 100) for member in order)]
    return {member: slice(start, end) for member, start, end in zip(order, [0, *ends], ends, strict=False)}


def judged(
    suspects: Suspects, round_number: int, said: Mapping[str, str], order: list[str] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> str:  # fmt: skip
    """Let owners (the keys) accuse members (the values, one letter each), and return who is left out."""
    words = {owner: [Deviation(peer_id=peer, reason="it is odd") for peer in said.get(owner, "")] for owner in MEMBERS}
    order = order or suspects.in_order(MEMBERS, round_number)
    found = suspects.judge(round_number, words, parts_of(order, sizes))
    assert suspects.out_of(round_number) == [each.peer_id for each in found]
    return "".join(each.peer_id for each in found)


def test_once_is_no_proof_most_of_the_last_rounds_are() -> None:
    suspects = Suspects()
    left_out = [judged(suspects, number, dict.fromkeys("abcd", "f")) for number in range(1, NAMED_AFTER)]
    assert left_out == [""] * (LEFT_OUT_AFTER - 1) + ["f"] * (NAMED_AFTER - LEFT_OUT_AFTER)
    assert suspects.lines == []
    assert judged(suspects, NAMED_AFTER, dict.fromkeys("abcd", "f")) == "f"
    assert suspects.is_named("f")
    assert suspects.lines == [
        "f lies: its contributions are out of line again and again, by the word of a, b, c, d until round 4; 4 of 5 "
        "others say so, in 4 of the last rounds: it is odd"
    ]
    judged(suspects, NAMED_AFTER + FORGIVEN_AFTER, {})
    assert suspects.lines == []


@pytest.mark.parametrize(("accused", "expected"), [("ef", "ef"), ("def", "")])
def test_half_of_the_members_are_never_left_out(
    accused: str, expected: str, caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    """Without a majority the others could not commit the round, and most cannot be wrong about most."""
    suspects = Suspects()
    for number in range(1, NAMED_AFTER + 1):
        said = {owner: accused.replace(owner, "") for owner in MEMBERS}
        left_out = judged(suspects, number, said)
        assert left_out == (expected if number >= LEFT_OUT_AFTER else "")
    assert [peer for peer in MEMBERS if suspects.is_named(peer)] == list(expected)
    assert ("as many as 3 are said to be out of line" in caplog.text) == (not expected)


def test_those_that_an_earlier_exchange_of_the_round_left_out_count_as_well() -> None:
    suspects = Suspects()
    for number in range(1, NAMED_AFTER + 1):
        left_out = judged(suspects, number, dict.fromkeys("abcd", "ef"))
        words = {owner: [Deviation(peer_id="d", reason="it is odd", is_clear=True)] for owner in "abc"} | {"d": []}
        found = suspects.judge(number, words, parts_of("abcd"))
        assert [each.peer_id for each in found] == ([] if left_out else ["d"])
    assert suspects.is_named("e")
    assert not suspects.is_named("d")


@pytest.mark.parametrize(("sure", "expected"), [("abc", "f"), ("ab", ""), ("abf", "")])
def test_what_is_clear_to_most_is_left_out_at_once_and_nobody_is_named_for_it(sure: str, expected: str) -> None:
    suspects = Suspects()
    words = {
        owner: [Deviation(peer_id="f", reason="it is odd", is_clear=owner in sure)] if owner != "f" else []
        for owner in MEMBERS
    }
    found = suspects.judge(1, words, parts_of(MEMBERS))
    assert "".join(each.peer_id for each in found) == "".join(suspects.out_of(1)) == expected
    assert suspects.lines == []


def test_several_attempts_at_a_round_count_once() -> None:
    suspects = Suspects()
    for _ in range(10):
        assert judged(suspects, 1, dict.fromkeys("abcde", "f")) == ""


def test_who_spoke_in_an_earlier_attempt_may_be_left_out_of_the_next_one() -> None:
    suspects = Suspects()
    for number in range(1, 5):
        judged(suspects, number, {"a": "f", "b": "f"})
        without = [member for member in MEMBERS if member != "a"]
        assert suspects.judge(number, dict.fromkeys(without, ()), parts_of(suspects.in_order(without, number))) == []


@pytest.mark.parametrize(("accusers", "expected"), [("ab", ""), ("abc", "f"), ("abcde", "f")])
def test_most_of_the_other_owners_have_to_say_the_same(accusers: str, expected: str) -> None:
    suspects = Suspects()
    for number in range(1, LEFT_OUT_AFTER):
        judged(suspects, number, dict.fromkeys(accusers, "f"), order=MEMBERS)
    assert judged(suspects, LEFT_OUT_AFTER, dict.fromkeys(accusers, "f"), order=MEMBERS) == expected


def test_owners_that_see_it_one_after_the_other_agree_too_while_parts_change_hands() -> None:
    suspects = Suspects()
    assert suspects.in_order(MEMBERS, 1) == MEMBERS
    assert judged(suspects, 1, {"a": "f"}) == ""
    assert suspects.in_order(MEMBERS, 2) == MEMBERS
    assert judged(suspects, 2, {"a": "f"}) == ""
    orders = [suspects.in_order(MEMBERS, number) for number in range(3, 9)]
    assert [order[0] for order in orders] == ["e", "f", "b", "c", "d", "e"]
    assert judged(suspects, 3, {"e": "f"}) == ""
    assert judged(suspects, 4, {}) == ""
    assert judged(suspects, 5, {"b": "f"}) == "f"
    judged(suspects, 5 + ROUNDS, {})
    assert suspects.in_order(MEMBERS, 6 + ROUNDS) == MEMBERS


def test_parts_stay_where_they_are_while_words_are_about_different_places() -> None:
    suspects = Suspects()
    for number in range(1, 20):
        assert suspects.in_order(MEMBERS, number) == MEMBERS
        judged(suspects, number, {"abcde"[number % 5]: "f"})


def test_owners_that_see_it_at_different_places_do_not_agree() -> None:
    suspects = Suspects()
    for number in range(1, 30):
        at = (5 * number) % 6  # Each time at another place than the time before.
        owner = suspects.in_order(MEMBERS, number)[at]
        judged(suspects, number, {owner: "f"} if owner != "f" else {})
    assert not suspects.is_named("f")


@pytest.mark.parametrize("seed", range(10))
def test_words_by_chance_name_nobody(seed: int) -> None:
    """Every owner finds every member out of line in one of 30 rounds, and most find each one so in one of 30."""
    suspects, rng = Suspects(), random.Random(seed)
    for number in range(300):
        odd = "".join(member for member in MEMBERS if rng.random() < 1 / 30)
        said = {
            owner: odd * (rng.random() < 0.8) + "".join(peer for peer in MEMBERS if rng.random() < 1 / 30)
            for owner in MEMBERS
        }
        judged(suspects, number, said)
    assert suspects.lines == []


def test_odd_text_now_and_then_gets_nobody_left_out() -> None:
    suspects = Suspects()
    for number in range(1, 60, ROUNDS):
        for late in (0, 1):
            assert judged(suspects, number + late, dict.fromkeys("abcde", "f")) == ""
    assert suspects.lines == []


def test_who_is_in_line_again_is_taken_again() -> None:
    suspects = Suspects()
    for number in range(1, 5):
        judged(suspects, number, dict.fromkeys("abcd", "f"))
    assert judged(suspects, 5, {}) == ""


def test_of_an_owner_and_whom_it_alone_accuses_wherever_its_part_is_nobody_is_named() -> None:
    """The owner may lie to all, or the other one to this owner alone. A line tells it, and both are heard further."""
    suspects = Suspects()
    for number in range(1, 1 + ALONE_ROUNDS):
        assert suspects.lines == []
        assert judged(suspects, number, {"a": "f"}) == ""
    assert "a says wherever its part is that f is out of line" in suspects.lines[0]
    assert not suspects.is_named("a")
    assert suspects.complaints("b").named == {}
    assert judged(suspects, 1 + ALONE_ROUNDS, dict.fromkeys("abcd", "f")) == "f"
    judged(suspects, ALONE_ROUNDS + FORGIVEN_AFTER, {})
    assert suspects.lines == []


@pytest.mark.parametrize("seed", range(10))
def test_owners_that_see_a_small_lie_now_and_then_are_not_named(seed: int) -> None:
    suspects, rng = Suspects(), random.Random(seed)
    for number in range(300):
        judged(suspects, number, {owner: "f" for owner in MEMBERS if rng.random() < 0.25})
    assert {line.split()[0] for line in suspects.lines} <= {"f"}


def test_an_owner_of_a_large_part_may_see_what_the_others_do_not() -> None:
    suspects = Suspects()
    for number in range(1, 30):
        judged(suspects, number, {"a": "f"}, sizes={"a": 400})
    assert suspects.lines == []


def test_attempts_without_the_accused_say_nothing_about_its_accusers() -> None:
    suspects = Suspects()
    for number in range(1, ALONE_ROUNDS):
        judged(suspects, number, {"a": "f"})
        without = [member for member in suspects.in_order(MEMBERS, number) if member != "f"]
        for _ in range(3):
            judged(suspects, number, {}, order=without)
    assert suspects.lines == []


def test_an_owner_that_accuses_in_one_place_only_may_be_right() -> None:
    suspects = Suspects()
    for number in range(1, 30):
        judged(suspects, number, {"a": "f"}, order=MEMBERS)
    assert suspects.lines == []


@pytest.mark.parametrize("said", [{"f": "f"}, {"a": "x", "b": "x", "c": "x", "d": "x"}])
def test_words_about_oneself_and_about_strangers_count_for_nothing(said: dict[str, str]) -> None:
    suspects = Suspects()
    assert [judged(suspects, number, said) for number in range(1, 9)] == [""] * 8
    assert suspects.lines == []


def test_of_two_that_are_out_of_line_both_are_left_out_of_the_round() -> None:
    suspects = Suspects()
    left_out = [judged(suspects, number, dict.fromkeys("abcd", "ef")) for number in range(1, 4)]
    assert left_out == ["", "", "ef"]


def test_where_nobody_can_say_who_is_wrong_one_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    suspects, said = Suspects(), [Deviation(peer_id="", reason="one is zero")]
    for number in (1, 2):
        assert suspects.judge(number, {"a": said, "b": said}, parts_of("ab")) == []
    line = "the contributions to round {} differ: one is zero; among 2 members nobody can say whose is wrong"
    assert suspects.lines == [line.format(2)]
    assert caplog.messages == [line.format(1)]
    suspects.judge(2 + FORGIVEN_AFTER, {"a": [], "b": []}, parts_of("ab"))
    assert suspects.lines == []


def test_what_a_member_found_itself_and_whom_it_names_are_its_complaints_until_that_is_forgiven() -> None:
    suspects = Suspects()
    assert suspects.complaints("a").to_text() == ""
    for number in range(1, NAMED_AFTER + 1):
        judged(suspects, number, dict.fromkeys("abcd", "f"), order=MEMBERS)
    told = suspects.complaints("b")
    assert told.words[0] == Word("f", 1, 100, 200, "it is odd")
    assert [word.round for word in told.words] == [1, 2, 3, 4]
    assert suspects.complaints("e").words == (), "it found nothing itself"
    assert {peer: named.round for peer, named in told.named.items()} == {"f": NAMED_AFTER}
    newcomer = Suspects()
    newcomer.take_over(told.named)
    assert newcomer.lines == suspects.lines
    assert newcomer.complaints("g").named == told.named
    judged(newcomer, NAMED_AFTER + FORGIVEN_AFTER - 1, {})
    assert newcomer.is_named("f")
    judged(newcomer, NAMED_AFTER + FORGIVEN_AFTER, {})
    assert newcomer.complaints("g") == Complaints()


def test_those_that_differ_among_few_are_in_nobody_s_complaints() -> None:
    suspects = Suspects()
    said = [Deviation(peer_id="", reason="one is zero")]
    suspects.judge(1, {"a": said, "b": said}, parts_of("ab"))
    assert suspects.complaints("a") == Complaints()


def computed(
    suspects: Suspects, accusers: str, number: int = 1, *, members: str = "abcdef", is_clear: bool = True
) -> list[str]:
    """Let members say that they have computed an answer of "f" again and found it wrong."""
    found = Deviation(peer_id="f", reason="it differs", is_computed=True, is_clear=is_clear)
    words = {member: [found] * 2 if member in accusers else [] for member in members}
    return [each.peer_id for each in suspects.judge(number, words, parts_of(suspects.in_order([*members], number)))]


def test_what_most_others_have_computed_again_is_no_chance() -> None:
    suspects = Suspects()
    assert computed(suspects, "abc") == ["f"] == suspects.out_of(1)
    assert suspects.lines == [
        "f lies: its answers or its contributions are wrong, by the word of a, b, c in round 1; 3 of 5 others "
        "have found it by computing: it differs"
    ]


@pytest.mark.parametrize(("members", "accusers"), [("abcdef", "ab"), ("abcdef", "abf"), ("af", "a"), ("abf", "a")])
def test_few_who_say_so_may_be_wrong_themselves(members: str, accusers: str) -> None:
    suspects = Suspects()
    assert computed(suspects, accusers, members=members) == []
    assert suspects.lines == []


def test_among_three_both_others_have_to_say_so() -> None:
    assert computed(Suspects(), "ab", members="abf") == ["f"]


@pytest.mark.parametrize("num_members", [6, 20])
def test_what_is_wrong_at_one_place_each_owner_finds_in_its_turn(num_members: int) -> None:
    suspects, members = Suspects(), "abcdefghijklmnopqrst"[:num_members]
    for number in range(num_members):
        if suspects.is_named("f"):
            break
        computed(suspects, suspects.in_order([*members], number)[0], number, members=members)
    assert suspects.is_named("f")


def test_who_contradicts_itself_in_one_round_is_left_out_and_not_named() -> None:
    suspects = Suspects()
    assert computed(suspects, "abc", 1, is_clear=False) == ["f"]
    assert suspects.lines == []
    # One that says so once more is not enough.
    assert computed(suspects, "a", 2, is_clear=False) == ["f"]
    assert suspects.lines == []
    assert computed(suspects, "abd", 3, is_clear=False) == ["f"]
    assert suspects.is_named("f")
