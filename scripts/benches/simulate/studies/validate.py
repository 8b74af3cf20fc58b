"""Is a simulated swarm as fast as a real one, whose computing is a pause of fixed length?

Half of the settings are saturated: the peers of the slowest stage are always busy. In the others the trainer keeps few
microbatches in flight, and the choice of peers, credits, queues and the length of the lines all matter. The time to
hand a microbatch on is measured before; the simulation gets no other figure of the real swarm.
"""

import asyncio
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import grpc

from peers.trainer.options import MOST_IN_FLIGHT
from scripts.benches.shared.common import (
    START_SECONDS,
    BenchOptions,
    fail_on_exit,
    require_distinct,
    run_of,
    say,
    with_corpus,
    workplace,
)
from scripts.benches.shared.swarm import NEVER, ServingPeer, SwarmProcesses
from scripts.benches.shared.throttle import Lines
from scripts.benches.sides.paced_stage import PACE
from scripts.benches.simulate.microbatches.choosers import Answer, Ours
from scripts.benches.simulate.microbatches.hop import SimulatedTrainer
from scripts.benches.simulate.microbatches.pipeline import Machine, SimulatedPipeline, View
from scripts.benches.simulate.timeline import Timeline
from swarm.averaging.agreement.rules import Timing
from swarm.config import RunConfig
from swarm.errors import DeadlineExceeded, SwarmError
from swarm.rpc import tls
from swarm.rpc.ask import describe
from swarm.rpc.tls import CLIENT_OPTIONS, through
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.stage.admission import LARGEST_NUM_SLOTS
from swarm.types import PeerId

POLL_SECONDS = 0.2
ANSWER_SECONDS = Timing().report_seconds


@dataclass
class Watched:
    """What one peer said: the times of its answers, and the microbatches that were committed until then."""

    stage: int
    committed: list[tuple[float, int]] = field(default_factory=list)

    @property
    def num_committed(self) -> int:
        return self.committed[-1][1] - self.committed[0][1]


def rate_between_commits(watched: Sequence[Watched]) -> float:
    """Microbatches per second of these peers together, from the first commit that was seen to the last. Pauses before
    the first commit and after the last one do not count, since one microbatch more or less between two polls would
    matter. Raises DeadlineExceeded."""
    commits = sorted(
        (now, after - before)
        for one in watched
        for (_, before), (now, after) in pairwise(one.committed)
        if after > before
    )
    if not commits or commits[-1][0] == commits[0][0]:
        raise DeadlineExceeded("hardly a microbatch was committed: measure for longer; is the machine busy?")
    return sum(number for _, number in commits[1:]) / (commits[-1][0] - commits[0][0])


async def watch(swarm: SwarmProcesses, *, warm_up_seconds: float, seconds: float) -> list[Watched]:
    """Wait until microbatches are committed, wait for the warm-up, and then watch all peers. Raises PeerUnavailable and
    DeadlineExceeded."""
    channels = [_channel(peer, swarm) for peer in swarm.peers]
    watched = [Watched(stage=peer.record.stage) for peer in swarm.peers]
    request = pb.DescribeRequest(run_id=swarm.config.run_id)
    now = asyncio.get_running_loop().time

    async def poll(channel: grpc.aio.Channel, one: Watched) -> None:
        with suppress(SwarmError):  # On a full line or a busy machine, a call may be lost.
            reply = await describe(channel, request, seconds=ANSWER_SECONDS)
            one.committed.append((now(), reply.counters.committed))

    async def until(there_at: float) -> None:
        while now() < there_at:
            fail_on_exit(swarm.children)
            await asyncio.gather(*map(poll, channels, watched))
            await asyncio.sleep(POLL_SECONDS)

    try:
        deadline = now() + START_SECONDS
        while not any(one.committed and one.num_committed for one in watched):
            if now() > deadline:
                raise DeadlineExceeded(f"no microbatch in {START_SECONDS:.0f} s: is the machine busy with other work?")
            await until(now() + POLL_SECONDS)
        await until(now() + warm_up_seconds)
        for one in watched:
            one.committed.clear()
        await until(now() + seconds)
    finally:
        await asyncio.gather(*(channel.close() for channel in channels))
    for peer, one in zip(swarm.peers, watched, strict=True):
        if len(one.committed) < 2:
            raise DeadlineExceeded(f"{peer.child.name} hardly answered in {seconds:.0f} s: is the machine busy?")
    return watched


def _channel(peer: ServingPeer, swarm: SwarmProcesses) -> grpc.aio.Channel:
    proxy = through(swarm.children.own.proxy) if isinstance(swarm.children, Lines) else ()
    credentials = tls.pinned_credentials(peer.record.certificate_pem)
    return grpc.aio.secure_channel(
        peer.record.endpoint, credentials, options=(*proxy, *CLIENT_OPTIONS, *tls.PINNED_OPTIONS)
    )


