"""By which way others will reach a machine, and ports that cannot be had."""

import socket
from collections.abc import Sequence

import pytest

from peers.doctor.finding import State
from peers.doctor.ports import Ports, from_outside, judge, unasked
from peers.reach.inquiry import Verdict
from scripts.benches.shared.ports import free_ports
from swarm.credentials.identity import generate
from swarm.machine.clock import SystemClock
from swarm.rpc.channels import ChannelPool
from swarm.rpc.v1 import meeting_pb2 as pb
from swarm.types import PeerRecord, PeerState
from tests.support.meeting import meeting_point


def _verdict(num_asked: int, endpoints: Sequence[str] = (), dht_endpoints: Sequence[str] = ()) -> Verdict:
    reply = pb.CheckReply(observed_host="203.0.113.7", endpoints=endpoints, dht_endpoints=dht_endpoints)
    return Verdict.of(pb.CheckRequest(endpoints=[":5001"], dht_endpoints=[":5002"]), [reply] * num_asked)


@pytest.mark.parametrize("host", ["::1", "127.0.0.1"])
def test_no_firewall_is_to_be_opened_for_a_host_that_only_this_machine_reaches(host: str) -> None:
    grpc, _ = judge(5001, 5002, _verdict(1), host=host)
    assert "firewall" not in grpc.text
    assert grpc.text.endswith(
        f"Only this machine can reach --host {host}: leave --host out, and others reach all of its addresses"
    )


def test_a_port_in_use_is_wrong_and_the_other_is_left_to_others() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        found = {finding.what: finding for finding in unasked(Ports(host="127.0.0.1", port=0, dht_port=port))}
    assert found["DHT port"].state is State.WRONG
    assert f"--dht-port {port} cannot be had: Address already in use; choose another port" in found["DHT port"].text
    assert found["gRPC port"].state is State.NOT_CHECKED


@pytest.mark.parametrize("host", ["", "127.0.0.1"])
def test_a_port_that_was_left_open_is_a_free_one(host: str) -> None:
    ports = Ports(host=host, port=0, dht_port=0)
    assert not ports.taken
    assert all(port > 0 for port in ports.free())


async def test_one_port_for_both_is_dialled_back_as_two() -> None:
    (port,) = free_ports(1)
    ports, own, other, channels = (
        Ports(host="127.0.0.1", port=port, dht_port=port),
        generate(),
        generate(),
        ChannelPool(),
    )
    async with meeting_point(other) as host:
        record = PeerRecord(
            peer_id=other.peer_id, announced_at=0.0, stage=0, endpoint=host.entry.endpoint,
            certificate_pem=other.certificate_pem, state=PeerState.SERVING,
        )  # fmt: skip
        try:
            found = await from_outside(ports, [record], channels, own, SystemClock())
        finally:
            await channels.close()
    assert [finding.text.split(",")[0] for finding in found] == [f"127.0.0.1:{port} is reached from outside"] * 2
