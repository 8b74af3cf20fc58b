"""All figures that are shown of one stage peer, each with its unit, its meaning, its source and its column.

To show one more figure, add a field to PeerRow: JSON and Prometheus have it then, the table if it has a column, and
docs/status.md once it is generated again. A figure that does not travel yet is also a field of DescribeReply
(proto/swarm/rpc/v1/stage.proto), which stage_peer/presence.py fills.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from peers.status.answer import MOST_ROUNDS, Answer
from peers.status.figure import Column, bans_of, counter, figure, number, read
from swarm.rpc.entry import direct
from swarm.rpc.v1 import stage_pb2 as pb
from swarm.types import PROTOCOLS, PeerRecord

LARGE_LAG_SECONDS = 0.2
"""The table shows the lag of an event loop from this value on."""

_ALIVE = ("joining", "moving", "serving")
_STATE_STYLES = {
    "serving": "green", "joining": "yellow", "moving": "yellow", "leaving": "yellow", "unreachable": "red",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PeerRow:
    """A stage peer: its announcement, and what it answered when asked."""

    name: str = figure(
        "What it is called.",
        is_label=True,
        announced=lambda record: record.name,
        column=Column("peer", 1, "{row.name}", is_text=True, least_width=12),
    )
    peer_id: str = figure("Its id, which belongs to its key.", is_label=True, announced=lambda record: record.peer_id)
    state: str = figure(
        "joining, serving, moving or leaving (or gone, some seconds ago); unreachable where it announces itself and "
        "does not answer within five seconds.",
        default="unreachable",
        answered=lambda said: said.reply.state,
        column=Column("state", 2, "{row.way}", is_text=True, styles=_STATE_STYLES),
    )
    moving_from: int | str | None = figure(
        "The stage that it comes from, while it is listed where it goes.", default=None, unit="stage"
    )
    moving_to: int | str | None = figure(
        "The stage that it goes to, while it finishes at the one where it is listed.", default=None, unit="stage"
    )
    moves: int = counter(
        "How often it has moved to another stage since it started.", announced=lambda record: record.moves
    )
    started_at: float = number(
        "When its process started, by its own clock; 0 where it has not announced that.",
        unit="seconds since the epoch",
        announced=lambda record: record.started_at,
    )
    device: str = figure(
        "What it computes on, as PyTorch names it (`cpu`, `cuda:1`); empty where it has not announced that. The table "
        "has it where some peer computes on something else than `cpu`.",
        default="",
        is_label=True,
        announced=lambda record: record.device,
        column=Column("device", 10, "{row.device}", is_shown=lambda row: row.device not in ("", "cpu"), is_text=True),
    )
    protocol: int = number(
        "The newest protocol that it speaks. The table has it where some peer's is another than that of the release "
        "which shows the table.",
        announced=lambda record: record.protocol_version,
        answered=lambda said: said.reply.protocol_version,
        column=Column("protocol", 3, "{row.protocol}", is_shown=lambda row: row.protocol not in (0, PROTOCOLS.newest)),
    )
    reached: str = figure(
        "How callers reach it: direct; punched, where meeting points arrange direct connections; relayed, where they "
        "carry all; or tunnel, where there is none at present. The table has it where some peer is not reached "
        "directly.",
        default="direct",
        announced=lambda record: "direct" if direct(record.endpoints) else "tunnel",
        answered=lambda said: said.reached,
        column=Column("reached", 9, "{row.reached}", is_shown=lambda row: row.reached != "direct", is_text=True),
    )
    punched_connections: int = number(
        "Connections that it has now and that a meeting point arranged.", answered=lambda said: said.reply.lines.punched
    )
    relayed_connections: int = number(
        "Connections that it has now and that a meeting point carries.", answered=lambda said: said.reply.lines.relayed
    )
    waiting_peers: int = number(
        "Peers that others do not reach and that wait at this one.",
        unit="peers",
        answered=lambda said: said.reply.lines.waiting,
    )
    carried_connections: int = number(
        "Connections that it carries for them now.", answered=lambda said: said.reply.lines.carried
    )
    carried_bytes: int = counter(
        "What it has carried for them since it serves its stage, both ways together.",
        unit="bytes",
        answered=lambda said: said.reply.lines.carried_bytes,
    )
    samples_per_second: float = number(
        "What it manages at its stage.",
        unit="samples/s",
        answered=lambda said: said.reply.samples_per_second,
        column=Column("samples/s", 4, "{row.samples_per_second:.1f}"),
    )
    computing_share: float = number(
        "The share of the last minute in which it computed; this and the next three are 1 together, and 0 where it "
        "computed no microbatch. On a GPU, the share in which the GPU worked or was given work.",
        answered=lambda said: said.reply.time_shares.computing,
        column=Column("busy", 7, "{row.computing_share:.0%}", is_shown=lambda row: row.computing_share > 0),
    )
    input_wait_share: float = number(
        "The share in which it had nothing to compute, because hidden states or gradients were still to come.",
        answered=lambda said: said.reply.time_shares.waiting_for_input,
    )
    room_wait_share: float = number(
        "The same, because what it had computed found no room at the next stage, or on the line there.",
        answered=lambda said: said.reply.time_shares.waiting_for_room,
    )
    averaging_share: float = number(
        "The same, because training waited for its average.", answered=lambda said: said.reply.time_shares.averaging
    )
    flops_utilisation: float = number(
        "The model's floating-point operations in that minute over those that its device manages at best (MFU), which "
        "is what `--peak-tflops` says, or a common GPU's maker; 0 where that is not known. A token takes 6 for each "
        "weight of a matrix (4 if it is frozen), and 12 L H T for L layers of H numbers in all heads and T positions.",
        answered=lambda said: said.reply.time_shares.utilisation,
        column=Column("MFU", 11, "{row.flops_utilisation:.0%}", is_shown=lambda row: row.flops_utilisation > 0),
    )
    idle_because: str = figure(
        "Why it computed for less than a third of that minute, and what to change. Below the table of peers stands the "
        "line of the one with the smallest share.",
        default="",
        answered=lambda said: said.idle_because,
    )
    queue_length: int = number(
        "Forwards and backwards that wait for its compute thread.",
        answered=lambda said: said.reply.queue_length,
        column=Column("queue", 6, "{row.queue_length}"),
    )
    round: int = number(
        "The round that it is at; the announced one where it does not answer.",
        announced=lambda record: record.round,
        answered=lambda said: said.reply.round,
        column=Column("round", 3, "{row.round}"),
    )
    samples: int = number(
        "What it holds towards this round.",
        unit="samples",
        answered=lambda said: said.reply.round_samples,
        column=Column("samples", 7, "{row.samples}"),
    )
    forwards: int = counter(
        "Forwards that it has computed since it started.",
        answered=lambda said: said.reply.counters.forwards,
        column=Column("forwards", 15, "{row.forwards}"),
    )
    backwards: int = counter(
        "Backwards that it has computed since it started.",
        answered=lambda said: said.reply.counters.backwards,
        column=Column("backwards", 16, "{row.backwards}"),
    )
    committed: int = counter(
        "Microbatches that count at its stage through it, since it started: they were acknowledged to it.",
        unit="microbatches",
        answered=lambda said: said.reply.counters.committed,
    )
    rerouted_backwards: int = counter(
        "Of these, the ones that it took over from a peer that dropped.",
        answered=lambda said: said.reply.counters.rerouted_backwards,
        column=Column("re-routed", 17, "{row.rerouted_backwards}"),
    )
    sessions: int = number(
        "Texts that are being written with its help, those included for which it only stands by. The table has these "
        "figures where it helps with some, or has done so.",
        answered=lambda said: said.reply.generation.sessions,
        column=Column("texts", 13, "{row.sessions}", is_shown=lambda row: row.generated_tokens > 0),
    )
    generated_tokens: int = counter(
        "Tokens of such texts that it has sampled or passed on since it started.",
        unit="tokens",
        answered=lambda said: said.reply.generation.tokens,
        column=Column("tokens", 14, "{row.generated_tokens}", is_shown=lambda row: row.generated_tokens > 0),
    )
    held_rounds: int = number(
        "Rounds whose weights it holds for such texts, and for evaluations.",
        unit="rounds",
        answered=lambda said: said.reply.generation.rounds,
    )
    alive_peers: int = number(
        "Peers of its stage when it committed its last round, itself included.",
        unit="peers",
        answered=lambda said: said.last.num_alive,
    )
    members: int = number(
        "Of these, the ones that took part in that round's average. The table shows both.",
        unit="peers",
        answered=lambda said: said.last.num_members,
        column=Column("members", 8, "{row.members}/{row.alive_peers}"),
    )
    recent_rounds: tuple[int, ...] = figure(
        f"The rounds in whose averages it took part, among the last {MOST_ROUNDS} that it has committed.",
        default=(),
        answered=lambda said: said.contributed_rounds,
    )
    averaged_fraction: float = number(
        "The share of the stage's parameters that this round averaged.",
        answered=lambda said: said.last.averaged_fraction,
    )
    averaged_bytes: int = number(
        "What it sent and received for this average.",
        unit="bytes",
        answered=lambda said: said.last.bytes_sent + said.last.bytes_received,
    )
    exchanged_bytes: int = counter(
        "The same for all rounds since it started.",
        unit="bytes",
        answered=lambda said: said.reply.averaging.exchanged_bytes,
    )
    compression_ratio: float = number(
        "The float32 size of what was averaged, over its size on the wire.",
        answered=lambda said: said.last.compression_ratio,
    )
    exchange_seconds: float = number(
        "How long it took to exchange the average.", unit="seconds", answered=lambda said: said.last.exchange_seconds
    )
    wait_seconds: float = number(
        "How long the round was closed before and after this exchange.",
        unit="seconds",
        answered=lambda said: said.last.wait_seconds,
    )
    contribution_norm: float = number(
        "The norm of what it contributed itself.", answered=lambda said: said.last.contribution_norm
    )
    attempts: int = counter(
        "Attempts to average that it has led since it started.", answered=lambda said: said.reply.averaging.attempts
    )
    aborted: Mapping[str, int] = figure(
        "Of these, the ones that came to nothing, by reason.",
        default={},
        only_grows=True,
        answered=lambda said: said.aborted,
    )
    downloads: int = counter(
        "States that it has downloaded because it was behind.", answered=lambda said: said.reply.averaging.downloads
    )
    inner_steps: int = number(
        "Inner steps that it took in its last committed round (DiLoCo); the next figures are about these. The table "
        "shows how many there were, and of how many samples.",
        answered=lambda said: said.inner.count,
        column=Column(
            "steps",
            12,
            "{row.inner_steps} x {row.samples_per_inner_step:.0f}",
            is_shown=lambda row: row.configured_samples_per_inner_step > 0,
        ),
    )
    samples_per_inner_step: float = number(
        "How many samples each of these steps used, on average.",
        unit="samples",
        answered=lambda said: said.inner.samples_per_step,
    )
    configured_samples_per_inner_step: int = number(
        "How many each was to use; 0 in the synchronous setting.",
        unit="samples",
        answered=lambda said: said.inner.configured_samples,
    )
    staleness: float = number(
        "How late gradients were: versions of the weights made between a microbatch's forward and the step that used "
        "it, on average. Where any was late, the table shows the average and the largest.",
        unit="steps",
        answered=lambda said: said.inner.mean_staleness,
        column=Column(
            "late", 11, "{row.staleness:.1f}/{row.largest_staleness}", is_shown=lambda row: row.largest_staleness > 0
        ),
    )
    largest_staleness: int = number(
        "The same of the latest gradient.", unit="steps", answered=lambda said: said.inner.largest_staleness
    )
    loop_lag_seconds: float = number(
        "By how long its event loop was late at most, in the last minute or two: for so long it answered nobody, and "
        f"with some seconds the others take it for dead. The table shows it from {LARGE_LAG_SECONDS} seconds on. A "
        "machine that has more to do than it has cores makes it large (give each peer fewer threads), and so does one "
        "that swaps, or slept.",
        unit="seconds",
        answered=lambda said: said.reply.loop_lag_seconds,
        column=Column(
            "lag", 5, "{row.loop_lag_seconds:.1f} s", is_shown=lambda row: row.loop_lag_seconds >= LARGE_LAG_SECONDS
        ),
    )
    waiting_for: str = figure(
        "What it waits for, and for how long already, where that is a second at least: another stage, a round, its "
        "state. A peer that joins says so too. The table has a line for each below the peers.",
        default="",
        answered=lambda said: said.waiting_for,
    )
    links: tuple[Mapping[str, Any], ...] = figure(
        "Its lines to peers of the next stage, as it measures them with microbatches: `peer_id`, "
        "`round_trip_seconds` of a request (0 where it sends without asking first), and `bytes_per_second`, at which "
        "tensors go there. Sixteen at most.",
        default=(),
        answered=lambda said: said.links,
    )
    bans: tuple[Mapping[str, Any], ...] = figure(
        "The peers of the next stage that it leaves alone since they failed it, as it says itself: `peer_id`, "
        "`reason`, and `until` when, by its clock, in seconds since the epoch. The table has a line for each below the "
        "peers.",
        default=(),
        announced=bans_of,
    )
    refusals: tuple[str, ...] = figure(
        "A line for each holder of its stage that says it is elsewhere in the run, and that it does not follow, and "
        "for each that it has found to lie. The table has these lines below the peers.",
        default=(),
        answered=lambda said: said.refusals,
    )

    @classmethod
    def of(cls, record: PeerRecord, reply: pb.DescribeReply | None, *, was_asked: bool = True) -> Self:
        """Make the row of a peer from its announcement and, unless it is silent or was not asked, its answer."""
        row = cls(**read(cls, record, None if reply is None else Answer.of(reply)))
        return row if was_asked else dataclasses.replace(row, state=record.state.value)

    @property
    def way(self) -> str:
        """The state in words, with the stage to which or from which the peer moves."""
        if self.moving_to is not None:
            return f"moving to {self.moving_to}"
        return self.state if self.moving_from is None else f"moving from {self.moving_from}"

    @property
    def stays(self) -> bool:
        return self.state in _ALIVE and self.moving_to is None
