"""How fast lines must be: bytes and seconds of small models, worked out by hand."""

import pytest

from scripts.benches.simulate.studies import bandwidth
from scripts.benches.simulate.studies.bandwidth import Training
from swarm.compression.codec import contribution_codec, result_codec
from swarm.config import AveragingConfig, load_preset

SMALL = Training(num_layers=6, num_parameters=6e6, step_seconds=1.0)
MEGABITS = 8e-3
"""Gigabits in a million bytes."""


def needed(*, wanted: float, overlap_steps: int = 0, num_fragments: int = 1) -> float:
    averaging = AveragingConfig(codec="fp16", overlap_steps=overlap_steps)
    return bandwidth.needed_gigabits_per_second(
        SMALL, averaging, round_steps=10, num_fragments=num_fragments, wanted=wanted
    )


def test_a_round_that_is_waited_for_may_take_as_long_as_the_machine_may_wait() -> None:
    # 12 MB have to be sent in as many seconds as the ten steps take.
    assert needed(wanted=0.5) == pytest.approx(MEGABITS * 12 / 10)
    # They have to be sent in a quarter of these seconds.
    assert needed(wanted=0.8) == pytest.approx(MEGABITS * 12 / 2.5)


def test_a_round_that_overlaps_may_take_those_steps_longer() -> None:
    assert needed(wanted=0.8, overlap_steps=3) == pytest.approx(MEGABITS * 12 / (3 + 2.5))


def test_fragments_share_the_steps_and_the_waiting() -> None:
    # There are two rounds of 6 MB, each hidden behind one step and half of 2.5 s.
    assert needed(wanted=0.8, overlap_steps=1, num_fragments=2) == pytest.approx(MEGABITS * 6 / (1 + 1.25))


def test_dense_codecs_send_half_a_contribution_and_half_a_result() -> None:
    averaging = AveragingConfig(codec="int8")
    codec, result = contribution_codec(averaging), result_codec(averaging)
    assert bandwidth.sent_bytes(averaging, 1 << 20) == codec.num_bytes(1 << 19) + result.num_bytes(1 << 19)


def test_sparse_codecs_send_the_contribution_to_the_other_member() -> None:
    averaging = load_preset("sparseloco").averaging
    assert bandwidth.sent_bytes(averaging, 1 << 20) == contribution_codec(averaging).num_bytes(1 << 20)
    # If every tile has an owner instead, the sum goes back with four times as many coefficients.
    owners = AveragingConfig(codec="topk", gather_members=1)
    expected = contribution_codec(owners).num_bytes(1 << 19) + result_codec(owners).num_bytes(1 << 19)
    assert bandwidth.sent_bytes(owners, 1 << 20) == expected


def test_whatever_is_smaller_on_the_wire_needs_less() -> None:
    for rows in bandwidth.run(bandwidth.Options())["ours"].values():
        assert rows["fp16, waiting"]["95%"] > rows["int8, waiting"]["95%"] > rows["int4, waiting"]["95%"]
        assert rows["int4, waiting"]["95%"] > 20 * rows["topk (sparseloco), waiting"]["95%"]
        assert rows["int8, waiting"]["95%"] > rows["int8, overlap 5"]["95%"] > rows["int8, overlap 1, fragments"]["95%"]


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="round_steps must be at least 72"):
        bandwidth.Options(round_steps=71)
    with pytest.raises(ValueError, match="overlap_steps must be"):
        bandwidth.Options(overlap_steps=100)
