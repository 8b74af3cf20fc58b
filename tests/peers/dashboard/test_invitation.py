"""The command lines with which a reader joins a run that is shown."""

import dataclasses
import re
from collections.abc import Sequence

from peers.dashboard.invitation import how_to_join
from swarm import config as configs
from swarm.rpc.invite import Invite
from swarm.types import PeerRecord, PeerState

CONFIG = configs.load_preset("tiny")


def _record(number: int, stage: int, state: PeerState = PeerState.SERVING) -> PeerRecord:
    return PeerRecord(
        peer_id=f"{number:040x}", announced_at=1.0, stage=stage, endpoint=f"192.0.2.{number}:5001", state=state
    )


def _lines(config: configs.RunConfig, records: Sequence[PeerRecord], *, insecure: bool = False) -> dict[str, str]:
    by_stage = {stage: [record for record in records if record.stage == stage] for stage in range(3)}
    return how_to_join(config, by_stage, insecure=insecure)


def _invites(lines: dict[str, str]) -> list[Invite]:
    return [Invite.parse(word) for line in lines.values() for word in re.findall(r"swarm://\w+", line)]


def test_they_lead_to_peers_of_several_stages_that_serve() -> None:
    records = [_record(1, 0), _record(2, 0), _record(3, 1, PeerState.LEAVING), _record(4, 1), _record(5, 2)]
    lines = _lines(CONFIG, records)
    assert [line.split()[0] for line in lines.values()] == ["swarm-peer", "swarm-trainer", "swarm-status"]
    for invite in _invites(lines):
        assert invite.is_to(CONFIG.run_id)
        assert not invite.is_locked
        hosts = [entry.host for entry in invite.entries]
        assert hosts == ["192.0.2.1", "192.0.2.4", "192.0.2.5", "192.0.2.2"][: len(hosts)]
        assert len(hosts) > 1


def test_those_of_a_locked_run_say_where_the_token_goes_and_hold_none() -> None:
    locked = dataclasses.replace(CONFIG, owner="ab" * 32)
    lines = _lines(locked, [_record(1, 0)], insecure=True)
    assert all(re.search(r" swarm://\w+#TOKEN ", line) and line.endswith(" --insecure") for line in lines.values())
    assert all(invite.is_locked for invite in _invites(lines))


def test_while_nobody_serves_there_is_nobody_to_come_to() -> None:
    assert _lines(CONFIG, [_record(1, 0, PeerState.JOINING)]) == {}
