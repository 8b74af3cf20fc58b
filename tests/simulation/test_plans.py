"""What each way to train sends: sizes and times of small models."""

import pytest

from swarm.compression.codec import contribution_codec, result_codec
from swarm.config import AveragingConfig, load_preset
from swarm.simulation import plans
from swarm.simulation.plans import Training

SMALL = Training(num_layers=6, num_parameters=6e6, step_seconds=1.0, steps_between=10)


def test_data_parallel_sends_every_layer_in_every_step() -> None:
    plan = plans.data_parallel(SMALL)
    assert plan.num_steps == 1
    assert [piece.num_bytes for piece in plan.pieces] == [2e6] * 6
    # The last layer's backward is done first, and its forward comes last.
    assert [piece.ready for piece in plan.pieces] == pytest.approx([1, 8 / 9, 7 / 9, 6 / 9, 5 / 9, 4 / 9])
    assert [piece.due for piece in plan.pieces] == pytest.approx([0, 1 / 18, 2 / 18, 3 / 18, 4 / 18, 5 / 18])


def test_diloco_sends_everything_once_a_round() -> None:
    plan = plans.diloco(SMALL)
    assert (plan.num_steps, {piece.step for piece in plan.pieces}) == (10, {9})
    assert sum(piece.num_bytes for piece in plan.pieces) == pytest.approx(12e6)


def test_streaming_sends_strided_fragments_at_equal_distances() -> None:
    plan = plans.streaming(SMALL, delay_steps=1, bits=plans.FP4_BITS)
    assert plan.delay_steps == 1
    # Two fragments: layers 0, 2, 4 and layers 1, 3, 5.
    assert [piece.step for piece in plan.pieces] == [0, 0, 0, 5, 5, 5]
    assert [round(piece.due * 18) for piece in plan.pieces] == [0, 2, 4, 1, 3, 5]
    assert sum(piece.num_bytes for piece in plan.pieces) == pytest.approx(3e6)


def test_ours_begins_after_a_step_and_has_the_real_sizes() -> None:
    plan = plans.ours(SMALL, AveragingConfig(codec="fp16", overlap_steps=3), in_fragments=False)
    (piece,) = plan.pieces
    assert (plan.delay_steps, piece.step, piece.ready, piece.due, piece.num_bytes) == (3, 9, 1.0, 0.0, 12e6)
    in_fragments = plans.ours(SMALL, AveragingConfig(codec="fp16", overlap_steps=3), in_fragments=True)
    assert [(piece.step, piece.num_bytes) for piece in in_fragments.pieces] == [(0, 6e6), (5, 6e6)]


def test_dense_codecs_send_half_a_contribution_and_half_a_result() -> None:
    averaging = AveragingConfig(codec="int8")
    codec, result = contribution_codec(averaging), result_codec(averaging)
    assert plans.sent_bytes(averaging, 1 << 20) == codec.num_bytes(1 << 19) + result.num_bytes(1 << 19)


def test_sparse_codecs_send_the_contribution_to_the_other_member() -> None:
    averaging = load_preset("sparseloco").averaging
    assert plans.sent_bytes(averaging, 1 << 20) == contribution_codec(averaging).num_bytes(1 << 20)
    # With an owner for every tile instead, the sum goes back with four times as many coefficients.
    owners = AveragingConfig(codec="topk", gather_members=1)
    expected = contribution_codec(owners).num_bytes(1 << 19) + result_codec(owners).num_bytes(1 << 19)
    assert plans.sent_bytes(owners, 1 << 20) == expected
