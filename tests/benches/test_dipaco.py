"""The dipaco bench: that its peers are the swarm's own, what it evaluates on, and what its figures mean."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.benches.dipaco import ARMS, Options, parameters, run_config, summary
from scripts.benches.shared import texts
from scripts.benches.shared.common import run_of, with_corpus
from scripts.benches.sides.dipaco_arm import PathSwarm, held_out_texts
from scripts.benches.sides.plain_training import PlainDiloco
from swarm.config import RunConfig
from swarm.data.path_router import PathRouter, hashed
from swarm.types import Block


def _config(text: str, **data: Any) -> RunConfig:
    return run_of(
        "dipaco", width=32, layers=2, head_width=16, variants=(2, 2) if "paths" in data else (1, 1), setting="diloco",
        length=16, microbatch=2, round_samples=32, rounds={"inner_batch_samples": 2}, dataset=text, data=data,
        optimizer={"name": "adamw", "clip_norm": 1e6}, averaging={"overlap_steps": 0},
    )  # fmt: skip


async def test_peers_of_one_path_train_as_plain_diloco_does(text: str, tmp_path: Path) -> None:
    config, data = with_corpus(_config(text), tmp_path / "corpora")
    swarm, plain = PathSwarm(config, data, 4), PlainDiloco(config, data, 4)
    for number in range(2):
        await swarm.train_round(number)
        plain.step(number)
    (weights,) = swarm.weights_of_paths
    assert weights.keys() == plain.weights.keys()
    for name, value in plain.weights.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-5)


async def test_a_block_is_averaged_by_the_peers_of_its_paths_alone(tmp_path: Path) -> None:
    shards = [tmp_path / f"{name}.txt" for name in "abcd"]
    for shard in shards:
        shard.write_text(f"{shard.name} has its own text\n" * 300)
    config, data = with_corpus(_config("stdlib", paths=[*map(str, shards)]), tmp_path / "corpora")
    swarm = PathSwarm(config, data, 4)
    await swarm.train_round(0)
    states = {
        block: {peer.holders[block].backend.weights.state_digest() for peer in swarm.peers if block in peer.holders}
        for block in config.blocks
    }
    assert [len(digests) for digests in states.values()] == [1] * 4, "holders of a block have the same weights"
    assert len({Block(0), Block(0, 1), Block(1), Block(1, 1)} & states.keys()) == 4
    assert len(set.union(*states.values())) == 4, "variants have learnt different things"
    # Two members send half of a contribution and half of the average, and receive as much.
    num_parameters = sum(weight.numel() for weight in swarm.weights_of_paths[0].values())
    assert swarm.bytes_per_peer == pytest.approx(2 * 4 * num_parameters)


def test_what_chose_a_path_is_not_predicted(text: str) -> None:
    """Of these tokens each is its own number, so that samples say where they are from."""
    config = _config(text)
    paths = dataclasses.replace(config, stages=dataclasses.replace(config.stages, variants=(2, 2)))
    sequence = "".join(map(chr, range(100)))
    weights_PF = torch.zeros(4, len(hashed([0])))
    weights_PF[3] = hashed(range(32))
    router = PathRouter(weights_PF=weights_PF, biases_P=torch.zeros(4), tokenizer="bytes")
    (found,) = held_out_texts(paths, [("ascii", sequence)], router)
    assert found.path == 3
    assert found.tokens_NT1[:, 1:].flatten().tolist() == list(range(32, 32 + 4 * 16))
    assert [each.path for each in held_out_texts(paths, [("ascii", sequence)] * 5, None)] == [0, 1, 2, 3, 0]
    weights_PF[2] = hashed(range(32, 64))
    again = list(held_out_texts(paths, [("ascii", sequence)], router, reroutes=True))
    assert torch.equal(torch.cat([each.tokens_NT1 for each in again]), found.tokens_NT1)
    assert [again[0].path, again[2].path] == [3, 2], "the tokens from 32 on choose the path of those from 64 on"
    assert not list(held_out_texts(paths, [("ascii", sequence[: 32 + 15])], router))


def test_all_arms_read_as_many_tokens_and_the_total_size_is_that_of_all_blocks() -> None:
    options = Options()
    shards = [f"{number}.jsonl" for number in range(16)]
    configs = [run_config(arm, shards, 1, options) for arm in ARMS.values()]
    assert len({config.rounds.round_samples for config in configs}) == 1
    assert {len(config.paths) for config in configs} == {1, 16}
    assert all(config.data.datasets == tuple(shards) for config in configs)
    sizes = {name: parameters(arm, options) for name, arm in ARMS.items()}
    assert sizes["routed"] == {"path": sizes["dense"]["path"], "all": sizes["total"]["all"]}


def _run(loss: float) -> dict[str, Any]:
    return {
        "loss": loss, "by_kind": {"c": loss}, "bytes_per_peer": 8.0, "curve": [[1, loss]], "seconds": 1.0,
        "rerouted_loss": loss + 0.5,
    }  # fmt: skip


@pytest.mark.parametrize(("routed", "passed"), [((1.9, 3.9), True), ((1.98, 3.96), False)])
def test_seeds_are_compared_one_by_one(routed: tuple[float, float], passed: bool) -> None:
    found = summary({"routed": [*map(_run, routed)], "dense": [_run(2.0), _run(4.0)], "random": [_run(2.0)] * 2})
    assert found["better_than_dense"] == pytest.approx((2 - routed[0]) / 4 + (4 - routed[1]) / 8)
    assert found["passed"] is passed
    mean = sum(routed) / 2
    assert found["routing"] == {"learned": pytest.approx(mean), "random": 2.0, "rerouted": pytest.approx(mean + 0.5)}
    assert "better_than_total" not in found
    assert summary({"dense": [_run(2.0)]})["passed"] is None


def test_kinds_have_as_much_text_each_and_whole_texts_are_held_out(tmp_path: Path) -> None:
    kinds = {
        "long": lambda: (f"{number} " * 10_000 for number in range(40)),
        "short": lambda: (f"{number} " * 500 for number in range(1000)),
    }
    training, held_out = texts.of_each_kind(300_000, kinds)
    for kind in kinds:
        assert sum(map(len, held_out[kind])) == 300_000 // 8
        assert 0 <= 300_000 - sum(map(len, training[kind] + held_out[kind])) < texts.LONGEST
        assert not {text[:9] for text in training[kind]} & {text[:9] for text in held_out[kind]}
    with pytest.raises(ValueError, match="too little text of some kind"):
        texts.of_each_kind(300_000, kinds | {"rare": lambda: ["once"]})
