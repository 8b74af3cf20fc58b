"""Who of eight peers lies? Two do, in each of ten ways: how many are named, by which defence, how many falsely, and
what it costs."""

import itertools
import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from peers.local.supervisor import last_line
from scripts.benches.shared.common import BenchOptions, ended, require_known, say, side, with_corpus, workplace
from scripts.benches.sides.liars_arm import (
    CAUGHT_ROUNDS,
    CHECK_SHARE,
    CHURN,
    DEFENCES,
    HONEST,
    HONEST_ROUNDS,
    MIXED,
    run_config,
)
from scripts.benches.sides.lies import WAYS

SETTINGS = ("synchronous", "diloco")
ALONE = ("comparing", "checks")
ROUNDS = HONEST_ROUNDS + CAUGHT_ROUNDS
GOALS = {"synchronous": 0.95, "diloco": 0.9}
"""The least mean share of liars to be caught."""
MOST_OVERHEAD = 0.05
Found = Mapping[tuple[str, str, str], Mapping[str, Any]]
"""By setting, way, and defences."""


@dataclass(frozen=True, kw_only=True)
class Options(BenchOptions):
    """Let two of eight peers lie in many ways, and count who is named as a liar."""

    settings: tuple[str, ...] = SETTINGS
    """Settings to train in."""
    ways: tuple[str, ...] = WAYS
    """Ways to lie."""
    defences: tuple[str, ...] = DEFENCES
    """all, comparing (contributions, and nothing else), checks (all but that)."""
    check_share: float = CHECK_SHARE
    """The share of answers that are computed again."""
    honest_rounds: int = 60
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
        require_known(self, "defences", DEFENCES)


def run(options: Options) -> dict[str, Any]:
    for setting in options.settings:
        with_corpus(run_config(setting, options.dataset, options.codec, 0))
    # The longest first, so that no process is left alone with it at the end.
    honest = [(setting, way, "all") for way in (CHURN, MIXED, HONEST) for setting in options.settings]
    lying = [*itertools.product(options.settings, options.ways, options.defences)]
    found = _run_all([*honest, *lying], options)
    return {setting: summary(setting, found) for setting in options.settings}


def _run_all(arms: list[tuple[str, str, str]], options: Options) -> Found:
    commands = {
        "-".join(arm): side(
            "liars_arm", *arm, options.honest_rounds if arm[1] in (CHURN, MIXED) else ROUNDS, options.dataset,
            options.codec, 0, options.check_share,
        )
        for arm in arms
    }  # fmt: skip
    by_name, found = {"-".join(arm): arm for arm in arms}, dict[tuple[str, str, str], Mapping[str, Any]]()
    with workplace("liars") as (_, children):
        for child in ended(children, commands, options.jobs):
            arm = by_name[child.name]
            figures = found[arm] = json.loads(last_line(child.log))
            # All that is known of the arm, so that a bench that breaks off later has not measured it for nothing.
            say(f"{', '.join(arm)}: {json.dumps(figures)}")
    return found


def summary(setting: str, found: Found) -> dict[str, Any]:
    """The figures of one setting: those of all defences together, and what of each defence alone was measured."""
    honest, churn, mixed = (found[setting, way, "all"] for way in (HONEST, CHURN, MIXED))
    by_defence = {
        defence: {
            way: _of_a_way(figures, honest)
            for (where, way, by), figures in found.items() if (where, by) == (setting, defence) and way in WAYS
        }
        for defence in DEFENCES
    }  # fmt: skip
    caught = {name: _mean_caught(ways) for name, ways in by_defence.items() if ways}
    ways = by_defence["all"]
    falsely = sum(
        figures["falsely_named"]
        for figures in (churn, mixed, *(each for row in by_defence.values() for each in row.values()))
    )
    return {
        "caught": caught.get("all"), "falsely_named": falsely,
        "falsely_left_out": churn["left_out"] + mixed["left_out"], "falsely_left_alone": churn["falsely_left_alone"],
        "honest_rounds": churn["rounds"] + mixed["rounds"], "rounding": mixed["rounding"],
        "overhead": honest["overhead"], "ways": ways,
        "alone": {name: {"caught": caught[name], "ways": by_defence[name]} for name in ALONE if name in caught},
        "reached": {
            "caught": caught.get("all", 0.0) >= GOALS[setting], "falsely_named": falsely == 0,
            "overhead": honest["overhead"] <= MOST_OVERHEAD,
            "loss": all(figures["loss_ratio"] <= 1.01 for figures in ways.values()),
        },
    }  # fmt: skip


def _of_a_way(figures: Mapping[str, Any], honest: Mapping[str, Any]) -> dict[str, Any]:
    told = ("caught", "named", "falsely_named", "left_alone", "falsely_left_alone", "found_by")
    return {name: figures[name] for name in told} | {"loss_ratio": figures["held_out_loss"] / honest["held_out_loss"]}


def _mean_caught(ways: Mapping[str, Mapping[str, Any]]) -> float:
    return float(statistics.mean(figures["caught"] for figures in ways.values()))
