"""By which way others will reach a machine, and ports that cannot be had."""

import socket

import pytest

from peers.doctor.finding import State
from peers.doctor.options import DoctorOptions
from peers.doctor.ports import from_outside, unasked
from peers.reach.listen import Outside
from scripts.benches.shared.ports import free_ports
from swarm.credentials.identity import generate
from swarm.machine.clock import SystemClock
from swarm.rpc.channels import ChannelPool
from swarm.types import PeerRecord, PeerState
from tests.support.meeting import meeting_point


def test_a_port_in_use_is_wrong_and_the_other_is_left_to_others() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        found = {finding.what: finding for finding in unasked(DoctorOptions(host="127.0.0.1", dht_port=port))}
    assert found["DHT port"].state is State.WRONG
    assert f"--dht-port {port} cannot be had: Address already in use; choose another port" in found["DHT port"].text
    assert found["gRPC port"].state is State.NOT_CHECKED


def test_the_dht_s_port_is_looked_for_where_a_peer_with_these_options_announces_it() -> None:
    announce = ("203.0.113.7:41001", "203.0.113.8")
    apart, one = (DoctorOptions(port=5001, dht_port=port, announce=announce) for port in (5002, 5001))
    assert apart.outside_dht == (Outside("203.0.113.7"), Outside("203.0.113.8"))
    assert one.outside_dht == one.outside == (Outside("203.0.113.7", 41001), Outside("203.0.113.8"))


def test_an_address_that_leads_nowhere_is_refused_as_by_a_peer() -> None:
    for text, fault in (("a:b:c", "takes HOST or HOST:PORT"), ("0.0.0.0", "0.0.0.0: this is no machine's address")):
        with pytest.raises(ValueError, match=f"^--announce {fault}"):
            DoctorOptions(announce=(text,))


async def test_one_port_for_both_is_dialled_back_as_two() -> None:
    (port,) = free_ports(1)
    options = DoctorOptions(host="127.0.0.1", port=port, dht_port=port)
    own, other, channels = generate(), generate(), ChannelPool()
    async with meeting_point(other) as host:
        record = PeerRecord(
            peer_id=other.peer_id, announced_at=0.0, stage=0, endpoint=host.entry.endpoint,
            certificate_pem=other.certificate_pem, state=PeerState.SERVING,
        )  # fmt: skip
        try:
            found = await from_outside(options, [record], channels, own, SystemClock())
        finally:
            await channels.close()
    assert [finding.text.split(",")[0] for finding in found] == [f"127.0.0.1:{port} is reached from outside"] * 2
