"""What does it cost that a process serves several stages, and do peers that choose their stages use what they have?

The part `single` compares, in turns of one round, with the model and options of the bench `pipeline`:

    span      one swarm-peer that serves both stages with one thread, and a trainer that feeds it, over TLS
    single    one process with one thread, which trains the whole model

In the part `capacity` peers with capacities of 1 : 4 : 16 come one after another. Each is a process that chooses its
stages itself, computes little, and pauses for the rest of its time, so that all fit on two cores. Then another one
comes, of capacity 4, and some are killed. What is measured are the samples that a trainer gets answered, over those of
the best of all layouts of the peers that are there then.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from peers.commands import command_line
from peers.local.supervisor import Child, Supervisor
from peers.shared.needs import of_stages
from peers.shared.room import together, written
from peers.shared.stage_choice import StageChoice
from scripts.benches import pipeline
from scripts.benches.shared import paired
from scripts.benches.shared.common import POLL_SECONDS, fail_on_exit, run_of, say, side, with_corpus, workplace
from scripts.benches.shared.swarm import NEVER, SwarmProcesses
from scripts.benches.sides.paced_stage import PACE
from scripts.benches.simulate.studies.spans import BACK, CAPACITIES, best_throughput, layouts, throughput
from swarm.config import RunConfig
from swarm.rebalancing import layout
from swarm.rebalancing.judgement import costs_of

STAGES = 4
NEWCOMER = CAPACITIES[1]
MICROBATCH = 4
PERIODS = 2
"""In so many check periods the swarm is to be back after a change."""
SETTLING_PERIODS = 8
"""For how many check periods newcomers may move at first: such a move waits for the end of a slow round."""
GOALS = {"ratio_to_single_process": 0.95, "share_of_capacity": 0.95, "share_after": BACK}


@dataclass(frozen=True, kw_only=True)
class Options(pipeline.Options):
    """Compare a peer that serves two stages with one process that trains the whole model, and see how well peers of
    different capacity are used that choose their stages themselves."""

    part: Literal["both", "single", "capacity"] = "both"
    """Which of the two to run."""
    d_model: tuple[int, ...] = (768,)
    """single: widths of the model to measure; multiples of 64. There is a layer for each 64 of the width, half of them
    at each stage: 12 at 768, as in GPT-2 small, and 6 at 384, as in nanoGPT's smallest model."""
    microbatches: int = 8
    """single: microbatches in a round. A round is one optimizer step; with DiLoCo, one inner and one outer step."""
    repetitions: int = 2
    """single: times that each side has its turn."""
    room: int = STAGES
    """capacity: for how many of the four stages each peer is given memory."""
    period: float = 20.0
    """capacity: mean seconds between two checks of a peer whether to move."""
    seconds_per_sample: float = 0.4
    """capacity: how long a peer of capacity 1 takes for a sample at one stage. With the default all of them together
    take four microbatches a second, at most; on a machine that has other work let them take fewer."""
    kill: tuple[int, ...] = (4, 16)
    """capacity: the capacities of the peers that are killed, one after another, once the newcomer is there."""

    def __post_init__(self) -> None:
        super().__post_init__()
        left = [*CAPACITIES, NEWCOMER]
        for capacity in self.kill:
            if capacity not in left:
                raise ValueError(f"--kill {capacity}: there is no such peer; those that come are 1, 4, 16 and 4")
            left.remove(capacity)
        if not 1 <= self.room <= STAGES or self.room * len(left) < STAGES:
            raise ValueError(f"--room {self.room}: the peers that are not killed have to hold all {STAGES} stages")


def run(options: Options) -> dict[str, Any]:
    started_at = time.monotonic()
    single = {} if options.part == "capacity" else _run_single(options)
    capacity = {} if options.part == "single" else _run_capacity(options)
    reached = [
        *(ratio >= GOALS["ratio_to_single_process"] for ratio in single.get("ratio_to_single_process", {}).values()),
        *([_is_reached(capacity)] if capacity else []),
    ]
    return {**single, **capacity, "passed": all(reached), "seconds": time.monotonic() - started_at}


# -- a span against a single process -----------------------------------------------------------------------------------


def _run_single(options: Options) -> dict[str, Any]:
    turns = {
        str(width): pipeline.in_turns(options, width, "span", [StageChoice(0, 1)], {"single": (1,)})
        for width in options.d_model
    }
    ratios = {width: paired.ratio(sides["span"], sides["single"]) for width, sides in turns.items()}
    return {
        **paired.figures({"ratio_to_single_process": ratios}),
        "tokens_per_second": {width: paired.medians(sides) for width, sides in turns.items()}, "repetitions": turns,
        "setting": options.setting, "microbatches_per_round": options.microbatches,
    }  # fmt: skip


