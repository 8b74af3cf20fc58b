"""Who of eight peers lies? Two do, in each of nine ways: how many are named, how many falsely, and what it costs."""

import itertools
import json
import statistics
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from peers.local.supervisor import Child, last_line
from scripts.benches.shared.common import POLL_SECONDS, BenchOptions, require_known, say, side, with_corpus, workplace
from scripts.benches.sides.liars_arm import CHURN, HONEST, HONEST_ROUNDS, MIXED, WAYS, run_config
from swarm.errors import PeerUnavailable

SETTINGS = ("synchronous", "diloco")
LYING_ROUNDS = 8
"""Rounds in which lies are told. A liar is caught if it is named within the first five of these."""
GOALS = {"synchronous": 0.95, "diloco": 0.9}
"""The least mean share of liars to be caught."""
MOST_OVERHEAD = 0.05


@dataclass(frozen=True, kw_only=True)
class Options(BenchOptions):
    """Let two of eight peers lie in many ways, and count who is named as a liar."""

    settings: tuple[str, ...] = SETTINGS
    """Settings to train in."""
    ways: tuple[str, ...] = WAYS
    """Ways to lie."""
    honest_rounds: int = 300
    """Rounds in which nobody lies and every third one kills a peer, and as many in which peers have two kinds of
    processors as well. Nobody may be named in them."""
    codec: str = "fp32"
    """How contributions are encoded."""
    jobs: int = 2
    """Processes at once, of one thread each."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_known(self, "settings", SETTINGS)
        require_known(self, "ways", WAYS)


def run(options: Options) -> dict[str, Any]:
    for setting in options.settings:
        with_corpus(run_config(setting, options.dataset, options.codec, 0))
    # The longest first, so that no process is left alone with it at the end.
    rounds = {CHURN: options.honest_rounds, MIXED: options.honest_rounds, HONEST: HONEST_ROUNDS + LYING_ROUNDS}
    arms = list(itertools.product((CHURN, MIXED, HONEST, *options.ways), options.settings))
    found = _run_all(arms, rounds, options)
    return {setting: summary(setting, found, options.ways) for setting in options.settings}


def _run_all(
    arms: list[tuple[str, str]], rounds: Mapping[str, int], options: Options
) -> dict[tuple[str, str], Mapping[str, Any]]:
    found: dict[tuple[str, str], Mapping[str, Any]] = {}
    waiting, running = deque(arms), dict[str, tuple[Child, str, str]]()
    with workplace("liars") as (_, children):
        while waiting or running:
            while waiting and len(running) < options.jobs:
                way, setting = waiting.popleft()
                number = rounds.get(way, HONEST_ROUNDS + LYING_ROUNDS)
                words = side("liars_arm", way, setting, number, options.dataset, options.codec, 0)
                child = children.start(f"{setting}-{way}", words)
                running[child.name] = child, way, setting
            for end in children.exits():
                child, way, setting = running.pop(end.name)
                if end.returncode:
                    raise PeerUnavailable(f"{setting}, {way}, failed: {end.reason}")
                figures = found[way, setting] = json.loads(last_line(child.log))
                say(f"{setting}, {way}: {figures['caught']:.2f} caught, {figures['falsely_named']} falsely named, "
                    f"{figures['seconds']:.0f} s")  # fmt: skip
            time.sleep(POLL_SECONDS)
    return found


def summary(setting: str, found: Mapping[tuple[str, str], Mapping[str, Any]], ways: tuple[str, ...]) -> dict[str, Any]:
    honest, churn, mixed = (found[way, setting] for way in (HONEST, CHURN, MIXED))
    by_way = {
        way: {
            "caught": figures["caught"], "falsely_named": figures["falsely_named"], "found_by": figures["found_by"],
            "loss_ratio": figures["held_out_loss"] / honest["held_out_loss"],
        }
        for way in ways for figures in [found[way, setting]]
    }  # fmt: skip
    caught = statistics.mean(figures["caught"] for figures in by_way.values())
    falsely = sum(figures["falsely_named"] for figures in (churn, mixed, *by_way.values()))
    return {
        "caught": caught, "falsely_named": falsely, "falsely_left_out": churn["left_out"] + mixed["left_out"],
        "honest_rounds": churn["rounds"] + mixed["rounds"], "rounding": mixed["rounding"],
        "overhead": honest["overhead"], "ways": by_way,
        "reached": {
            "caught": caught >= GOALS[setting], "falsely_named": falsely == 0,
            "overhead": honest["overhead"] <= MOST_OVERHEAD,
            "loss": all(abs(figures["loss_ratio"] - 1.0) <= 0.01 for figures in by_way.values()),
        },
    }  # fmt: skip
