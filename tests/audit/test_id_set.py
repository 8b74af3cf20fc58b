"""IdSet against Python's own set."""

from hypothesis import given
from hypothesis import strategies as st

from swarm.audit.id_set import IdSet

IDS = st.sets(st.integers(0, 40))


@given(left=IDS, right=IDS, start=st.integers(0, 40), length=st.integers(1, 20))
def test_it_is_a_set(left: set[int], right: set[int], start: int, length: int) -> None:
    ids, other = IdSet(left), IdSet(right)
    assert list(ids) == sorted(left)
    assert len(ids) == len(left)
    assert set(ids.common(other)) == left & right
    assert set(ids.without(other)) == left - right
    both = ids.copy()
    both.update(other)
    assert set(both) == left | right
    assert set(ids) == left
    ids.add_range(start, start + length)
    assert set(ids) == left | set(range(start, start + length))
    ends = [end for _, end in ids.ranges()]
    assert all(end < later for end, (later, _) in zip(ends, list(ids.ranges())[1:], strict=False)), (
        "ranges that touch are one"
    )


def test_its_size_goes_with_the_gaps() -> None:
    ids = IdSet()
    for index in range(100_000):
        ids.add(index)
    assert list(ids.ranges()) == [(0, 100_000)]
