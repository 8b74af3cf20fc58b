"""A swarm-peer that lies about its round: `python -m tests.support.liar ANCHOR OPTIONS...`.

It says that it is at round 1000, serves a state in which all weights are ANCHOR, and follows no other peer. In all
other respects it works like the program, with the same options.
"""

import sys
from collections.abc import Mapping
from typing import Any

from peers import commands
from peers.shared import process

ROUND = 1000


def main() -> None:
    value = float(sys.argv.pop(1))
    process.prepare_environment()
    _patch(value)
    commands.peer()


def _patch(value: float) -> None:
    import torch

    from peers.stage_peer import own_state, resume
    from peers.stage_peer.others import Others
    from swarm.averaging.agreement.branches import Branches
    from swarm.checkpoint.folder import Restored
    from swarm.stage.weights import StageWeights

    async def find_nobody(*arguments: Any, **options: Any) -> Others:
        return Others()

    def choose(config: Any, stage: int, shapes: Mapping[str, torch.Size], *others: Any) -> resume.Beginning:
        restored = Restored(
            round=ROUND, run_samples=ROUND * config.rounds.round_samples, lineage="f" * 64, highest_microbatch=-1,
            config=config, files=(),
            tensors={f"anchor/{name}": torch.full(shape, value) for name, shape in shapes.items()},
        )  # fmt: skip
        return resume.Beginning(
            restored=restored, round=restored.round, run_samples=restored.run_samples, lineage=restored.lineage,
            highest_microbatch=-1,
        )  # fmt: skip

    own_state.find_others, resume.choose = find_nobody, choose  # type: ignore[assignment, attr-defined]
    StageWeights.check = lambda self, *arguments, **options: None  # type: ignore[method-assign]
    Branches.choose = lambda self, **options: None  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
