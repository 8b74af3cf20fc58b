"""The commands with which people join the run that is shown, each with its purpose. They hold no token.

Used by program.py.
"""

from collections.abc import Mapping, Sequence

from peers.shared.joining import Joining
from peers.shared.network import entries_of
from swarm.config import RunConfig
from swarm.types import PeerRecord


def how_to_join(config: RunConfig, records: Mapping[int, Sequence[PeerRecord]], *, insecure: bool) -> dict[str, str]:
    """The commands by their purpose; none while no peer serves.

    Args:
        records: the records that are announced at each stage.
    """
    entries = entries_of(row for _, row in sorted(records.items()))
    if not entries:
        return {}
    joining = Joining.at(config, entries, insecure=insecure)
    return {
        "Give a machine to the run": joining.peer,
        "Feed it text": joining.trainer,
        "Watch it in a terminal": joining.status,
    }
