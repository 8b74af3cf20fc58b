"""The faults that chaos inflicts on a swarm: which processes each kind hits, and how it ends.

A fault is over when its stack is closed. No fault takes the last live peer of a stage.
"""

import os
import signal
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Literal

from scripts.benches.chaos.cast import Cast, Role
from scripts.benches.chaos.program import set_clock
from scripts.benches.shared import proc

DOWN_SECONDS = (1.0, 5.0)  # Time after which a killed process is started again, as systemd or a user's loop would do
SLOW_BYTES_PER_SECOND = 20_000.0
MAX_CLOCK_JUMP_SECONDS = 30.0
LOST_SECONDS = 1.0  # How long an answer is held back before its connection breaks. By then the work has been done.


@dataclass(frozen=True)
class Kind:
    """A kind of fault. `begin` puts the action that ends it on the stack, and returns the roles that it hit, if any."""

    hits: Literal["processes", "network", "clock", "disk"]
    weight: float
    seconds: tuple[float, float]
    begin: Callable[[Cast, Random, ExitStack], list[Role]]


def _one(cast: Cast, random: Random, *, peers: bool = True) -> list[Role]:
    candidates = [
        role for role in (cast.peers() if peers else cast.trainers()) if role.alive and _can_spare(cast, role)
    ]
    return [random.choice(candidates)] if candidates else []


def _can_spare(cast: Cast, role: Role) -> bool:
    return all(sum(other.alive for other in cast.peers(stage)) > 1 for stage in role.stages)


def _kill(cast: Cast, random: Random, undo: ExitStack, *, peers: bool = True) -> list[Role]:
    victims = _one(cast, random, peers=peers)
    for role in victims:
        cast.kill9(role, random.uniform(*DOWN_SECONDS))
    return victims


def _kill_dht(cast: Cast, random: Random, undo: ExitStack) -> list[Role]:
    return [role for role in _one(cast, random) if _kill_p2pd(role)]


def _kill_p2pd(role: Role) -> bool:
    """Kill a process's p2pd. Return False if there is none, for example because it has just died."""
    assert role.child is not None
    killed = False
    for pid, name in proc.children(role.child.pid).items():
        if name == "p2pd":
            # The child may have ended by itself in between.
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed = True
    return killed


def _freeze(cast: Cast, random: Random, undo: ExitStack) -> list[Role]:
    victims = _one(cast, random)
    for role in victims:
        cast.freeze(role)
        undo.callback(cast.thaw, role)
    return victims


def _restart(cast: Cast, random: Random, undo: ExitStack) -> list[Role]:
    victims = _one(cast, random)
    for role in victims:
        cast.restart(role)
    return victims


def _jump(cast: Cast, random: Random, undo: ExitStack) -> list[Role]:
    victims = [random.choice(cast.roles)]
    for role in victims:
        set_clock(role.clock, random.uniform(-MAX_CLOCK_JUMP_SECONDS, MAX_CLOCK_JUMP_SECONDS))
        undo.callback(set_clock, role.clock, 0.0)
    return victims


def _fill_disk(cast: Cast, random: Random, undo: ExitStack) -> list[Role]:
    undo.callback(cast.fill_disk())
    return cast.peers()


def _hinder(
    cast: Cast, sources: list[Role], targets: list[Role], undo: ExitStack, bytes_per_second: float = 0.0
) -> None:
    for source in sources:
        for target in targets:
            if source is not target:
                cast.throttle.hinder(source.link, target.link, bytes_per_second)
                undo.callback(cast.throttle.clear, source.link, target.link, bytes_per_second)


def _both_ways(
    cast: Cast, victims: list[Role], others: list[Role], undo: ExitStack, bytes_per_second: float = 0.0
) -> list[Role]:
    _hinder(cast, victims, others, undo, bytes_per_second)
    _hinder(cast, others, victims, undo, bytes_per_second)
    return victims


def _part(cast: Cast, random: Random, undo: ExitStack) -> list[Role]:
    role = random.choice(cast.peers())
    others = [other for other in cast.roles if other is not role]
    return _both_ways(cast, [role], random.sample(others, random.randint(1, len(others))), undo)


def _part_one_way(cast: Cast, random: Random, undo: ExitStack) -> list[Role]:
    role = random.choice(cast.peers())
    ends = ([role], cast.roles) if random.random() < 0.5 else (cast.roles, [role])
    _hinder(cast, *ends, undo)
    return [role]


def _slow(cast: Cast, random: Random, undo: ExitStack) -> list[Role]:
    return _both_ways(cast, [random.choice(cast.peers())], cast.roles, undo, SLOW_BYTES_PER_SECOND)


def _stall(cast: Cast, random: Random, undo: ExitStack) -> list[Role]:
    one, other = random.sample(cast.roles, 2)
    return [*_both_ways(cast, [one], [other], undo), other]


def _lose(cast: Cast, random: Random, undo: ExitStack, *, replies: bool) -> list[Role]:
    callee = random.choice([role for role in cast.peers() if role.stages])
    stage = random.choice(callee.stages)
    before = [role for role in cast.peers(stage - 1) if role is not callee]
    caller = random.choice(cast.trainers() if stage == 0 else before)
    undo.callback(cast.throttle.break_connections, caller.link, callee.link)
    ends = [callee, caller] if replies else [caller, callee]
    _hinder(cast, ends[:1], ends[1:], undo)
    return ends


KINDS: Mapping[str, Kind] = {
    "kill-peer": Kind("processes", 4, (0.0, 0.0), _kill),
    "kill-trainer": Kind("processes", 1, (0.0, 0.0), partial(_kill, peers=False)),
    "kill-dht": Kind("processes", 1, (0.0, 0.0), _kill_dht),
    "freeze": Kind("processes", 2, (1.0, 15.0), _freeze),
    "restart": Kind("processes", 2, (0.0, 0.0), _restart),
    "partition": Kind("network", 2, (1.0, 15.0), _part),
    "one-way": Kind("network", 2, (1.0, 15.0), _part_one_way),
    "slow-link": Kind("network", 1, (5.0, 15.0), _slow),
    "stalled-link": Kind("network", 2, (2.0, 10.0), _stall),
    "lost-replies": Kind("network", 2, (LOST_SECONDS, LOST_SECONDS), partial(_lose, replies=True)),
    "lost-acks": Kind("network", 2, (LOST_SECONDS, LOST_SECONDS), partial(_lose, replies=False)),
    "clock-jump": Kind("clock", 1, (5.0, 20.0), _jump),
    "full-disk": Kind("disk", 1, (5.0, 20.0), _fill_disk),
}  # Every kind of fault. Of the DHT only p2pd is killed, because the rest of it runs in a thread of the peer.
