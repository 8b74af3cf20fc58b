"""A swarm at one moment, as people see it: plain records of stages, peers and trainers.

Nothing here calls a peer.
"""

import dataclasses
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from peers.status.answer import LastPeer, time_of_day
from peers.status.figure import Column, bans_of, figure, number, read
from peers.status.peer_row import PeerRow
from swarm.config import RunConfig
from swarm.machine.words import counted, numbered
from swarm.rpc.entry import Entry
from swarm.rpc.invite import Invite
from swarm.training.run_rounds import RunRounds
from swarm.types import Block, TrainerRecord

MOST_NAMED = 8
"""The most peers that one line names."""


@dataclass(frozen=True, kw_only=True)
class Joining:
    """The commands with which others join one run: give a machine to it, feed it text, and watch it."""

    peer: str = "swarm-peer INVITE"
    trainer: str = "swarm-trainer INVITE --steps 100"
    status: str = "swarm-status INVITE --watch"

    @classmethod
    def at(cls, config: RunConfig, entries: Sequence[Entry], *, insecure: bool) -> Self:
        """The commands with an invite that names as many of these peers as fit, the first ones; without peers, with the
        word INVITE."""
        if not entries:
            return cls()
        invite = Invite.fitting(config.run_id, entries, is_locked=bool(config.owner))
        word = f"{invite}#TOKEN" if config.owner else str(invite)
        options = " --insecure" if insecure else ""
        classes = "".join(f" --allow-class {shlex.quote(name)}" for name in config.own_classes)
        own_text = "".join(f" --{option} {shlex.quote(name)}" for option, name in config.data.named_by_users)
        return cls(
            peer=f"swarm-peer {word}{classes}{options}",
            trainer=f"swarm-trainer {word} --steps 100{own_text}{options}",
            status=f"swarm-status {word} --watch{options}",
        )


def remedy(join_command: str, stage: int | str, run_round: int, *, may_return: bool) -> str:
    """Text that says what a user can do about a stage without a peer. It warns of losing what the stage has learnt.
    `run_round` is the round that the run's other peers have reached. `may_return` says whether the stage's last peer
    fell silent, and did not leave: then it still holds the stage, and nobody is advised to begin the stage anew."""
    command = f"{join_command} --stage {stage}"
    if run_round == 0:
        return f"start one with {command}"
    if may_return:
        return (
            "what it has learnt is with that peer, which may only be frozen, cut off or on its way to a new address, "
            f"and is waited for. If it is gone for good, start one with {command} --resume DIR, where DIR has a "
            "checkpoint"
        )
    return (
        f"what it had learnt was with its peers. If they are gone for good, start one with {command} --resume DIR, "
        "where DIR has a checkpoint; if there is none, with --start-over in place of --resume DIR"
    )


@dataclass(frozen=True, kw_only=True)
class StageRow:
    stage: int
    variant: int = 0
    peers: tuple[PeerRow, ...] = ()
    num_asked: int | None = None
    """How many of the peers were asked what they do, the first ones; the others are shown as they announce themselves.
    None if all were asked."""
    last_peer: LastPeer | None = None
    """If no peer serves the stage, the last one that did; None if it is not known."""

    @property
    def block(self) -> Block:
        return Block(self.stage, self.variant)

    @property
    def is_served(self) -> bool:
        return any(peer.stays for peer in self.peers)


@dataclass(frozen=True, kw_only=True)
class TrainerRow:
    name: str = figure(
        "What it is called.",
        is_label=True,
        announced=lambda record: record.name,
        column=Column("trainer", 1, "{row.name}", is_text=True, least_width=12),
    )
    protocol: int = number("The newest protocol that it speaks.", announced=lambda record: record.protocol_version)
    step: int = number(
        "The step that it has seen last.", announced=lambda record: record.step, column=Column("step", 2, "{row.step}")
    )
    loss: float | None = figure(
        "The loss of this step.", default=None, unit="nats per token", announced=lambda record: record.loss,
        column=Column("loss", 3, "{row.loss_text}"),
    )  # fmt: skip
    tokens_per_second: float = number(
        "What the whole swarm trained on, in this step.",
        unit="tokens/s",
        announced=lambda record: record.tokens_per_second,
        column=Column("tokens/s", 4, "{row.tokens_per_second:,.0f}"),
    )
    paths: tuple[int, ...] = figure(
        "The paths that it feeds, in a run of several; empty if it feeds all.",
        default=(),
        announced=lambda record: record.paths,
        column=Column("paths", 5, "{row.paths_text}", is_shown=lambda row: row.paths, is_text=True, least_width=8),
    )
    bans: tuple[Mapping[str, Any], ...] = figure(
        "The peers of stage 0 that it leaves alone since they failed it, as it says itself; as of a peer.",
        default=(),
        announced=bans_of,
    )

    @classmethod
    def of(cls, record: TrainerRecord) -> Self:
        return cls(**read(cls, record, None))

    @property
    def paths_text(self) -> str:
        return ", ".join(map(str, self.paths)) or "all"

    @property
    def loss_text(self) -> str:
        return "-" if self.loss is None else f"{self.loss:.3f}"


