"""What a stage peer says of its own answers: it signs the gradients that count, and shows what it computed with.

It signs for the peer that sent the microbatch, and shows to peers that check it (stage/spot_check), or the one before
it. Never computes anything.
"""

import asyncio
from collections.abc import Mapping

import torch

from swarm.errors import RoundMismatch
from swarm.hop.spot_checks import ANCHOR_ROUND, LOSS, digests_of
from swarm.rpc.callers import Quota, caller_of
from swarm.rpc.serving import Context, check_address, send
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.rpc.wire import frames
from swarm.stage.computation import Computation
from swarm.stage.ledger import EntryState
from swarm.stage.stage import Stage
from swarm.training.sketches import RESTATED_TOLERANCE, Statement, share_of_difference
from swarm.training.tally import Sign

MOST_SHOWN = 16
"""Showings at once; one caller may have half."""


class OwnAnswers:
    """`sign` signs with the key of this peer; None: nothing is signed."""

    def __init__(self, stage: Stage, sign: Sign | None) -> None:
        self._stage = stage
        self._config = stage.context.config
        self._sign = sign
        self._is_drifting = not self._config.rounds.synchronous
        self._showings = Quota("showings", MOST_SHOWN)

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
        return pb.Statement(**Statement.signed(self._sign, self.place, index, present, sketch_N)._asdict())

    @property
    def _own(self) -> dict[int, torch.Tensor]:
        """What this peer has signed in this round."""
        return self._stage.context.backend.weights.round.signed.setdefault("", {})

    @property
    def place(self) -> tuple[str, str, str]:
        """What a statement of this round is about, beside the microbatch."""
        return self._config.run_id, str(self._stage.block), self._stage.context.backend.weights.round.lineage

    async def show(self, context: Context, request: pb.ShowRequest) -> None:
        """Answer a peer that checks this one, or the one before it. Raises RoundMismatch if the microbatch is not kept
        any more, and Overloaded."""
        check_address(request.address, run_id=self._config.run_id, block=self._stage.block)
        tensors = self._exchanged(request)
        if tensors is None:
            raise RoundMismatch(f"microbatch {request.microbatch} is not kept, this peer is at {self._stage.round}")
        with self._showings.taken(caller_of(context)):
            digests = await asyncio.to_thread(digests_of, tensors)
            # Earlier releases do not expect a tensor that they do not know.
            shown = {name: tensor for name, tensor in tensors.items() if request.tensors and name != ANCHOR_ROUND}
            encodings = {**self._stage.context.backend.boundary_in(request.round).encodings, LOSS: "fp32"}
            for frame in frames(pb.ShowReply(digests=digests), shown, encodings):
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
