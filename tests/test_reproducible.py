"""Members of a stage get the same bits on processors of different kinds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support import reproducible

_OWN = torch.backends.cpu.get_cpu_capability()


@pytest.mark.parametrize(
    "processor",
    [
        reproducible.ANOTHER_PROCESSOR,
        pytest.param(
            {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
            marks=[pytest.mark.slow, pytest.mark.skipif(_OWN != "AVX512", reason="this processor has no AVX-512")],
        ),
    ],
)
def test_another_processor_computes_the_same_bits(processor: dict[str, str], tmp_path: Path) -> None:
    """That holds with another number of threads, too."""
    reproducible.write_encoded(tmp_path)
    command = [sys.executable, "-m", "tests.support.reproducible", str(tmp_path), "3"]
    other = subprocess.run(command, env=os.environ | processor, check=True, capture_output=True, text=True)
    assert json.loads(other.stdout) == reproducible.of_everything(tmp_path)


def test_every_machine_that_runs_this_test_computes_the_same_bits() -> None:
    """If one of these changed on all machines, members of two releases would no longer reach the same state."""
    assert reproducible.of_arithmetic() == {
        "AdamW": "363ce086c513cc2c95e1bebce185581d57fcfcb5a8dcde6e65782d64c0602097",
        "AdamW with moments in 8 bits": "33b0d1903f0d6fba318be76aa1901e896c5c66db5f80dc2eb0d258ac71b8601e",
        "Muon": "aa101c797f0cd21aa70ee4673452801f1d0fdb86555fda97d68b47ce84d53673",
        "Nesterov": "6bba6fdfed81fab88129aac7a6ac369753721346084fa8bb2ec1cdae00e1cd45",
        "inverse DCT": "5d137ea4f5e482382c406dccf7e74cd57192ac3f849b79a789577a970f91f8d7",
    }
