"""A member goes from round to round, and keeps some state of its own when it takes over a state that others hold."""

from unittest.mock import Mock

import pytest

from swarm.averaging.advance import Advance
from swarm.averaging.agreement import messages
from swarm.averaging.agreement.messages import Standing, lineage_after
from swarm.averaging.averager import place_of
from swarm.averaging.donor import Donor
from swarm.averaging.own_round import OwnRound
from swarm.averaging.roster import Roster
from swarm.averaging.vectors.shared import TiedParameters
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.training.round_member import Snapshot
from tests.averaging.doubles import make_context, peer_id, record
from tests.averaging.fake_stage import FakeStage, make_config
from tests.support.virtual_time import in_virtual_time


@pytest.mark.parametrize(
    ("members", "branch", "carries"),
    [([2, 3], "", True), ([1, 2], "", False), ([2, 3], "another", False), ([], "", False)],
    ids=["without it", "it is in the result", "another branch", "nobody tells"],
)
@in_virtual_time
async def test_only_what_no_round_has_taken_is_kept(members: list[int], branch: str, *, carries: bool) -> None:
    stage, context = FakeStage(), make_context(record(1), config=make_config("diloco"))
    place = place_of(context, messages.standing_of(stage.progress()))
    advance = Advance(
        context, place, stage, OwnRound(context, place, stage), shared=Mock(spec=TiedParameters),
        donor=Donor(place, stage, context.clock), roster=Roster(context, place),
    )  # fmt: skip
    ids = [peer_id(number) for number in members]
    outcome = pb.Outcome(round=0, prepared=pb.Prepared(digest="ab", member_ids=ids))
    tensors = (await stage.snapshot()).tensors
    snapshot = Snapshot(
        round=1, run_samples=4, lineage=lineage_after(branch or stage.lineage, outcome), tensors=tensors,
        digest=stage.digest_of(tensors),
    )  # fmt: skip
    async with context.tasks.running():
        await advance.install(snapshot, [outcome] if members else [], [])
    assert stage.carried == [carries]
    assert place.standing.round == 1


@in_virtual_time
async def test_outcomes_of_rounds_to_come_are_not_kept() -> None:
    """A donor may make them up. They would stay as the newest ones, in place of those that this peer commits."""
    place = place_of(make_context(record(1)), Standing(run_samples=0, round=0, lineage="00"))
    told = [pb.Outcome(round=number) for number in (6, 7, 8, 1 << 40)]
    place.installed(Standing(run_samples=28, round=7, lineage="07"), told, [])
    assert list(place.outcomes) == [6]
