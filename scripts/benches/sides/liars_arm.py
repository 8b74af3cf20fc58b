"""A swarm in one process in which peers of one stage lie, for the bench `liars`.

One peer of stage 0 sends microbatches to the peers of stage 1, and has their answers checked: all are stage peers as
swarm-peer has them. The last line of stdout is one JSON object.
"""

import asyncio
import json
import logging
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from peers.shared import logs, process
from peers.stage_peer.served_block import ServedBlock
from scripts.benches.shared.common import run_of, say, with_corpus
from scripts.benches.sides import mixed_processors
from scripts.benches.sides.liars_costs import Costs
from scripts.benches.sides.lies import CONTRIBUTIONS, WAYS, LyingBackend, LyingMember, Vectors
from scripts.benches.sides.reference import HeldOut
from swarm.config import RunConfig
from swarm.data.microbatches import Microbatches
from swarm.errors import DeadlineExceeded, IntegrityError
from swarm.honesty.comparison import Comparison, Deviation
from tests.support.whole_swarm import WholePeer, WholeSwarm, whole_swarm

NUM_PEERS, LIARS = 8, (2, 5)
"""The peers of stage 1, and which of them lie."""
INNER_STEPS = 8
MICROBATCHES_EACH = 16
"""Microbatches of each peer in a synchronous round."""
SAMPLES = {"synchronous": 4, "diloco": 32}
"""Samples, of 32 tokens, of a microbatch. An inner step of DiLoCo takes one microbatch: with 8 samples the directions
of honest peers differ so much that a lie in one layer is not found."""
CHECK_SHARE = 0.09
"""With it, and so many microbatches in a round, all but one of the ten ways are found nearly always, and one wrong
microbatch in ten half the time in synchronous rounds."""
HONEST_ROUNDS = 6
"""Rounds before the lies begin."""
CAUGHT_ROUNDS = 5
"""A liar is caught if it is named within so many rounds in which it lies."""
ROUND_SECONDS = 1800.0
"""Longest wait for a round: it takes minutes where many programs share the cores."""
POLL_SECONDS = 0.01
HONEST, CHURN, MIXED = "honest", "churn", "mixed"
"""Nobody lies. With churn every third round a peer is killed and replaced; with mixed processors too, but without a
network."""
DEFENCES = ("all", "comparing", "checks")
"""All of the swarm's defences, contributions compared and nothing else, and all that but comparing."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """What is trained, and who lies."""

    way: str
    defences: str = "all"
    num_peers: int = NUM_PEERS
    liars: Sequence[int] = LIARS
    honest_rounds: int = HONEST_ROUNDS

    @property
    def tellers(self) -> Sequence[int]:
        return self.liars if self.way in WAYS else ()


def run_config(
    setting: str, dataset: str, codec: str, seed: int, check_share: float = CHECK_SHARE, each: int = 0
) -> RunConfig:
    """`each` is how many microbatches each of the peers has in a round; 0: as many as the bench has."""
    is_synchronous, samples = setting == "synchronous", SAMPLES[setting]
    each = each or (MICROBATCHES_EACH if is_synchronous else INNER_STEPS)
    return run_of(
        "liars", width=64, layers=4, head_width=32, stages=2, setting=setting, length=32, microbatch=samples,
        round_samples=NUM_PEERS * each * samples, dataset=dataset, data={"seed": seed, "held_out_fraction": 0.02},
        rounds={"check_share": check_share, **({} if is_synchronous else {"inner_batch_samples": samples})},
        optimizer={"learning_rate": 3e-3, "schedule": "constant", "warmup_samples": 64},
        averaging={"codec": codec, **({} if is_synchronous else {"overlap_steps": 0})},
    )  # fmt: skip


# -- what is found -----------------------------------------------------------------------------------------------------


class Findings(logging.Handler):
    """Notes what found a liar, and whom senders leave alone, from what the product says in its log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: set[str] = set()
        self.left_alone: set[str] = set()
        """How the ids begin of those that get no more microbatches."""

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if record.name == "swarm.honesty.suspects":
            self.lines.add(line)
        elif " gets no more microbatches of stage " in line:
            self.left_alone.add(line.split()[0])

    @property
    def by_kind(self) -> Mapping[str, int]:
        """How many words there were of each kind, in rounds that a member was left out of, and when it was named."""
        kinds = {"its norm": "norm", "its cosine": "direction", "gave before": "repeated",
                 "its answers or": "computed", "answers' gradients": "sketched"}  # fmt: skip
        counts = Counter(kind for line in self.lines for text, kind in kinds.items() if text in line)
        return {**counts, "in_one_layer": sum(" in layers." in line for line in self.lines)}

    @property
    def num_left_out(self) -> int:
        """How often a contribution was found out of line by so many owners that it was left out of its round."""
        return len({line.split(" is out")[0] for line in self.lines if " is out of line: " in line})


