"""The gpu bench on the CPU: its plain loop is the run's training, a part that fails stops no other, and what is said
where there is no GPU."""

import dataclasses

import pytest
import torch

from scripts.benches import gpu
from scripts.benches.shared.common import run_of, with_corpus
from scripts.benches.sides import gpu_stage
from scripts.benches.sides.reference import Reference
from swarm.errors import Fatal, PeerUnavailable

CPU = torch.device("cpu")
TINY = gpu.Options(
    device="cpu", d_model=64, layers=2, vocab_size=256, sequence_length=16, stage_width=64, microbatches=2, tokens=4
)  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(Fatal, match="needs a GPU"):
        gpu.run(gpu.Options())


def test_the_plain_loop_takes_the_steps_of_the_run() -> None:
    config, data = with_corpus(
        run_of(
            "gpu", width=32, layers=2, head_width=16, length=16, microbatch=2, round_samples=4,
            data={"max_tokens": 100_000},
            optimizer={"learning_rate": 1e-2, "warmup_samples": 0, "weight_decay": 0.1, "clip_norm": 0.5},
        )
    )  # fmt: skip
    found = gpu_stage.train(config, data, CPU, warm_up=1, steps=5, compiles=False)
    reference = Reference(config, data)
    assert found.losses == pytest.approx([reference.step(step) for step in range(6)], abs=1e-4)
    assert found.losses[-1] < found.losses[0] - 0.3


def test_parts_are_compared_and_one_that_fails_stops_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers: dict[str, gpu.Figures] = {
        "plain": {"plain_tokens_per_second": 200.0, "plain_losses": [3.0, 2.0], "failed": {}},
        "static": {"static_tokens_per_second": 150.0, "static_losses": [3.0, 2.5], "failed": {}},
        "two_stages": {"failed": {"two_stages": "no room"}},
        "stage": {"stage_ratio_to_graph": 0.9, "failed": {}},
    }

    def apart(part: gpu.Part, options: gpu.Options, seconds: float) -> gpu.Figures:
        assert 0.0 < seconds <= gpu.PART_SECONDS[part]
        if part not in answers:
            raise PeerUnavailable("ended by SIGSEGV")
        return answers[part]

    monkeypatch.setattr(gpu, "apart", apart)
    figures = gpu.run(TINY)
    assert figures["failed"] == {
        "one_stage": "ended by SIGSEGV", "two_stages": "no room", "generate": "ended by SIGSEGV"
    }  # fmt: skip
    assert (figures["static_ratio_to_plain"], figures["largest_loss_difference"]) == (0.75, 0.5)
    assert figures["stage_ratio_to_graph"] == 0.9
    assert "static_ratio_to_plain: 0.75" in capsys.readouterr().err


def test_both_sides_write_the_same_text() -> None:
    figures = gpu.run(dataclasses.replace(TINY, only=("generate",)))
    assert figures["same_tokens"]
    assert figures["generate_ratio_to_transformers"] > 0.0
    assert gpu.exit_code(figures) == 0
