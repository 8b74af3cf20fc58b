"""How much each caller may take of a peer."""

import pytest

from swarm.errors import Overloaded
from swarm.rpc.callers import (
    BURST_CALLS,
    CALLS_PER_SECOND,
    ENTRIES_PER_CALL,
    LONGEST_SECONDS,
    MOST_REMEMBERED,
    WASTED_CALLS,
    Caller,
    Callers,
    Quota,
    caller_of,
    token_or_address_of,
)
from tests.support import locked
from tests.support.manual_clock import ManualClock

ONE, OTHER = Caller("one"), Caller("other")


def test_no_caller_has_more_than_its_share_and_all_together_no_more_than_there_is() -> None:
    quota = Quota("sessions", 4)
    with quota.taken(ONE), quota.taken(ONE):
        with pytest.raises(Overloaded, match="no room for more sessions beside this caller's 2"):
            quota.take(ONE)
        with quota.taken(OTHER), quota.taken(Caller("third")):
            assert quota.total == 4
            with pytest.raises(Overloaded, match="no room for more sessions beside 4"):
                quota.take(Caller("fourth"))
            assert quota.total == 4
    assert quota.total == 0
    assert not quota.callers


def test_calls_beyond_a_rate_wait() -> None:
    clock = ManualClock()
    callers = Callers(clock, max_calls=10**6)
    assert max(callers.enter(ONE) for _ in range(BURST_CALLS)) == pytest.approx(0.0, abs=1e-9)
    assert callers.enter(ONE) == pytest.approx(1 / CALLS_PER_SECOND)
    assert callers.enter(ONE) == pytest.approx(2 / CALLS_PER_SECOND)
    assert callers.enter(OTHER) == 0.0
    clock.advance(1.0)
    later = [callers.enter(ONE) for _ in range(int(CALLS_PER_SECOND))]
    assert later[-3:] == pytest.approx([0.0, 1 / CALLS_PER_SECOND, 2 / CALLS_PER_SECOND], abs=1e-9)


