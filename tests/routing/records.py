"""Peers of one stage, by number."""

from typing import Any

from swarm.types import PeerId, PeerRecord, PeerState


def id_of(number: int) -> PeerId:
    """The id of peer `number`; ids have the order of their numbers."""
    return PeerId(f"{number:040x}")


def record_of(number: int, samples_per_second: float = 1.0, **changes: Any) -> PeerRecord:
    """A serving peer's announcement, with some fields changed."""
    values = {
        "peer_id": id_of(number), "announced_at": 0.0, "stage": 0, "endpoint": f"host:{number}",
        "state": PeerState.SERVING, "samples_per_second": samples_per_second,
    }  # fmt: skip
    return PeerRecord.model_validate(values | changes)