MICROBATCH_SIZE = 4
DIRECTORY_SECONDS = 2.0
SIMULATED_SECONDS = 400.0
WARM_UP_SECONDS, SEED = 15.0, 0  # Training before each measurement; the seed of the simulated swarm
GOAL_PERCENT = 10.0

SettingName = Literal["unequal", "equal", "slow-peer", "unequal-few", "equal-long-line", "slow-peer-long-line"]
Work = tuple[tuple[float, ...], ...]
"""The share of its stage's microbatches that each peer committed, by stage and peer."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    paces: tuple[tuple[float, ...], ...]  # Seconds of computing for a sample, forward and backward, by stage and peer
    max_in_flight: int = MOST_IN_FLIGHT  # The most microbatches in flight of the trainer
    round_trip_seconds: float = 0.0
    """The time that the length of the lines adds to a call and its answer, between any two processes."""

    @property
    def limit(self) -> float:
        return min(sum(1 / (pace * MICROBATCH_SIZE) for pace in stage) for stage in self.paces)


UNEQUAL = ((0.05, 0.1, 0.15),)
EQUAL = ((0.08, 0.08), (0.08, 0.08))
SLOW_PEER = ((0.06, 0.06), (0.06, 0.18), (0.06, 0.06))
SETTINGS: dict[SettingName, Setting] = {
    "unequal": Setting(paces=UNEQUAL), "equal": Setting(paces=EQUAL), "slow-peer": Setting(paces=SLOW_PEER),
    "unequal-few": Setting(paces=UNEQUAL, max_in_flight=2),
    "equal-long-line": Setting(paces=EQUAL, max_in_flight=4, round_trip_seconds=0.1),
    "slow-peer-long-line": Setting(paces=SLOW_PEER, max_in_flight=4, round_trip_seconds=0.1),
}  # fmt: skip
ALONE = Setting(paces=((0.05,),), max_in_flight=1)
"""A swarm with one microbatch at a time. Its time besides computing is that of handing on."""


@dataclass(frozen=True, kw_only=True)
class Options(BenchOptions):
    """Compare the simulator with real local swarms."""

    settings: tuple[SettingName, ...] = tuple(SETTINGS)
    """Swarms to compare."""
    seconds: float = 30.0
    """Length of each measurement."""
    repetitions: int = 3
    """Times that each real swarm is measured; medians are compared."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_distinct(self, ["settings"])


def run(options: Options) -> dict[str, Any]:
    link_seconds = handing_on_seconds(_real(options, "alone", ALONE)[0])
    say(f"to hand a microbatch on takes {1000 * link_seconds:.1f} ms")
    settings = {}
    for name in options.settings:
        setting = SETTINGS[name]
        rates, work = _real(options, name, setting)
        simulated, simulated_work = simulate(
            setting, SEED, link_seconds=link_seconds, warm_up_seconds=WARM_UP_SECONDS,
            seconds=SIMULATED_SECONDS,
        )  # fmt: skip
        median = statistics.median(rates)
        settings[name] = {
            "real": median, "real_lowest": min(rates), "real_highest": max(rates), "simulated": simulated,
            "limit": setting.limit, "difference_percent": 100.0 * (simulated / median - 1.0),
            "work_difference_points": largest_difference_points(work, simulated_work),
        }  # fmt: skip
        say(f"{name}: {median:.2f} microbatches/s, simulated {simulated:.2f}")
    largest = max(abs(setting["difference_percent"]) for setting in settings.values())
    return {
        "largest_difference_percent": largest,
        "largest_work_difference_points": max(setting["work_difference_points"] for setting in settings.values()),
        "passed": largest <= GOAL_PERCENT, "link_seconds": link_seconds, "settings": settings,
    }  # fmt: skip


def handing_on_seconds(rates: Sequence[float]) -> float:
    """The time to hand a microbatch on and get the answer, without computing, from the rates of the swarm `ALONE`."""
    return max(0.0, 1 / statistics.median(rates) - ALONE.paces[0][0] * MICROBATCH_SIZE)


def largest_difference_points(one: Work, other: Work) -> float:
    """The largest difference of a peer's share of its stage's work, in percentage points."""
    return max(
        100.0 * abs(share - other_share)
        for stage, other_stage in zip(one, other, strict=True)
        for share, other_share in zip(stage, other_stage, strict=True)
    )


# -- simulated -------------------------------------------------------------------------------------------------------


