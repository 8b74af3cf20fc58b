"""Who may do what in a locked run, written down a second time, and what a kind of token may that no line names."""

import pytest

from swarm.credentials.rights import (
    CALLS,
    PROGRAMS,
    Role,
    require_announcement,
    require_call,
    require_program,
    require_serving,
)
from swarm.errors import NotAllowed

OF_TRAINERS = {"Acquire", "Check", "Connect", "Describe", "Meet", "Probe", "Read", "Tokenizer"}
OF_TRAINERS_AT_STAGE_0 = {"Evaluate", "Generate", "Hold", "SpotCheck", "Train"}
KEYS = ["runs", "run.0123.stage.1", "run.0123.stage.1.1", "run.0123.claims", "run.0123.amendments"]


def _named(method: str) -> str:
    return method.rpartition("/")[2]


def _refused(role: Role, method: str, stage: int) -> bool:
    try:
        require_call(role, method, stage)
    except NotAllowed:
        return True
    return False


@pytest.mark.parametrize("stage", [0, 1])
def test_a_trainer_may_make_these_calls_and_a_peer_all(stage: int) -> None:
    may = OF_TRAINERS | (set() if stage else OF_TRAINERS_AT_STAGE_0)
    assert {_named(method) for method in CALLS if not _refused(Role.TRAINER, method, stage)} == may
    assert not any(_refused(Role.PEER, method, stage) for method in CALLS)


def test_a_trainer_announces_itself_among_trainers_alone_and_serves_nobody() -> None:
    require_announcement(Role.TRAINER, "run.0123.trainers")
    for key in KEYS:
        require_announcement(Role.PEER, key)
        with pytest.raises(NotAllowed, match=f"a trainer's token does not give the right to announce .* under {key}"):
            require_announcement(Role.TRAINER, key)
    require_serving(Role.PEER)
    with pytest.raises(NotAllowed, match="it has a trainer's token"):
        require_serving(Role.TRAINER)


def _made_up() -> Role:
    """A third kind of token, which no line of the table names."""
    role = str.__new__(Role, "watcher")
    role._name_, role._value_ = "WATCHER", "watcher"
    return role


def test_a_role_that_no_line_names_may_nothing() -> None:
    role = _made_up()
    assert all(_refused(role, method, stage) for method in CALLS for stage in (0, 1))
    for key in (*KEYS, "run.0123.trainers", "run.0123.watchers", "trainers"):
        with pytest.raises(NotAllowed):
            require_announcement(role, key)
    with pytest.raises(NotAllowed):
        require_serving(role)
    for prog in PROGRAMS:
        with pytest.raises(ValueError, match="a watcher's: ask the run's owner for one with --role "):
            require_program(role, prog)
