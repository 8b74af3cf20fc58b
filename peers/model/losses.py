"""The losses that a trainer has measured, for a model's card.

A trainer writes them into metrics.jsonl, by the step, which is a round of the whole swarm.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

METRICS = "metrics.jsonl"
_NAMES = {"train/loss": "training", "val/loss": "held-out"}
"""What is taken, and what it is called."""


@dataclass(frozen=True, kw_only=True)
class MeasuredLoss:
    """One figure.

    Attributes:
        name: of what it is the loss.
        loss: nats a token.
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
            row = json.loads(line)
            for key, name in _NAMES.items():
                if isinstance(loss := row.get(key), float):
                    found.append(MeasuredLoss(name=name, round=int(row["step"]), loss=loss))
    except OSError as error:
        raise ValueError(f"--metrics {file}: {error.strerror}") from None
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ValueError(f"--metrics {file} is no metrics.jsonl of a swarm-trainer") from None
    if not found:
        raise ValueError(f"--metrics {file} has no losses")
    return found


def losses_until(losses: Sequence[MeasuredLoss], round_number: int) -> Mapping[str, float]:
    """The last of each kind that was measured by a round, under a name that says when."""
    last = {loss.name: loss for loss in sorted(losses, key=lambda loss: loss.round) if loss.round <= round_number}
    return {f"Loss, {loss.name}, at round {loss.round}": loss.loss for loss in last.values()}
