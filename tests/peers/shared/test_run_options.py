"""Errors about values that came from options."""

from types import SimpleNamespace

import pytest

from peers.shared.run_options import FIELDS, naming_options
from peers.stage_peer.options import PeerOptions
from swarm.errors import CorpusMismatch


@pytest.mark.parametrize(
    ("given", "text", "said"),
    [
        ({"dataset": ("x",)}, "data.dataset 'x' does not exist", "--dataset 'x' does not exist"),
        ({"dataset": ()}, "data.dataset 'x' does not exist", "data.dataset 'x' does not exist"),
        ({"tokenizer": "x"}, "data.dataset 'x' does not exist", "data.dataset 'x' does not exist"),
        ({"stages": 9}, "stages.num_stages (9) is above it", "--stages (9) is above it"),
        ({"lora_rank": 0}, "set lora.rank.", "set --lora-rank."),
        ({"dataset": ("x",)}, "data.dataset_digests, 'data.dataset'", "data.dataset_digests, 'data.dataset'"),
    ],
)
@pytest.mark.parametrize("kind", [ValueError, CorpusMismatch])
def test_a_field_is_named_as_the_option_that_gave_it(
    given: dict[str, object], text: str, said: str, kind: type[Exception]
) -> None:
    with pytest.raises(kind) as caught, naming_options(SimpleNamespace(**given)):
        raise kind(text)
    assert str(caught.value) == said
    assert type(caught.value) is kind


def test_other_errors_stay_what_they_are() -> None:
    undecodable = UnicodeDecodeError("utf-8", b"x", 0, 1, "no text")
    with pytest.raises(UnicodeDecodeError) as caught, naming_options(SimpleNamespace(dataset=("x",))):
        raise undecodable
    assert caught.value is undecodable


def test_the_names_are_those_of_options() -> None:
    assert set(FIELDS) <= set(PeerOptions.__dataclass_fields__)
