"""Checkpoints of a real swarm: it goes on where it stopped, in any number of stages, and a lost stage comes back.

Every swarm here trains the same synchronous run of four layers, whose states are compared with one that was never
interrupted.
"""

import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from peers.local.supervisor import Supervisor
from swarm.checkpoint import file
from tests.support.swarm import RealSwarm, wait_until, write_text

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(6000)]

STOP, END = 10, 20
BOUND = 1e-4
SECONDS = 1500.0


class Swarm(RealSwarm):
    """One peer a stage, all in one folder of checkpoints."""

    start_seconds = SECONDS

    def __init__(
        self, folder: Path, children: Supervisor, num_stages: int, *, setting: str = "synchronous", every: int = 5,
        resume: bool = False,
    ) -> None:  # fmt: skip
        folder.mkdir(exist_ok=True)
        # One text, for its digest and its path are part of the configuration.
        text = str(write_text(folder.parent / "text.txt"))
        changes = {"num_layers = 2": "num_layers = 4", "num_stages = 2": f"num_stages = {num_stages}"}
        super().__init__(folder, children, setting=setting, changes={**changes, str(folder / "text.txt"): text})
        self.checkpoints = folder / "checkpoints"
        self.options = ["--checkpoint", str(self.checkpoints), "--checkpoint-every", str(every)]
        self.options += ["--keep-checkpoints", "9", *(["--resume", str(self.checkpoints)] if resume else [])]
        self.start_peers([0], *self.options)
        self.start_peers(range(1, num_stages), *self.options)

    def train(self, name: str, steps: int) -> list[float]:
        """Train, and wait for the end; gives the losses."""
        assert self.wait_for_end(self.start_trainer(name, steps=steps), SECONDS) == 0
        return [row["train/loss"] for row in self.steps(name)]

    def wait_for_round(self, number: int, num_stages: int) -> dict[str, torch.Tensor]:
        """The whole model at the beginning of a round, from the checkpoints."""
        names = [file.FileName(round=number, num_stages=num_stages, stage=stage) for stage in range(num_stages)]
        paths = [self.checkpoints / str(name) for name in names]
        wait_until(lambda: all(path.exists() for path in paths), SECONDS, f"checkpoints of round {number}")
        return {
            name: tensor
            for path in paths
            for name, tensor in file.load(path, file.parameters(path)).items()
            if name.startswith("anchor/")
        }

    def kill_all(self) -> None:
        """Kill all processes at once with kill -9."""
        for peer in list(self.peers):
            self.kill(peer)


@pytest.fixture(scope="module")
def children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervisor]:
    """Starts processes, and ends whatever is left of them."""
    with Supervisor(tmp_path_factory.mktemp("logs"), grace_seconds=0.0) as children:
        yield children


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all swarms."""
    return tmp_path_factory.mktemp("swarms")


@pytest.fixture(scope="module")
def uninterrupted(folder: Path, children: Supervisor) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final weights of a run in three stages."""
    swarm = Swarm(folder / "uninterrupted", children, 3)
    losses = swarm.train("whole", END)
    weights = swarm.wait_for_round(END, 3)
    swarm.kill_all()
    return losses, weights


@pytest.fixture(scope="module")
def stopped(folder: Path, children: Supervisor) -> Path:
    """Checkpoints of a swarm whose processes were all killed after step 10."""
    swarm = Swarm(folder / "stopped", children, 3)
    swarm.train("first", STOP)
    swarm.wait_for_round(STOP, 3)
    swarm.kill_all()
    return swarm.checkpoints


def _assert_same(
    losses: list[float], weights: dict[str, torch.Tensor], expected: tuple[list[float], dict[str, torch.Tensor]]
) -> None:
    assert losses == pytest.approx(expected[0][-len(losses) :], rel=BOUND)
    assert weights.keys() == expected[1].keys()
    for name, value in expected[1].items():
        difference = float(torch.linalg.vector_norm(weights[name] - value) / torch.linalg.vector_norm(value))
        assert difference < BOUND, name


@pytest.mark.parametrize("num_stages", [3, 2, 4])
def test_a_stopped_run_goes_on_in_any_number_of_stages(
    folder: Path, children: Supervisor, stopped: Path, num_stages: int,
    uninterrupted: tuple[list[float], dict[str, torch.Tensor]],
) -> None:  # fmt: skip
    resumed = folder / f"resumed-{num_stages}"
    shutil.copytree(stopped, resumed / "checkpoints")
    swarm = Swarm(resumed, children, num_stages, resume=True)
    losses = swarm.train("second", END - STOP)
    assert [row["step"] for row in swarm.steps("second")] == list(range(STOP + 1, END + 1))
    _assert_same(losses, swarm.wait_for_round(END, num_stages), uninterrupted)
    for peer in swarm.peers:
        said = f"stages.num_stages: 3 before, {num_stages} now" in peer.child.log.read_text(encoding="utf-8")
        assert said == (num_stages != 3)
    swarm.kill_all()


