"""Computes what a storm cost, from event logs: rounds, throughput, and how soon all processes were back.

All times are monotonic times of this machine, because one kind of fault sets wall clocks.
"""

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from scripts.benches.chaos.cast import Cast, Role, Usage
from swarm.audit.audit import audit

Window = tuple[float, float]

BOUND_SECONDS = 60.0  # A round that not all of its stages have committed after this time counts as not committed
GOALS = {"rounds_committed_share": 0.97, "throughput_of_live_capacity": 0.85}
"""The smallest values with which a run passes."""


@dataclass(frozen=True, kw_only=True)
class Struck:
    kind: str
    at: float
    seconds: float
    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Committed:
    """A round of one stage, which the first of its peers committed at `at`, after so many attempts."""

    round: int
    parent: str
    lineage: str
    at: float
    samples: int
    attempts: int


def of(
    cast: Cast, setting: str, *, calm: Sequence[Window], storm: Sequence[Window], struck: Sequence[Struck]
) -> dict[str, Any]:
    """All figures. Each part of the storm is compared with the calm windows before and after it, because a machine's
    speed changes over time."""
    events = {role.name: _read(role) for role in cast.peers()}
    stages = sorted({stage for role in cast.peers() for stage in role.stages})
    chains = {stage: chain([_at(stage, own) for own in events.values()]) for stage in stages}
    attempts = [
        one.attempts for rounds in chains.values() for one in rounds if any(_within(one.at, part) for part in storm)
    ]
    seconds = [d for rounds in chains.values() for part in storm for d in durations(rounds, part)]
    rates, calm_rates = _slowest(chains, storm), _slowest(chains, calm)
    capacities = [_mean(cast.capacity, part) for part in storm]
    to_commit, to_return = _recoveries(cast, events, chains, struck)
    audited = audit([role.events for role in cast.roles if role.events.exists()])
    found = audited.findings
    return {
        "rounds_committed_share": sum(second <= BOUND_SECONDS for second in seconds) / max(1, len(seconds)),
        "first_attempt_share": sum(number <= 1 for number in attempts) / max(1, len(attempts)),
        "faults_per_round": sum(bool(one.names) for one in struck) * len(stages) / max(1, len(attempts)),
        "throughput_of_live_capacity": share_of_possible(rates, calm_rates, capacities),
        "samples_per_second": {"storm": rates, "undisturbed": calm_rates},
        "live_capacity_mean": statistics.fmean(capacities), "round_seconds": quantiles(seconds),
        "kill_to_commit_seconds": quantiles(to_commit), "kill_to_back_seconds": quantiles(to_return),
        "growth": growth(cast.usage, (storm[0][0], storm[-1][1])),
        "faults": dict(Counter(one.kind for one in struck if one.names)), "goes_on": goes_on(chains, calm[-1]),
        "duplicates": found.duplicates,
        **({"missing": found.missing} if setting == "synchronous" else {"lost_share": audited.lost_share}),
        "digests_compared": found.digests_compared, "digests_differing": found.digests_differing,
        "violations": list(found.violations),
    }  # fmt: skip


def goes_on(chains: Mapping[int, Sequence[Committed]], last: Window) -> bool:
    """Whether every stage has committed a round after the last window. The rates alone do not show that a swarm has
    stopped for good: the undisturbed rate after the storm, with which its last part is compared, then falls as well."""
    return all(bool(rounds) and rounds[-1].at > last[1] for rounds in chains.values())


def share_of_possible(rates: Sequence[float], calm_rates: Sequence[float], capacities: Sequence[float]) -> float:
    """The work that was done during a storm's parts, over the work that their live capacity could have done at the
    undisturbed rates, of which there is one more."""
    around = [statistics.fmean(pair) for pair in pairwise(calm_rates)]
    possible = sum(calm * capacity for calm, capacity in zip(around, capacities, strict=True))
    return sum(rates) / possible if possible else 0.0


def growth(usage: Sequence[Usage], window: Window) -> dict[str, Any]:
    """The resources of the processes that were alive throughout the second half of a window, at the beginning and the
    end of that half: medians over the processes, and the largest growth. In the first half caches and buffers fill."""
    middle = (window[0] + window[1]) / 2
    by_process: dict[tuple[str, int], list[Usage]] = {}
    for used in usage:
        if _within(used.at, (middle, window[1])):
            by_process.setdefault((used.name, used.pid), []).append(used)
    span = window[1] - middle
    lived = [row for row in by_process.values() if row[-1].at - row[0].at > 0.9 * span]
    if not lived:
        return {}
    found: dict[str, Any] = {"processes": len(lived), "minutes": span / 60}
    for name in ("resident_bytes", "num_descriptors", "num_threads", "num_tasks"):
        # Each end is a median of some samples, because a process holds more while a round is exchanged.
        ends = [[statistics.median(getattr(u, name) for u in part) for part in (row[:12], row[-12:])] for row in lived]
        found[name] = {
            "before": statistics.median(before for before, _ in ends),
            "after": statistics.median(after for _, after in ends),
            "largest_growth": max(after - before for before, after in ends),
        }
    return found


