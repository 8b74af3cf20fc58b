"""The DHT's keys: the names under which peers and trainers announce themselves.

Used by directory and discovery, by records, which lets a trainer's token announce under one of them only, and by the
programs, which tell their node and their servicer which keys their run has (`of_run`). Pure.
"""

RUNS = "swarm.runs"
"""Where a joiner that knows nothing but an address finds the run."""
_TRAINERS = ".trainers"


def of_stage(run_id: str, stage: int) -> str:
    """The key for peers of a stage."""
    return f"{run_id}.stage.{stage}"


def of_trainers(run_id: str) -> str:
    """The key for trainers: in a locked run, the only one that a trainer's token is good for."""
    return f"{run_id}{_TRAINERS}"


def of_claims(run_id: str) -> str:
    """The key for peers on their way to a stage."""
    return f"{run_id}.claims"


def is_for_trainers(key: str) -> bool:
    """Whether a key is the one for trainers, of any run."""
    return key.endswith(_TRAINERS)


def of_run(run_id: str, num_stages: int) -> list[str]:
    """All keys of a run."""
    stages = [of_stage(run_id, stage) for stage in range(num_stages)]
    return [RUNS, *stages, of_trainers(run_id), of_claims(run_id)]
