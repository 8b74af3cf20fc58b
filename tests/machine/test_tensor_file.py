"""Files of tensors."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm.errors import IntegrityError
from swarm.machine import tensor_file


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_others_may_read_a_file_as_the_umask_says(umask: int, mode: int, tmp_path: Path) -> None:
    path, before = tmp_path / "weights.safetensors", os.umask(umask)
    try:
        tensor_file.write(path, {"matrix": torch.zeros(2)})
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == mode


def test_a_file_that_is_removed_while_it_is_opened_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, from_file = tmp_path / "weights.safetensors", torch.UntypedStorage.from_file
    tensor_file.write(path, {"matrix": torch.zeros(2)})

    def remove_first(*arguments: Any, **options: Any) -> Any:
        path.unlink()
        return from_file(*arguments, **options)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", remove_first)
    with pytest.raises(IntegrityError, match=r"^[^\n]+ cannot be read: it has just been removed [^\n]+$"):
        _ = list(_names(path))


def _names(path: Path) -> Iterator[str]:
    with tensor_file.opened(path, IntegrityError) as file:
        yield from file.keys()
