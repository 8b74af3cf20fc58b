"""The check that every service makes first: whether a request is meant for this peer.

Used by the servicers of stage, averaging and leases.
"""

from swarm.errors import IncompatibleVersion, WrongRun, WrongStage
from swarm.rpc.v1.stage_pb2 import Address
from swarm.types import PROTOCOL_VERSION


def check_address(address: Address, *, run_id: str, stage: int) -> None:
    """Raise IncompatibleVersion, WrongRun or WrongStage unless a request names this protocol, run and stage."""
    if address.protocol_version != PROTOCOL_VERSION:
        raise IncompatibleVersion(
            f"protocol version {address.protocol_version} is not {PROTOCOL_VERSION}, which this peer speaks: "
            "use the same release of swarm on every machine"
        )
    if address.run_id != run_id:
        raise WrongRun(f"run {address.run_id[:80]!r} is not {run_id!r}, which this peer serves")
    if address.stage != stage:
        raise WrongStage(f"this peer serves stage {stage}, not {address.stage}")