def nothing_compared(*_: Any) -> Sequence[Deviation]:
    return ()


# -- rounds ------------------------------------------------------------------------------------------------------------


class LiarsRounds:
    """Rounds of the swarm, of which some peers lie.

    Attributes:
        members: the peers of stage 1 that are there now.
        named: by peer, the first round in which an honest peer named it, and the line that says why.
    """

    def __init__(self, arm: Arm, swarm: WholeSwarm) -> None:
        self._arm = arm
        self._swarm = swarm
        self.members = [peer for peer in swarm.peers if peer.stage == 1]
        self.named: dict[str, tuple[int, str]] = {}
        for number in arm.tellers:
            _let_lie(served(self.members[number]), arm)

    async def run(self, number: int) -> None:
        """Train until all peers have committed the round. Raises DeadlineExceeded, and IntegrityError if peers of one
        round hold different states."""
        dead = number // 3 % len(self.members) if self._arm.way == CHURN and number % 3 == 2 else None
        try:
            async with asyncio.timeout(ROUND_SECONDS), asyncio.TaskGroup() as tasks:
                if dead is not None:
                    tasks.create_task(self._replace(dead, number))
                await self._swarm.train(1, first=number)
                # What is waited for is spread over the peers, here and below.
                while any(served(peer).stage.round <= number for peer in self.members):  # noqa: ASYNC110
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            raise DeadlineExceeded(f"round {number} took longer than {ROUND_SECONDS:.0f} s") from None
        await self._require_one_state()
        honest = [peer for place, peer in enumerate(self.members) if place not in self._arm.tellers]
        for line in (line for peer in honest for line in served(peer).averager.counters().refusals):
            # Other lines name nobody: among few members nobody can say who is wrong.
            peer_id, is_naming, _ = line.partition(" lies: ")
            if is_naming:
                self.named.setdefault(peer_id, (number, line))

    async def _replace(self, place: int, number: int) -> None:
        """Kill a peer in the middle of the round, and start another one."""
        half = self._swarm.config.rounds.round_samples // 2

        def num_samples() -> int:
            return sum(served(peer).member.progress().num_samples for peer in self.members)

        while num_samples() < half and served(self.members[place]).stage.round == number:  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)
        await self.members[place].kill()
        self.members[place] = await self._swarm.start(1)

    async def _require_one_state(self) -> None:
        snapshots = [await served(peer).member.snapshot() for peer in self.members]
        states = {(snapshot.round, snapshot.digest) for snapshot in snapshots}
        if len(states) > len({number for number, _ in states}):
            raise IntegrityError("peers hold different states of one round")

    def weights(self) -> Vectors:
        """The whole model's, as its first peer of each stage holds them."""
        blocks = [served(self._swarm.peers[0]), served(self.members[0])]
        anchors = [block.stage.context.backend.weights.anchor(block.stage.round) for block in blocks]
        return {name: value for anchor in anchors for name, value in (anchor or {}).items()}


def served(peer: WholePeer) -> ServedBlock:
    assert peer.server is not None, "it serves until it is killed"
    return peer.server