@dataclass(frozen=True, kw_only=True)
class SwarmView:
    run: str
    stages: tuple[StageRow, ...] = ()
    """One row for each block of the run, also for blocks without a peer."""
    trainers: tuple[TrainerRow, ...] = ()
    paths: tuple[tuple[int, ...], ...] = ()
    """The variants that each path leads through; empty in a run without variants."""
    events: tuple[str, ...] = ()
    """Lines that say what happened (peers were killed, joined, ended), oldest first."""
    join_command: str = "swarm-peer INVITE"
    """The command with which one more peer joins the run."""

    @property
    def empty_stages(self) -> list[int | str]:
        """Blocks, by their labels, without any peer: none serves, none is on its way there, and none is announced but
        silent."""
        return [row.block.label for row in self._unserved if row.block.label not in self.silent_stages]

    def may_return(self, stage: int | str) -> bool:
        """Whether the last peer of an empty stage fell silent, and so may still hold what the stage has learnt."""
        last = self.last_peers.get(stage)
        return last is not None and not last.has_left

    @property
    def peers(self) -> list[PeerRow]:
        return [peer for row in self.stages for peer in row.peers]

    @property
    def left_out(self) -> list[str]:
        """Lines about the peers of large blocks that were not asked, which a table leaves out."""
        return [
            f"stage {row.block.label}: {len(row.peers):,} peers are announced; {row.num_asked} of them were asked and "
            "are shown (all with --every-peer)"
            for row in self.stages
            if row.num_asked is not None
        ]

    @property
    def round(self) -> int:
        """The newest round of the run, by what its peers say or announce."""
        # A peer on its way to a stage has a row at round 0, which says nothing about the run.
        return RunRounds.of(
            {row.block: [at.round for at in row.peers if at.round or at.state == "serving"] for row in self.stages}
        ).latest

    @property
    def silent_stages(self) -> dict[int | str, list[str]]:
        """The names of announced peers by the label of their block, for blocks at which none of them answers."""
        silent = {
            row.block.label: [peer.name or peer.peer_id[:8] for peer in row.peers if peer.state == "unreachable"]
            for row in self._unserved
        }
        return {stage: names for stage, names in silent.items() if names}

    @property
    def waiting_paths(self) -> dict[int | str, str]:
        """For each block that no peer serves, by its label, the paths through it in words; none in a run without
        variants."""
        through = {
            row.block: [number for number, path in enumerate(self.paths) if path[row.stage] == row.variant]
            for row in self._unserved
        }
        return {block.label: numbered("path", paths) for block, paths in through.items() if paths}

    @property
    def last_peers(self) -> dict[int | str, LastPeer]:
        """For each block, by its label, that no peer serves, the last one that did, if that is known."""
        return {row.block.label: row.last_peer for row in self._unserved if row.last_peer is not None}

    @property
    def _unserved(self) -> list[StageRow]:
        return [row for row in self.stages if not row.is_served]

    @property
    def refusals(self) -> dict[str, str]:
        """Lines about holders that peers do not follow. Keys name only the two peers, because the rest changes in each
        view."""
        return {
            f"{peer.peer_id} refuses {refusal.partition(' ')[0]}": f"{peer.name}: {refusal}"
            for peer in self.peers
            for refusal in peer.refusals
        }

    @property
    def bans(self) -> dict[str, str]:
        """Lines that say which sender has banned which peer, why and until when. Keys name both and the cause."""
        names = {peer.peer_id: peer.name for peer in self.peers}
        senders: list[PeerRow | TrainerRow] = [*self.peers, *self.trainers]
        lines = {}
        for sender in senders:
            for ban in sender.bans:
                name = names.get(ban["peer_id"]) or ban["peer_id"][:8]
                until = time_of_day(ban["until"])
                key = f"{sender.name} leaves {name} alone: {ban['reason']}"
                lines[key] = f"{sender.name} leaves {name} alone until {until}: {ban['reason']}"
        return lines

    @property
    def waits(self) -> list[str]:
        """Lines that say what peers wait for, and why they have little to do: the reason of the one that has least."""
        waiting = [f"{peer.name} waits for {peer.waiting_for}" for peer in self.peers if peer.waiting_for]
        # While a stage is empty, nothing else is the reason.
        idle = [peer for peer in self.peers if peer.idle_because and not self.empty_stages]
        idle.sort(key=lambda peer: peer.computing_share)
        others = f" ({counted(len(idle) - 1, 'other')} too)" if len(idle) > 1 else ""
        return waiting + [f"{peer.name} is {peer.idle_because}{others}" for peer in idle[:1]]

    @property
    def older(self) -> list[str]:
        """A line about peers and trainers whose release is older than that of others; none if there are none."""
        senders: list[PeerRow | TrainerRow] = [*self.peers, *self.trainers]
        newest = max((sender.protocol for sender in senders), default=0)
        older = [sender for sender in senders if 0 < sender.protocol < newest]
        if not older:
            return []
        oldest, names = min(sender.protocol for sender in older), sorted({sender.name for sender in older})
        return [
            f"of an older release, with protocol {oldest} and not {newest}: {', '.join(names[:MOST_NAMED])}"
            + (f" and {len(names) - MOST_NAMED:,} more" if len(names) > MOST_NAMED else "")
            + f"; update before a release with protocol {newest + 1} comes, which leaves them out"
        ]

    def to_json(self) -> str:
        """One line of JSON: every field by its name, and `empty_stages` and `silent_stages` besides."""
        stages = {"empty_stages": self.empty_stages, "silent_stages": list(self.silent_stages)}
        return json.dumps({**dataclasses.asdict(self), **stages}, allow_nan=False)