def test_calls_that_come_to_nothing_count_more() -> None:
    callers = Callers(ManualClock())
    for _ in range(BURST_CALLS // WASTED_CALLS):
        assert callers.enter(ONE) == 0.0
        callers.leave(ONE, wasted=True)
    assert callers.enter(ONE) == pytest.approx(1 / CALLS_PER_SECOND)
    callers.leave(ONE, wasted=True)
    assert callers.enter(ONE) == pytest.approx((WASTED_CALLS + 1) / CALLS_PER_SECOND)
    assert callers.enter(OTHER) == 0.0


def test_long_lists_count_as_calls_of_their_own() -> None:
    clock = ManualClock()
    callers = Callers(clock, max_calls=10**6)
    for _ in range(BURST_CALLS // 10):
        assert callers.enter(ONE, 9 * ENTRIES_PER_CALL) == pytest.approx(0.0, abs=1e-9)
    assert callers.enter(ONE, ENTRIES_PER_CALL - 1) == pytest.approx(1 / CALLS_PER_SECOND)


def test_long_lists_are_refused_rather_than_not_counted_in_full() -> None:
    clock = ManualClock()
    callers = Callers(clock, max_calls=10**6)
    num_calls = 100
    num_entries = (num_calls - 1) * ENTRIES_PER_CALL
    in_time = BURST_CALLS + int(LONGEST_SECONDS * CALLS_PER_SECOND)
    for _ in range(in_time // num_calls):
        callers.enter(ONE, num_entries)
    for _ in range(3):
        with pytest.raises(Overloaded, match="wait 10 s already"):
            callers.enter(ONE, num_entries)
        assert callers.enter(ONE) == pytest.approx(LONGEST_SECONDS), "of ordinary calls no more is counted"
    assert callers.num_calls == in_time // num_calls + 3
    clock.advance(num_calls / CALLS_PER_SECOND)
    callers.enter(ONE, num_entries)
    with pytest.raises(Overloaded):
        callers.enter(ONE, num_entries)


def test_what_comes_back_by_itself() -> None:
    clock = ManualClock()
    quota = Quota("bytes", 100, per_second=10.0, clock=clock)
    quota.take(ONE, 25)
    quota.take(ONE, 25)
    assert not quota.fits(ONE)
    quota.take(OTHER, 50)
    assert not quota.fits(Caller("third")), "the others have all there is"
    clock.advance(2.5)
    assert (quota.held(ONE), quota.total, set(quota.callers)) == (25.0, 50.0, {ONE, OTHER})
    quota.take(ONE, 25)
    with pytest.raises(Overloaded, match="no room for more bytes beside this caller's 50"):
        quota.take(ONE)
    clock.advance(5.0)
    assert not quota.callers


def test_no_number_of_callers_fills_the_memory() -> None:
    clock = ManualClock()
    quota = Quota("calls", each=1, per_second=1.0, clock=clock)
    for number in range(2 * MOST_REMEMBERED):
        quota.take(Caller(str(number)))
        quota.wait_seconds(ONE, 1)
    assert len(quota.callers) == MOST_REMEMBERED
    assert quota.held(ONE) == 2 * MOST_REMEMBERED, "one that keeps taking is remembered"


def test_microbatches_have_room_of_their_own() -> None:
    """Slots bound the number of microbatches, but nothing bounds that of other calls, so they are counted apart."""
    callers = Callers(max_bytes=100)
    callers.kept[True].each = 1000
    callers.keep(ONE, 600, training=True)
    callers.keep(ONE, 60)
    callers.keep(ONE, 400, training=True)
    for training in (True, False):
        with pytest.raises(Overloaded) as refused:
            callers.keep(ONE, 60, training=training)
        assert refused.value.retry_after_seconds <= 0.1, "as for a slot: a call that ends makes room at once"
    assert callers.num_bytes == 1060
    callers.release(ONE, 1000, training=True)
    callers.release(ONE, 60)
    assert callers.num_bytes == 0


class _Context:
    def __init__(self, peer: str, chain_pem: str = "") -> None:
        self._peer = peer
        self._chain_pem = chain_pem

    def peer(self) -> str:
        return self._peer

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"x509_pem_cert": [self._chain_pem.encode()]} if self._chain_pem else {}


@pytest.mark.parametrize(
    ("peer", "caller"),
    [
        ("ipv4:192.0.2.1:5001", "ipv4:192.0.2.1"),
        ("ipv6:%5B2001:db8:0:7::1%5D:5001", "ipv6:[2001:db8:0:7::/64]"),
        ("ipv6:%5B2001:db8:0:7:8:9:a:b%5D:5001", "ipv6:[2001:db8:0:7::/64]"),
        ("ipv6:%5B2001:db8:0:8::1%5D:5001", "ipv6:[2001:db8:0:8::/64]"),
        ("ipv6:%5B::ffff:192.0.2.1%5D:5001", "ipv4:192.0.2.1"),
        ("ipv6:%5Bfe80::1%25eth0%5D:5001", "ipv6:[fe80::/64]"),
        ("ipv6:%5B::1%5D:5001", "ipv6:[::1]"),
        ("unix:", "unix"),
    ],
)
def test_callers_without_certificates_are_addresses(peer: str, caller: str) -> None:
    assert caller_of(_Context(peer)) == caller


def test_a_bearer_is_a_token_whatever_keys_it_is_used_with() -> None:
    one, another, trainer = (
        _Context("ipv4:192.0.2.1:5001", member.certificate_pem)
        for member in (locked.PEER, locked.OTHER_PEER, locked.TRAINER)
    )
    assert caller_of(one) != caller_of(another)
    assert token_or_address_of(one) == token_or_address_of(another)
    assert token_or_address_of(one) != token_or_address_of(trainer)
    assert token_or_address_of(_Context("ipv6:%5B2001:db8::1%5D:5001")) == "ipv6:[2001:db8::/64]"
