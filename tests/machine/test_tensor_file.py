"""Files of tensors."""

from pathlib import Path

import pytest
import torch

from swarm.errors import IntegrityError
from swarm.machine import tensor_file


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path, matrix = tmp_path / "weights.safetensors", torch.arange(6.0).reshape(2, 3)
    tensor_file.write(path, {"matrix": matrix.T}, {"format": "pt"})
    with tensor_file.opened(path, IntegrityError) as file:
        assert torch.equal(file.get_tensor("matrix"), matrix.T)
        assert file.metadata() == {"format": "pt"}


def test_what_cannot_be_written_is_one_line_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "no such folder" / "weights.safetensors"
    with pytest.raises(OSError, match=r"^cannot write .*no such folder/weights\.safetensors: [^\n]+$"):
        tensor_file.write(path, {"matrix": torch.zeros(2)})
