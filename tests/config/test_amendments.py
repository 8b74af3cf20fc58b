"""Amendments: what an owner may sign, what a peer believes, and the configuration of each round."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from swarm.config import Amendment, RunConfig, Timeline, from_dict, to_json
from swarm.errors import IntegrityError
from tests.support.locked import OWNER, STRANGER

CONFIG = from_dict(
    {"owner": OWNER.authority.fingerprint, "outer": {"momentum": 0.5, "learning_rate": 0.7}}, source="test"
).begun()
LATER = "optimizer.learning_rate=3e-4"


def _signed(*changes: tuple[int, str], config: RunConfig = CONFIG) -> Timeline:
    timeline = Timeline(config)
    for round_number, setting in changes:
        timeline.add([*timeline.texts, Amendment.sign(OWNER, timeline, round_number, [setting]).text])
    return timeline


def test_an_amendment_holds_from_its_round_on_and_the_later_one_counts() -> None:
    owner = _signed((5, LATER), (8, "averaging.codec=int8"), (8, "optimizer.learning_rate=1e-4"))
    peer = Timeline(CONFIG)
    assert peer.at(9) is CONFIG
    peer.add(owner.texts[:1])
    peer.add(owner.texts)
    peer.add(owner.texts)
    rates = [peer.at(number).optimizer.learning_rate for number in (0, 4, 5, 7, 8, 900)]
    assert rates == [1e-3, 1e-3, 3e-4, 3e-4, 1e-4, 1e-4]
    assert [peer.at(number).averaging.codec for number in (7, 8)] == ["fp32", "int8"]
    assert peer.digest_at(4) == "" != peer.digest_at(5) != peer.digest_at(8) == peer.last == owner.last
    assert peer.under(peer.digest_at(5)) is peer.at(7)
    assert [peer.number_of(peer.digest_at(number)) for number in (4, 5, 8)] == [0, 1, 3]


def test_what_was_left_out_stays_as_it_was_filled_in() -> None:
    config = dataclasses.replace(CONFIG, outer=from_dict({}, source="test").outer)
    before = config.outer_step
    after = _signed((1, "outer.learning_rate=0.4"), config=config).at(1)
    assert (after.outer_step.learning_rate, after.outer_step.momentum) == (0.4, before.momentum)


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("model.d_model=64", "model.d_model cannot be amended"),
        ("model.custom_class=a:B", "model.custom_class cannot be amended"),
        ("rounds.setting=synchronous", "rounds.setting cannot be amended"),
        ("data.dataset=other", "names its data.digest as well"),
        ("data.weights=[1, 2]", "data.weights has 2 numbers, and data.dataset names 1"),
        ("wire.dtype=auto", "names what it sets: wire.dtype"),
        ("owner=" + 64 * "0", "owner cannot be amended"),
        ("revoked=['ada']", "revoked names each token by the 16 digits"),
        ("optimizer.learning_rate=0", "names what it sets"),
        ("optimizer.learning_rate=-1", "learning_rate must"),
    ],
)
def test_what_cannot_be_amended_is_refused_in_one_line(setting: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as refused:
        Amendment.sign(OWNER, Timeline(CONFIG), 5, [setting])
    assert "\n" not in str(refused.value)


def test_only_the_owner_of_this_very_run_amends_it() -> None:
    with pytest.raises(ValueError, match="the key is of owner"):
        Amendment.sign(STRANGER, Timeline(CONFIG), 5, [LATER])
    open_run = dataclasses.replace(CONFIG, owner="")
    with pytest.raises(ValueError, match="is open: nobody may amend it"):
        Amendment.sign(OWNER, Timeline(open_run), 5, [LATER])
    (text,) = _signed((5, LATER)).texts
    other = dataclasses.replace(CONFIG, run="other")
    for config in (open_run, other, dataclasses.replace(CONFIG, owner=STRANGER.authority.fingerprint)):
        with pytest.raises(IntegrityError):
            Timeline(config).add([text])


@pytest.mark.parametrize(
    "tamper",
    [
        lambda text: text.replace("\n5\n", "\n6\n"),
        lambda text: text.replace("3e-4", "3e+4"),
        lambda text: text[:-12] + "AAAAAAAA" + text[-4:],
        lambda text: "\n".join(reversed(text.split("\n"))),
        lambda text: "",
        lambda text: "swarm amendment 1",
        lambda text: text.replace("\n1\n", "\none\n"),
    ],
)
def test_an_amendment_that_was_tampered_with_is_none(tamper: Callable[[str], str]) -> None:
    (text,) = _signed((5, LATER)).texts
    peer = Timeline(CONFIG)
    assert tamper(text) != text
    with pytest.raises(IntegrityError):
        peer.add([tamper(text)])
    assert peer.amendments == ()


def test_amendments_are_one_chain() -> None:
    chain = _signed((5, LATER), (8, "averaging.codec=int8"))
    peer = Timeline(CONFIG)
    with pytest.raises(IntegrityError, match="does not follow"):
        peer.add(chain.texts[1:])
    peer.add(chain.texts)
    with pytest.raises(IntegrityError, match="two amendments 1"):
        peer.add(_signed((6, LATER)).texts)
    assert peer.texts == chain.texts
    with pytest.raises(ValueError, match="round 7 is too early"):
        Amendment.sign(OWNER, peer, 7, [LATER])
    with pytest.raises(IntegrityError, match="is not known here"):
        peer.under("0" * 32)


def test_amendments_are_bounded() -> None:
    long = "optimizer.learning_rate=3e-4" + " " * 3000
    with pytest.raises(ValueError, match="too many amendments"):
        _signed((1, long), (1, long), (1, long), (1, long))


def test_a_token_is_revoked_at_once_and_stays_so() -> None:
    first, second = "0123456789abcdef", "f" * 16
    timeline = _signed((900, f"revoked=['{first}']"), config=CONFIG)
    assert timeline.revoked == (first,)
    assert timeline.at(899).revoked == ()
    with pytest.raises(ValueError, match=f"stays so: `revoked` has to name {first} as well"):
        Amendment.sign(OWNER, timeline, 900, [f"revoked=['{second}']"])
    text = Amendment.sign(OWNER, timeline, 900, [f"revoked=['{first}', '{second}']"]).text
    timeline.add([*timeline.texts, text])
    assert list(timeline.revoked) == [first, second]
    assert Timeline(CONFIG).revoked == ()
    assert Timeline(dataclasses.replace(CONFIG, revoked=(first,))).revoked == (first,)
    assert "revoked" not in to_json(CONFIG), "a run without revoked tokens has the id that it always had"


_PARTS: dict[str, Any] = {"data": {"dataset": ["hf:x", "hf:y"], "part_rows": 10}}


@pytest.mark.parametrize(
    ("section", "setting"),
    [
        (_PARTS, "rounds.round_samples=512"),
        (_PARTS, "data.weights=[1, 2]"),
        (_PARTS, f"data.digest={'a' * 64}"),
    ],
)
def test_what_says_which_microbatches_a_round_has_stays(section: dict[str, Any], setting: str) -> None:
    config = from_dict({"owner": OWNER.authority.fingerprint, **section}, source="test").begun()
    name = setting.partition("=")[0]
    with pytest.raises(ValueError, match=f"^{name} cannot be amended with .*, because it says which") as refused:
        Amendment.sign(OWNER, Timeline(config), 5, [setting])
    assert "\n" not in str(refused.value)


def test_warmup_stays_as_it_was_when_rounds_become_longer() -> None:
    config = from_dict(
        {"owner": OWNER.authority.fingerprint, "rounds": {"setting": "diloco"}, "model": {"weights": "0" * 64}},
        source="test",
    )
    after = _signed((1, f"rounds.round_samples={2 * config.rounds.round_samples}"), config=config).at(1)
    assert after.rounds.round_samples == 2 * config.rounds.round_samples
    assert after.gradient_step == config.gradient_step
