"""The options that the bench `nanogpt` requires."""

import pytest

from peers.shared import cli
from scripts.benches.nanogpt import Options


def test_the_text_has_to_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.parse(Options, prog="nanogpt", argv=[])
    assert "missing --dataset" in capsys.readouterr().err


def test_a_round_of_diloco_has_to_fit_in() -> None:
    with pytest.raises(ValueError, match="--iterations must be at least 50, not 49"):
        Options(dataset="text.txt", iterations=49)
    assert Options(dataset="text.txt", iterations=49, settings=("synchronous",)).iterations == 49
