"""A resumed run says what of its configuration is new."""

import dataclasses
from pathlib import Path

import pytest

from peers.stage_peer.resume import ResumeOptions
from peers.stage_peer.resume_news import say_changes
from swarm.config import AveragingConfig, OptimizerConfig, RunConfig
from swarm.training.optim import learning_rate
from tests.checkpoint.states import CONFIG, cut, write_cut
from tests.support.whole_swarm import whole_swarm

BEFORE = RunConfig(optimizer=OptimizerConfig(learning_rate=1e-3, warmup_samples=1000))
NOW = dataclasses.replace(
    BEFORE,
    optimizer=OptimizerConfig(
        learning_rate=3e-3, warmup_samples=100, schedule="cosine", total_samples=10_000, final_fraction=0.1
    ),
    averaging=AveragingConfig(codec="int8"),
)


def test_every_field_that_differs_is_named_with_both_values(caplog: pytest.LogCaptureFixture) -> None:
    say_changes(BEFORE, NOW, round_number=7, run_samples=500)
    before, now = learning_rate(BEFORE.optimizer, 500), learning_rate(NOW.optimizer, 500)
    assert 3 * before < now
    assert caplog.messages == [
        "goes on at round 7 with another configuration than the checkpoint's:",
        "  optimizer.learning_rate: 0.001 before, 0.003 now",
        "  optimizer.schedule: 'constant' before, 'cosine' now",
        "  optimizer.warmup_samples: 1000 before, 100 now",
        "  optimizer.total_samples: 0 before, 10000 now",
        "  averaging.codec: 'fp32' before, 'int8' now",
        f"  the learning rate at 500 samples: {before:.4g} before, {now:.4g} now",
    ]


def test_the_same_configuration_needs_no_word(caplog: pytest.LogCaptureFixture) -> None:
    elsewhere = dataclasses.replace(BEFORE, data=dataclasses.replace(BEFORE.data, dataset="elsewhere"))
    say_changes(BEFORE, elsewhere, round_number=7, run_samples=500)
    assert not caplog.messages


def test_without_another_optimizer_the_learning_rate_stays(caplog: pytest.LogCaptureFixture) -> None:
    say_changes(BEFORE, dataclasses.replace(BEFORE, averaging=NOW.averaging), round_number=7, run_samples=500)
    assert caplog.messages[1:] == ["  averaging.codec: 'fp32' before, 'int8' now"]


@pytest.mark.parametrize("is_changed", [True, False])
async def test_a_peer_says_so_when_it_resumes(
    tmp_path: Path, is_changed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    before = cut(2)
    (tmp_path / "checkpoints").mkdir()
    write_cut(tmp_path / "checkpoints", before, 3)
    now = dataclasses.replace(before, optimizer=OptimizerConfig(learning_rate=0.02, weight_decay=0.1))
    resume = ResumeOptions(folder=tmp_path / "checkpoints")
    async with whole_swarm(now if is_changed else before, tmp_path / "logs", num_peers=(), resume=resume) as swarm:
        peer = await swarm.start(0)
    assert peer.server is not None
    said = [line for line in caplog.messages if " now" in line]
    assert (
        said
        == [
            f"  optimizer.learning_rate: {CONFIG.optimizer.learning_rate} before, 0.02 now",
            "  the learning rate at 48 samples: 0.01 before, 0.02 now",
        ]
        * is_changed
    )
