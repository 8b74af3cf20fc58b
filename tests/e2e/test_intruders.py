"""Processes with a token lie to a real swarm of two stages. The swarm goes on, and the memory of its peers stays
small."""

import asyncio
import contextlib
import re
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest

from peers.commands import command_line
from peers.local.supervisor import Child
from swarm.config import load as load_config
from swarm.credentials.identity import generate
from swarm.credentials.rights import Role
from swarm.dht import keys
from swarm.dht.known_records import MAX_OWNER_RECORDS
from swarm.dht.records import seal
from swarm.pipeline.lease_service import MAX_COUNT, MAX_NAMED
from swarm.rpc.channels import ChannelPool
from swarm.rpc.v1 import lease_pb2 as pb
from swarm.rpc.v1.lease_pb2_grpc import LeaseServiceStub
from swarm.rpc.v1.stage_pb2 import Address
from swarm.types import PROTOCOLS, TrainerRecord
from tests.support import locked
from tests.support.swarm import RealPeer, RealSwarm, real_swarm

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealSwarm]:
    with real_swarm(tmp_path_factory.mktemp("intruders"), setting="synchronous") as swarm:
        swarm.start_peers([0], "--token", str(locked.PEER_TOKEN))
        swarm.start_peers([1], "--token", str(locked.PEER_TOKEN))
        yield swarm


@contextlib.contextmanager
def beside(lies: Coroutine[Any, Any, None]) -> Iterator[None]:
    """Run `lies` in a thread until the block ends."""
    stop = Event()

    async def until_stopped() -> None:
        task = asyncio.create_task(lies)
        stopping = asyncio.create_task(asyncio.to_thread(stop.wait))
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    with ThreadPoolExecutor() as threads:
        lying = threads.submit(asyncio.run, until_stopped())
        try:
            yield
        finally:
            stop.set()
        lying.result()


async def _claim_all(swarm: RealSwarm, run_id: str, num_names: int, wanted: int) -> None:
    """Say again and again, under many names, that every microbatch of the round is held here, and run none."""
    token, size = locked.issue(Role.TRAINER), load_config(swarm.config).microbatches_per_round
    newest = 0

    async def lie(peer: RealPeer) -> None:
        nonlocal newest
        identity = token.admit(generate())
        stub: Any = LeaseServiceStub(ChannelPool(identity=identity).channel(peer.record))
        address = Address(run_id=run_id, protocol_version=PROTOCOLS.newest, stage=peer.stage)
        while True:
            ids = range(newest * size, newest * size + MAX_NAMED)
            request = pb.AcquireRequest(
                address=address, trainer_id=identity.peer_id, count=wanted, holding=ids, acknowledged=ids[: size // 2],
                newest_round=newest, newest_is_complete=True, newest_is_granted=True,
            )  # fmt: skip
            reply = await stub.Acquire(request, timeout=10)
            newest = max(newest, reply.round)
            await asyncio.sleep(0.1)

    async with asyncio.TaskGroup() as tasks:
        for peer in swarm.peers:
            for _ in range(num_names):
                tasks.create_task(lie(peer))


def _start_trainer(swarm: RealSwarm, name: str, *, steps: int) -> Child:
    arguments = [
        "--initial-peers", f"{swarm.address}#{locked.TRAINER_TOKEN}", "--steps", str(steps), "--output",
        str(swarm.folder / name), "--evaluate-every", "0", "--evaluation-samples", "16",
    ]  # fmt: skip
    return swarm.children.start(name, command_line("trainer", arguments))


def _run_id(swarm: RealSwarm) -> str:
    found = re.search(r"of new run (\S+) on", (swarm.folder / "logs" / "peer-1.log").read_text())
    assert found is not None
    return found[1]


def test_a_second_token_that_names_every_microbatch_as_held_stalls_nothing(swarm: RealSwarm) -> None:
    """It speaks under 17 names at each stage, and together they name more microbatches than a leader would keep."""
    trainer = _start_trainer(swarm, "beside-many-names", steps=4)
    swarm.wait_for_steps("beside-many-names", 1)
    with beside(_claim_all(swarm, _run_id(swarm), num_names=17, wanted=0)):
        assert swarm.wait_for_end(trainer, 60.0) == 0
    assert len(swarm.steps("beside-many-names")) == 4


@pytest.mark.slow
def test_a_trainer_s_token_fills_no_node_with_records(swarm: RealSwarm) -> None:
    num_foreign, num_own = _flood(swarm.address, _run_id(swarm))
    assert num_foreign == 0
    assert num_own == MAX_OWNER_RECORDS
    trainer = _start_trainer(swarm, "beside-many-records", steps=1)
    assert swarm.wait_for_end(trainer, 60.0) == 0


def _flood(address: str, run_id: str) -> tuple[int, int]:
    """Store as many records as possible at one peer. Return how many it accepted under keys of other runs, and of this
    run."""
    from tests.support.dht_stranger import Stranger

    token, expiration = locked.issue(Role.TRAINER), time.time() + 100

    def store(key: str) -> bool:
        who = token.admit(generate())
        value = seal(who, key, TrainerRecord(peer_id=who.peer_id, announced_at=time.time(), name="x"), expiration)
        return all(stranger.send(address, key, [(who.peer_id, value)], expiration))

    with Stranger(address) as stranger:
        foreign = [store(f"another.{number}.trainers") for number in range(50)]
        own = [store(keys.of_trainers(run_id)) for _ in range(MAX_OWNER_RECORDS + 20)]
    return sum(foreign), sum(own)


@pytest.mark.slow
def test_nor_does_one_that_is_there_first_takes_what_it_is_given_and_runs_none_of_it(swarm: RealSwarm) -> None:
    with beside(_claim_all(swarm, _run_id(swarm), num_names=2, wanted=MAX_COUNT)):
        trainer = _start_trainer(swarm, "beside-a-taker", steps=5)
        assert swarm.wait_for_end(trainer, 150.0) == 0
    assert len(swarm.steps("beside-a-taker")) == 5
