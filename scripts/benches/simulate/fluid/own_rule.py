"""This project's rule: every peer has a Judgement of swarm.rebalancing, and looks and claims as in peers/stage_peer."""

import itertools
import math
import random

from scripts.benches.simulate.fluid.swarm import FluidSwarm
from swarm.rebalancing.decision import next_check_seconds
from swarm.rebalancing.judgement import SETTLE_SECONDS, Judgement
from swarm.rebalancing.layout import Layout, Span, all_spans, layout_of
from swarm.types import Block, ClaimRecord, ClaimState, PeerId, PeerRecord, PeerState


class NoRule:
    """Newcomers take any stage, and no peer moves."""

    def __init__(self, swarm: FluidSwarm, rng: random.Random) -> None:
        self._swarm = swarm
        self._rng = rng

    def began(self, peer: int) -> None:
        """Called for a peer that is there from the start, and serves."""

    def came(self, peer: int) -> None:
        """Called for a newcomer, which has to `join` a stage."""
        self._swarm.join(peer, self._rng.randrange(self._swarm.num_stages))

    def left(self, peer: int) -> None:
        """Called when a peer has gone."""


class SwarmRule(NoRule):
    """The SWARM paper's rule (arXiv 2301.11913, appendix, Algorithm 2).

    Every T seconds the idlest peer of the stage with the least waiting work goes to the stage with the most. In a full
    pipeline nearly all work waits before the weakest stage, so stages are ordered by their throughput.
    """

    def __init__(self, swarm: FluidSwarm, rng: random.Random, *, period_seconds: float) -> None:
        super().__init__(swarm, rng)
        self._period_seconds = period_seconds
        swarm.timeline.after(period_seconds, self._tick)

    def came(self, peer: int) -> None:
        self._swarm.join(peer, self._by_load()[-1])

    def _tick(self) -> None:
        idlest, *_, busiest = self._by_load()
        peers = list(self._swarm.peers[idlest])
        if idlest != busiest and len(peers) > 1:
            # All machines are alike, so the idlest is chosen at random.
            self._swarm.move(self._rng.choice(peers), busiest)
        # The next look is planned after the move, so that the peer arrives before it even if a download takes a whole
        # period.
        self._swarm.timeline.after(self._period_seconds, self._tick)

    def _by_load(self) -> list[int]:
        """The stages, from the one with the least waiting work, which has most peers, to the one with the most."""
        counts = self._swarm.loads
        return sorted(range(len(counts)), key=lambda stage: (-counts[stage], self._rng.random()))


LISTED_SECONDS = (15.0, 20.0)
"""How long dead peers are listed: announcements last for 20 seconds and are renewed every 5."""
FIGURES_SECONDS = 600.0  # How often new errors are drawn for the announced figures
FIGURES_OFF = 0.03  # Standard deviation of a peer's announced throughput, as a share of its real one
ROUND_SECONDS = 60.0  # The same for all peers; a peer that moves serves on until the end of the round
LOOK_SECONDS = 60.0  # Mean time between two looks of a peer whether to move
SAMPLES_PER_SECOND = 10.0  # The throughput of every peer; only ratios count


