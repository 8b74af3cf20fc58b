"""swarm-model route: the shards that it writes, the router beside them, and what it refuses."""

import collections
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from peers.model import program as model
from peers.model import route
from peers.model.options import RouteModelOptions
from peers.shared.named_model import hidden_features
from swarm import config as configs
from swarm.data import path_router
from swarm.data.path_router import hashed
from swarm.errors import IntegrityError
from tests.interchange.small_models import make, save

KINDS = {
    "py": "def function_{0}(argument):\n    return argument + {0}\n",
    "c": "#include <header{0}.h>\nint main(void) {{ return {0}; }}\n",
    "html": "<html><body><p>Page {0}</p></body></html>\n",
    "en": "Once upon a time there were {0} bees, and they sang.\n",
}


def _texts(folder: Path, num_each: int = 40) -> dict[str, str]:
    """Texts of four kinds, with the kind of each."""
    rows = {text.format(number): kind for kind, text in KINDS.items() for number in range(num_each)}
    with (folder / "text.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": row, "kind": kind}) + "\n" for row, kind in sorted(rows.items()))
    return rows


def _route(folder: Path, *more: str, paths: int = 4) -> list[list[str]]:
    """Route the texts, and return the rows of each shard."""
    source = ["--paths", str(paths), "--dataset", str(folder / "text.jsonl")]
    assert model.main(["route", "--output", str(folder / "shards"), *source, *more]) == 0
    return _shards(folder / "shards")


def _shards(folder: Path) -> list[list[str]]:
    return [
        [json.loads(line)["text"] for line in path.read_text().splitlines()]
        for path in sorted(folder.glob("path-*.jsonl"))
    ]


def test_texts_that_begin_alike_come_into_one_shard_and_none_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = _texts(tmp_path)
    shards = _route(tmp_path, "--most-over-mean", "1.5")
    assert sorted(row for shard in shards for row in shard) == sorted(kinds)
    assert sorted({kinds[row] for row in shard}.pop() for shard in shards) == sorted(KINDS)
    assert all(len({kinds[row] for row in shard}) == 1 for shard in shards)
    router = path_router.read(tmp_path / "shards")
    for path, shard in enumerate(shards):
        assert {router.choose(list(row.encode()), hashed) for row in shard} == {path}
    told = capsys.readouterr().out
    settings = tomllib.loads(told)["data"]
    assert settings["paths"] == [str(tmp_path / "shards" / f"path-0{path}.jsonl") for path in range(4)]
    run = {"stages": {"num_stages": 2, "variants": [2, 2]}, "data": settings}
    assert len(configs.from_dict(run, source="told").data.datasets) == 4


def test_fewer_sequences_than_paths_are_refused(tmp_path: Path) -> None:
    _texts(tmp_path, 1)
    with pytest.raises(ValueError, match="there are 4 sequences, too few for 5 paths"):
        _route(tmp_path, paths=5)
    assert not (tmp_path / "shards").exists()


@pytest.mark.parametrize(("rows", "what"), [(9, "grew"), (7, "shrank")])
def test_a_text_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, what: str
) -> None:  # fmt: skip
    def write(number: int) -> None:
        lines = [json.dumps({"text": text.format(row)}) for row in range(3) for text in KINDS.values()]
        (tmp_path / "text.jsonl").write_text("\n".join(lines[:number]) + "\n")

    def clustered(*given: Any, **options: Any) -> Any:
        write(rows)
        return true(*given, **options)

    true = path_router.clustered
    monkeypatch.setattr(path_router, "clustered", clustered)
    write(8)
    with pytest.raises(IntegrityError, match=f"the text {what} while it was read: route it again"):
        _route(tmp_path, paths=2)
    assert not (tmp_path / "shards").exists()


def test_a_random_cut_mixes_all_and_has_no_router(tmp_path: Path) -> None:
    kinds = _texts(tmp_path)
    shards = _route(tmp_path, "--random", "--seed", "3")
    assert not (tmp_path / "shards" / "router.json").exists()
    for shard in shards:
        assert len({kinds[row] for row in shard}) == 4
    (tmp_path / "shards").rename(tmp_path / "before")
    assert _route(tmp_path, "--random", "--seed", "3") == shards
    (tmp_path / "shards").rename(tmp_path / "again")
    assert _route(tmp_path, "--random", "--seed", "4") != shards


def test_a_model_s_hidden_states_tell_as_well_what_is_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kinds = _texts(tmp_path, 20)
    theirs = save("llama-2", tmp_path / "model")
    shards = _route(tmp_path, "--model", str(tmp_path / "model"), "--most-over-mean", "2")
    assert sorted(row for shard in shards for row in shard) == sorted(kinds)
    router = path_router.read(tmp_path / "shards")
    assert router.model == str(tmp_path / "model")

    def features(tokens: Any) -> torch.Tensor:
        """By transformers, whose hidden states before the last norm are those of the last layer."""
        last: list[torch.Tensor] = []
        hook = theirs.model.layers[-1].register_forward_hook(lambda _, __, output: last.append(output))
        with torch.no_grad():
            theirs(torch.tensor([tokens]))
        hook.remove()
        return (last[0][0] if last[0].ndim == 3 else last[0]).mean(0)

    chosen = collections.Counter(
        router.choose(list(row.encode()), features) == path for path, shard in enumerate(shards) for row in shard
    )
    assert chosen[True] > 0.95 * chosen.total()


def test_a_run_folder_s_hidden_states_are_those_of_its_model(tmp_path: Path) -> None:
    """Also of no token, as blank text may have."""
    save("llama-2", tmp_path / "model")
    assert model.main(["import", str(tmp_path / "model"), "--output", str(tmp_path / "run")]) == 0
    imported, own = (hidden_features(str(tmp_path / each), tmp_path / "cache", print)[0] for each in ("model", "run"))
    assert torch.equal(imported([1, 2, 3]), own([1, 2, 3]))
    assert own([1, 2, 3]).count_nonzero() == len(own([]))
    assert own([]).count_nonzero() == 0


def test_a_path_without_text_is_refused(tmp_path: Path) -> None:
    """Where all begin alike, nothing says which sequences belong to it."""
    rows = [{"text": f"{'the same licence for all of them, ' * 3} {number}"} for number in range(60)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=r"path [01] would get no text: many sequences begin alike"):
        _route(tmp_path, "--most-over-mean", "3", paths=2)
    assert not (tmp_path / "shards").exists()
    assert all(_route(tmp_path, paths=2))


def test_the_path_with_the_least_loss_takes_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two models one has learnt Python and HTML, and the other one C and English."""
    kinds = _texts(tmp_path, 30)
    learnt = [("py", "html"), ("c", "en")]
    for path, own in enumerate(learnt):
        module = make("llama-2").train()
        optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
        rows = [row for row, kind in kinds.items() if kind in own]
        for step in range(40):
            tokens = torch.tensor([list(row.encode()[:33]) for row in rows[step % 10 :: 10]])
            loss = module(tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        module.save_pretrained(tmp_path / "out" / f"path-0{path}")
    shards = _route(tmp_path, "--refine", str(tmp_path / "out"), "--most-over-mean", "1.5", paths=2)
    for own, shard in zip(learnt, shards, strict=True):
        assert {kinds[row] for row in shard} == {*own}
    with pytest.raises(ValueError, match="has no path-02: export the run's paths there with swarm-model export"):
        route.route(
            RouteModelOptions(
                output=tmp_path / "three", paths=3, dataset=(str(tmp_path / "text.jsonl"),), refine=tmp_path / "out"
            )
        )
    assert not (tmp_path / "three").exists()
