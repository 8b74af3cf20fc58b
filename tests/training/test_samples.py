import pytest
import torch

from swarm.config import DataConfig
from swarm.errors import MalformedMessage
from swarm.training import samples
from swarm.training.samples import DOCUMENTS, TARGETS, TOKENS, Amount

CHAT = DataConfig(dataset="x.jsonl", format="chat")


def _row(*values: int) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.int32)


def test_nothing_is_predicted_across_the_border_of_documents() -> None:
    batch = {TOKENS: _row(5, 6, 7, 8, 9), TARGETS: _row(1, 0, 1, 1, 1), DOCUMENTS: _row(0, 0, 0, 1, 1)}
    assert samples.targets(batch).tolist() == [[-100, 7, -100, 9]]
    assert samples.amount(batch) == Amount(1, 2)
    assert samples.documents(batch) is not None


def test_of_plain_text_all_is_predicted() -> None:
    batch = {TOKENS: torch.zeros(3, 5, dtype=torch.int32)}
    assert samples.amount(batch) == Amount(3, 12)
    assert samples.has_target(batch) is None


def test_what_travels_follows_from_the_configuration() -> None:
    assert samples.names(DataConfig()) == [TOKENS]
    assert samples.names(CHAT) == [TOKENS, TARGETS, DOCUMENTS]
    assert samples.names(DataConfig(dataset="x.jsonl", format="completion", packing=False)) == [TOKENS, TARGETS]


@pytest.mark.parametrize(
    ("name", "values", "reason"),
    [
        (TOKENS, (0, 9), "outside the vocabulary"),
        (TOKENS, (-1, 0), "outside the vocabulary"),
        (TARGETS, (0, 2), "neither is a target nor is none"),
        (TARGETS, (-1, 1), "neither is a target nor is none"),
        (DOCUMENTS, (1, 1), "do not follow each other"),
        (DOCUMENTS, (0, 2), "do not follow each other"),
        (DOCUMENTS, (0, -1), "do not follow each other"),
    ],
)
def test_what_cannot_be_is_refused(name: str, values: tuple[int, int], reason: str) -> None:
    batch = {TOKENS: _row(0, 1), TARGETS: _row(1, 1), DOCUMENTS: _row(0, 1)}
    samples.require_sound(batch, 9)
    with pytest.raises(MalformedMessage, match=reason):
        samples.require_sound({**batch, name: _row(*values)}, 9)