# -- peers of different capacity ---------------------------------------------------------------------------------------


def _run_capacity(options: Options) -> dict[str, Any]:
    config, _ = with_corpus(_config(options))
    with workplace("spans") as (folder, children):
        swarm = SwarmProcesses(config, children, folder / "swarm", program=_program, logs_events=True)
        swarm.prepare()
        peers = Peers(swarm, children, options, _memory(config, options.room))
        for capacity in CAPACITIES:
            peers.come(capacity)
            peers.until_all_serve()
        swarm.launch_trainer("trainer", NEVER)
        say("a trainer starts")
        peers.until(lambda: bool(peers.answered_at()))
        deadline = time.monotonic() + SETTLING_PERIODS * options.period
        peers.until(lambda: peers.is_settled or time.monotonic() > deadline)
        peers.watch(PERIODS * options.period)
        began_at, seconds = time.monotonic(), PERIODS * options.period
        peers.watch(seconds)
        (share,) = peers.shares([began_at], seconds)
        say(f"share of capacity {share:.3f}: {peers.in_words()}")
        changes: dict[str, Callable[[], None]] = {"join": partial(peers.come, NEWCOMER)}
        changes |= {f"kill_{capacity}": partial(peers.kill, capacity) for capacity in options.kill}
        after = {name: peers.after(name, change) for name, change in changes.items()}
    figures = {name: {change: one[name] for change, one in after.items()} for name in next(iter(after.values()))}
    return {"share_of_capacity": share, **figures, "room": options.room, "period_seconds": options.period}


def _is_reached(figures: dict[str, Any]) -> bool:
    moved, least = figures["blocks_moved"], figures["least_blocks_moved"]
    return (
        figures["share_of_capacity"] >= GOALS["share_of_capacity"]
        and all(share >= GOALS["share_after"] for share in figures["share_after"].values())
        and all(moved[change] <= least[change] for change in moved)
    )


def _config(options: Options) -> RunConfig:
    # Rounds are short, since a peer that moves waits for the end of one. A staleness of 3 lets peers always have
    # something to compute, since this measures what they manage and not what is learnt.
    return run_of(
        "spans", width=64, layers=STAGES, head_width=32, stages=STAGES, setting="diloco", length=32,
        microbatch=MICROBATCH, round_samples=48, dataset=options.dataset, data={"max_tokens": 1_000_000},
        rounds={"inner_batch_samples": 8, "max_staleness": 3}, optimizer={"learning_rate": 1e-3},
        outer={"learning_rate": 0.7, "momentum": 0.6}, averaging={"codec": "int8"},
    )  # fmt: skip


def _program(name: str, arguments: Sequence[str]) -> list[str]:
    return side("paced_stage", name, *arguments) if name == "peer" else command_line(name, arguments)


def _memory(config: RunConfig, room: int) -> int | None:
    """Memory for so many stages and no more; None if that is all."""
    if room == STAGES:
        return None
    each = of_stages(config, on_gpu=False)

    def least(length: int) -> list[int]:
        return [together(each, range(first, first + length)).least for first in range(STAGES - length + 1)]

    return (max(least(room)) + min(least(room + 1))) // 2


def least_moved(
    costs: Sequence[float], room: int, capacities: Sequence[float], before: Sequence[layout.Span | None]
) -> int:
    """How many blocks peers have to enter at least, until their throughput is BACK of the best. `before` has the spans
    until now; None for a newcomer, whose blocks do not count."""
    enough = BACK * best_throughput(tuple(costs), room, tuple(capacities))
    return min(
        sum(len({*after} - {*was}) for after, was in zip(chosen, before, strict=True) if was is not None)
        for chosen in layouts(len(costs), room, len(capacities))
        if throughput(costs, capacities, chosen) >= enough
    )


@dataclass(eq=False)
class Peer:
    capacity: float
    child: Child
    span: layout.Span = ()
    """The blocks that it serves, or served last; empty until it serves."""


