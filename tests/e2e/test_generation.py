"""Real peers write the text that transformers writes, also when one of them is killed while the swarm trains."""

import asyncio
import dataclasses
import signal
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from peers.commands import command_line
from peers.generate.models import open_swarm
from peers.generate.options import GenerateOptions
from peers.model import program
from scripts.benches.shared.theirs import writer
from swarm import config as configs
from swarm.config import OptimizerConfig, RoundsConfig
from swarm.credentials.identity import generate
from swarm.data.tokenizers import ByteTokenizer
from swarm.generation.engine import Engine, collect
from swarm.generation.sampling import Sampling
from swarm.generation.text_model import TextStream
from swarm.interchange.run_folder import to_toml
from swarm.pipeline.swarm_engine import SwarmEngine
from swarm.rpc.ask import describe
from swarm.rpc.channels import ChannelPool
from swarm.rpc.v1 import stage_pb2 as pb
from tests.support.swarm import RealPeer, RealSwarm, real_swarm, run_all, wait_until, whole_lines, write_text

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

COUNT, KILLED_AT, LONGEST = 64, 20, 256
GREEDY = Sampling(temperature=0.0)
PROMPT = list(b"def main():")
SIZES: dict[str, Any] = {
    "vocab_size": 259, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": LONGEST, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def _import(folder: Path) -> None:
    """A model with random weights, as a run of three stages."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter.ndim == 1) + 0.15 * torch.randn(parameter.shape))
    model.save_pretrained(folder / "model")
    options = ("--stages", "3", "--dataset", str(write_text(folder / "text.txt")))
    assert program.main(["import", str(folder / "model"), "--output", str(folder / "run"), *options]) == 0
    path = folder / "run" / "run.toml"
    config = configs.load(path)
    config = dataclasses.replace(
        config, data=dataclasses.replace(config.data, sequence_length=64, microbatch_size=2, held_out_fraction=0.1),
        rounds=RoundsConfig(setting="synchronous", round_samples=16), optimizer=OptimizerConfig(learning_rate=1e-4),
    )  # fmt: skip
    path.write_text(to_toml(config), encoding="utf-8")


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealSwarm]:
    """Three peers that have the model, and two more of the middle stage; every round leaves checkpoints."""
    with real_swarm(tmp_path_factory.mktemp("texts")) as swarm:
        folder = swarm.folder
        _import(folder)
        swarm.model = folder / "run"
        options = ("--checkpoint", str(folder / "checkpoints"), "--checkpoint-every", "1", "--keep-checkpoints", "999")
        swarm.start_peers([0], *options)
        own = ("--model", str(swarm.model))
        started = [swarm.launch(stage, *options, *more) for stage, more in ((1, own), (2, own), (1, ()), (1, ()))]
        for child, ready_file in started:
            swarm.arrived(child, ready_file)
        yield swarm


@pytest.fixture(scope="module")
def theirs(swarm: RealSwarm) -> list[int]:
    """What transformers writes with the model as it was before the run."""
    return _theirs(swarm.folder / "model")


def _theirs(folder: Path) -> list[int]:
    return writer(AutoModelForCausalLM.from_pretrained(folder).eval(), PROMPT, COUNT)()


@torch.no_grad()
def _their_logprobs(folder: Path, tokens: list[int]) -> list[float]:
    """The log-probabilities, by transformers, of the tokens after the first."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    logprobs_TV = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    found: list[float] = logprobs_TV.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
    return found


async def _counters(channels: ChannelPool, peer: RealPeer) -> pb.GenerationCounters:
    """A peer's counters: the sessions that it has now, and the tokens that have passed by."""
    return (await describe(channels.channel(peer.record), pb.DescribeRequest(), seconds=10.0)).generation


async def _kill_in_mid_text(swarm: RealSwarm, engine: Engine) -> list[int]:
    """Let a text be written, and kill its middle peer meanwhile. Return the tokens of the text."""
    middle, channels = [peer for peer in swarm.peers if peer.stage == 1], ChannelPool(identity=generate())
    before = [(await _counters(channels, peer)).tokens for peer in middle]
    found: list[int] = []
    async with aclosing(engine.generate(PROMPT, GREEDY, COUNT)) as stream:
        async for token in stream:
            found.append(token)
            if len(found) == KILLED_AT // 2:
                after = [(await _counters(channels, peer)).tokens for peer in middle]
                growth = [now - then for now, then in zip(after, before, strict=True)]
            if len(found) == KILLED_AT:
                assert sorted(growth)[-2] == 0 < max(growth) < COUNT
                swarm.kill(middle[growth.index(max(growth))])
    return found


def _text(tokens: list[int]) -> str:
    stream = TextStream(ByteTokenizer(), PROMPT)
    return "".join(map(stream.push, tokens)) + stream.rest()


@contextmanager
def _server(swarm: RealSwarm) -> Iterator[str]:
    """Run swarm-generate --serve, and yield its URL. At the end Ctrl-C ends it, without an error."""
    command = command_line("generate", ["--initial-peers", swarm.address, "--serve", "0"])
    (swarm.folder / "logs" / "server.log").unlink(missing_ok=True)
    server = swarm.children.start("server", command)
    wait_until(lambda: len(whole_lines(server.log)) == 2, 60.0, f"the server's address; see {server.log}")
    yield whole_lines(server.log)[-1].split()[-1]
    server.process.send_signal(signal.SIGINT)
    assert swarm.wait_for_end(server, 20.0) == 0


async def _hang_up(swarm: RealSwarm, client: openai.AsyncOpenAI, model: str) -> None:
    """Hang up in mid-text, and check that within two seconds no peer keeps anything of the text."""
    channels = ChannelPool(identity=generate())

    async def num_sessions() -> int:
        return sum([(await _counters(channels, peer)).sessions for peer in swarm.peers])

    prompt = bytes(PROMPT).decode()
    answer = await client.completions.create(model=model, prompt=prompt, max_tokens=LONGEST - len(PROMPT), stream=True)
    await anext(aiter(answer))
    assert await num_sessions() >= 3
    await answer.close()
    async with asyncio.timeout(2.0):
        while await num_sessions():  # noqa: ASYNC110 - nothing says when
            await asyncio.sleep(0.05)
    await channels.close()


async def test_a_swarm_answers_openai_s_client_and_lets_go_of_what_it_hangs_up_on(
    swarm: RealSwarm, theirs: list[int]
) -> None:
    with _server(swarm) as url:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60.0) as client:
            listed, _ = (await client.models.list()).data
            assert listed.id.endswith("@0")
            answer = await client.completions.create(
                model=listed.id, prompt=bytes(PROMPT).decode(), temperature=0, max_tokens=COUNT, stream=True
            )
            found = "".join([chunk.choices[0].text async for chunk in answer])
            assert found == _text(theirs)
            # What lm-eval's client sends.
            scored = await client.completions.create(
                model=listed.id, prompt=[PROMPT, PROMPT[:5]], echo=True, logprobs=1, max_tokens=1, temperature=0,
                seed=1234,
            )  # fmt: skip
            for prompt, choice in zip((PROMPT, PROMPT[:5]), scored.choices, strict=True):
                assert choice.logprobs is not None
                assert choice.logprobs.token_logprobs is not None
                first, *others, _ = choice.logprobs.token_logprobs
                assert first is None
                assert others == pytest.approx(_their_logprobs(swarm.folder / "model", prompt), abs=1e-4)
            await _hang_up(swarm, client, listed.id)


