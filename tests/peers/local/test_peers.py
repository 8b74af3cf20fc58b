"""With which options each peer of a local swarm is started."""

import dataclasses
from pathlib import Path

import pytest

from peers.local.peers import spans_of
from peers.shared.option_types import StageChoice
from swarm import config as configs
from tests.peers.local.children import serve, started_peers

_CHOSEN = {
    "--preset", "--config", "--checkpoint", "--checkpoint-every", "--keep-checkpoints", "--model", "--lora-rank",
    "--tokenizer", "--set",
}  # fmt: skip


def test_each_peer_has_its_device_and_its_part_of_the_memory(tmp_path: Path) -> None:
    _, peers, children = started_peers(tmp_path)
    for stage in (0, 1, 2):
        peers.start(peers.spans[stage])
    commands = [children.commands[f"peer-{number}"] for number in (1, 2, 3)]
    assert [command[command.index("--device") + 1] for command in commands] == ["cuda:0", "cuda:1", "cuda:0"]
    # Four peers share half of 8 GiB.
    assert {command[command.index("--graph-memory-mib") + 1] for command in commands} == {"1024"}


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
    [(None, [(0, 0), (1, 1), (2, 2)]), (2, [(0, 1), (2, 2)]), (3, [(0, 2)]), (9, [(0, 2)])],
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


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["--preset", "tiny"]),
        ({"preset": "small"}, ["--preset", "small"]),
        ({"config": Path("x.toml")}, ["--config", "x.toml"]),
        (
            {"model": "m", "lora_rank": 4, "tokenizer": "t", "set": ("run=r", "wire.dtype=bf16")},
            ["--tokenizer", "t", "--model", "m", "--lora-rank", "4", "--set", "run=r", "--set", "wire.dtype=bf16"],
        ),
        ({"checkpoint": Path("c")}, ["--checkpoint", "c", "--preset", "tiny"]),
        (
            {"checkpoint": Path("c"), "checkpoint_every": 5, "keep_checkpoints": 2},
            ["--checkpoint", "c", "--checkpoint-every", "5", "--keep-checkpoints", "2", "--preset", "tiny"],
        ),
    ],
)
def test_the_first_peer_gets_what_was_asked_for(
    options: dict[str, object], expected: list[str], tmp_path: Path
) -> None:
    _, peers, children = started_peers(tmp_path, None, **options)
    peers.start(peers.spans[0])
    command = children.commands["peer-1"]
    options_at = [index for index, word in enumerate(command) if word in _CHOSEN]
    assert [word for index in options_at for word in command[index : index + 2]] == expected


@pytest.mark.parametrize(("rounds", "planned"), [((), "60"), ((30, 40), "100")])
def test_a_run_that_goes_on_is_planned_for_the_steps_that_come_as_well(
    rounds: tuple[int, ...], planned: str, tmp_path: Path
) -> None:
    for number in rounds:
        (tmp_path / f"stage-0-of-3.round-{number}.safetensors").touch()
    _, peers, children = started_peers(tmp_path, None, model="m", steps=60, resume=tmp_path)
    peers.start(peers.spans[0])
    command = children.commands["peer-1"]
    assert command[command.index("--steps") + 1] == planned


def test_those_who_join_are_told_of_a_model_that_the_user_s_configuration_names(tmp_path: Path) -> None:
    config = configs.load_preset("tiny")
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, custom_class="mine:Model"))
    _, peers, children = started_peers(tmp_path, config)
    serve(peers.start(peers.spans[0]))
    peers.start(peers.spans[1])
    assert "--allow-class" not in children.commands["peer-1"]
    assert " --allow-class mine:Model" in " ".join(children.commands["peer-2"])
