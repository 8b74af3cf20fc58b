"""How one comes to the run that is shown: the lines to type, each with its purpose. They hold no token.

Used by program.py.
"""

import shlex
from collections.abc import Mapping, Sequence
from itertools import zip_longest

from swarm.config import RunConfig
from swarm.rpc.entry import Entry
from swarm.rpc.invite import Invite
from swarm.types import PeerId, PeerRecord, PeerState


def how_to_join(
    config: RunConfig, records: Mapping[int, Sequence[PeerRecord]], *, insecure: bool
) -> dict[str, str]:  # fmt: skip
    """The lines, by purpose; none while no peer serves.

    Args:
        records: what is announced at each stage.
    """
    serving = [[record for record in row if record.state is PeerState.SERVING] for _, row in sorted(records.items())]
    # One of each stage, then a second of each: they do not all go at once.
    spread = [record for column in zip_longest(*serving) for record in column if record is not None]
    entries = [Entry(PeerId(record.peer_id), record.endpoint) for record in spread]
    if not entries:
        return {}
    invite = Invite.fitting(config.run_id, entries, is_locked=bool(config.owner))
    word = f"{invite}#TOKEN" if config.owner else str(invite)
    options = " --insecure" if insecure else ""
    own_class = f" --allow-class {shlex.quote(config.model.custom_class)}" if config.model.custom_class else ""
    return {
        "Give a machine to the run": f"swarm-peer {word}{own_class}{options}",
        "Feed it text": f"swarm-trainer {word} --steps 100{options}",
        "Watch it in a terminal": f"swarm-status {word} --watch{options}",
    }
