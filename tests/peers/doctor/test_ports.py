"""By which way others will reach a machine, and ports that cannot be had."""

import socket

import pytest

from peers.doctor.finding import State
from peers.doctor.ports import Ports, judge, unasked


def test_what_is_reached_is_told_with_its_address() -> None:
    grpc, dht = judge(5001, 5002, ["203.0.113.7:5001"], ["203.0.113.7:5002"], 2)
    assert grpc.text == "203.0.113.7:5001 is reached from outside, by 2 peers"
    assert dht.text == "203.0.113.7:5002 is reached from outside"


def test_what_is_not_reached_is_told_with_what_happens_then() -> None:
    grpc, dht = judge(5001, 5002, [], [], 1)
    assert grpc.text.startswith("1 peer got no answer at 5001: others will reach it by way of further peers. To be")
    assert dht.text == "no answer at 5002: this machine will ask the DHT, and not be asked"


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