@dataclass(eq=False)
class Peers:
    """Peers of different capacity, which choose their stages themselves."""

    swarm: SwarmProcesses
    children: Supervisor
    options: Options
    memory_bytes: int | None
    there: list[Peer] = field(default_factory=list)
    num_entered: int = 0
    """How many blocks peers have entered since they first served."""

    @property
    def costs(self) -> list[float]:
        return [*costs_of(self.swarm.config).values()]

    def come(self, capacity: float) -> None:
        say(f"a peer of capacity {capacity:g} starts")
        # A stage that no peer holds any more is restored from a checkpoint, which all of them can read.
        disk = self.swarm.folder / "checkpoints"
        disk.mkdir(exist_ok=True)
        pace = {PACE: str(self.options.seconds_per_sample / capacity)}
        child = self.swarm.launch_peer(
            "auto", environment=pace, rebalance_every=self.options.period, memory=self.memory_bytes,
            graph_memory_mib=64, checkpoint=disk, checkpoint_every=1, resume=disk,
        )  # fmt: skip
        self.there.append(Peer(capacity, child))

    def kill(self, capacity: float) -> None:
        peer = next(peer for peer in self.there if peer.capacity == capacity)
        say(f"the peer of capacity {capacity:g} at {written(peer.span)} is killed")
        self.there.remove(peer)
        self.swarm.peers = [one for one in self.swarm.peers if one.child is not peer.child]
        self.children.kill9(peer.child)

    def look(self) -> None:
        """See where the peers are now. Raises PeerUnavailable if a process has ended."""
        fail_on_exit(self.children)
        for peer in self.there:
            if not self.swarm.ready_file(peer.child.name).exists():
                continue
            serving = self.swarm.until_ready(peer.child, "auto")
            before, peer.span = peer.span, tuple(serving.blocks)
            if not before:
                self.swarm.peers.append(serving)
            elif before != peer.span:
                self.num_entered += len({*peer.span} - {*before})
                say(f"a peer of capacity {peer.capacity:g} has moved: {self.in_words()}")

    def until(self, there: Callable[[], bool]) -> None:
        while not there():
            self.look()
            time.sleep(POLL_SECONDS)

    def until_all_serve(self) -> None:
        self.until(lambda: all(peer.span for peer in self.there))

    def watch(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self.until(lambda: time.monotonic() >= end)

    @property
    def is_settled(self) -> bool:
        """Whether the blocks are where they could give BACK of what is possible at best."""
        capacities, spans = tuple(peer.capacity for peer in self.there), [peer.span for peer in self.there]
        best = best_throughput(tuple(self.costs), self.options.room, capacities)
        return all(spans) and throughput(self.costs, capacities, spans) >= BACK * best

    def answered_at(self) -> list[float]:
        """When the trainer's microbatches were answered, in monotonic seconds."""
        log = self.swarm.events / "trainer.jsonl"
        events = map(json.loads, log.read_text().splitlines()) if log.exists() else ()
        return [event["monotonic"] for event in events if event["event"] == "ack"]

    def shares(self, begins: Sequence[float], seconds: float) -> list[float]:
        """For each of these times: the samples that were answered in so many seconds from then on, over those of the
        best layout of the peers that are there."""
        answered_at = self.answered_at()
        best = best_throughput(tuple(self.costs), self.options.room, tuple(peer.capacity for peer in self.there))
        most = seconds * best / self.options.seconds_per_sample
        return [MICROBATCH * sum(begin < at <= begin + seconds for at in answered_at) / most for begin in begins]

    def after(self, name: str, change: Callable[[], None]) -> dict[str, Any]:
        """The figures of a change, over PERIODS check periods from the time on after which the swarm is to be back."""
        self.look()
        num_entered, began_at, before = self.num_entered, time.monotonic(), {*self.there}
        change()
        spans = [peer.span if peer in before and peer.span else None for peer in self.there]
        least = least_moved(self.costs, self.options.room, [peer.capacity for peer in self.there], spans)
        seconds = PERIODS * self.options.period
        self.watch(2 * seconds)
        begins = [began_at + seconds * number / 20 for number in range(21)]
        shares = self.shares(begins, seconds)
        say(f"after {name}: share of capacity {shares[-1]:.3f}, {self.in_words()}")
        return {
            "share_after": shares[-1],
            "periods_until_back": next((n * PERIODS / 20 for n, share in enumerate(shares) if share >= BACK), None),
            "blocks_moved": self.num_entered - num_entered, "least_blocks_moved": least,
        }  # fmt: skip

    def in_words(self) -> str:
        """Who is where."""
        each = (f"{peer.capacity:g} at {written(peer.span) if peer.span else 'none yet'}" for peer in self.there)
        return ", ".join(each)
