"""The command lines with which others join a run or fill a stage that no peer serves. They hold no token."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from swarm.config import RunConfig
from swarm.rpc.entry import Entry
from swarm.rpc.invite import Invite


@dataclass(frozen=True, kw_only=True)
class Joining:
    """The commands with which others join one run.

    Attributes:
        peer: gives a machine to the run.
        trainer: feeds it text.
        status: watches it.
    """

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
        own_class = f" --allow-class {shlex.quote(config.model.custom_class)}" if config.model.custom_class else ""
        own_text = "".join(f" --{option} {shlex.quote(name)}" for option, name in config.data.named_by_users)
        return cls(
            peer=f"swarm-peer {word}{own_class}{options}",
            trainer=f"swarm-trainer {word} --steps 100{own_text}{options}",
            status=f"swarm-status {word} --watch{options}",
        )


def remedy(join_command: str, stage: int, run_round: int, *, may_return: bool) -> str:
    """Text that says what a user can do about a stage without a peer. It warns of losing what the stage has learnt.

    Args:
        run_round: the round that the run's other peers have reached.
        may_return: whether the stage's last peer fell silent, and did not leave: then it still holds the stage, and
            nobody is advised to begin the stage anew.
    """
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
