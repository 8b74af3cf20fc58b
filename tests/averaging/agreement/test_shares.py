import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.averaging.agreement.shares import (
    Counts,
    Share,
    Shares,
    divide,
    most_rounds,
    most_samples,
    part_sizes,
    shares_of,
)
from swarm.errors import MalformedMessage
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.types import Block
from tests.averaging.fake_stage import make_config


def offer(name: str, samples: int, norm: float = 1.0, targets: int | None = None) -> tuple[str, pb.BeginReply]:
    num_targets = samples if targets is None else targets
    return name, pb.BeginReply(num_samples=samples, num_targets=num_targets, round_samples=samples, norm=norm)


def weights(offers: list[tuple[str, pb.BeginReply]], clip: float) -> list[float]:
    return [s.weight for s in divide(dict(offers), num_elements=8, tile=1, clip_to_median=clip).members]


def test_weights_are_the_parts_of_the_targets() -> None:
    assert weights([offer("a", 1), offer("b", 0), offer("c", 3)], 3.0) == [0.25, 0.0, 0.75]
    unequal = [offer("a", 5, targets=10), offer("b", 5, targets=0), offer("c", 1, targets=30)]
    assert weights(unequal, 3.0) == [0.25, 0.0, 0.75]


def test_weights_without_any_target_are_the_parts_of_the_samples() -> None:
    assert weights([offer("a", 1, targets=0), offer("b", 3, targets=0)], 3.0) == [0.25, 0.75]


def test_a_norm_far_above_the_median_counts_for_less() -> None:
    offers = [offer("a", 1, 1.0), offer("b", 1, 2.0), offer("c", 1, 60.0), offer("d", 0, 0.0)]
    assert weights(offers, 3.0) == pytest.approx([1 / 3, 1 / 3, 1 / 3 * 6 / 60, 0.0])
    assert weights(offers, 0.0) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0.0])


def test_all_zero_contributions_are_not_clipped() -> None:
    assert weights([offer("a", 1, 0.0), offer("b", 1, 0.0)], 3.0) == [0.5, 0.5]


@given(
    st.integers(0, 200_000),
    st.lists(st.floats() | st.floats(1, 1e9), min_size=1, max_size=12),
    st.sampled_from([1, 256, 4096]),
)
def test_parts_cover_the_vector_at_tile_borders(num_elements: int, bandwidths: list[float], tile: int) -> None:
    sizes = part_sizes(num_elements, bandwidths, tile=tile)
    assert sum(sizes) == num_elements
    assert min(sizes) >= 0
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    assert all(end % tile == 0 or end == num_elements for end in ends)


def test_equal_and_unknown_lines_get_equal_parts() -> None:
    assert part_sizes(12, [0.0, 0.0, 0.0], tile=1) == [4, 4, 4]
    assert part_sizes(12, [1.0, 1.4, 1.2], tile=1) == [4, 4, 4]
    assert part_sizes(12, [1.0, 100.0], tile=1) == [6, 6]


@given(st.lists(st.floats(1, 7.9), min_size=3, max_size=12))
def test_lines_are_done_together(bandwidths: list[float]) -> None:
    """The time D + (M - 2) P over the bandwidth is equal for all owners whose parts are not bounded, not higher for
    those that own as little as can be, and not lower for those that own as much."""
    num_elements, num_owners = 10**9, len(bandwidths)
    sizes = part_sizes(num_elements, bandwidths, tile=1)
    if max(bandwidths) <= 1.5 * min(bandwidths):
        assert max(sizes) - min(sizes) <= 1
        return
    least, most = (0.0, num_elements) if num_owners < 4 else (num_elements / num_owners * each for each in (1 / 16, 2))
    assert all(least - 1 <= size <= most + 1 for size in sizes)
    seconds = [(num_elements + (num_owners - 2) * size) / line for size, line in zip(sizes, bandwidths, strict=True)]
    small, large = (
        [s for s, size in zip(seconds, sizes, strict=True) if abs(size - edge) <= 1] for edge in (least, most)
    )
    others = [s for s, size in zip(seconds, sizes, strict=True) if least + 1 < size < most - 1]
    if others:
        assert max(others) == pytest.approx(min(others), rel=1e-6)
    assert max([*others, *large], default=0.0) <= min([*others, *small], default=math.inf) * (1 + 1e-6)