def passed(figures: Mapping[str, Any]) -> bool:
    return (
        all(figures[name] >= least for name, least in GOALS.items())
        and figures["goes_on"]
        and not any(figures[name] for name in ("duplicates", "violations", "trainer_exits"))
        and not figures.get("missing")
    )


def chain(peers: Iterable[Sequence[Mapping[str, Any]]]) -> list[Committed]:
    """The rounds that led to a stage's final state, oldest first, from the events of each of its peers."""
    begun: dict[tuple[int, str], set[tuple[int, str]]] = {}
    commits: dict[str, list[Mapping[str, Any]]] = {}
    for event in (event for events in peers for event in events):
        if event["event"] == "begin":
            begun.setdefault((event["round"], event["lineage"]), set()).add((event["attempt"], event["leader"]))
        elif event["event"] == "commit":
            commits.setdefault(event["lineage"], []).append(event)
    rounds = {}
    for lineage, same in commits.items():
        first = min(same, key=lambda event: event["monotonic"])
        rounds[lineage] = Committed(
            round=first["round"], parent=first["parent"], lineage=lineage, at=first["monotonic"],
            samples=first["samples"],
            attempts=len(begun.get((first["round"], first["parent"]), ())),
        )  # fmt: skip
    found: list[Committed] = []
    newest = max(rounds.values(), key=lambda one: (one.round, one.at), default=None)
    while newest is not None:
        found.append(newest)
        # If a lost stage came back from a checkpoint, the chain has a gap. The round before the gap is the last one
        # committed.
        earlier = [one for one in rounds.values() if one.at < found[-1].at and one.round < found[-1].round]
        newest = rounds.get(newest.parent) or max(earlier, key=lambda one: one.at, default=None)
    return found[::-1]


def durations(rounds: Sequence[Committed], window: Window) -> list[float]:
    """The seconds of each round that was under way in a window. If no commit follows the last one, its time until the
    window's end counts as well."""
    pairs = [(before.at, after.at) for before, after in pairwise(rounds)]
    taken = [end - begin for begin, end in pairs if end > window[0] and begin < window[1]]
    if rounds and rounds[-1].at < window[1]:
        taken.append(window[1] - rounds[-1].at)
    return taken


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Quantiles of the values; empty if there are none."""
    if not values:
        return {}
    ordered = sorted(values)
    at = {f"p{percent}": ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] for percent in (50, 90, 99)}
    return {"count": float(len(ordered)), **at, "max": ordered[-1]}


def _read(role: Role) -> list[dict[str, Any]]:
    found = []
    for line in role.events.read_bytes().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def throughput(rounds: Sequence[Committed], window: Window) -> float:
    """Samples per second from the last commit before the window (or the first in it) to the first one after it, so that
    neither end cuts a round in two and a stall at the end counts; if there is none after it, to the window's end."""
    before = [one for one in rounds if one.at <= window[0]][-1:]
    after = [one for one in rounds if one.at > window[1]][:1]
    inside = [*before, *(one for one in rounds if _within(one.at, window))]
    counted = [*inside[1:], *after] if inside else []
    end = after[0].at if after else window[1]
    return sum(one.samples for one in counted) / (end - inside[0].at) if counted else 0.0


def _slowest(chains: Mapping[int, Sequence[Committed]], windows: Sequence[Window]) -> list[float]:
    return [min(throughput(rounds, window) for rounds in chains.values()) for window in windows]


def _recoveries(
    cast: Cast, events: Mapping[str, Sequence[Mapping[str, Any]]], chains: Mapping[int, Sequence[Committed]],
    struck: Sequence[Struck],
) -> tuple[list[float], list[float]]:  # fmt: skip
    """For each kill of a peer, and each of its stages, the seconds until the stage's next commit, and until the next
    commit by that peer itself."""
    to_commit, to_return = [], []
    by_name = {role.name: role for role in cast.roles}
    for fault in struck:
        for role in [by_name[name] for name in fault.names if fault.kind == "kill-peer"]:
            for stage in role.stages:
                to_commit += [one.at - fault.at for one in chains[stage] if one.at > fault.at][:1]
                own = [e["monotonic"] for e in _at(stage, events[role.name]) if e["event"] == "commit"]
                to_return += [at - fault.at for at in own if at > fault.at][:1]
    return to_commit, to_return


def _at(stage: int, events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The events that are about a stage."""
    return [event for event in events if event.get("block") == str(stage)]


def _within(at: float, window: Window) -> bool:
    return window[0] < at <= window[1]


def _mean(series: Sequence[tuple[float, float]], window: Window) -> float:
    inside = [point for point in series if _within(point[0], window)]
    steps = [(after[0] - before[0], before[1]) for before, after in pairwise(inside)]
    return sum(seconds * value for seconds, value in steps) / sum(seconds for seconds, _ in steps)
