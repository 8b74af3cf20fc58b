"""Four processes average 20 M float32 parameters over this machine's loopback: ours against hivemind's averager.

A repetition is one round of each arm, in turn. `round_speedup_*` compare whole rounds, until the last member has
applied the result. `speedup_*` favour ours: hivemind's time is its whole step without matchmaking, ours only that of
the exchange at the slowest member. At the end one member of each side is killed with kill -9 when half of a round's
bytes have been sent, and each survivor is asked which values it holds. An error is the distance to the exact mean of
the known values, over the norm of the mean. Loopback bytes are counted by the kernel.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.local.supervisor import Child, Supervisor
from scripts.benches.shared import paired
from scripts.benches.shared.common import (
    ONE_THREAD,
    OutputOptions,
    fail_on_exit,
    largest_of,
    say,
    side,
    wait_for_json,
    workplace,
    write_json,
)
from scripts.benches.shared.proc import loopback_bytes
from scripts.benches.sides.averaging_peer import READY_FILE
from swarm.errors import DeadlineExceeded, IntegrityError

PEERS = 4  # Processes of each side
LEAD_SECONDS = 0.3
"""Time between the order to start and the start itself. Until then all processes have read the order."""
POLL_SECONDS = 0.002
MAX_ERROR = 0.3  # An arm with a larger error has not averaged, so its time does not count
SAME = 1e-2
"""A survivor that is closer to a mean than this holds that mean. Any two of the means are much further apart."""
HALF_SECONDS = 300.0  # Longest wait for half of a round's bytes, which takes seconds


@dataclass(frozen=True, kw_only=True)
class Options(OutputOptions):
    """Compare an averaging round with hivemind's."""

    parameters: int = 20_000_000
    """Float32 parameters that each process averages."""
    repetitions: int = 5
    """Measured rounds of each arm, after one that does not count."""


@dataclass(frozen=True)
class Arm:
    """One side with one codec. The codec has the name that the side's processes use."""

    side: str
    codec: str

    @property
    def name(self) -> str:
        return f"{self.side}_{self.codec}"


ARMS = (Arm("ours", "int8"), Arm("hivemind", "8bit"), Arm("ours", "fp16"), Arm("hivemind", "fp16"))


@dataclass(frozen=True, kw_only=True)
class Round:
    """One measured round of one arm: what each member reported at its end, and the values that the members then
    held."""

    finished: Sequence[dict[str, Any]]
    compared: Sequence[dict[str, Any]]
    loopback_bytes: int

    @property
    def seconds(self) -> float:
        return self.largest("seconds")

    def largest(self, name: str) -> float:
        return max(float(reply[name]) for reply in self.finished)

    @property
    def error(self) -> float:
        """The worst member's distance from the mean of all; infinity if one is not finite."""
        return largest_of(float(reply["distances"]["all"]) for reply in self.compared)


@dataclass(eq=False)
class Group:
    side: str
    module: str
    options: Options
    children: Supervisor
    folder: Path
    members: dict[int, Child] = field(default_factory=dict)
    num_orders: int = 0

    def start(self, numbers: Sequence[int], *arguments: str) -> list[dict[str, Any]]:
        for number in numbers:
            name, folder = f"{self.side}-{number}", self._folder(number)
            folder.mkdir(parents=True)
            command = side(self.module, folder, number, PEERS, self.options.parameters, *arguments)
            self.members[number] = self.children.start(name, command, environment=ONE_THREAD)
        return [wait_for_json(self._folder(number) / READY_FILE, self.children) for number in numbers]

    def order(self, name: str, **arguments: Any) -> int:
        number, self.num_orders = self.num_orders, self.num_orders + 1
        for member in self.members:
            write_json(self._folder(member) / f"{number}.json", {"name": name, **arguments})
        return number

    def ask(self, name: str, **arguments: Any) -> list[dict[str, Any]]:
        number = self.order(name, **arguments)
        return [wait_for_json(self._folder(m) / f"{number}.reply.json", self.children) for m in self.members]

    def kill9(self, member: int) -> None:
        self.children.kill9(self.members.pop(member))

    def _folder(self, member: int) -> Path:
        return self.folder / self.side / str(member)


def run(options: Options) -> dict[str, Any]:
    rounds: dict[Arm, list[Round]] = {arm: [] for arm in ARMS}
    with workplace("allreduce") as (folder, children):
        groups = _start_groups(options, children, folder)
        for repetition in range(1 + options.repetitions):
            for arm in paired.order(ARMS, repetition):
                measured = _round(groups[arm.side], arm)
                if repetition > 0:
                    rounds[arm].append(measured)
                say(f"{arm.name}, {repetition} of {options.repetitions}: {measured.seconds:.2f} s")
        killed = {}
        for arm in ARMS[2:]:
            say(f"{arm.name}: a member is killed")
            half = round(statistics.median(r.loopback_bytes for r in rounds[arm]) / 2)
            killed[arm.side] = _killed_round(groups[arm.side], arm, half)
    return {**_figures(rounds), "killed": killed}