def _let_lie(peer: ServedBlock, arm: Arm) -> None:
    if arm.way in CONTRIBUTIONS:
        LyingMember(peer.member, CONTRIBUTIONS[arm.way], arm.honest_rounds)
    else:
        LyingBackend(peer.stage.context.backend, arm.way, lambda: peer.stage.round >= arm.honest_rounds)


async def train(arm: Arm, config: RunConfig, data: Microbatches, num_rounds: int, folder: Path) -> dict[str, Any]:
    findings, costs = Findings(), Costs()
    loggers = [logging.getLogger(name) for name in ("swarm.honesty.suspects", "swarm.hop.spot_checks")]
    for each in loggers:
        each.addHandler(findings)

    def tokens(_: RunConfig, index: int) -> torch.Tensor:
        return torch.from_numpy(data.tokens(index))

    with ExitStack() as stack:
        if arm.defences == "checks":
            stack.enter_context(mock.patch.object(Comparison, "deviations", nothing_compared))
        stack.enter_context(costs.counted())
        async with whole_swarm(config, folder, num_peers=(1, arm.num_peers), tokens=tokens) as swarm:
            rounds = LiarsRounds(arm, swarm)
            liars = {rounds.members[number].peer_id for number in arm.tellers}
            began, cpu = time.perf_counter(), time.process_time()
            for number in range(num_rounds):
                await rounds.run(number)
                seconds = time.process_time() - cpu
                say(f"round {number}: {len(rounds.named)} named, {seconds:.0f} s of the processor so far")
            seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
            loss = HeldOut(config, data).loss(rounds.weights())
    for each in loggers:
        each.removeHandler(findings)
    last = arm.honest_rounds + CAUGHT_ROUNDS
    left_alone = sum(any(peer.startswith(begin) for begin in findings.left_alone) for peer in liars)
    return {
        "caught": sum(peer in rounds.named and rounds.named[peer][0] < last for peer in liars) / max(1, len(liars)),
        "named": len(rounds.named.keys() & liars), "falsely_named": len(rounds.named.keys() - liars),
        "left_alone": left_alone, "falsely_left_alone": len(findings.left_alone) - left_alone,
        "left_out": findings.num_left_out, "found_by": findings.by_kind,
        "false_lines": [line for peer, (_, line) in rounds.named.items() if peer not in liars],
        "held_out_loss": loss, "rounds": num_rounds, "overhead": sum(costs.seconds.values()) / cpu,
        "costs": {kind: each / cpu for kind, each in costs.seconds.items()},
        "costs_by_function": {name: each / cpu for name, each in costs.by_function.items()},
        "num_checked": costs.num_calls["compute_again"], "seconds": seconds, "cpu_seconds": cpu,
    }  # fmt: skip


def main(
    setting: str, way: str, defences: str, num_rounds: int, dataset: str, codec: str, seed: int, check_share: float
) -> None:
    process.prepare_environment()
    torch.set_num_threads(1)
    logs.setup_logging(f"bench liars {setting} {way}", "warning")
    logging.getLogger("swarm").setLevel(logging.ERROR)
    for name in ("honesty.suspects", "hop.spot_checks"):
        logging.getLogger(f"swarm.{name}").setLevel(logging.WARNING)
    share = 0.0 if defences == "comparing" else check_share
    config, data = with_corpus(run_config(setting, dataset, codec, seed, share))
    if way == MIXED:
        each = MICROBATCHES_EACH if config.rounds.synchronous else INNER_STEPS
        with mixed_processors.other_kind(setting, dataset, codec, seed) as other:
            figures = mixed_processors.train(config, data, other, (NUM_PEERS, each), num_rounds)
    else:
        with tempfile.TemporaryDirectory(prefix="bench-liars-") as folder:
            arm = Arm(way=way, defences=defences)
            figures = asyncio.run(train(arm, config, data, num_rounds, Path(folder) / "events"))
    print(json.dumps(figures))
