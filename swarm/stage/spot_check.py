"""A stage peer's part in spot checks: it shows what it computed of a microbatch, or computes again what another did.

The peer that answers a check gets from the checked one all that this has received, sent on, got back and answered. Its
neighbours on both sides say the digests of what they sent and got, so it cannot show other tensors than it computed
with. From the tensors that it received this peer computes those that it sent, and compares. In a synchronous round both
work with the same weights. With DiLoCo these have drifted apart since the round began (honesty/drift).

hop/spot_checks decides what is checked, and what comes of it.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch

from swarm.errors import MalformedMessage, NotReady, Overloaded, PeerUnavailable, RoundMismatch, SwarmError
from swarm.events import Checked
from swarm.honesty.drift import FIRST_ROUND, Drift, Likeness
from swarm.hop.spot_checks import LEAST_ANSWERS, LOSS, MOST_SIGNED, digests_of, loss_tensor
from swarm.rpc.ask import Stream, address_of
from swarm.rpc.callers import Quota, caller_of
from swarm.rpc.channels import ChannelPool
from swarm.rpc.serving import Context, check_address, send
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.rpc.wire import TensorReader, TensorSpec, frames, parsed, stage_stub
from swarm.stage.boundary import GRADIENT, HIDDEN, boundary_of, reply_specs, request_specs
from swarm.stage.computation import OUTPUT, OUTPUT_GRADIENT, Computation
from swarm.stage.ledger import EntryState
from swarm.stage.runtime import Priority
from swarm.stage.stage import Stage
from swarm.training.sketches import RESTATED_TOLERANCE, SIGNED_TOLERANCE, Sketch, Statement, share_of_difference
from swarm.training.tally import Sign
from swarm.types import Block, PeerRecord

logger = logging.getLogger(__name__)

TOLERANCE = 0.05
"""The largest difference of two tensors, as a share of the larger norm, that kinds of hardware and of code may make;
likewise of two losses."""
SILENCE_SECONDS = 15.0
MOST_CHECKS, MOST_SHOWN = 2, 16
"""Checks that this peer makes at once, and showings to peers that check; of each, one caller may have half."""
MOST_DISPROVED = 64
"""The peers that are remembered."""

_Reply = pb.SpotCheckReply


class _NotShown(Exception):
    """The peer that is checked does not show what it computed with."""


class SpotCheck:
    """
    Args:
        peers: the peers of a block, of this one or of the next.
        sign: signs with the key of this peer; None: nothing is signed.
    """

    def __init__(
        self, stage: Stage, *, peers: Callable[[Block], Sequence[PeerRecord]] = lambda _: (),
        channels: ChannelPool | None = None, sign: Sign | None = None,
    ) -> None:  # fmt: skip
        self._stage = stage
        self._config = stage.context.config
        self._backend = stage.context.backend
        self._peers = peers
        self._channels = channels
        self._sign = sign
        self._is_drifting = not self._config.rounds.synchronous
        """Whether the peers of the block have other weights within a round."""
        self._drift = Drift()
        self._wrong = defaultdict[str, set[int]](set)
        """By peer, the microbatches of which its answers were found wrong. With DiLoCo each answer that is found right
        takes one away."""
        self._checks = Quota("checks", MOST_CHECKS)
        self._showings = Quota("showings", MOST_SHOWN)

    # -- the peer that is checked, and its neighbour -------------------------------------------------------------------

    def may_count(self, computation: Computation) -> bool:
        """Whether a microbatch may count here that this peer has signed before in this round. If a sender lied then,
        its gradient is another one now, and others would take this peer for the liar."""
        signed_N, sketch_N = self._own.get(computation.microbatch.index), computation.sketch
        return signed_N is None or not sketch_N.numel() or share_of_difference(signed_N, sketch_N) <= RESTATED_TOLERANCE

    def state(self, computation: Computation) -> pb.Statement | None:
        """Sign that a microbatch counts here, with its sketch; None if it does not, or nothing is sketched."""
        index, sketch_N, present = computation.microbatch.index, computation.sketch, self._stage.round
        entry = self._stage.ledger.find(index)
        counts = entry is not None and (entry.state, entry.round) == (EntryState.COMMITTED, present)
        if self._sign is None or not sketch_N.numel() or not counts:
            return None
        self._own.setdefault(index, sketch_N)
        return pb.Statement(**Statement.signed(self._sign, self._place, index, present, sketch_N)._asdict())

    @property
    def _own(self) -> dict[int, torch.Tensor]:
        """What this peer has signed in this round."""
        return self._signed.setdefault("", {})

    @property
    def _signed(self) -> dict[str, dict[int, torch.Tensor]]:
        return self._stage.context.records.witnessed.of(self._backend.weights.sketch)

    @property
    def _place(self) -> tuple[str, str, str]:
        """What a statement of this round is about, beside the microbatch."""
        return self._config.run_id, str(self._stage.block), self._backend.weights.round.lineage

    async def show(self, context: Context, request: pb.ShowRequest) -> None:
        """Answer a peer that checks this one, or the one before it. Raises RoundMismatch if the microbatch is not kept
        any more, and Overloaded."""
        check_address(request.address, run_id=self._config.run_id, block=self._stage.block)
        tensors = self._exchanged(request)
        if tensors is None:
            raise RoundMismatch(f"microbatch {request.microbatch} is not kept, this peer is at {self._stage.round}")
        with self._showings.taken(caller_of(context)):
            digests = await asyncio.to_thread(digests_of, tensors)
            for frame in frames(pb.ShowReply(digests=digests), tensors if request.tensors else {}):
                await send(context, frame)

    def _exchanged(self, request: pb.ShowRequest) -> Mapping[str, torch.Tensor] | None:
        """All that this peer had of a microbatch of a round. With DiLoCo each stage ends rounds by itself, so the stage
        before does not know the round."""
        entry, kept = self._stage.ledger.find(request.microbatch), self._stage.context.records.exchanged
        may_be_of_any = self._is_drifting and not request.tensors
        if entry is None or not (may_be_of_any or entry.round == request.round):
            return None
        if entry.computation is not None:
            return entry.computation.exchanged()
        if request.microbatch in kept:
            kept[request.microbatch] = kept.pop(request.microbatch)  # Others may ask for it, too.
        return kept.get(request.microbatch)

    # -- the peer that checks ------------------------------------------------------------------------------------------

    async def answer(self, context: Context, request: pb.SpotCheckRequest) -> pb.SpotCheckReply:
        """Compute again what another peer of the block answered. Cancellation ends it.

        Raises WrongRun, WrongStage, MalformedMessage, and Overloaded.
        """
        check_address(request.address, run_id=self._config.run_id, block=self._stage.block)
        if not request.checked_id:
            await self._witness(request)
            return _Reply()
        if self._is_drifting:
            # Each stage ends rounds by itself, so the sender does not know them: what counts is this peer's own.
            request.round = self._stage.round
            if request.round < FIRST_ROUND:
                return _Reply(reason="the run has just begun")
        with self._checks.taken(caller_of(context)):
            try:
                tensors = await self._get_shown(request)
                reason = await self._difference(request, tensors)
            except _NotShown as error:
                reply = _Reply(verdict=_Reply.VERDICT_NOT_SHOWN, reason=str(error))
            except (SwarmError, TimeoutError) as error:
                return _Reply(reason=str(error))
            else:
                if reason is None:
                    return _Reply(reason="this peer has seen too little of others to tell")
                reply = _Reply(verdict=_Reply.VERDICT_DIFFERS if reason else _Reply.VERDICT_AGREES, reason=reason)
                self._take_in(request, reason)
        self._stage.context.events.write(
            Checked(
                round=request.round, microbatch=request.microbatch, peer=request.checked_id,
                verdict=_Reply.Verdict.Name(reply.verdict).removeprefix("VERDICT_").lower(), reason=reply.reason,
            )
        )  # fmt: skip
        return reply

    async def _witness(self, request: pb.SpotCheckRequest) -> None:
        """Remember what other peers of the block have signed. With DiLoCo nothing is signed."""
        if self._is_drifting:
            return
        present, indices = self._stage.round, self._stage.context.indices
        place, signed = self._place, self._signed
        statements = [Statement.read(each) for each in request.statements[:MOST_SIGNED]]
        signers = await asyncio.to_thread(lambda: [each.signer(place) for each in statements])
        members = {record.peer_id for record in self._peers(self._stage.block)}
        for signer, each in zip(signers, statements, strict=True):
            is_of_round = each.round == present and each.microbatch in indices
            if signer in members and is_of_round:
                with suppress(ValueError):  # The first one stays.
                    signed.setdefault(signer, {}).setdefault(each.microbatch, each.sketch_N)

    def _signed_sketch(self, request: pb.SpotCheckRequest, place: Sequence[str]) -> torch.Tensor | None:
        """The sketch of the microbatch that the checked peer has signed."""
        for each in map(Statement.read, request.statements[:1]):
            about = (each.microbatch, each.round, each.signer(place))
            if about == (request.microbatch, request.round, request.checked_id):
                with suppress(ValueError):
                    return each.sketch_N
        return None

    def _take_in(self, request: pb.SpotCheckRequest, reason: str) -> None:
        """Count what was found, and say of a peer in the next exchanges that it computes wrongly, or do so no more."""
        peer, disproved = request.checked_id, self._stage.context.records.disproved
        if reason and (peer in self._wrong or len(self._wrong) < MOST_DISPROVED):
            self._wrong[peer].add(request.microbatch)
            if len(self._wrong[peer]) >= (LEAST_ANSWERS if self._is_drifting else 1):
                logger.warning("%s computes wrongly: of microbatch %d, %s", peer, request.microbatch, reason)
                disproved[peer] = f"of microbatch {request.microbatch}, {reason}"
        elif self._is_drifting and not reason and peer in self._wrong:
            self._wrong[peer].pop()
            if len(self._wrong[peer]) < LEAST_ANSWERS:
                disproved.pop(peer, None)
            if not self._wrong[peer]:
                del self._wrong[peer]

    async def _get_shown(self, request: pb.SpotCheckRequest) -> Mapping[str, torch.Tensor]:
        """All that the peer had of the microbatch, if its neighbours sent and got the same.

        Raises _NotShown, and other errors if nothing can be known.
        """
        size, following = self._config.data, self._backend.stage + 1
        config = self._stage.context.config_in(request.round)
        specs = request_specs(config, self._backend.stage)
        # What the sender says of the loss accuses nobody: the peer has to show the same, and that is compared.
        loss = TensorSpec(shape=(1,), encoding="fp32")
        outer = {**specs, **reply_specs(config, self._backend.stage), LOSS: loss}
        spec = boundary_of(config).spec(size.microbatch_size, size.sequence_length)
        inner = {} if self._backend.is_last else {OUTPUT: spec, OUTPUT_GRADIENT: spec}
        try:
            tensors, _ = await self._ask(request, self._stage.block, request.checked_id, {**outer, **inner})
        except (RoundMismatch, MalformedMessage, Overloaded, PeerUnavailable) as error:
            # Whether it has just died the sender sees: then it answers nothing more. With DiLoCo a peer keeps few
            # microbatches, and counts one that was asked for again only once.
            if isinstance(error, RoundMismatch) and (self._is_drifting or self._stage.round > request.round):
                raise
            raise _NotShown(f"it shows nothing: {error}") from None
        digests = await asyncio.to_thread(_by_name, tensors)
        told = {each.name: each.digest for each in request.digests}
        for name in outer:
            if name not in told:
                raise MalformedMessage(f"the digest of {name} is missing")
            if told[name] != digests[name]:
                raise _NotShown(f"it shows another {name} than it exchanged")
        if inner:
            path = self._config.path_of(request.microbatch)
            block = self._config.blocks_of(path)[following]
            _, at_next = await self._ask(request, block, request.next_id, {})
            for name, own in ((HIDDEN, OUTPUT), (GRADIENT, OUTPUT_GRADIENT)):
                if at_next.get(name) != digests[own]:
                    raise PeerUnavailable(f"{request.checked_id} and {request.next_id} tell {name} differently")
        return tensors

    async def _ask(
        self, request: pb.SpotCheckRequest, block: Block, peer_id: str, specs: Mapping[str, TensorSpec]
    ) -> tuple[Mapping[str, torch.Tensor], Mapping[str, bytes]]:
        """The tensors that a peer shows, and the digests of all that it has; without `specs` only the latter."""
        record = next((each for each in self._peers(block) if each.peer_id == peer_id), None)
        if record is None or self._channels is None:
            raise NotReady(f"this peer does not know {peer_id} of stage {block}")
        wanted = pb.ShowRequest(
            address=address_of(self._config.run_id, block), microbatch=request.microbatch, round=request.round,
            tensors=bool(specs),
        )  # fmt: skip
        reader, digests = TensorReader(specs), dict[str, bytes]()
        # Its megabytes would hold up the pings of other calls.
        channel = self._channels.channel(record, bulk=bool(specs))
        async with Stream(stage_stub(channel).Show(wanted)) as stream:
            while not digests or not reader.complete:
                message, pieces = parsed(pb.ShowReply, await stream.read(SILENCE_SECONDS))
                digests = digests or {each.name: each.digest for each in message.digests}
                if not digests:
                    raise MalformedMessage("no digests came")
                for piece in pieces:
                    reader.feed(piece)
            stream.cancel()
        return reader.tensors, digests

    async def _difference(self, request: pb.SpotCheckRequest, tensors: Mapping[str, torch.Tensor]) -> str | None:
        """What is wrong with the tensors that the peer sent, in words; empty if they follow from those that it got, and
        None if that cannot be told."""
        inputs = {name: tensors[name] for name in request_specs(self._config, self._backend.stage)}
        sketch, place = self._backend.weights.sketch, self._place
        signed_N = await asyncio.to_thread(self._signed_sketch, request, place)
        reason, _ = await self._stage.context.runtime.run(
            lambda: self._compare(request, inputs, tensors, sketch, signed_N),
            priority=Priority.FORWARD, age=self._stage.context.runtime.next_age(),
        )  # fmt: skip
        return reason

    def _compare(
        self, request: pb.SpotCheckRequest, inputs: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor],
        sketch: Sketch | None, signed_N: torch.Tensor | None,
    ) -> str | None:  # fmt: skip
        backend = self._backend

        def decode(wire: torch.Tensor) -> torch.Tensor:
            return backend.function.decode(wire, inputs)

        if self._is_drifting and request.round != backend.weights.round.number:
            return None  # Another round has begun here.
        again = backend.compute_again(request.microbatch, request.round, inputs, tensors.get(OUTPUT_GRADIENT))
        told_and_made = {LOSS: (tensors[LOSS], loss_tensor(again.loss))} if backend.is_last else {}
        for name, download in ((OUTPUT, again.hidden), (GRADIENT, again.gradient)):
            if download is not None:
                told_and_made[name] = decode(tensors[name]), decode(download.wait())
        if self._is_drifting:
            came = {OUTPUT: decode(tensors[HIDDEN])} if HIDDEN in tensors else {}
            found = {name: Likeness.of(*pair, came.get(name)) for name, pair in told_and_made.items()}
            return self._drift.fault(request.checked_id, found)
        for name, (told, made) in told_and_made.items():
            share = share_of_difference(told, made)
            if not share <= TOLERANCE:
                return f"its {name} differs by {share:.0%} from what follows from its inputs"
        # Another round may have begun here, whose signs are others.
        if signed_N is not None and sketch is not None and backend.weights.sketch is sketch:
            share = share_of_difference(again.sketch.wait(), signed_N)
            if not share <= SIGNED_TOLERANCE:
                return f"the gradient that it has signed differs by {share:.0%} from what follows from its inputs"
        return ""


def _by_name(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, bytes]:
    return {each.name: each.digest for each in digests_of(tensors)}
