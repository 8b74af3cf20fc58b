"""The path router: what it chooses, the folder that it is written to, and the shards that it learns from."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from swarm.config import DataConfig
from swarm.data import path_router
from swarm.data.path_router import PathRouter, arranged, balanced, classified, clustered, hashed, sequences
from swarm.data.sources import Source
from swarm.errors import IntegrityError

HELLO, WORLD = (list(text.encode()) for text in ("hello hello hello", "world 1 2 3 world"))


def _router() -> PathRouter:
    """One whose paths take what begins like HELLO, and what begins like WORLD."""
    weights_PF = torch.stack([hashed(HELLO), hashed(WORLD)])
    return PathRouter(weights_PF=weights_PF, biases_P=torch.tensor([0.0, 0.125]), tokenizer="bytes", model="there")


def test_hashes_never_change() -> None:
    """A router outlives a release: these places must stay."""
    some = ([0], [65535], [1, 2], [1, 2, 3])
    places = [[hashed(tokens, log2_features=log2).nonzero().ravel().tolist() for tokens in some] for log2 in (9, 11)]
    assert places[0] == [[433], [65], [15, 29, 170], [15, 29, 145, 170, 275, 300]]
    assert places[1] == [[1733], [261], [63, 116, 681], [63, 116, 580, 681, 1100, 1200]]
    assert hashed([1, 2, 3]).norm() == pytest.approx(1)
    assert hashed([]).count_nonzero() == 0


def test_a_router_is_read_as_it_was_written(tmp_path: Path) -> None:
    router = _router()
    router.write(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["router.json", "router.safetensors"]
    found = path_router.read(tmp_path)
    assert torch.equal(found.weights_PF, router.weights_PF)
    assert torch.equal(found.biases_P, router.biases_P)
    assert (found.tokenizer, found.model, found.num_paths) == ("bytes", "there", 2)


def test_a_router_with_fewer_features_chooses_by_as_many(tmp_path: Path) -> None:
    weights_PF = torch.stack([hashed(HELLO, log2_features=9), hashed(WORLD, log2_features=9)])
    PathRouter(weights_PF=weights_PF, biases_P=torch.zeros(2), tokenizer="bytes").write(tmp_path)
    router = path_router.read(tmp_path)
    assert [router.choose(text, router.hashed) for text in (HELLO, WORLD)] == [0, 1]


def test_a_folder_without_a_sound_router_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no router\.json: swarm-model route makes one"):
        path_router.read(tmp_path)
    for weights_PF in (torch.zeros(3, 4), torch.full((2, 4), torch.nan), torch.zeros(2, 5), torch.zeros(2)):
        PathRouter(weights_PF=weights_PF, biases_P=torch.zeros(2), tokenizer="").write(tmp_path)
        with pytest.raises(IntegrityError, match="is no router"):
            path_router.read(tmp_path)
    (tmp_path / "router.safetensors").write_bytes(b"short")
    with pytest.raises(IntegrityError, match="not a whole safetensors file"):
        path_router.read(tmp_path)
    (tmp_path / "router.json").write_text('{"format": 2}')
    with pytest.raises(IntegrityError, match="of another release"):
        path_router.read(tmp_path)


# -- the shards of paths -----------------------------------------------------------------------------------------------


def _blobs(num_each: int, *centers: tuple[float, float]) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    noise = np.random.RandomState(0).normal(0, 0.1, (len(centers) * num_each, 2))
    return (np.repeat(centers, num_each, axis=0) + noise).astype(np.float32)


def test_a_long_text_is_cut_at_ends_of_lines_and_nothing_is_lost(tmp_path: Path) -> None:
    long, unbroken = "".join(f"line {number} of a long text\n" for number in range(300)), "x" * 250
    (tmp_path / "a.txt").write_text(long)
    (tmp_path / "b.txt").write_text(unbroken)
    (tmp_path / "c.jsonl").write_text('{"text": "short"}\n{"text": ""}\n{"no": 1}\n')
    source = Source(str(tmp_path), DataConfig(dataset=str(tmp_path)))
    found = list(sequences(source, 100))
    assert max(map(len, found)) <= 100
    lines = [sequence for sequence in found if sequence.startswith("line")]
    assert "".join(lines) == long
    assert all(sequence.endswith("\n") for sequence in lines)
    assert sorted(sequence for sequence in found if sequence not in lines) == ["short", "x" * 50, "x" * 100, "x" * 100]
    assert source.faults.num_rows == 1


def test_clusters_are_those_of_k_means_as_long_as_none_is_too_large() -> None:
    """Of four clusters that are well apart, each is found; if one has half of all, what is farthest out goes next."""
    features = _blobs(50, (0, 0), (3, 0), (0, 3), (3, 3))
    clusters, centroids = clustered(features, [1.0] * 200, 4, 1.2, seed=1)
    assert [len(set(blob)) for blob in clusters.reshape(4, 50)] == [1, 1, 1, 1]
    assert len(set(clusters)) == 4
    means = np.stack([features[clusters == cluster].mean(0) for cluster in range(4)])
    assert np.allclose(centroids, means, atol=1e-5)

    features = _blobs(50, (0, 0), (0.1, 0), (3, 0))
    sizes = np.random.RandomState(0).randint(1, 9, 150).astype(float)
    free, _ = clustered(features, sizes.tolist(), 3, 100.0, seed=1)
    clusters, centroids = clustered(features, sizes.tolist(), 3, 1.1, seed=1)
    shares = [np.bincount(found, sizes, 3) * 3 / sizes.sum() for found in (free, clusters)]
    assert shares[0].max() > 1.1 >= shares[1].max()
    means = np.stack([np.average(features[clusters == k], axis=0, weights=sizes[clusters == k]) for k in range(3)])
    assert np.allclose(centroids, means, atol=0.1)


def test_paths_with_common_blocks_take_clusters_that_are_alike() -> None:
    """As well as the best of all arrangements; and of four groups of four clusters each has a variant of its own, of
    the first stage that has variants."""
    paths = [*itertools.product((0, 1), (0, 1))]
    points = np.random.RandomState(3).normal(0, 1, (4, 2)).astype(np.float32)

    def cost(order: Sequence[int]) -> float:
        pairs = itertools.combinations(zip(order, paths, strict=True), 2)
        return sum(
            float(np.square(points[one] - points[other]).sum())
            * sum(0.5**stage * (path[stage] == other_path[stage]) for stage in range(2))
            for (one, path), (other, other_path) in pairs
        )

    assert cost(arranged(points, paths, seed=0).tolist()) == pytest.approx(
        min(map(cost, itertools.permutations(range(4))))
    )
    groups = np.random.RandomState(4).permutation(16) % 4
    blobs = (np.eye(4)[groups] + np.random.RandomState(5).normal(0, 0.05, (16, 4))).astype(np.float32)
    # Stages without variants, however many, change nothing.
    crossed = [(*[0] * 40, one, other, 0) for one, other in itertools.product(range(4), repeat=2)]
    of_path = groups[arranged(blobs, crossed, seed=1)].reshape(4, 4)
    assert [len(set(of_variant)) for of_variant in of_path] == [1, 1, 1, 1]


@pytest.mark.parametrize("best", [[0, 1, 2, 3], [0, 0, 2, 2], [3, 3, 3, 3]])
def test_the_path_with_the_least_loss_is_found_by_features(best: list[int]) -> None:
    """Also if only two paths, or a single one, are ever the best."""
    features = _blobs(30, (0, 0), (3, 0), (0, 3), (3, 3))
    wanted = np.repeat(best, 30)
    weights_PF, biases_P = classified(features, wanted, np.ones(len(wanted)), 4)
    assert np.array_equal((torch.from_numpy(features) @ weights_PF.T + biases_P).argmax(1).numpy(), wanted)


def test_sequences_with_many_beginnings_count_no_more_than_others() -> None:
    features = _blobs(200, (0, 0), (0.15, 0))
    best = np.repeat([0, 1], 200)
    alike = classified(features, best, np.ones(400), 2)
    nine_times = np.repeat(features[best == 1], 9, axis=0)
    many = np.concatenate([features[best == 0], nine_times]), np.repeat([0, 1], [200, 1800])
    counted = classified(*many, np.repeat([1.0, 1 / 9], [200, 1800]), 2)
    for one, other in zip(alike, counted, strict=True):
        assert torch.allclose(one, other, atol=1e-3)


@pytest.mark.parametrize("most_over_mean", [1.05, 1.5])
def test_no_shard_is_larger_than_asked_for(most_over_mean: float) -> None:
    """Biases alone do it where sequences differ, so that the router makes the same choice later."""
    generator = np.random.RandomState(0)
    scores_NP = torch.from_numpy(generator.normal((3.0, 0.0, 0.0, -1.0), 1.0, (4000, 4)))
    sizes = generator.randint(1, 100, 4000)
    biases_P, paths_N = balanced(scores_NP, sizes.tolist(), most_over_mean)
    loads = np.bincount(paths_N, sizes, 4)
    assert loads.max() <= most_over_mean * loads.mean()
    by_router = (scores_NP + biases_P).argmax(1).numpy()
    assert (by_router == paths_N).mean() > 0.97


def test_sequences_that_begin_alike_are_spread_all_the_same() -> None:
    scores_NP = torch.tensor([[1.0, 0.5, 0.0]]).repeat(90, 1)
    _, paths_N = balanced(scores_NP, [10] * 90, 1.1)
    assert np.bincount(paths_N).max() <= 33
    one, two = balanced(torch.tensor([[0.0, 1.0], [0.0, 2.0]]), [1000, 1], 1.01)[1]
    assert (one, two) == (0, 1) or (one, two) == (1, 0), "a sequence larger than a shard may be has one of its own"