class Counting(Ours):
    def __init__(self, timeline: Timeline, rng: random.Random, num_answers: Counter[PeerId]) -> None:
        super().__init__(timeline, rng)
        self.num_answers = num_answers

    def succeeded(self, stage: int, peer_id: PeerId, answer: Answer) -> None:
        self.num_answers[peer_id] += 1
        super().succeeded(stage, peer_id, answer)


def simulate(
    setting: Setting, seed: int, *, link_seconds: float, warm_up_seconds: float, seconds: float
) -> tuple[float, Work]:
    """Microbatches per second of a simulated swarm with one trainer, and each peer's share of them."""
    timeline = Timeline()
    num_answers: Counter[PeerId] = Counter()

    def make_view(machine: Machine | None = None) -> View:
        who = "trainer" if machine is None else machine.peer_id
        return View(Counting(timeline, random.Random(f"{seed} {who}"), num_answers), who)

    pipeline = SimulatedPipeline(
        timeline, random.Random(seed), num_stages=len(setting.paces), num_samples=MICROBATCH_SIZE,
        max_in_flight=len(setting.paces) + 2, largest_in_flight=LARGEST_NUM_SLOTS, make_view=make_view,
    )  # fmt: skip
    peers = machines(setting, link_seconds)
    for machine in peers:
        pipeline.start(machine)
    view = make_view()

    def read_directory() -> None:
        pipeline.announce([view])
        timeline.after(DIRECTORY_SECONDS, read_directory)

    read_directory()
    trainer = SimulatedTrainer(pipeline, view, max_in_flight=setting.max_in_flight)
    trainer.fill()
    timeline.run(warm_up_seconds)
    before, answers_before = trainer.num_done, num_answers.copy()
    timeline.run(warm_up_seconds + seconds)
    answers = [
        [num_answers[machine.peer_id] - answers_before[machine.peer_id] for machine in peers if machine.stage == stage]
        for stage in range(len(setting.paces))
    ]
    return (trainer.num_done - before) / seconds, shares(answers)


def machines(setting: Setting, link_seconds: float) -> list[Machine]:
    """The peers of the simulated swarm. There a line belongs to a peer, the way between two peers is half of one line
    and half of the other, and the trainer has no line: so the lines of every second stage get the whole length."""
    return [
        Machine(
            peer_id=PeerId(f"{100 * stage + number:040x}"), stage=stage, busy_seconds=pace * MICROBATCH_SIZE,
            link_seconds=link_seconds + setting.round_trip_seconds if stage % 2 == 0 else 0.0, jitter=0.0,
        )
        for stage, peers in enumerate(setting.paces)
        for number, pace in enumerate(peers)
    ]  # fmt: skip


def shares(counts: Sequence[Sequence[int]]) -> Work:
    return tuple(tuple(count / max(1, sum(stage)) for count in stage) for stage in counts)


# -- real ------------------------------------------------------------------------------------------------------------


def _config(options: Options, num_stages: int) -> RunConfig:
    # The simulator's peers take no steps, so the real ones wait for none.
    return run_of(
        "validate", width=32, layers=num_stages, head_width=16, stages=num_stages, setting="diloco", length=32,
        microbatch=MICROBATCH_SIZE, round_samples=NEVER * MICROBATCH_SIZE, dataset=options.dataset,
        model={"custom_class": "scripts.benches.sides.paced_stage:Paced"}, data={"max_tokens": 1_000_000},
        rounds={"inner_batch_samples": 64 * MICROBATCH_SIZE, "max_staleness": 1},
    )  # fmt: skip


def _real(options: Options, name: str, setting: Setting) -> tuple[list[float], Work]:
    """Microbatches per second of a real swarm, each time that it was measured, and each peer's share in all of them."""
    config, _ = with_corpus(_config(options, len(setting.paces)))
    with workplace("validate", line_seconds=setting.round_trip_seconds or None) as (folder, children):
        swarm = SwarmProcesses(config, children, folder / "run")
        say(f"{name}: peers start")
        stages = [stage for stage, peers in enumerate(setting.paces) for _ in peers]
        swarm.start_peers(stages, [{PACE: str(pace)} for peers in setting.paces for pace in peers])
        swarm.launch_trainer("trainer", NEVER, max_in_flight=setting.max_in_flight)
        runs: list[list[Watched]] = []
        for _ in range(options.repetitions):
            warm_up_seconds = 0.0 if runs else WARM_UP_SECONDS
            runs.append(asyncio.run(watch(swarm, warm_up_seconds=warm_up_seconds, seconds=options.seconds)))
    rates = [rate_between_commits([one for one in watched if one.stage == 0]) for watched in runs]
    by_peer = list(zip(*runs, strict=True))
    counts = [
        [sum(one.num_committed for one in peer) for peer in by_peer if peer[0].stage == stage]
        for stage in range(len(setting.paces))
    ]
    return rates, shares(counts)
