"""Announcements come from strangers: unknown fields are ignored, and wrong ones are refused."""

from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError

from swarm.types import (
    PROTOCOLS,
    Ban,
    Block,
    ClaimRecord,
    PeerRecord,
    PeerState,
    Protocols,
    RunRecord,
    TrainerRecord,
    common_protocol,
)

RECORD: dict[str, Any] = {
    "peer_id": "ab" * 20,
    "announced_at": 1.0,
    "stage": 2,
    "endpoint": "host:1234",
    "state": "serving",
}


def test_record_survives_its_json() -> None:
    record = PeerRecord(**RECORD, samples_per_second=12.5, lineage="0f")
    assert PeerRecord.model_validate_json(record.model_dump_json()) == record
    assert record.state is PeerState.SERVING


def test_releases_train_together_if_they_have_a_protocol_in_common() -> None:
    last, this, next_ = Protocols(4, 5), Protocols(5, 6), Protocols(6, 7)
    assert [this.meets(other) for other in (last, this, next_)] == [other.meets(this) for other in (last, this, next_)]
    assert [last.meets(other) for other in (last, this, next_)] == [True, True, False]
    assert [next_.meets(other) for other in (last, this, next_)] == [False, True, True]
    assert (str(this), str(Protocols(5, 5))) == ("5 to 6", "5")


def test_what_all_do_alike_depends_on_the_oldest_of_their_newest_protocols() -> None:
    newer = Protocols(PROTOCOLS.newest, PROTOCOLS.newest + 1)
    older = Protocols(PROTOCOLS.newest - 2, PROTOCOLS.newest - 1)
    assert common_protocol([]) == common_protocol([newer]) == PROTOCOLS.newest
    assert common_protocol([newer, older]) == older.newest


def test_a_block_is_named_as_its_stage_unless_it_is_a_variant() -> None:
    for name, block in (("2", Block(2)), ("2.1", Block(2, 1)), ("10.12", Block(10, 12)), ("0", Block(0))):
        assert (str(block), Block.parse(name)) == (name, block)
    assert sorted(map(Block.parse, ("10", "2.1", "0", "2"))) == [Block(0), Block(2), Block(2, 1), Block(10)]


@pytest.mark.parametrize("name", ["", "x", "1.", ".1", "1.x", "-1", "1.2.3", "4096", "1.4096", "1 ", "\u0661"])
def test_what_names_no_block_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="names no block"):
        Block.parse(name)


def test_a_claim_names_adjacent_blocks_and_those_before() -> None:
    claim = {"peer_id": "ab" * 20, "announced_at": 1.0, "claimed_at": 1.0, "stage": 2, "state": "pending"}
    newcomer = ClaimRecord.model_validate(claim | {"num_stages": 3})
    assert (newcomer.span, newcomer.from_span) == ((Block(2), Block(3), Block(4)), ())
    assert ClaimRecord.model_validate(claim | {"from_stage": 1, "from_num_stages": 2}).from_span == (Block(1), Block(2))
    for num_stages in (0, 4097):
        with pytest.raises(ValidationError):
            ClaimRecord.model_validate(claim | {"num_stages": num_stages})


def test_fields_of_later_versions_are_ignored() -> None:
    assert PeerRecord.model_validate({**RECORD, "shoe_size": 46}) == PeerRecord(**RECORD)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peer_id", "xy" * 20),
        ("peer_id", "ab"),
        ("name", "n" * 65),
        ("name", "a\x1b[2J"),
        ("software_version", "1\x07"),
        ("stage", -1),
        ("endpoint", "e" * 321),
        ("other_endpoints", ["192.0.2.1:1; reboot"]),
        ("other_endpoints", ["192.0.2.1:1"] * 8),
        ("endpoint", "host:1\x1b[2J"),
        ("endpoint", "$(reboot):1"),
        ("dht_address", "/ip4/192.0.2.1/tcp/1/p2p/x; reboot"),
        ("other_dht_addresses", ["/ip4/192.0.2.1/tcp/1/p2p/x; reboot"]),
        ("other_dht_addresses", ["/ip4/192.0.2.1/tcp/1/p2p/x"] * 4),
        ("state", "asleep"),
        ("samples_per_second", float("nan")),
        ("samples_per_second", float("inf")),
        ("samples_per_second", -1.0),
        ("lineage", "G"),
        ("certificate_pem", "c" * 4097),
        ("device", "d" * 33),
        ("device", "cpu\x1b[2J"),
        ("bans", [{"peer_id": "ab" * 20, "until": 1.0}] * 5),
        ("bans", [{"peer_id": "ab", "until": 1.0}]),
        ("bans", [{"peer_id": "ab" * 20, "until": float("inf")}]),
        ("bans", [{"peer_id": "ab" * 20, "until": 1.0, "reason": "r" * 101}]),
        ("bans", [{"peer_id": "ab" * 20, "until": 1.0, "reason": "\x1b[2J"}]),
    ],
)
def test_a_wrong_field_is_refused(field: str, value: object) -> None:
    with pytest.raises(ValidationError, match=field):
        PeerRecord.model_validate({**RECORD, field: value})


def test_a_trainer_may_have_no_loss_yet_but_not_a_nan() -> None:
    assert TrainerRecord(peer_id="ab" * 20, announced_at=1.0).loss is None
    with pytest.raises(ValidationError, match="loss"):
        TrainerRecord(peer_id="ab" * 20, announced_at=1.0, loss=float("nan"))


NUMBERS = [
    (model, name)
    for model in (PeerRecord, TrainerRecord, ClaimRecord, RunRecord, Ban)
    for name, field in model.model_fields.items()
    if {int, float} & {field.annotation, *get_args(field.annotation)} and field.annotation is not bool
]


@pytest.mark.parametrize(("model", "name"), NUMBERS)
def test_no_number_is_so_large_that_it_stops_who_reads_it(model: type[BaseModel], name: str) -> None:
    """Sums, calendars, JSON and floats fail for some of these."""
    for number in ("1e999", "1e301", "-1e301", "1" + "0" * 400, "-1" + "0" * 400):
        with pytest.raises(ValidationError) as caught:
            model.model_validate_json(f'{{"{name}": {number}}}')
        assert name in {error["loc"][0] for error in caught.value.errors()}
