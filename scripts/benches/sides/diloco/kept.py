"""Keeps the results of the diloco bench: a file for each arm and seed, with the figures and what they are of.

With --keep the bench continues where it was stopped. Figures of other rounds or of another text are refused.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.benches.shared.common import write_json


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The files in a folder, and the origin that they must have."""

    folder: Path
    rounds_at_200: int  # Outer steps of the arm with H = 200
    dataset: str  # The dataset as named on the command line
    digest: str  # The digest of the dataset's text

    def read(self, arm: str, seed: int) -> Mapping[str, Any] | None:
        """The figures of an arm and seed; None if they are not kept. Raises ValueError."""
        path = self._path(arm, seed)
        if not path.exists():
            return None
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            figures: Mapping[str, Any] = found["figures"]
            rounds, dataset, digest = (found["of"][name] for name in ("rounds_at_200", "dataset", "digest"))
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"--keep: {path} does not say what its figures are of; name another folder") from None
        if (rounds, digest) != (self.rounds_at_200, self.digest):
            raise ValueError(
                f"--keep: {path} is of {rounds} rounds at H = 200 of {dataset} ({digest[:12]}), and not of "
                f"{self.rounds_at_200} of {self.dataset} ({self.digest[:12]}); name another folder"
            )
        return figures

    def write(self, arm: str, seed: int, figures: Mapping[str, Any]) -> None:
        of = {"rounds_at_200": self.rounds_at_200, "dataset": self.dataset, "digest": self.digest}
        write_json(self._path(arm, seed), {"of": of, "figures": dict(figures)})

    def _path(self, arm: str, seed: int) -> Path:
        return self.folder / f"{arm}-{seed}.json"