def _start_groups(options: Options, children: Supervisor, folder: Path) -> dict[str, Group]:
    say("the processes start")
    numbers = range(PEERS)
    ours = Group("ours", "swarm_averager", options, children, folder)
    contacts = ours.start(numbers, *(arm.codec for arm in ARMS if arm.side == ours.side))
    ours.ask("meet", contacts=contacts)
    theirs = Group("hivemind", "hivemind_averager", options, children, folder)
    # The first process must run before others can join it.
    (first,) = theirs.start(numbers[:1])
    theirs.start(numbers[1:], *first["addresses"])
    return {group.side: group for group in (ours, theirs)}


def _begin(group: Group, arm: Arm) -> int:
    """Make a group start a round. Return the loopback's byte count before the round."""
    group.ask("prepare", codec=arm.codec)
    before = loopback_bytes()
    group.order("start", at=time.monotonic() + LEAD_SECONDS)
    return before


def _compared(group: Group, means: dict[str, list[int]]) -> list[dict[str, Any]]:
    if group.side == "ours":
        group.ask("rest")
    return group.ask("compare", means=means)


def _round(group: Group, arm: Arm) -> Round:
    before = _begin(group, arm)
    finished = group.ask("finish")
    moved = loopback_bytes() - before
    compared = _compared(group, {"all": list(group.members)})
    measured = Round(finished=finished, compared=compared, loopback_bytes=moved)
    # `num_members` is missing if the round failed, or if its result was downloaded from another member.
    if any(reply.get("num_members") != len(group.members) for reply in finished) or measured.error > MAX_ERROR:
        raise IntegrityError(f"{arm.name} has not averaged: {finished}, error {measured.error:.2g}")
    return measured


def _killed_round(group: Group, arm: Arm, half_bytes: int) -> dict[str, Any]:
    """Kill the last member when half of a round's bytes have been sent, and return what the others hold afterwards."""
    everybody = list(group.members)
    before = _begin(group, arm)
    until_sent(before + half_bytes, group.children)
    group.kill9(everybody[-1])
    if group.side == "ours":
        # The killed member's samples are lost, and the others train on until the round has enough.
        group.order("learn", num_samples=len(everybody))
    finished = group.ask("finish")
    compared = _compared(group, {"all": everybody, "survivors": list(group.members)})
    return {
        "survivors_agree": len({reply["digest"] for reply in compared}) == 1,
        "survivors_hold": [held(reply["distances"]) for reply in compared],
        "distance_to_mean_of_all": [reply["distances"]["all"] for reply in compared],
        "distance_to_mean_of_survivors": [reply["distances"]["survivors"] for reply in compared],
        "errors": [reply.get("error", "") for reply in finished],
        "attempts": max(reply.get("attempts", 1) for reply in finished),
        "seconds": max(reply["seconds"] for reply in finished),
    }


def until_sent(total_bytes: int, children: Supervisor) -> None:
    """Wait until the loopback's byte count reaches this number. Raises PeerUnavailable and DeadlineExceeded."""
    deadline = time.monotonic() + HALF_SECONDS
    while (missing := total_bytes - loopback_bytes()) > 0:
        fail_on_exit(children)
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"of half a round {missing:,} bytes are missing after {HALF_SECONDS:.0f} s")
        time.sleep(POLL_SECONDS)


def held(distances: dict[str, float]) -> str:
    name, nearest = min(distances.items(), key=lambda item: item[1])
    return f"the mean of {name}" if nearest < SAME else "neither mean"


def _figures(rounds: dict[Arm, list[Round]]) -> dict[str, Any]:
    def turns(value: Callable[[Round], float], side: str = "") -> paired.Turns:
        return {arm.name: list(map(value, found)) for arm, found in rounds.items() if side in ("", arm.side)}

    seconds, errors = turns(lambda r: r.seconds), paired.medians(turns(lambda r: r.error))
    whole_steps = turns(lambda r: r.seconds + r.largest("matchmaking_seconds"), "hivemind")
    exchanges = turns(lambda r: r.largest("exchange_seconds"), "ours")
    speedups = {
        "round_speedup_int8": paired.ratio(whole_steps["hivemind_8bit"], seconds["ours_int8"]),
        "round_speedup_fp16": paired.ratio(whole_steps["hivemind_fp16"], seconds["ours_fp16"]),
        "speedup_int8": paired.ratio(seconds["hivemind_8bit"], exchanges["ours_int8"]),
        "speedup_fp16": paired.ratio(seconds["hivemind_fp16"], exchanges["ours_fp16"]),
    }
    return {
        **paired.figures(speedups), "median_seconds": paired.medians(seconds),
        "exchange_seconds": paired.medians(exchanges), "whole_step_seconds": paired.medians(whole_steps),
        "errors": errors, "loopback_bytes": paired.medians(turns(lambda r: r.loopback_bytes)),
    }  # fmt: skip
