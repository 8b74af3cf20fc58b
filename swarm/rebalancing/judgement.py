"""One peer's conclusions from its looks at the DHT: which span to join with, and whether to move.

Keeps what the peer has learnt from look to look: how long others stay, which throughput it measured itself, which
blocks it could not enter, whether it has seen a gap before. What a sample costs at each stage follows from the
configuration alone: reports of a stage's peers say as much about their machines as about the stage. Pure: it never
waits, reads or claims.
"""

import dataclasses
import statistics
from collections.abc import Collection, Mapping, Sequence, Set

from swarm.config import RunConfig
from swarm.model.stages import layer_ranges
from swarm.rebalancing.decision import DEFAULT, choose_span, decide
from swarm.rebalancing.layout import IDLE, Layout, Paths, Span, all_spans, layout_of, newcomers_before, without_choosing
from swarm.types import MOST_NAMED_PATHS, Block, ClaimRecord, PeerId, PeerRecord, TrainerRecord

PRIOR_SECONDS = 3600.0
"""The stay that is assumed at first, as if one peer had been watched for this long and had then left."""
SETTLE_SECONDS = 3.0
"""The time from a claim to the second look. By then all claims of the same moment can be read."""
AVOID_SECONDS = 60.0
"""How long a peer avoids a block that it could not enter; twice as long each time."""
MAX_AVOID_SECONDS = 3600.0


def costs_of(config: RunConfig) -> dict[Block, float]:
    """Relative cost of a sample at each block, 1 on average: the number of multiplications in a forward pass.

    Of a custom class only the number of layers is known, so they count as equal.
    """
    layers = layer_ranges(config)
    work = {block: _work(config, block.stage, layers[block.stage]) for block in config.blocks}
    mean = statistics.fmean(work.values())
    return {block: of_block / mean for block, of_block in work.items()}


def _work(config: RunConfig, stage: int, layers: range) -> float:
    """Multiplications for one token. Never 0, since even a stage without layers handles every sample."""
    model, num_layers = config.model, len(layers)
    query_width = model.num_heads * model.width_of_heads
    kv_width = model.kv_heads * model.width_of_heads
    projections = model.d_model * (query_width + 2 * kv_width)
    # On average a token attends to half of the sequence, which is multiplied twice: with its query, and as values.
    attention = config.data.sequence_length * query_width
    num_reading = 2 if model.is_gated else 1
    reads = projections + attention + num_reading * model.d_model * model.feed_forward_width
    # These are the multiplications for each column of the residual stream that a layer writes.
    writes = query_width + model.feed_forward_width
    if model.custom_class:
        return max(num_layers, 1) * (reads + model.d_model * writes)
    work = model.d_model + num_layers * (reads + model.trained_width * writes)
    if stage == config.stages.num_stages - 1:
        # The last layer writes all columns, whatever travels elsewhere.
        work += (model.d_model - model.trained_width) * writes + model.vocab_size * model.d_model
    for after in model.bottleneck_layers:
        work += model.d_model * (model.bottleneck_dim * (after - 1 in layers) + model.d_model * (after in layers))
    return work


class Stays:
    """Counts from look to look which peers are there, and for how long."""

    def __init__(self) -> None:
        self._present: Set[PeerId] = frozenset()
        self._seen_at: float | None = None
        self._peer_seconds = PRIOR_SECONDS
        self._num_departures = 1

    def look(self, present: Set[PeerId], now: float) -> None:
        if self._seen_at is not None:
            self._peer_seconds += len(self._present) * (now - self._seen_at)
            self._num_departures += len(self._present - present)
        self._present, self._seen_at = present, now

    @property
    def mean_seconds(self) -> float:
        return self._peer_seconds / self._num_departures


Records = Mapping[Block, Sequence[PeerRecord]]