def test_text_is_that_of_transformers_whatever_happens(swarm: RealSwarm, theirs: list[int]) -> None:
    asked = GenerateOptions(prompt="-", initial_peers=(swarm.address,))

    async def at_rest() -> list[list[int]]:
        async with open_swarm(asked) as model:
            two = await asyncio.gather(*(collect(model.engine, PROMPT, GREEDY, COUNT) for _ in range(2)))
            return [*two, await _kill_in_mid_text(swarm, model.engine)]

    assert asyncio.run(at_rest()) == [theirs] * 3
    command = ("--prompt", bytes(PROMPT).decode(), "--temperature", "0", "--max-tokens", str(COUNT))
    told, alone = run_all(
        ("generate", "--initial-peers", swarm.address, *command), ("generate", "--model", str(swarm.model), *command)
    )
    assert (told.returncode, told.stdout) == (0, alone.stdout), told.stderr
    trainer = swarm.start_trainer("train", steps=10)
    swarm.wait_for_steps("train", 2)

    async def while_it_trains() -> tuple[int | None, list[int]]:
        async with open_swarm(asked) as model:
            found = await _kill_in_mid_text(swarm, model.engine)
            assert isinstance(model.engine, SwarmEngine)
            return model.engine.round, found

    round_number, found = asyncio.run(while_it_trains())
    assert swarm.wait_for_end(trainer) == 0
    exported = ("--output", str(swarm.folder / "out"), "--round", str(round_number))
    assert program.main(["export", "--checkpoint", str(swarm.folder / "checkpoints"), *exported]) == 0
    assert found == _theirs(swarm.folder / "out")
    peers = [peer for stage in swarm.status()["stages"] for peer in stage["peers"] if peer["state"] == "serving"]
    assert {peer["sessions"] for peer in peers} == {0}
    assert min(peer["generated_tokens"] for peer in peers) > 0
