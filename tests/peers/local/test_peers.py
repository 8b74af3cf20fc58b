"""With which options each peer of a local swarm is started."""

import dataclasses
from pathlib import Path

import pytest

from peers.local.peers import spans_of
from peers.shared.stage_choice import StageChoice
from swarm import config as configs
from tests.peers.local.children import serve, started_peers


def test_where_stages_have_variants_a_peer_serves_a_path(tmp_path: Path) -> None:
    """There are as few peers as serve every block, and one more goes to where there are fewest."""
    _, peers, children = started_peers(tmp_path, configs.load_preset("dipaco"))
    assert peers.spans == [StageChoice(path=path) for path in (0, 5, 10, 15)]
    for span in peers.spans[:3]:
        peers.start(span)
    assert children.commands["peer-2"][children.commands["peer-2"].index("--path") + 1] == "5"
    assert [str(block) for block, number in peers.counts().items() if not number] == ["1.3", "2.3"]
    assert peers.most_needed() == StageChoice(path=15)
    assert spans_of(configs.load_preset("shared-value")) == [StageChoice(path=path) for path in range(4)]
    with pytest.raises(ValueError, match="--stages-per-peer is for runs without variants"):
        spans_of(configs.load_preset("dipaco"), 2)


@pytest.mark.parametrize(
    ("stages_per_peer", "spans"),
    [(None, [(0, 0), (1, 1), (2, 2)]), (2, [(0, 1), (2, 2)]), (9, [(0, 2)])],
)
def test_a_peer_serves_so_many_adjacent_stages_and_the_last_one_those_that_are_left(
    stages_per_peer: int | None, spans: list[tuple[int, int]], tmp_path: Path
) -> None:
    _, peers, children = started_peers(tmp_path, None, stages_per_peer=stages_per_peer)
    assert peers.spans == [StageChoice(*span) for span in spans]
    peer = peers.start(peers.spans[0])
    assert [block.stage for block in peer.blocks] == [*range(spans[0][1] + 1)]
    command = children.commands["peer-1"]
    assert command[command.index("--stage") + 1] == str(peers.spans[0])


def test_those_who_join_are_told_of_a_model_that_the_user_s_configuration_names(tmp_path: Path) -> None:
    config = configs.load_preset("tiny")
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, custom_class="mine:Model"))
    _, peers, children = started_peers(tmp_path, config)
    serve(peers.start(peers.spans[0]))
    peers.start(peers.spans[1])
    assert "--allow-class" not in children.commands["peer-1"]
    assert " --allow-class mine:Model" in " ".join(children.commands["peer-2"])
