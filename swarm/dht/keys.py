"""The DHT's keys: the names under which peers and trainers announce themselves.

Pure.
"""

import re
from collections.abc import Iterable

from swarm.types import Block

RUNS = "swarm.runs"
"""The key under which a joiner that has only an address finds the run."""
_OF_A_RUN = re.compile(r"[^\x00-\x1f]{1,200}\.(stage\.\d{1,4}(\.\d{1,4})?|trainers|claims)")


def of_block(run_id: str, block: Block) -> str:
    return f"{run_id}.stage.{block}"


def of_trainers(run_id: str) -> str:
    return f"{run_id}.trainers"


def of_claims(run_id: str) -> str:
    return f"{run_id}.claims"


def is_of_a_run(key: str) -> bool:
    """Whether a key is one of `of_run`, of whichever run."""
    return key == RUNS or _OF_A_RUN.fullmatch(key) is not None


def of_run(run_id: str, blocks: Iterable[Block]) -> list[str]:
    return [RUNS, *(of_block(run_id, block) for block in blocks), of_trainers(run_id), of_claims(run_id)]
