"""Spot checks: a sender of microbatches has a few of its answers computed again by other peers of the block.

In a synchronous round all peers of a block compute the same of a microbatch, up to rounding. The sender draws
microbatches by chance once their answers count, so a peer cannot know which of its answers will be checked. A gradient
much longer than others is always checked: one in a round would make what the sender contributes look like a lie. The
peer that checks gets the tensors from the one that is checked, and compares them with what the neighbours on both sides
sent and got (stage/spot_check). A peer whose answer two others or more find wrong, and fewer find right, gets no more
work from this sender.

With DiLoCo all peers of a block begin a round with the same weights, its anchor, and say which answers they computed
with it: these are checked like those of a synchronous round. Then the weights drift apart, and an answer is only found
unlike what others compute. After one that was, the next ones are checked too, and some of them have to be found wrong
before anything follows.

In synchronous rounds the peer signs a sketch of the gradient that it adds to its sum, for every answer. The sender
passes that on to one other peer, which compares it with what the peer says when it contributes the sum
(training/sketches).
"""

import asyncio
import logging
import random
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Never

import torch
from blake3 import blake3

from swarm.compression.activations import ENCODINGS
from swarm.errors import SwarmError
from swarm.honesty.drift import FIRST_ROUND
from swarm.hop.answers import HopReply, Tensors
from swarm.hop.calls import EncodingsIn
from swarm.machine.tensor_file import bytes_of
from swarm.machine.words import printable
from swarm.routing.router import Router
from swarm.rpc.ask import address_of, ask
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.rpc.wire import GRADIENT
from swarm.training.samples import Microbatch
from swarm.training.sketches import LONGEST_STATEMENT
from swarm.types import LONGEST_REASON, Block, PeerId, PeerRecord

logger = logging.getLogger(__name__)

CHECK_SECONDS = 120.0
"""Longest wait for one peer's verdict: it first gets the tensors, over a line that may be slow."""
WITNESS_SECONDS = 5.0
"""Longest wait until a peer has taken statements. Meanwhile others gather."""
GATHER_SECONDS = 0.25
"""So long statements gather before they are passed on, because each call costs much more than a statement."""
MOST_SIGNED = 256
"""The most statements that wait to be passed on. Further ones are let go."""
MOST_DRAWN = 4
"""The most answers that wait to be checked. Further ones are let go: checks must not wait long, or take much memory."""
MOST_STANDINGS = 4096
"""The most peers of which anything is known. Those that answered longest ago are forgotten."""
MOST_ASKED = 7
"""How many peers are asked about one answer at most."""
SIGNING_PROTOCOL = 13
"""Peers that speak it sign their answers."""
LEAST_WRONG = 2
"""So many peers must find an answer wrong, or not be shown one in so many checks, before a peer is at fault."""
FORGOTTEN_AFTER = 16
"""That something was not shown is forgotten after so many right answers at most: a liar would hide its lies alone."""
LONG_FACTOR, LEAST_NORMS, NORMS_KEPT = 5.0, 16, 64
"""A gradient is much longer than others if its norm is so many times the median of this many, the last ones."""
MOST_UNSIGNED, UNSIGNED_SHARE = 8, 0.125
"""A peer may leave so many answers unsigned while others sign theirs, and beside them this share of what it signs."""
MOST_ANCHORED = 0.5
"""The largest share of answers from a round's anchor that are checked. Each of them stands for those since the last
one, as far as that allows; others are then checked half as often."""
LEAST_ANSWERS = 3
"""So many other answers of a peer, less those that are found right, have to be found wrong before it is at fault."""
LEAST_OTHERS = 3
"""These are not checked where a peer has fewer others: they would not know what is usual (honesty/drift)."""
LOSS, ANCHOR_ROUND = "loss", "anchor_round"
"""The loss that a peer answers, and the round whose anchor it says it has used, as tensors, shown like the others."""

_Reply = pb.SpotCheckReply


@dataclass(frozen=True, kw_only=True)
class _Drawn:
    """An answer that is to be checked, and the tensors that were sent and got."""

    microbatch: Microbatch
    peer: PeerId
    next_peer: str
    statement: pb.Statement | None
    tensors: Tensors
    is_exact: bool
    """Whether others that compute it again have to get the same."""


