"""The DHT's keys: the names under which peers and trainers announce themselves.

Pure.
"""

import re
from collections.abc import Iterable

from swarm.types import Block

RUNS = "swarm.runs"
"""The key under which a joiner that has only an address finds the run."""
MOST_BITS = 16
"""The most bits of a part's name."""
_OF_A_RUN = re.compile(r"[^\x00-\x1f]{1,200}\.(stage\.\d{1,4}(\.\d{1,4})?|trainers|claims|amendments)")
_PART = re.compile(rf"(.*\.stage\.\d{{1,4}}(?:\.\d{{1,4}})?)/([01]{{1,{MOST_BITS}}})")


def of_block(run_id: str, block: Block) -> str:
    return f"{run_id}.stage.{block}"


def of_trainers(run_id: str) -> str:
    return f"{run_id}.trainers"


def of_claims(run_id: str) -> str:
    return f"{run_id}.claims"


def of_amendments(run_id: str) -> str:
    return f"{run_id}.amendments"


def bits_of(peer_id: str) -> str:
    return f"{int(peer_id[: MOST_BITS // 4], 16):0{MOST_BITS}b}"


def part_of(key: str, bits: str) -> str:
    """The part of a stage's key for the peers whose ids begin with these bits; without bits the key itself."""
    return f"{key}/{bits}" if bits else key


def whole_of(key: str) -> str:
    """The key of which this one is a part, or this key itself."""
    part = _PART.fullmatch(key)
    return key if part is None else part[1]


def takes(key: str, subkey: str) -> bool:
    """Whether a peer with the id `subkey` may announce itself under a key, as far as the id goes."""
    part = _PART.fullmatch(key)
    try:
        return part is None or bits_of(subkey).startswith(part[2])
    except ValueError:
        return False


def is_of_a_run(key: str) -> bool:
    return key == RUNS or _OF_A_RUN.fullmatch(whole_of(key)) is not None


def of_run(run_id: str, blocks: Iterable[Block]) -> list[str]:
    others = of_trainers(run_id), of_claims(run_id), of_amendments(run_id)
    return [RUNS, *(of_block(run_id, block) for block in blocks), *others]
