"""The path router: what it chooses, and the folder that it is written to."""

from pathlib import Path

import pytest
import torch

from swarm.data import path_router
from swarm.data.path_router import PathRouter, hashed
from swarm.errors import IntegrityError

HELLO, WORLD = (list(text.encode()) for text in ("hello hello hello", "world 1 2 3 world"))


def _router() -> PathRouter:
    """One whose paths take what begins like HELLO, and what begins like WORLD."""
    weights_PF = torch.stack([hashed(HELLO), hashed(WORLD)])
    return PathRouter(weights_PF=weights_PF, biases_P=torch.tensor([0.0, 0.125]), tokenizer="bytes", model="there")


def test_what_begins_alike_takes_one_path() -> None:
    router = _router()
    assert router.choose(list(b"hello hello"), hashed) == 0
    assert router.choose(list(b"world 1 2"), hashed) == 1
    assert router.choose([], hashed) == 1, "nothing but the biases tells"
    same, other = list(b"h" * 32), list(b"h" * 31 + b"w")
    assert router.choose(same + HELLO, hashed) == router.choose(same + WORLD, hashed), "only 32 tokens count"
    assert not torch.equal(hashed(same), hashed(other))


def test_hashes_never_change() -> None:
    """A router outlives a release: these places must stay."""
    places = [hashed(tokens).nonzero().ravel().tolist() for tokens in ([0], [65535], [1, 2], [1, 2, 3])]
    assert places == [[433], [65], [15, 29, 170], [15, 29, 145, 170, 275, 300]]
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


def test_a_router_of_other_paths_or_another_tokenizer_is_refused() -> None:
    _router().require(2, "bytes")
    with pytest.raises(ValueError, match="chooses among 2 paths, and the run has 3"):
        _router().require(3, "bytes")
    with pytest.raises(ValueError, match=r"made with another tokenizer \(bytes\) than the run's \(0123\)"):
        _router().require(2, "0123")


def test_a_folder_without_a_sound_router_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no router\.json: swarm-model route makes one"):
        path_router.read(tmp_path)
    for weights_PF in (torch.zeros(3, 4), torch.full((2, 4), torch.nan), torch.zeros(2)):
        PathRouter(weights_PF=weights_PF, biases_P=torch.zeros(2), tokenizer="").write(tmp_path)
        with pytest.raises(IntegrityError, match="is no router"):
            path_router.read(tmp_path)
    (tmp_path / "router.safetensors").write_bytes(b"short")
    with pytest.raises(IntegrityError, match="not a whole safetensors file"):
        path_router.read(tmp_path)
    (tmp_path / "router.json").write_text('{"format": 2}')
    with pytest.raises(IntegrityError, match="of another release"):
        path_router.read(tmp_path)