@dataclass(eq=False)
class _Standing:
    """What is known of one peer's answers.

    Attributes:
        num_right: how many were found right, by whether others had to get the same. With DiLoCo the two kinds say
            nothing of each other; of those that need not be the same, these are the ones since one was found wrong.
        num_wrong: how many were found wrong, less those that were found right since; not below 0.
        num_unshown: how many were not shown lately to most of the peers that were to check them.
        num_since: how many came since one was not shown.
        num_signed: how many it signed.
        num_unsigned: how many it left unsigned while others signed theirs.
        first_unsigned: the round of the first one of these. It does not count: a peer that was alone in the round
            before signs nothing yet.
        num_unanchored: with DiLoCo, how many came since the last one that was computed with an anchor.
    """

    num_right: Counter[bool] = field(default_factory=Counter)
    num_wrong: int = 0
    num_unshown: int = 0
    num_since: int = 0
    num_signed: int = 0
    num_unsigned: int = 0
    first_unsigned: int | None = None
    num_unanchored: int = 0


class SpotChecks:
    """Checks of the answers from one block. `run` makes them, one after the other.

    Args:
        share: the share of answers that are checked; 0: none are. The first answers of a peer are checked more often.
        drifts: whether peers of the block have other weights within a round (DiLoCo).
        encodings_in: gives the encodings of a round, by the tensors' names.
        stub: gives StageService's stub for another process.
        rng: draws. Nobody else may know what it draws next.
    """

    def __init__(
        self, *, run_id: str, block: Block, share: float, router: Router, stub: Callable[[PeerRecord], Any],
        drifts: bool = False, encodings_in: EncodingsIn = lambda _: {}, rng: random.Random | None = None,
    ) -> None:  # fmt: skip
        self._run_id, self._block, self.share = run_id, block, share
        self._drifts, self._encodings_in = drifts, encodings_in
        self._norms = deque[float](maxlen=NORMS_KEPT)
        """Those of the last gradients that were answered."""
        self._router = router
        self._stub = stub
        self._rng = rng or random.SystemRandom()
        self._drawn: asyncio.Queue[_Drawn] = asyncio.Queue(maxsize=MOST_DRAWN)
        self._signed: asyncio.Queue[tuple[PeerId, pb.Statement]] = asyncio.Queue(maxsize=MOST_SIGNED)
        self._standings: defaultdict[PeerId, _Standing] = defaultdict(_Standing)
        self._last_signer: PeerId | None = None
        """The peer of the last answer, if that was signed."""

    def acknowledged(
        self, microbatch: Microbatch, tensors: Tensors, reply: HopReply, statement: pb.Statement | None
    ) -> None:
        """Draw whether an answer that counts is checked, and let another peer witness what the peer has signed."""
        peer = reply.route[self._block]
        if self._drifts or (statement is not None and statement.ByteSize() > LONGEST_STATEMENT):
            statement = None
        standing = self._standings[peer] = self._standings.pop(peer, _Standing())
        while len(self._standings) > MOST_STANDINGS:
            del self._standings[next(iter(self._standings))]
        standing.num_since += 1
        if statement is not None and not self._signed.full():
            self._signed.put_nowait((peer, statement))
        if microbatch.is_replay:
            return
        standing.num_unanchored += 1
        self._note_signed(peer, microbatch, is_signed=statement is not None)
        is_exact = not self._drifts or reply.anchor_round is not None
        is_long = self._has_long_gradient(microbatch.round, reply)
        # The others are looked up last: that takes as long as there are peers, and few answers are drawn.
        is_drawn = self._draws(peer, microbatch, is_exact=is_exact, is_long=is_long)
        if is_drawn and len(self._others(peer)) >= (1 if is_exact else LEAST_OTHERS):
            following = (other for block, other in reply.route.items() if block.stage == self._block.stage + 1)
            made = {**tensors, **reply.tensors, LOSS: loss_tensor(reply.loss)}
            if self._drifts and reply.anchor_round is not None:
                made[ANCHOR_ROUND] = anchor_tensor(reply.anchor_round)
            self._drawn.put_nowait(
                _Drawn(
                    microbatch=microbatch, peer=peer, next_peer=next(following, ""), statement=statement, tensors=made,
                    is_exact=is_exact,
                )
            )  # fmt: skip

    def _has_long_gradient(self, round_number: int, reply: HopReply) -> bool:
        if GRADIENT not in reply.tensors:
            return False
        norm = ENCODINGS[self._encodings_in(round_number)[GRADIENT]].norm(reply.tensors[GRADIENT])
        is_long = len(self._norms) >= LEAST_NORMS and norm > LONG_FACTOR * statistics.median(self._norms)
        self._norms.append(norm)
        return is_long

    def _draws(self, peer: PeerId, microbatch: Microbatch, *, is_exact: bool, is_long: bool) -> bool:
        """Draw whether an answer is checked."""
        standing, share = self._standings[peer], self.share
        if self._drawn.full() or not (is_exact or microbatch.round >= FIRST_ROUND):
            return False
        if self._drifts:
            of_anchored = min(MOST_ANCHORED, share * standing.num_unanchored)
            if is_exact:
                standing.num_unanchored = 0
                share = max(share, of_anchored)
            elif of_anchored < MOST_ANCHORED:
                share /= 2
        return is_long or self._rng.random() < max(share, (1 + standing.num_right[is_exact]) ** -3)

    def _note_signed(self, peer: PeerId, microbatch: Microbatch, *, is_signed: bool) -> None:
        """Leave a peer alone that leaves its answers unsigned, while others sign theirs: of these it could contribute
        whatever it likes."""
        standing, others_sign = self._standings[peer], self._last_signer not in (None, peer)
        self._last_signer = peer if is_signed else None
        standing.num_signed += is_signed
        if is_signed or not others_sign or not self._others(peer):
            return
        record = self._router.record(self._block, peer)
        if record is None or record.protocol_version < SIGNING_PROTOCOL:
            return
        if standing.first_unsigned is None:
            standing.first_unsigned = microbatch.round
        standing.num_unsigned += microbatch.round != standing.first_unsigned
        if standing.num_unsigned > MOST_UNSIGNED + UNSIGNED_SHARE * standing.num_signed:
            self._distrust(peer, microbatch, f"it has left {standing.num_unsigned} answers unsigned")
            standing.num_unsigned = 0

    async def run(self) -> None:
        """Make the checks that are drawn, and pass statements on, until this is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._make_checks())
            tasks.create_task(self._pass_on())

    async def _make_checks(self) -> Never:
        while True:
            await self._check(await self._drawn.get())

    async def _pass_on(self) -> Never:
        """Pass each peer's statements on to another one, of which the peer does not know which. So it has to contribute
        to the average what it has signed."""
        while True:
            signed = [await self._signed.get()]
            await asyncio.sleep(GATHER_SECONDS)
            while not self._signed.empty():
                signed.append(self._signed.get_nowait())
            others = {peer: self._others(peer) for peer in dict(signed)}
            # One for all, but for its own statements.
            candidates = sorted({each for some in others.values() for each in some})
            order = self._rng.sample(candidates, len(candidates))
            witnesses = {peer: next((each for each in order if each in some), None) for peer, some in others.items()}
            chosen = defaultdict[PeerId, list[pb.Statement]](list)
            for peer, statement in signed:
                if (witness := witnesses[peer]) is not None:
                    chosen[witness].append(statement)
            address = address_of(self._run_id, self._block)
            requests = {other: pb.SpotCheckRequest(address=address, statements=each) for other, each in chosen.items()}
            await asyncio.gather(*(self._ask(other, each, WITNESS_SECONDS) for other, each in requests.items()))

    async def _check(self, drawn: _Drawn) -> None:
        """Ask other peers of the block until one finds the answer right, or most of them find it wrong."""
        microbatch, standing = drawn.microbatch, self._standings[drawn.peer]
        request = pb.SpotCheckRequest(
            address=address_of(self._run_id, self._block), microbatch=microbatch.index, round=microbatch.round,
            checked_id=drawn.peer, next_id=drawn.next_peer,
            digests=await asyncio.to_thread(digests_of, drawn.tensors),
            statements=[] if drawn.statement is None else [drawn.statement],
        )  # fmt: skip
        wrong, right, unshown, num_proofs = dict[PeerId, str](), list[PeerId](), list[str](), 0
        others = self._others(drawn.peer)
        for other in self._rng.sample(others, min(MOST_ASKED, len(others))):
            reply = await self._ask(other, request)
            said = printable(reply.reason[:LONGEST_REASON])
            if reply.verdict == _Reply.VERDICT_DIFFERS:
                wrong[other] = said
                num_proofs += reply.is_proof
            elif reply.verdict == _Reply.VERDICT_AGREES:
                right.append(other)
                # Who says that it was shown nothing may be lying.
                if not wrong and len(right) > len(unshown):
                    standing.num_right[drawn.is_exact] += 1
                    if drawn.is_exact != self._drifts:
                        standing.num_wrong = max(0, standing.num_wrong - 1)
                    if standing.num_right.total() % FORGOTTEN_AFTER == 0:
                        standing.num_unshown = 0
                    return
            elif reply.verdict == _Reply.VERDICT_NOT_SHOWN:
                unshown.append(said)
        if len(wrong) >= LEAST_WRONG and len(wrong) > len(right):
            standing.num_right[not self._drifts] = 0
            standing.num_wrong += 1
            is_proven = not self._drifts or num_proofs >= LEAST_WRONG
            if not is_proven and standing.num_wrong < LEAST_ANSWERS:
                return  # The next answer is checked, too.
            reason = f"it computes wrongly, say {len(wrong)} others: {next(iter(wrong.values()))}"
            self._distrust(drawn.peer, microbatch, reason)
        elif wrong:
            self._note_doubt(drawn, wrong, right)
        elif len(unshown) >= LEAST_WRONG and len(unshown) > len(right):
            # One that has died shows nothing either, and answers nothing more.
            is_alive, standing.num_since = standing.num_since > 0, 0
            standing.num_unshown += 1
            if standing.num_unshown >= LEAST_WRONG and is_alive:
                self._distrust(drawn.peer, microbatch, f"it does not show others what it computed: {unshown[0]}")

    def _distrust(self, peer: PeerId, microbatch: Microbatch, reason: str) -> None:
        logger.warning(
            "%s gets no more microbatches of stage %s from this process; of microbatch %d, %s",
            self._name(peer), self._block, microbatch.index, reason,
        )  # fmt: skip
        self._router.distrust(peer, reason[:LONGEST_REASON])

    def _note_doubt(self, drawn: _Drawn, wrong: Mapping[PeerId, str], right: list[PeerId]) -> None:
        accuser, reason = next(iter(wrong.items()))
        logger.warning(
            "%s finds an answer of %s to microbatch %d wrong (%s), and %s",
            self._name(accuser), self._name(drawn.peer), drawn.microbatch.index, reason,
            f"{len(right)} others find it right" if right else "no other peer can say who is right",
        )  # fmt: skip

    async def _ask(
        self, other: PeerId, request: pb.SpotCheckRequest, seconds: float = CHECK_SECONDS
    ) -> pb.SpotCheckReply:
        if (record := self._router.record(self._block, other)) is None:
            return _Reply(reason="it is gone")
        try:
            return await ask(self._stub(record).SpotCheck, request, seconds=seconds)
        except SwarmError as error:
            logger.debug("%s could not be asked about an answer: %s", record.name, error)
            return _Reply(reason=str(error))

    def _others(self, peer: PeerId) -> list[PeerId]:
        """The peers that could check a peer's answers; none if that is this very process."""
        return [other for other in self._router.others(self._block, peer) if self._router.own not in (peer, other)]

    def _name(self, peer: PeerId) -> str:
        record = self._router.record(self._block, peer)
        return record.name if record is not None and record.name else peer[:8]


def loss_tensor(loss: float) -> torch.Tensor:
    return torch.tensor([loss], dtype=torch.float32)


def anchor_tensor(anchor_round: int) -> torch.Tensor:
    return torch.tensor([anchor_round])


def digests_of(tensors: Tensors) -> list[pb.TensorDigest]:
    """The BLAKE3 digest of each tensor's bytes as they travel. Runs in a thread: it may read many megabytes."""
    digests = {name: blake3(bytes_of(tensor.cpu())).digest() for name, tensor in sorted(tensors.items())}
    return [pb.TensorDigest(name=name, digest=digest) for name, digest in digests.items()]