class OwnRule(NoRule):
    def __init__(self, swarm: FluidSwarm, rng: random.Random, *, room: int = 1) -> None:
        """Each peer has room for so many adjacent stages. Those that no peer holds it restores from a checkpoint, as
        under the other rules."""
        super().__init__(swarm, rng)
        self._timeline = swarm.timeline
        self._paths, self._blocks = swarm.paths, swarm.blocks
        self._costs = dict.fromkeys(self._blocks, 1.0)
        self._spans = all_spans(swarm.paths, room)
        self._judgements: dict[int, Judgement] = {}
        self._records: dict[int, list[PeerRecord]] = {}
        self._claims: dict[int, ClaimRecord] = {}
        self._changed()
        self._timeline.after(FIGURES_SECONDS, self._measure)

    # -- the DHT -----------------------------------------------------------------------------------------------------

    def _changed(self) -> None:
        self._rows: dict[Block, list[PeerRecord]] | None = None
        self._layout: Layout | None = None
        self._listed: frozenset[PeerId] = frozenset()

    def _read(self) -> dict[Block, list[PeerRecord]]:
        if self._rows is None:
            self._rows = {block: [] for block in self._costs}
            for record in itertools.chain.from_iterable(self._records.values()):
                self._rows[record.block].append(record)
            self._listed = frozenset(_id(peer) for peer in self._records.keys() | self._claims.keys())
        return self._rows

    def _announce(self, peer: int) -> None:
        figure = self._figure(peer)
        self._records[peer] = [
            PeerRecord(
                peer_id=_id(peer), announced_at=self._timeline.time(), stage=block.stage, variant=block.variant,
                endpoint="simulated:1", state=PeerState.SERVING, movable=True, samples_per_second=figure,
            )
            for block in self._span_of(peer)
        ]  # fmt: skip
        self._changed()

    def _claim(self, peer: int, span: Span, before: Span) -> ClaimRecord:
        now = self._timeline.time()
        self._claims[peer] = claim = ClaimRecord(
            peer_id=_id(peer), announced_at=now, claimed_at=now, state=ClaimState.PENDING,
            **ClaimRecord.fields_of(span), **(ClaimRecord.fields_of(before, before=True) if before else {}),
        )  # fmt: skip
        self._changed()
        return claim

    def _confirm(self, peer: int, span: Span) -> None:
        goes = {"state": ClaimState.CONFIRMED, **ClaimRecord.fields_of(span)}
        self._claims[peer] = self._claims[peer].model_copy(update=goes)
        self._changed()

    def _withdraw(self, peer: int) -> None:
        del self._claims[peer]
        self._changed()

    def _measure(self) -> None:
        self._timeline.after(FIGURES_SECONDS, self._measure)
        for peer, records in self._records.items():
            figure = self._figure(peer)
            self._records[peer] = [record.model_copy(update={"samples_per_second": figure}) for record in records]
        self._changed()

    def _figure(self, peer: int) -> float:
        rate = self._swarm.rate(peer, max(1, len(self._swarm.span_of.get(peer, ()))))
        return SAMPLES_PER_SECOND * rate * max(0.1, self._rng.gauss(1.0, FIGURES_OFF))

    # -- coming and going --------------------------------------------------------------------------------------------

    def began(self, peer: int) -> None:
        """Let a peer that is there from the start announce itself, and check from time to time whether to move."""
        self._judgements[peer] = self._judgement(peer)
        self._arrived(peer, move_seconds=None)

    def came(self, peer: int) -> None:
        self._judgements[peer] = judgement = self._judgement(peer)
        span = judgement.first_choice(self._read(), list(self._claims.values()), ())
        assert span is not None, "every stage can be entered"
        own = self._claim(peer, span, ())
        self._timeline.after(SETTLE_SECONDS, lambda: self._join(peer, own))

    def _judgement(self, peer: int) -> Judgement:
        return Judgement(own_id=_id(peer), costs=self._costs, spans=self._spans, paths=self._paths)

    def left(self, peer: int) -> None:
        del self._judgements[peer]
        self._timeline.after(self._rng.uniform(*LISTED_SECONDS), lambda: self._forget(peer))

    def _forget(self, peer: int) -> None:
        self._records.pop(peer, None)
        self._claims.pop(peer, None)
        self._changed()

    def _join(self, peer: int, own: ClaimRecord) -> None:
        if (judgement := self._judgements.get(peer)) is None:
            return
        span = judgement.choice(self._read(), list(self._claims.values()), own, ())
        assert span is not None, "every stage can be entered"
        self._confirm(peer, span)
        self._swarm.join(peer, *self._numbers(span), then=lambda: self._arrived(peer, move_seconds=None))

    def _arrived(self, peer: int, *, move_seconds: float | None) -> None:
        span = self._span_of(peer)
        self._announce(peer)
        if peer in self._claims:
            self._withdraw(peer)
        judgement = self._judgements[peer]
        judgement.arrived(span, move_seconds=move_seconds)
        judgement.serves()
        self._will_look(peer)

    # -- moving ------------------------------------------------------------------------------------------------------

    def _will_look(self, peer: int) -> None:
        self._timeline.after(next_check_seconds(self._rng, LOOK_SECONDS), lambda: self._look(peer))

    def _look(self, peer: int) -> None:
        if (judgement := self._judgements.get(peer)) is None:
            return
        rows, now, span = self._read(), self._timeline.monotonic(), self._span_of(peer)
        judgement.look(self._listed, now)
        rate = self._records[peer][0].samples_per_second * len(span)
        judgement.measured(dict.fromkeys(span, rate))
        if self._layout is None:
            self._layout = layout_of(rows, self._claims.values(), self._costs, self._paths)
        target = judgement.wants(self._layout, (), now)
        if target is None or not self._can_spare(peer, target):
            self._will_look(peer)
            return
        own = self._claim(peer, target, span)
        self._timeline.after(SETTLE_SECONDS, lambda: self._look_again(peer, target, own))

    def _look_again(self, peer: int, target: Span, own: ClaimRecord) -> None:
        if (judgement := self._judgements.get(peer)) is None:
            return
        layout = layout_of(self._read(), self._claims.values(), self._costs, self._paths, own=own)
        if not judgement.still_wants(layout, target, (), self._timeline.monotonic()):
            self._withdraw(peer)
            self._will_look(peer)
            return
        self._confirm(peer, target)
        ends = self._timeline.monotonic()
        if {*self._span_of(peer)} - {*target}:
            ends = math.ceil(ends / ROUND_SECONDS) * ROUND_SECONDS
        self._timeline.at(ends, lambda: self._go(peer, target))

    def _go(self, peer: int, target: Span) -> None:
        if (judgement := self._judgements.get(peer)) is None:
            return
        if not self._can_spare(peer, target):
            judgement.gave_up(target, self._timeline.monotonic(), before=self._span_of(peer))
            self._withdraw(peer)
            self._will_look(peer)
            return
        self._records[peer] = [record for record in self._records[peer] if record.block in target]
        self._changed()
        seconds = self._swarm.download_seconds
        self._swarm.move(peer, *self._numbers(target), then=lambda: self._arrived(peer, move_seconds=seconds))

    def _can_spare(self, peer: int, target: Span) -> bool:
        """Whether another peer stays at each stage that the peer would leave."""
        left = {*self._swarm.span_of[peer]} - {*self._numbers(target)}
        return all(
            any(other != peer and self._stays(other, stage) for other in self._swarm.peers[stage]) for stage in left
        )

    def _stays(self, peer: int, stage: int) -> bool:
        claim = self._claims.get(peer)
        return claim is None or claim.state is not ClaimState.CONFIRMED or self._blocks[stage] in claim.span

    def _span_of(self, peer: int) -> Span:
        return tuple(self._blocks[stage] for stage in self._swarm.span_of[peer])

    def _numbers(self, span: Span) -> list[int]:
        return list(map(self._blocks.index, span))


def _id(peer: int) -> PeerId:
    return PeerId(f"{peer:040x}")