@pytest.mark.parametrize(("stage", "repeats"), [(1, False), (0, True), (1, True), (2, True)])
def test_a_stage_that_died_comes_back_from_a_joiner_s_checkpoint(
    folder: Path, children: Supervisor, stage: int, repeats: bool,
    uninterrupted: tuple[list[float], dict[str, torch.Tensor]],
) -> None:  # fmt: skip
    """Every round is written, and the stage dies in the middle of one: it comes back into the same round.

    Or it died between the others' commit and its own checkpoint: then the others repeat a round for it.
    """
    swarm = Swarm(folder / f"lost-{stage}-{repeats}", children, 3, every=1)
    trainer = swarm.start_trainer("through", steps=END)
    written = swarm.checkpoints / str(file.FileName(round=6, num_stages=3, stage=stage))
    wait_until(written.exists, SECONDS, "a checkpoint of round 6")
    (victim,) = [peer for peer in swarm.peers if peer.stage == stage]
    swarm.kill(victim)
    said = f"stage {stage} has no peer"
    wait_until(lambda: said in trainer.log.read_text(), SECONDS, "the trainer to name the empty stage")
    if repeats:
        reached = max(name.round for name in file.names(swarm.checkpoints) if name.stage != stage)
        for name in file.names(swarm.checkpoints):
            if name.stage == stage and name.round >= reached:
                (swarm.checkpoints / str(name)).unlink()
    (joiner,) = swarm.start_peers([stage], *swarm.options, "--resume", str(swarm.checkpoints))
    assert ("the other stages repeat round" in joiner.child.log.read_text()) == repeats
    assert swarm.wait_for_end(trainer, SECONDS) == 0
    losses = [row["train/loss"] for row in swarm.steps("through")]
    _assert_same(losses, swarm.wait_for_round(END, 3), uninterrupted)
    swarm.kill_all()


def test_diloco_enters_at_the_others_round_and_writes_on_leaving(folder: Path, children: Supervisor) -> None:
    swarm = Swarm(folder / "diloco", children, 2, setting="diloco")
    swarm.train("first", 7)
    (victim,) = [peer for peer in swarm.peers if peer.stage == 1]
    swarm.wait_for_round(5, 2)
    swarm.kill(victim)
    # Checkpoints are so rare that the peer writes only those on leaving.
    options = ["--checkpoint", str(swarm.checkpoints), "--checkpoint-every", "1000", "--keep-checkpoints", "9"]
    (joiner,) = swarm.start_peers([1], *options, "--resume", str(swarm.checkpoints))
    enters = re.search(r"it enters at round (\d+) as it was at round 5", joiner.child.log.read_text())
    assert enters is not None
    # Microbatches that were still under way when the trainer ended may have completed another round.
    assert int(enters[1]) in (7, 8)
    swarm.train("second", 2)
    joiner.child.process.send_signal(signal.SIGTERM)

    def newest() -> int:
        return max(name.round for name in file.names(swarm.checkpoints) if name.stage == 1)

    wait_until(lambda: newest() >= int(enters[1]) + 2, SECONDS, "a checkpoint on leaving")
    assert swarm.wait_for_end(joiner.child, SECONDS) == 0
    assert joiner.child.log.read_text().splitlines()[-1].endswith("INFO: this peer has left")
    # Where a last checkpoint cannot be written, as on a full disk, the peer does not end as if all were well.
    full = folder / "full"
    (spare,) = swarm.start_peers([0], "--checkpoint", str(full), "--checkpoint-every", "1000")
    full.rename(folder / "away")
    full.touch()
    spare.child.process.send_signal(signal.SIGTERM)
    assert swarm.wait_for_end(spare.child, SECONDS) == 1
    last = spare.child.log.read_text().splitlines()[-1]
    assert "error: this peer has left, and its last checkpoint is missing: no checkpoint of round" in last
    swarm.peers = [peer for peer in swarm.peers if peer.child in children.running]
    swarm.kill_all()


# -- a stage begins anew -----------------------------------------------------------------------------------------------


def test_an_empty_stage_is_named_and_waited_for(children: Supervisor, tmp_path: Path) -> None:
    swarm = RealSwarm(tmp_path, children)
    swarm.start_peers([0])
    swarm.start_peers([1, 1])
    trainer = swarm.start_trainer("waiting", steps=1000)
    swarm.wait_for_steps("waiting", 3)
    for peer in [peer for peer in swarm.peers if peer.stage == 1]:
        swarm.kill(peer)
    log = swarm.folder / "logs" / "waiting.log"
    # The newcomer also waits, because the stage's peers may come back.
    patient, _ = swarm.launch(1)
    wait_until(lambda: "stage 1 has no peer" in log.read_text(), 30.0, "the trainer to name the empty stage")
    wait_until(lambda: "stage 1 was held by" in patient.log.read_text(), 30.0, "a joiner to say for whom it waits")
    children.kill9(patient)
    swarm.start_peers([1, 1], "--start-over")
    swarm.wait_for_more("waiting", 5)
    swarm.interrupt(trainer)
    assert "stopped at step" in log.read_text()
    report = swarm.audit()
    assert (report["violations"], report["duplicates"]) == ([], 0)
    # Stage 1 lost all its peers, and with them all that it had learnt.
    assert report["stages"][0]["lost"] == 0
    assert report["stages"][1]["lost"] > 0
    swarm.assert_no_tracebacks()
