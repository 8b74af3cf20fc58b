"""--contributions: the same from a run's peers, its checkpoints and its event logs, whoever came and went."""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from peers.stage_peer.served_block import ServedBlock
from peers.status import program
from peers.status.contributions import Tallies, of_checkpoints, of_logs
from swarm.audit.audit import audit
from swarm.averaging.agreement.place import Phase
from swarm.averaging.agreement.timing import Timing
from swarm.checkpoint import file
from swarm.checkpoint.file import Header
from swarm.config import RunConfig
from swarm.credentials.identity import generate
from swarm.routing.poll import Poll
from swarm.rpc.channels import ChannelPool
from swarm.training.complaints import Complaints, Named, Word
from swarm.training.tally import EMPTY, Given, by_peer, total
from swarm.types import Block
from tests.audit.honest import Lines, edit
from tests.support.chain import DILOCO, SYNCHRONOUS
from tests.support.whole_swarm import WholeSwarm, whole_swarm

STEPS = 4


async def _told_by(swarm: WholeSwarm, channels: ChannelPool) -> Tallies:
    """What the run's peers say when they are asked, as Lookout asks them."""
    found = Tallies(swarm.config.run_id)
    for block in swarm.config.blocks:
        records = [peer.servers[block].presence.record() for peer in swarm.peers if block in peer.servers]
        heard = await Poll(swarm.config.run_id, channels).ask(records, tally=True)
        found.add(block, [one.reply.tally for one in heard if one.reply is not None], {r.peer_id for r in records})
    return found


async def _until(condition: Callable[[], bool]) -> None:
    """Wait for as long as the test may take: on a busy machine a round of all these peers takes many seconds."""
    while not condition():  # noqa: ASYNC110 - whatever makes it true sets no event
        await asyncio.sleep(0.005)


async def _end_of_rounds(served: Sequence[ServedBlock]) -> None:
    """Wait until no samples are left that would end another round of DiLoCo. A leader waits for its members' reports
    for a while before it begins one."""
    before: list[str] = []
    while (now := [each.member.progress().lineage for each in served]) != before or not _are_between_rounds(served):
        before = now
        await asyncio.sleep(Timing().fresh_seconds + 1.5)


def _are_between_rounds(served: Sequence[ServedBlock]) -> bool:
    return all(each.averager.place.group.phase is Phase.IDLE for each in served)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "config", [SYNCHRONOUS, pytest.param(DILOCO, marks=pytest.mark.slow)], ids=["synchronous", "diloco"]
)
async def test_it_is_the_same_from_peers_checkpoints_and_event_logs(
    config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints, channels = tmp_path / "checkpoints", ChannelPool(insecure=True)
    checkpoints.mkdir()
    async with whole_swarm(config, tmp_path / "events", num_peers=(2, 2, 1)) as swarm:
        victim = swarm.peers[1]
        training = asyncio.create_task(swarm.train(STEPS))
        both = [peer.servers[Block(0)] for peer in swarm.peers[:2]]
        # If the victim died between an exchange and its commit, its signature would be missing, and the tally begin
        # anew.
        await _until(lambda: all(each.stage.round >= 1 for each in both) and _are_between_rounds(both))
        await victim.kill()
        joiner = await swarm.start(0)
        await training
        swarm.peers.remove(victim)
        served = [each for peer in swarm.peers for each in peer.servers.values()]
        await _until(lambda: all(each.stage.round >= STEPS for each in served))
        if not config.rounds.synchronous:
            await _end_of_rounds(served)
        told = await _told_by(swarm, channels)
        for peer in swarm.peers:
            for block, own in peer.servers.items():
                state = await own.member.snapshot()
                header = Header(
                    config=config, stage=block.stage, round=state.round, run_samples=state.run_samples,
                    lineage=state.lineage, highest_microbatch=0, state_digest=state.digest, tally=state.tally.to_text(),
                )  # fmt: skip
                file.write(checkpoints, header, state.tensors, owner="test")
        await channels.close()
    kept = of_checkpoints(sorted(checkpoints.iterdir()))
    report = audit(swarm.logs)
    assert report.findings.violations == []
    for block, tally in told.blocks.items():
        logged = report.tallies[block]
        assert (tally.since, tally.peers) == (0, kept.blocks[block].peers) == (0, logged.peers)
        assert tally.digest == kept.blocks[block].digest == logged.digest
        signers = told.signers[block]
        assert signers
        assert kept.signers[block] == tally.signers(config.run_id, block) >= signers
        whole = sum(gave.samples for gave in tally.peers.values())
        if config.rounds.synchronous:
            assert whole == (tally.round + 1) * config.rounds.round_samples
            targets = sum(gave.targets for gave in tally.peers.values())
            assert targets == whole * config.data.sequence_length
    given = by_peer(told.blocks)
    assert victim.peer_id in given
    assert total(given[swarm.peers[0].peer_id]).num_bytes > 0
    assert joiner.peer_id in given or not config.rounds.synchronous
    shown = Console(width=120)
    with shown.capture() as captured:
        shown.print(of_logs(report.run, report.tallies).render())
    assert "as the event logs prove" in captured.get()
    assert program.main(["--contributions", "--json", "--checkpoint", *map(str, sorted(checkpoints.iterdir()))]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["peers"][victim.peer_id]["blocks"]["0"]["samples"] == given[victim.peer_id][Block(0)].samples

    def exaggerate(lines: Lines) -> None:
        commit = next(line for line in lines if line["event"] == "commit")
        commit["given"][0][0] += 1

    for path in swarm.logs:
        if "peer-0" in path.name:
            edit(path, exaggerate)
    assert not audit(swarm.logs).proven


def test_who_is_named_is_shown_with_those_that_have_signed_it() -> None:
    keys = sorted((generate() for _ in range(5)), key=lambda identity: identity.peer_id)
    run, liar = "run.0123", keys[4].peer_id
    tally = EMPTY.after(0, parent="", result="", given={key.peer_id: Given(1, 1, 1, 1) for key in keys})
    word = Word(liar, 0, 0, 10, "its norm is [odd]")
    said = Complaints(words=(word,), named={liar: Named(0, f"{liar} lies [again]")}).to_text()
    signed = [tally.sign(key.sign_with_point, run, Block(0), said) for key in keys[:3]]
    text = tally.settled(signed, run, Block(0)).to_text()
    found = Tallies(run, names={liar: "larry"})
    found.add(Block(0), [text])
    block = json.loads(found.to_json())["blocks"]["0"]
    by = [key.peer_id for key in keys[:3]]
    assert block["named"] == {
        liar: {"round": 0, "line": f"{liar} lies [again]", "accuses_falsely": False, "signed_by": by}
    }
    assert block["out_of_line"] == [{"owner": owner, **word._asdict()} for owner in by]
    shown = Console(width=200)
    with shown.capture() as captured:
        shown.print(found.render())
    assert f"stage 0: larry (3 of 5 members name it): {liar} lies [again]" in captured.get()
    fewer = Tallies(run)
    fewer.add(Block(0), [text], among=by[:2])
    assert json.loads(fewer.to_json())["blocks"]["0"]["named"] == {}, "two of them are nobody that is announced"


def test_files_that_are_no_checkpoints_are_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\xff" * 100)
    with pytest.raises(ValueError, match="is no checkpoint"):
        of_checkpoints([path])
