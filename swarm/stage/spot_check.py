"""Spot checks: a stage peer computes again what another peer of its block answered.

The peer that answers a check gets from the checked one all that this has received, sent on, got back and answered. Its
neighbours on both sides say the digests of what they sent and got, so it cannot show other tensors than it computed
with. From the tensors that it received this peer computes those that it sent, and compares. In a synchronous round both
work with the same weights, and so they do with DiLoCo if the answer was computed with the round's anchor. Later in the
round weights have drifted apart (honesty/drift).

hop/spot_checks decides what is checked, and what comes of it.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

import torch

from swarm.errors import MalformedMessage, NotReady, Overloaded, PeerUnavailable, RoundMismatch, SwarmError
from swarm.events import Checked
from swarm.honesty.drift import FIRST_ROUND, Drift, Likeness
from swarm.hop.spot_checks import (
    ANCHOR_ROUND,
    LEAST_ANSWERS,
    LOSS,
    MOST_SIGNED,
    anchor_tensor,
    digests_of,
    loss_tensor,
)
from swarm.rpc.ask import Stream, address_of
from swarm.rpc.callers import Quota, caller_of
from swarm.rpc.channels import ChannelPool
from swarm.rpc.serving import Context, check_address
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.rpc.wire import TensorReader, TensorSpec, parsed, stage_stub
from swarm.stage.boundary import (
    GRADIENT,
    HIDDEN,
    OUTPUT,
    OUTPUT_GRADIENT,
    boundary_of,
    reply_specs,
    request_specs,
)
from swarm.stage.own_answers import OwnAnswers
from swarm.stage.runtime import Priority
from swarm.stage.stage import Stage
from swarm.training.sketches import LONGEST_STATEMENT, SIGNED_TOLERANCE, Sketch, Statement, share_of_difference
from swarm.training.tally import Sign
from swarm.types import Block, PeerRecord

logger = logging.getLogger(__name__)

TOLERANCE = 0.05
"""The largest difference of two tensors, as a share of the larger norm, that kinds of hardware and of code may make;
likewise of two losses."""
SILENCE_SECONDS = 15.0
MOST_CHECKS = 2
"""Checks that this peer makes at once; one caller may have half."""
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

    Attributes:
        own: what this peer itself has answered.
    """

    def __init__(
        self, stage: Stage, *, peers: Callable[[Block], Sequence[PeerRecord]], channels: ChannelPool,
        sign: Sign | None = None,
    ) -> None:  # fmt: skip
        self._stage = stage
        self._config = stage.context.config
        self._backend = stage.context.backend
        self._peers = peers
        self._channels = channels
        self.own = OwnAnswers(stage, sign)
        self._is_drifting = not self._config.rounds.synchronous
        """Whether the peers of the block have other weights within a round."""
        self._drift = Drift()
        """What is usual later in a round."""
        self._unlike = defaultdict[str, set[int]](set)
        """By peer, the microbatches of which its answers were found unlike this peer's. Each that is found like them
        takes one away."""
        self._proved = set[str]()
        """The peers of which an answer was found wrong that had to be the same."""
        self._checks = Quota("checks", MOST_CHECKS)

    async def answer(self, context: Context, request: pb.SpotCheckRequest) -> pb.SpotCheckReply:
        """Compute again what another peer of the block answered. Cancellation ends it.

        Raises WrongRun, WrongStage, MalformedMessage, and Overloaded.
        """
        check_address(request.address, run_id=self._config.run_id, block=self._stage.block)
        if not request.checked_id:
            await self._witness(request)
            return _Reply()
        is_exact = True
        if self._is_drifting:
            # Each stage ends rounds by itself, so the sender does not know them: what counts is this peer's own.
            anchored = self._anchor_round(request)
            request.round, is_exact = (self._stage.round, False) if anchored is None else (anchored, True)
            if not is_exact and request.round < FIRST_ROUND:
                return _Reply(reason="the run has just begun")
        with self._checks.taken(caller_of(context)):
            try:
                tensors = await self._get_shown(request)
                reason, is_sure = await self._difference(request, tensors, is_exact=is_exact)
            except _NotShown as error:
                reply = _Reply(verdict=_Reply.VERDICT_NOT_SHOWN, reason=str(error))
            except (SwarmError, TimeoutError) as error:
                return _Reply(reason=str(error))
            else:
                if reason is None:
                    return _Reply(reason="this peer has seen too little of others to tell")
                reply = _Reply(verdict=_Reply.VERDICT_DIFFERS if reason else _Reply.VERDICT_AGREES, reason=reason)
                reply.is_proof = is_sure
                self._take_in(request, reason, is_sure=is_sure)
        self._stage.context.events.write(
            Checked(
                round=request.round, microbatch=request.microbatch, peer=request.checked_id,
                verdict=_Reply.Verdict.Name(reply.verdict).removeprefix("VERDICT_").lower(), reason=reply.reason,
            )
        )  # fmt: skip
        return reply

    def _anchor_round(self, request: pb.SpotCheckRequest) -> int | None:
        """The round whose anchor the checked peer says it has used, if that is the present one or the one before."""
        told, present = _by_name(request.digests).get(ANCHOR_ROUND), self._stage.round
        possible = {each: {ANCHOR_ROUND: anchor_tensor(each)} for each in range(max(0, present - 1), present + 1)}
        return next((each for each, made in possible.items() if _by_name(digests_of(made))[ANCHOR_ROUND] == told), None)

    async def _witness(self, request: pb.SpotCheckRequest) -> None:
        """Remember what other peers of the block have signed. With DiLoCo nothing is signed."""
        if self._backend.weights.sketch is None:
            return
        present, indices = self._stage.round, self._stage.context.indices
        place, signed = self.own.place, self._backend.weights.round.signed
        few = [each for each in request.statements[:MOST_SIGNED] if each.ByteSize() <= LONGEST_STATEMENT]
        statements = [Statement.read(each) for each in few]
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

    def _take_in(self, request: pb.SpotCheckRequest, reason: str, *, is_sure: bool) -> None:
        """Count what was found, and say of a peer in the next exchanges that it computes wrongly, or do so no more."""
        peer, disproved, unlike = request.checked_id, self._stage.context.records.disproved, self._unlike
        if reason and not is_sure and (peer in unlike or len(unlike) < MOST_DISPROVED):
            unlike[peer].add(request.microbatch)
        elif not reason and not is_sure and peer in unlike:
            unlike[peer].pop()
            if len(unlike[peer]) < LEAST_ANSWERS and peer not in self._proved:
                disproved.pop(peer, None)
            if not unlike[peer]:
                del unlike[peer]
        if reason and is_sure and len(self._proved) < MOST_DISPROVED:
            self._proved.add(peer)
        if reason and (peer in self._proved or len(unlike.get(peer, ())) >= LEAST_ANSWERS):
            logger.warning("%s computes wrongly: of microbatch %d, %s", peer, request.microbatch, reason)
            disproved[peer] = f"of microbatch {request.microbatch}, {reason}"

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
            tensors, shown = await self._ask(request, self._stage.block, request.checked_id, {**outer, **inner})
        except (RoundMismatch, MalformedMessage, Overloaded, PeerUnavailable) as error:
            # Whether it has just died the sender sees: then it answers nothing more. With DiLoCo a peer keeps few
            # microbatches, and counts one that was asked for again only once.
            if isinstance(error, RoundMismatch) and (self._is_drifting or self._stage.round > request.round):
                raise
            raise _NotShown(f"it shows nothing: {error}") from None
        digests, told = _by_name(await asyncio.to_thread(digests_of, tensors)), _by_name(request.digests)
        # What the sender says accuses nobody, so it counts only if the peer says so itself.
        if ANCHOR_ROUND in told and told[ANCHOR_ROUND] != shown.get(ANCHOR_ROUND):
            raise _NotShown("it says otherwise than before whether it has used the round's anchor")
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
        if record is None:
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
                digests = digests or _by_name(message.digests)
                if not digests:
                    raise MalformedMessage("no digests came")
                for piece in pieces:
                    reader.feed(piece)
            stream.cancel()
        return reader.tensors, digests

    async def _difference(
        self, request: pb.SpotCheckRequest, tensors: Mapping[str, torch.Tensor], *, is_exact: bool
    ) -> tuple[str | None, bool]:
        """What is wrong with the tensors that the peer sent, in words; empty if they follow from those that it got, and
        None if that cannot be told; and whether no honest peer looks so."""
        inputs = {name: tensors[name] for name in request_specs(self._config, self._backend.stage)}
        sketch, place = self._backend.weights.sketch, self.own.place
        signed_N = await asyncio.to_thread(self._signed_sketch, request, place)
        found, _ = await self._stage.context.runtime.run(
            lambda: self._compare(request, inputs, tensors, sketch, signed_N, is_exact=is_exact),
            priority=Priority.FORWARD, age=self._stage.context.runtime.next_age(),
        )  # fmt: skip
        return found

    def _compare(
        self, request: pb.SpotCheckRequest, inputs: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor],
        sketch: Sketch | None, signed_N: torch.Tensor | None, *, is_exact: bool,
    ) -> tuple[str | None, bool]:  # fmt: skip
        backend = self._backend

        def decode(wire: torch.Tensor) -> torch.Tensor:
            return backend.function.decode(wire, inputs, backend.boundary_in(request.round))

        if not is_exact and request.round != backend.weights.round.number:
            return None, False  # Another round has begun here.
        again = backend.compute_again(
            request.microbatch, request.round, inputs, tensors.get(OUTPUT_GRADIENT), at_anchor=is_exact
        )
        told_and_made = {LOSS: (tensors[LOSS], loss_tensor(again.loss))} if backend.is_last else {}
        for name, download in ((OUTPUT, again.hidden), (GRADIENT, again.gradient)):
            if download is not None:
                told_and_made[name] = decode(tensors[name]), decode(download.wait())
        if not is_exact:
            came = {OUTPUT: decode(tensors[HIDDEN])} if HIDDEN in tensors else {}
            found = {name: Likeness.of(*pair, came.get(name)) for name, pair in told_and_made.items()}
            return self._drift.fault(request.checked_id, found), False
        for name, (told, made) in told_and_made.items():
            share = share_of_difference(told, made)
            if not share <= TOLERANCE:
                return f"its {name} differs by {share:.0%} from what follows from its inputs", True
        # Another round may have begun here, whose signs are others.
        if signed_N is not None and sketch is not None and backend.weights.sketch is sketch:
            share = share_of_difference(again.sketch.wait(), signed_N)
            if not share <= SIGNED_TOLERANCE:
                return f"the gradient that it has signed differs by {share:.0%} from what follows from its inputs", True
        return "", True


def _by_name(digests: Iterable[pb.TensorDigest]) -> dict[str, bytes]:
    return {each.name: each.digest for each in digests}