def test_a_boast_is_not_believed_beyond_measure() -> None:
    sizes = part_sizes(900, [1.0, 1.0, 1e12], tile=1)
    assert sizes == part_sizes(900, [1.0, 1.0, 8.0], tile=1)
    # Where members are compared, who boasts owns twice the even part, and all others see something.
    assert part_sizes(8_000_000, [1e7] * 7 + [1e12], tile=1)[-1] == pytest.approx(2_000_000, abs=1)
    sizes = part_sizes(8_000_000, [1e7] * 6 + [1e12] * 2, tile=1)
    assert sizes[6:] == pytest.approx([2_000_000] * 2, abs=1)
    assert min(sizes) == pytest.approx(4_000_000 / 6, abs=1)


SHARE = Share(
    peer_id="a", counts=Counts(num_samples=1, num_targets=1, round_samples=1, norm=1.0), weight=0.5, num_elements=2
)  # fmt: skip


def test_a_member_that_is_named_twice_is_refused() -> None:
    with pytest.raises(MalformedMessage, match="named twice"):
        Shares((SHARE, SHARE))


@given(st.lists(st.integers(1, 1 << 40), min_size=1, max_size=300))
def test_weights_that_were_rounded_are_accepted(samples: list[int]) -> None:
    shares = divide(dict(offer(str(i), n) for i, n in enumerate(samples)), num_elements=8, tile=1, clip_to_median=0.0)
    assert sum(share.weight for share in shares.members) == pytest.approx(1.0)


def test_a_stranger_has_no_share() -> None:
    with pytest.raises(MalformedMessage, match="no member"):
        Shares((SHARE,)).of("b")


def _named(name: str = "a", **counts: float) -> pb.Share:
    told: dict[str, Any] = {"num_samples": 2, "num_targets": 2, "round_samples": 2, "norm": 1.0} | counts
    return pb.Share(contact=pb.Contact(peer_id=name), num_elements=8, **told)


@pytest.mark.parametrize("setting", ["synchronous", "diloco"])
def test_members_compute_the_weights_from_all_members_counts(setting: str) -> None:
    config = make_config(setting)
    shares = shares_of([_named("a"), _named("b", num_targets=6)], config, Block(0))
    assert [share.weight for share in shares.members] == [0.25, 0.75]
    clipped = shares_of([_named("a"), _named("b"), _named("c", norm=1e9)], config, Block(0))
    assert (clipped.of("c").weight < 1e-6) == (setting == "diloco")


@pytest.mark.parametrize("setting", ["synchronous", "diloco"])
@pytest.mark.parametrize(
    "lie",
    [
        {"num_samples": 1 << 40},
        {"num_samples": 1 << 40, "num_targets": 1 << 40, "round_samples": (1 << 48) - 1000},
        {"num_targets": 1 << 20},
        {"norm": math.inf},
        {"norm": -1.0},
        {"num_samples": 0, "num_targets": 0},
    ],
)
def test_a_leader_that_names_impossible_counts_is_refused(setting: str, lie: dict[str, float]) -> None:
    with pytest.raises(MalformedMessage, match="the contribution of liar is"):
        shares_of([_named("honest"), _named("liar", **lie)], make_config(setting), Block(0))


@pytest.mark.parametrize("setting", ["synchronous", "diloco"])
def test_a_member_with_more_than_can_count_takes_part_with_what_can(setting: str) -> None:
    config = make_config(setting)
    much = Counts(num_samples=1 << 30, num_targets=3 << 29, round_samples=1 << 20, norm=1.0)
    bounded = much.bounded(config, Block(0))
    assert (bounded.round_samples, bounded.num_samples) == (
        most_samples(config, Block(0)), most_rounds(config) * most_samples(config, Block(0))
    )  # fmt: skip
    assert bounded.num_targets == 3 * bounded.num_samples // 2
    assert bounded.bounded(config, Block(0)) == bounded
    assert not bounded.fault(config, Block(0))
    assert much.fault(config, Block(0))
