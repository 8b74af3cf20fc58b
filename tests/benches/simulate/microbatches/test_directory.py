"""What simulated senders know of a large stage."""

import hashlib

from scripts.benches.simulate.microbatches.directory import Directory
from scripts.benches.simulate.timeline import Timeline
from swarm.dht.split_key import LEAST_POINTS, SPLIT
from swarm.types import PeerRecord, PeerState


def test_a_sender_knows_a_sample_of_a_large_stage_and_more_if_it_has_more_to_send() -> None:
    directory = Directory(Timeline(), 2)
    for stage, size in enumerate((20, 400)):
        directory.update(stage, [_record(number, stage) for number in range(size)])
    assert (len(directory.all(0)), len(directory.all(1))) == (20, 400)
    small, large, wide = directory.read([("a trainer", 0, 0), ("a trainer", 1, 0), ("another", 1, 2000)])
    assert len(small) == 20
    assert LEAST_POINTS * 8 <= len(large) <= LEAST_POINTS * SPLIT
    assert len(wide) > 300
    assert directory.read([("a trainer", 1, 0)]) == [large]


def _record(number: int, stage: int) -> PeerRecord:
    return PeerRecord(
        peer_id=hashlib.sha1(b"%d" % number).hexdigest(), announced_at=0.0, stage=stage, endpoint="192.0.2.1:1",
        state=PeerState.SERVING,
    )  # fmt: skip
