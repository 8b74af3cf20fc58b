"""Real peers write the text that transformers writes, also when one of them is killed while the swarm trains."""

import asyncio
import dataclasses
import signal
import subprocess
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from peers.commands import command_line
from peers.generate.options import GenerateOptions
from peers.generate.swarm_model import open_swarm
from peers.local.supervisor import Supervisor
from swarm import config as configs
from swarm.config import OptimizerConfig, RoundsConfig
from swarm.credentials.identity import generate
from swarm.generation.engine import Engine, collect
from swarm.generation.sampling import Sampling
from swarm.interchange.run_folder import to_toml
from swarm.pipeline.swarm_engine import SwarmEngine
from swarm.rpc.channels import ChannelPool
from swarm.rpc.describe import describe
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.types import PeerRecord, PeerState
from tests.support.swarm import RealPeer, RealSwarm, run, write_text

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

COUNT, KILLED_AT = 128, 40
GREEDY = Sampling(temperature=0.0)
PROMPT = list(b"def main():")
SIZES: dict[str, Any] = {
    "vocab_size": 259, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[RealSwarm]:
    with Supervisor(tmp_path / "logs") as children:
        yield RealSwarm(tmp_path, children)


def _import(folder: Path) -> Any:
    """A model with random weights, as a run of three stages; gives it."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter.ndim == 1) + 0.15 * torch.randn(parameter.shape))
    model.save_pretrained(folder / "model")
    options = ("--stages", "3", "--dataset", str(write_text(folder / "text.txt")))
    result = run("model", "import", str(folder / "model"), "--output", str(folder / "run"), *options)
    assert result.returncode == 0, result.stderr
    path = folder / "run" / "run.toml"
    config = configs.load(path)
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, sequence_length=64, microbatch_size=2, held_out_fraction=0.1),
        rounds=RoundsConfig(setting="synchronous", round_samples=8),
        optimizer=OptimizerConfig(learning_rate=1e-4),
    )
    path.write_text(to_toml(config), encoding="utf-8")
    return model


def _theirs(model: Any) -> list[int]:
    prompt = torch.tensor([PROMPT])
    tokens = model.generate(prompt, max_new_tokens=COUNT, do_sample=False, eos_token_id=None, pad_token_id=0)
    found: list[int] = tokens[0, len(PROMPT) :].tolist()
    return found


async def _num_tokens(channels: ChannelPool, peer: RealPeer) -> int:
    """That have passed by a peer."""
    record = PeerRecord(
        peer_id=peer.ready["peer_id"], announced_at=0.0, stage=peer.stage, endpoint=peer.ready["endpoint"],
        certificate_pem=peer.ready["certificate_pem"], state=PeerState.SERVING,
    )  # fmt: skip
    reply = await describe(channels.channel(record), pb.DescribeRequest(), seconds=10.0)
    return reply.generation.tokens


async def _kill_in_mid_text(swarm: RealSwarm, engine: Engine) -> list[int]:
    """A text whose middle peer is killed; gives its tokens."""
    middle, channels = [peer for peer in swarm.peers if peer.stage == 1], ChannelPool(identity=generate())
    before = [await _num_tokens(channels, peer) for peer in middle]
    found: list[int] = []
    async with aclosing(engine.generate(PROMPT, GREEDY, COUNT)) as stream:
        async for token in stream:
            found.append(token)
            if len(found) == KILLED_AT // 2:
                after = [await _num_tokens(channels, peer) for peer in middle]
                growth = [now - then for now, then in zip(after, before, strict=True)]
            if len(found) == KILLED_AT:
                assert sorted(growth)[-2] == 0 < max(growth) < COUNT
                swarm.kill(middle[growth.index(max(growth))])
    return found


def _serve(swarm: RealSwarm, expected: str) -> None:
    """The swarm answers OpenAI's client with the same text."""
    arguments = ["--initial-peers", swarm.address, "--serve", "0"]
    server = subprocess.Popen(command_line("generate", arguments), stderr=subprocess.PIPE, text=True)
    with server:
        try:
            assert server.stderr is not None
            [url] = [word for _, line in zip(range(2), server.stderr, strict=False) for word in line.split()[-1:]][1:]
            with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60.0) as client:
                [listed] = client.models.list().data
                assert listed.id.endswith("@0")
                prompt = bytes(PROMPT).decode()
                answer = client.completions.create(
                    model=listed.id, prompt=prompt, temperature=0, max_tokens=COUNT, stream=True
                )
                found = prompt + "".join(chunk.choices[0].text for chunk in answer)
            assert found == expected
            server.send_signal(signal.SIGINT)
            assert server.wait(20.0) == 0
        finally:
            server.kill()


def test_text_is_that_of_transformers_whatever_happens(swarm: RealSwarm) -> None:
    theirs = _theirs(_import(swarm.folder))
    swarm.model = swarm.folder / "run"
    checkpoints = ("--checkpoint", str(swarm.folder / "checkpoints"), "--checkpoint-every", "1")
    options = (*checkpoints, "--keep-checkpoints", "999")
    swarm.start_peers([0], *options)
    swarm.start_peers([1, 2], *options, "--model", str(swarm.model))
    swarm.start_peers([1, 1], *options)

    asked = GenerateOptions(prompt="-", initial_peers=(swarm.address,))

    async def at_rest() -> list[list[int]]:
        async with open_swarm(asked) as model:
            two = await asyncio.gather(*(collect(model.engine, PROMPT, GREEDY, COUNT) for _ in range(2)))
            return [*two, await _kill_in_mid_text(swarm, model.engine)]

    assert asyncio.run(at_rest()) == [theirs] * 3
    command = ("--prompt", bytes(PROMPT).decode(), "--temperature", "0", "--max-tokens", str(COUNT))
    told = run("generate", "--initial-peers", swarm.address, *command)
    assert told.returncode == 0, told.stderr
    assert told.stdout == run("generate", "--model", str(swarm.model), *command).stdout
    trainer = swarm.start_trainer("train", steps=25)
    swarm.wait_for_steps("train", 2)

    async def while_it_trains() -> tuple[int | None, list[int]]:
        async with open_swarm(asked) as model:
            found = await _kill_in_mid_text(swarm, model.engine)
            assert isinstance(model.engine, SwarmEngine)
            return model.engine.round, found

    round_number, found = asyncio.run(while_it_trains())
    assert swarm.wait_for_end(trainer) == 0
    exported = ("--output", str(swarm.folder / "out"), "--round", str(round_number))
    result = run("model", "export", "--checkpoint", str(swarm.folder / "checkpoints"), *exported)
    assert result.returncode == 0, result.stderr
    assert found == _theirs(AutoModelForCausalLM.from_pretrained(swarm.folder / "out").eval())
    peers = [peer for stage in swarm.status()["stages"] for peer in stage["peers"] if peer["state"] == "serving"]
    assert {peer["sessions"] for peer in peers} == {0}
    assert min(peer["generated_tokens"] for peer in peers) > 0


@pytest.mark.slow
def test_a_swarm_answers_openai_s_client(swarm: RealSwarm) -> None:
    _import(swarm.folder)
    swarm.model = swarm.folder / "run"
    swarm.start_peers([0])
    swarm.start_peers([1, 2], "--model", str(swarm.model))
    command = ("--prompt", bytes(PROMPT).decode(), "--temperature", "0", "--max-tokens", str(COUNT))
    told = run("generate", "--model", str(swarm.model), *command)
    _serve(swarm, told.stdout.removesuffix("\n"))
