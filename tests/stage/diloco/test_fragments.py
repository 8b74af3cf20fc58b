"""Fragments: whole blocks, dealt out so that neighbours are in different ones."""

import pytest

from swarm.stage.diloco.fragments import dealt


def test_fragments_deal_out_whole_blocks() -> None:
    names = ["embedding.weight", "layers.0.a", "layers.0.b", "layers.1.a", "layers.10.a", "head.norm", "head.weight"]
    assert dealt(names, 2) == [
        ["embedding.weight", "layers.1.a", "head.norm", "head.weight"],
        ["layers.0.a", "layers.0.b", "layers.10.a"],
    ]
    with pytest.raises(ValueError, match="only 5 blocks"):
        dealt(names, 6)
