"""The losses that a trainer has measured, for a model's card.

A trainer writes them into metrics.jsonl, each with its step, which is a round of the whole swarm.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from swarm.machine import json_file
from swarm.metrics.log import OF_SOURCE

METRICS = "metrics.jsonl"
_NAMES = {"train/loss": "training", "val/loss": "held-out"}
"""The figures that are read, and their names in a model's card. Held-out losses of single datasets are read as well."""


@dataclass(frozen=True, kw_only=True)
class MeasuredLoss:
    """A loss at one round.

    Attributes:
        name: the text on which it was measured: training, held-out, or one dataset's held-out text.
        loss: nats per token.
    """

    name: str
    round: int
    loss: float


def read_losses(path: Path) -> list[MeasuredLoss]:
    """All losses in a trainer's folder, or in its metrics.jsonl. Raises ValueError if there are none."""
    file = path / METRICS if path.is_dir() else path
    found = list[MeasuredLoss]()
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
        for line in lines:
            row = json_file.parse(line)
            for key, loss in row.items():
                if isinstance(loss, float) and (name := _name(key)):
                    found.append(MeasuredLoss(name=name, round=int(row["step"]), loss=loss))
    except OSError as error:
        raise ValueError(f"--metrics {file}: {error.strerror}") from None
    except (ValueError, OverflowError, KeyError, AttributeError, TypeError):
        raise ValueError(f"--metrics {file} is no metrics.jsonl of a swarm-trainer") from None
    if not found:
        raise ValueError(f"--metrics {file} has no losses")
    return found


def _name(key: str) -> str:
    """The name of a loss, by its key in metrics.jsonl; empty for another figure."""
    if key.startswith(OF_SOURCE):
        return f"held-out, {key.removeprefix(OF_SOURCE)}"
    return _NAMES.get(key, "")


def losses_until(losses: Sequence[MeasuredLoss], round_number: int) -> Mapping[str, float]:
    """For each figure, the last loss that was measured up to a round. The keys also say at which round it was."""
    last = {loss.name: loss for loss in sorted(losses, key=lambda loss: loss.round) if loss.round <= round_number}
    return {f"Loss, {loss.name}, at round {loss.round}": loss.loss for loss in last.values()}
