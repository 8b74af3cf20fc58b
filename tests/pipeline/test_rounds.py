"""What a trainer learns of the stages by asking."""

from swarm.pipeline.rounds import RoundWatcher
from swarm.rpc.channels import ChannelPool
from swarm.types import PeerRecord, PeerState


async def test_who_is_announced_and_cannot_be_reached_is_named() -> None:
    records = [
        PeerRecord(
            peer_id="0" * 40, name="gpu-box", announced_at=0.0, stage=1, endpoint="127.0.0.1:1", state=PeerState.SERVING
        )
    ]
    channels = ChannelPool(insecure=True)
    watcher = RoundWatcher(
        run_id="run", num_stages=2, synchronous=True, peers=lambda stage: records if stage == 1 else [],
        channels=channels,
    )  # fmt: skip
    await watcher.poll()
    assert watcher.known_round is None
    assert watcher.why_silent(0) is None
    assert (watcher.why_silent(1) or "").startswith("gpu-box at 127.0.0.1:1 (UNAVAILABLE: failed to connect")
    records.clear()
    await watcher.poll()
    assert watcher.why_silent(1) is None
    await channels.close()
