"""The loss plot is a picture, whatever the file holds."""

import json
from pathlib import Path

import pytest

from swarm.metrics.plot import plot_loss


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"step": 1, "train/loss": 5.0, "val/loss": None}, {"step": 2, "train/loss": None}],
        [{"step": 1, "train/loss": 5.0, "val/loss": 5.1}, {"step": 1, "event": "killed peer 1-0"}],
        [{"step": 1, "val/loss": 5.1, "val/loss/$x^{$.txt": 5.0, "val/loss/code": None}],
    ],
)
def test_plot(rows: list[dict[str, object]], tmp_path: Path) -> None:
    metrics, image = tmp_path / "metrics.jsonl", tmp_path / "loss.png"
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plot_loss(metrics, image)
    assert image.read_bytes().startswith(b"\x89PNG")