class Judgement:
    """One peer's conclusions. Every argument `closed` holds the blocks that the peer cannot enter.

    Every `now` is seconds of a clock that never goes back. The peer also avoids blocks that it failed to enter.
    """

    def __init__(
        self, *, own_id: PeerId, costs: Mapping[Block, float], spans: Collection[Span] | None = None,
        paths: Paths | None = None,
    ) -> None:  # fmt: skip
        """`spans` are those for which the peer has room; None: any single block. Without `paths` there is one, through
        all blocks."""
        self.paths = paths
        self._own_id = own_id
        self._costs = costs
        self._spans = all_spans([tuple(costs)], 1) if spans is None else spans
        self._policy = DEFAULT
        self._stays = Stays()
        self._rates: dict[Block, float] = {}
        self._avoided: dict[Block | Span, tuple[float, float]] = {}
        """Until when each block is avoided, or a span to which the peer could not narrow its own, and for how long it
        will be the next time."""
        self._saw_gap = False

    def look(self, present: Set[PeerId], now: float) -> None:
        """Take note of the peers that are there, those on their way to other blocks included."""
        self._stays.look(present, now)

    def see(self, trainers: Collection[TrainerRecord]) -> None:
        """Note which paths the trainers feed. While there are none, the paths count as they did before."""
        assert self.paths is not None, "only a run of several paths asks"
        # A trainer that feeds all names none.
        named = [record.paths for record in trainers]
        if named:
            feeds_all = any(len(paths) in (0, MOST_NAMED_PATHS) for paths in named)
            fed = {number for paths in named for number in paths}
            self.paths = {path: 1.0 if feeds_all or n in fed else IDLE for n, path in enumerate(self.paths)}

    # -- joining -----------------------------------------------------------------------------------------------------

    def first_choice(self, records: Records, claims: Sequence[ClaimRecord], closed: Collection[Block]) -> Span | None:
        """The span that this newcomer should claim; None if there is none that it can enter."""
        others = [claim for claim in claims if claim.peer_id != self._own_id]
        layout = layout_of(self._without_own(records), others, self._costs, self.paths)
        return choose_span(layout, self._spans, closed=closed)

    def choice(
        self, records: Records, claims: Sequence[ClaimRecord], own: ClaimRecord, closed: Collection[Block]
    ) -> Span | None:
        """The span that this newcomer should serve, after the second look.

        Each of several newcomers that start together places those before it by the same rule.
        """
        layout = layout_of(self._without_own(records), without_choosing(claims), self._costs, self.paths, own=own)
        num_before = len(newcomers_before(claims, own, layout))
        return choose_span(layout, self._spans, num_before=num_before, closed=closed)

    def _without_own(self, records: Records) -> Records:
        """The records without those of this peer's id. A newcomer has no record yet, so such a record is from a killed
        process, whose blocks may now be those that need a peer."""
        return {block: [r for r in row if r.peer_id != self._own_id] for block, row in records.items()}

    # -- moving ------------------------------------------------------------------------------------------------------

    def serves(self) -> None:
        """Note that the peer has begun to serve its span: a gap that it saw from another one does not count."""
        self._saw_gap = False

    def measured(self, rates: Mapping[Block, float]) -> None:
        """Note the samples per second that the peer has measured at each block that it serves, as if it served that
        one alone."""
        self._rates.update(rates)

    def wants(self, layout: Layout, closed: Collection[Block], now: float) -> Span | None:
        """The span that the peer should claim; None if it should stay until its next look."""
        target = self._decide(layout, closed, now, waited=self._saw_gap)
        if target is None:
            self._saw_gap = self._decide(layout, closed, now, waited=True) is not None
        return target

    def still_wants(self, layout: Layout, target: Span, closed: Collection[Block], now: float) -> bool:
        """Whether the move to `target` is still called for, after the second look (`layout_of` with `own`)."""
        return self._decide(layout, closed, now, waited=self._saw_gap) == target

    def _decide(self, layout: Layout, closed: Collection[Block], now: float, *, waited: bool) -> Span | None:
        policy = dataclasses.replace(self._policy, stay_seconds=self._stays.mean_seconds)
        return decide(
            layout, self._own_id, policy, spans=self._spans, own_rates=self._rates, waited=waited,
            closed=self.avoided(now) | set(closed),
        )  # fmt: skip

    # -- how a move ended --------------------------------------------------------------------------------------------

    def arrived(self, span: Span, *, move_seconds: float | None) -> None:
        """Note that the peer serves a span now. The next move is expected to take as long as this one did."""
        if move_seconds is not None:
            self._policy = dataclasses.replace(self._policy, move_seconds=move_seconds)
        self._avoided.pop(span, None)
        for block in span:
            self._avoided.pop(block, None)

    def gave_up(self, span: Span, now: float, *, before: Span = ()) -> None:
        """Avoid the new blocks of a span for a while, because the peer could not leave blocks of its span `before` for
        it or not enter it. If it has no new ones, avoid that span."""
        avoiding: list[Block | Span] = [block for block in span if block not in before]
        for avoided in avoiding or [span]:
            _, seconds = self._avoided.get(avoided, (0.0, AVOID_SECONDS))
            self._avoided[avoided] = now + seconds, min(2 * seconds, MAX_AVOID_SECONDS)

    def avoided(self, now: float) -> set[Block | Span]:
        """The blocks that the peer avoids now, because it has failed to enter them, and spans."""
        return {avoided for avoided, (until, _) in self._avoided.items() if until > now}
