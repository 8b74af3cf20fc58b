"""One peer's answers to others: every call of AveragingService is checked and handed to the part that answers it.

Called by averaging/servicer, or by the transport of a test. Decides nothing.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from swarm.averaging.catching_up.donor import Donor
from swarm.averaging.context import Context
from swarm.averaging.exchanging.participant import Participant
from swarm.averaging.exchanging.reduction import Payload
from swarm.averaging.exchanging.shared import SharedBlocks
from swarm.averaging.leading.barrier import Barrier
from swarm.averaging.members.report_answers import ReportAnswers
from swarm.averaging.transport import BARRIER, REPORT, Method, Reply, Request
from swarm.compression.codec import Buffer
from swarm.machine.out_of_memory import is_out_of_memory
from swarm.rpc.address import check_address
from swarm.rpc.callers import Caller
from swarm.rpc.turns import NOBODY
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.rpc.v1.stage_pb2 import Address


@dataclass(eq=False)
class Handlers:
    """Answers the calls of other peers.

    Each method raises WrongRun, IncompatibleVersion or WrongStage for a call that is not meant for this peer, and
    NotReady before this peer averages. It also raises what the answering part raises.
    """

    context: Context
    participant: Participant
    donor: Donor
    shared_blocks: SharedBlocks
    barrier: Barrier
    reports: ReportAnswers

    @cached_property
    def _answers(self) -> dict[str, Callable[[Any], Any]]:
        return {REPORT.name: self.reports.answer, BARRIER.name: self.barrier.answer, **self.participant.answers}

    async def handle(self, method: Method[Request, Reply], request: Request) -> Reply:
        """Answer one request with one reply."""
        message: Any = request
        self._check(message.address)
        with self._ends_without_memory():
            reply: Reply = await self._answers[method.name](request)
        self.context.changes.signal()
        return reply

    async def exchange(self, opening: pb.ExchangeOpen, pieces: AsyncIterator[bytes]) -> Payload:
        """Answer as the owner of a part; see Participant.exchange."""
        self._check(opening.address)
        with self._ends_without_memory():
            return await self.participant.exchange(opening, pieces)

    async def download(
        self, request: pb.DownloadRequest, caller: Caller = NOBODY
    ) -> AsyncGenerator[pb.DownloadReply, None]:
        """Answer a peer that is behind; see Donor.serve."""
        self._check(request.address)
        async with aclosing(self.donor.serve(request, caller)) as replies:
            async for reply in replies:
                yield reply

    async def shared(self, request: pb.SharedRequest) -> Buffer:
        """Return this stage's average of shared blocks to another stage that holds them."""
        self._check(request.address)
        return self.shared_blocks.answer(request)

    @contextmanager
    def _ends_without_memory(self) -> Iterator[None]:
        """If the block runs out of memory, end the whole averager with that error.

        Otherwise this peer would be left out round after round, and nothing that it computes would count.
        """
        try:
            yield
        except Exception as error:
            if is_out_of_memory(error):
                self.context.tasks.spawn(_raise(error))
            raise

    def _check(self, address: Address) -> None:
        check_address(address, run_id=self.context.config.run_id, stage=self.context.own.stage)
        self.context.tasks.require_running()


async def _raise(error: Exception) -> None:
    raise error
