"""What honest traffic loses to an intruder, compared with a harmless process that is equally busy, in turns."""

import asyncio
import dataclasses
import datetime
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from peers.local.supervisor import Supervisor
from peers.shared.token_option import VARIABLE
from scripts.benches.shared import proc
from scripts.benches.shared.common import (
    BenchOptions,
    fail_on_exit,
    run_of,
    say,
    side,
    wait_for_json,
    with_corpus,
    workplace,
    write_json,
)
from scripts.benches.shared.swarm import StageBefore, SwarmProcesses
from swarm.config import RunConfig
from swarm.credentials.identity import generate
from swarm.credentials.rights import Role
from swarm.credentials.token import Token, new_owner
from swarm.errors import IntegrityError
from swarm.stage.boundary import HIDDEN, TOKENS

KINDS = ("malformed", "opens", "idle", "slow")
IN_FLIGHT, WARM_UP_SECONDS = 3, 1.0
REFUSALS = {"UNAUTHENTICATED", "PERMISSION_DENIED", "UNIMPLEMENTED", "UNAVAILABLE"}
"""Outcomes of calls that are rejected at once: with an invalid token, to a method that the peer does not have, or
without a connection."""
OWN_FAULTS = {"UsageError", "InvalidStateError", "InternalError"}
"""Errors that gRPC raises for a call that has already ended. The end of the call itself is counted elsewhere."""


@dataclass(frozen=True, kw_only=True)
class Options(BenchOptions):
    """Measure what honest traffic keeps beside an intruder."""

    seconds: float = 8.0
    """Length of each measurement."""
    repetitions: int = 3
    """Measurements of each kind of intruder, and of its harmless counterpart."""


def run(options: Options) -> dict[str, Any]:
    torch.set_num_threads(1)
    now = datetime.datetime.now(datetime.UTC)
    owner = new_owner(now)
    tokens = [owner.issue(Role.PEER, name="bench", now=now, lifetime=datetime.timedelta(days=1)) for _ in range(2)]
    config, _ = with_corpus(_config(options, owner.authority.fingerprint))
    with workplace("intruders") as (folder, children):
        say("the peer starts")
        os.environ[VARIABLE] = str(tokens[0])
        swarm = SwarmProcesses(config, children, folder / "swarm")
        swarm.start_peers([1])
        target = {
            "endpoint": swarm.peers[0].record.endpoint, "certificate_pem": swarm.peers[0].record.certificate_pem,
            "run_id": config.run_id, "token": str(tokens[1]), "num_samples": config.data.microbatch_size,
        }  # fmt: skip
        file = folder / "target.json"
        write_json(file, target)
        figures: dict[str, Any] = {}
        with asyncio.Runner() as runner:
            honest = runner.run(_connect(config, swarm, tokens[0]))
            for kind in KINDS:
                say(f"beside an intruder: {kind}")
                ratios, shares, rates = [], [], []
                outcomes: Counter[str] = Counter()
                for _ in range(options.repetitions):
                    tally = folder / f"tally-{time.monotonic_ns()}.json"
                    with _beside(children, kind, side("intruder", kind, file, tally)) as used:
                        before = wait_for_json(tally, children)
                        rate = runner.run(_rate(honest, options.seconds))
                        shares.append(min(1.0, used() / (options.seconds + WARM_UP_SECONDS)))
                        after = wait_for_json(tally, children)
                    rates.append((after["calls"] - before["calls"]) / (after["at"] - before["at"]))
                    outcomes.update(after["outcomes"])
                    require_let_in(kind, after["calls"], after["outcomes"])
                    with _beside(children, "harmless", proc.busy(shares[-1])):
                        ratios.append(rate / runner.run(_rate(honest, options.seconds)))
                figures[kind] = {
                    "honest_rate_ratio": statistics.median(ratios), "cores": statistics.mean(shares),
                    "calls_per_second": statistics.mean(rates), "outcomes": dict(outcomes),
                }  # fmt: skip
            runner.run(honest.channels.close())
    return {"worst_ratio": min(figure["honest_rate_ratio"] for figure in figures.values()), **figures}


def _config(options: Options, owner: str) -> RunConfig:
    # No round ends while the bench runs.
    config = run_of(
        "intruders", width=256, layers=4, stages=2, setting="diloco", length=64, microbatch=8, round_samples=8 << 20,
        dataset=options.dataset, data={"max_tokens": 1_000_000}, rounds={"inner_batch_samples": 32},
    )  # fmt: skip
    return dataclasses.replace(config, owner=owner)


def require_let_in(kind: str, num_calls: int, outcomes: Mapping[str, int]) -> None:
    """Raise IntegrityError if an intruder made no call, or if every call was rejected at once."""
    ends = outcomes.keys() - OWN_FAULTS
    if num_calls == 0 or (ends and ends <= REFUSALS):
        raise IntegrityError(f"the {kind} intruder does no harm: of its {num_calls} calls ended {dict(outcomes)}")


@contextmanager
def _beside(children: Supervisor, name: str, command: Sequence[str]) -> Iterator[Callable[[], float]]:
    """Run another process beside the honest traffic. Yields a function that gives the processor seconds that it has
    used."""
    child = children.start(f"{name}-{time.monotonic_ns()}", command)
    # The imports of the process do not belong to the measurement.
    time.sleep(4.0)
    began = proc.cpu_seconds(child.pid)
    yield lambda: proc.cpu_seconds(child.pid) - began
    fail_on_exit(children)
    children.kill9(child)


async def _rate(honest: StageBefore, seconds: float) -> float:
    """Microbatches a second, several at a time, after a second of warm-up."""
    num_done, counts = 0, False

    async def feed() -> None:
        nonlocal num_done
        while True:
            await honest.call()
            num_done += counts

    feeding = [asyncio.create_task(feed()) for _ in range(IN_FLIGHT)]
    await asyncio.sleep(WARM_UP_SECONDS)
    counts = True
    await asyncio.sleep(seconds)
    counts = False
    for task in feeding:
        task.cancel()
    for end in await asyncio.gather(*feeding, return_exceptions=True):
        if not isinstance(end, asyncio.CancelledError):
            raise end if isinstance(end, BaseException) else AssertionError("feeding ended")
    return num_done / seconds


async def _connect(config: RunConfig, swarm: SwarmProcesses, token: Token) -> StageBefore:
    size, length = config.data.microbatch_size, config.data.sequence_length
    tensors = {
        TOKENS: torch.randint(config.model.vocab_size, (size, length + 1), dtype=torch.int32),
        HIDDEN: torch.randn(size, length, config.model.d_model),
    }
    return StageBefore(*swarm.hop(1, token.admit(generate())), tensors)
