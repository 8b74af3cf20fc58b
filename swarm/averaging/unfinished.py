"""What an earlier attempt left that may have been decided.

Used by a leader (averaging/leader) once its members have begun, and by the simulator. Pure.
"""

from collections.abc import Mapping

from swarm.averaging import messages
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.types import PeerId

Begun = Mapping[PeerId, pb.BeginReply]


def unfinished(begun: Begun) -> pb.Prepared | None:
    """The newest earlier result, if it may have been decided: no member of its exchange knows better."""
    prepared = [reply.prepared for reply in begun.values() if reply.HasField("prepared")]
    if not prepared:
        return None
    newest = max(prepared, key=lambda p: messages.require_ballot(p.ballot))
    ballot = messages.require_ballot(newest.ballot)
    for peer in newest.member_ids:
        reply = begun.get(PeerId(peer))
        # One that was restarted since has no say: it may have prepared the result and forgotten.
        if (
            reply is not None
            and reply.prepared.digest != newest.digest
            and messages.require_ballot(reply.since) <= ballot
        ):
            return None
    return newest
