"""A stage's initial weights are fetched from peers that have the model's folder, or a part of it."""

import random
from pathlib import Path

import pytest
import torch

from swarm.config import RunConfig
from swarm.content.service import Fetcher, Kind, nothing
from swarm.content.weights import WeightsCache
from swarm.errors import Fatal, IntegrityError, PeerUnavailable
from swarm.interchange import weights
from swarm.interchange.run_folder import ImportOptions, import_model, open_weights
from swarm.interchange.source import Source
from swarm.interchange.weights import Index, Weights
from swarm.machine.clock import SystemClock
from swarm.machine.waits import Waits
from swarm.model.stages import parameter_shapes
from tests.content.lines import FakeLine, after
from tests.interchange.small_models import save


@pytest.fixture
def run(tmp_path: Path) -> tuple[RunConfig, Weights]:
    """A run of three stages, with tied embeddings."""
    save("llama-3", tmp_path / "model")
    config = import_model(Source(tmp_path / "model"), tmp_path / "run", ImportOptions(num_stages=3))
    return config, open_weights(tmp_path / "run", config)


def cache_of(
    folder: Path, config: RunConfig, line: FakeLine, own: Weights | None = None, source: Source | None = None
) -> WeightsCache:
    """One peer's cache, with a line to others."""
    clock = SystemClock()
    fetcher = Fetcher(line, Kind.WEIGHTS, line.donors, clock, random.Random(0))
    return WeightsCache(folder, config.model.weights, fetcher, Waits(), own=own, source=source)


async def test_a_stage_is_fetched_and_then_given_to_others(
    tmp_path: Path, run: tuple[RunConfig, Weights], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is fetched from a peer that dies, a liar, and one that has all; nothing of other stages is fetched."""
    monkeypatch.setattr(weights, "SEGMENT_BYTES", 2048)
    monkeypatch.setattr("swarm.content.weights.SEGMENT_BYTES", 2048)
    config = import_model(Source(tmp_path / "model"), tmp_path / "segments", ImportOptions(num_stages=3))
    full = open_weights(tmp_path / "segments", config)
    line = FakeLine(dies=full.content, lacks=nothing, liar=lambda _: b"x", whole=full.content)
    line.faults["dies"] = after(5, PeerUnavailable("it hung up"))
    cache = cache_of(tmp_path / "cache", config, line)
    last = parameter_shapes(config, 2)
    assert cache.here(last) is None
    found = await cache.of(last)
    expected, got = full.load(last), found.load(last)
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    assert line.num_sent["whole"] > 10
    names = {path.name for path in (tmp_path / "cache").iterdir()}
    assert names == {"index.json", "embedding.safetensors", "layers.2.safetensors", "head.safetensors"}
    # A second newcomer has it from the first, which still lacks the other stages.
    second = cache_of(tmp_path / "second", config, FakeLine(first=cache_of(tmp_path / "cache", config, line).content))
    await second.of(last)
    with pytest.raises(PeerUnavailable, match="no peer that answers has it"):
        await second.of(parameter_shapes(config, 1))


async def test_a_damaged_part_of_the_cache_is_found(tmp_path: Path, run: tuple[RunConfig, Weights]) -> None:
    """The peer that loads it finds the damage, and so do peers that fetch it from here."""
    config, full = run
    shapes = parameter_shapes(config, 1)
    cache = cache_of(tmp_path / "cache", config, FakeLine(whole=full.content))
    found = await cache.of(shapes)
    path = tmp_path / "cache" / "layers.1.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(Exception, match="does not match its digest"):
        found.load(shapes)
    with pytest.raises(PeerUnavailable):
        await cache_of(tmp_path / "second", config, FakeLine(damaged=cache.content)).of(shapes)


def test_of_a_part_only_the_segments_that_it_lies_in_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "SEGMENT_BYTES", 64)
    whole = torch.arange(100.0).reshape(10, 10)
    given = Weights(Index.of([("matrix", whole)]), lambda _: [("matrix", whole)], place=Path("given"))
    whole[9, 9] = -1.0

    def read(*part: slice) -> torch.Tensor:
        return given.load({"matrix"}, lambda _, matrix: matrix[part])["matrix"]

    for sound in [(slice(5),), (slice(5, 9),), (slice(None), slice(3)), (slice(0),)]:
        assert torch.equal(read(*sound), whole[sound])
    for damaged in [(slice(9, 10),), (slice(None), slice(6, 7)), (slice(None),)]:
        with pytest.raises(IntegrityError, match="matrix does not match its digest"):
            read(*damaged)


async def test_weights_of_another_shape_are_refused_before_they_come(
    tmp_path: Path, run: tuple[RunConfig, Weights]
) -> None:
    config, full = run
    line = FakeLine(whole=full.content)
    shapes = {"layers.1.attention.q.weight": torch.Size([2, 2])}
    with pytest.raises(Fatal, match=r"do not fit its model: layers.1.attention.q.weight"):
        await cache_of(tmp_path / "cache", config, line).of(shapes)
    assert line.num_sent["whole"] == 1
