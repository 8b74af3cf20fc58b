"""Meeting other workers, and losing one."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from peers.static import workers
from peers.static.workers import Shape, interface_to_others, joined, num_threads
from swarm.errors import PeerUnavailable


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("Connection closed by peer"), PeerUnavailable),
        (dist.DistBackendError("NCCL error"), PeerUnavailable),
        (torch.OutOfMemoryError("CUDA out of memory."), torch.OutOfMemoryError),
        (NotImplementedError("no such operation"), NotImplementedError),
    ],
)
def test_what_an_exchange_raises_is_a_lost_worker(
    error: Exception, expected: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(expected):
        _raise_among(2, error, monkeypatch)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, 8),
        ({"OMP_NUM_THREADS": "1"}, None),
        ({"LOCAL_WORLD_SIZE": "3", "TORCHELASTIC_RUN_ID": "x", "OMP_NUM_THREADS": "1"}, 2),
        ({"LOCAL_WORLD_SIZE": "16", "TORCHELASTIC_RUN_ID": "x", "OMP_NUM_THREADS": "1"}, 1),
        ({"LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "x", "OMP_NUM_THREADS": "4"}, None),
    ],
)
def test_workers_share_a_machine_s_cores_unless_the_user_says_otherwise(
    environment: dict[str, str], expected: int | None
) -> None:
    assert num_threads(environment, 8) == expected


def test_a_worker_that_is_alone_has_lost_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="shapes"):
        _raise_among(1, RuntimeError("shapes cannot be multiplied"), monkeypatch)


def test_a_worker_on_mps_is_alone_in_its_mesh() -> None:
    with joined(Shape(dp=1, tp=1, pp=1), torch.device("mps"), {}) as joined_workers:
        assert joined_workers.total(1.0, 2.0) == [1.0, 2.0]
        assert [joined_workers.place(axis) for axis in ("pp", "dp", "tp")] == [0, 0, 0]


def _raise_among(num_workers: int, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    with joined(Shape(dp=1, tp=1, pp=1), torch.device("cpu"), {}) as workers:
        assert workers.total(1.0, 2.0) == [1.0, 2.0]
        monkeypatch.setattr(dist, "get_world_size", lambda: num_workers)
        raise error


def _interfaces(**addresses: str) -> Any:
    return {name: [SimpleNamespace(address=address)] for name, address in addresses.items()}


@pytest.mark.parametrize(
    ("environment", "ways", "expected"),
    [
        ({}, {"": "192.0.2.7", "192.0.2.1": "192.0.2.7"}, None),
        ({"MASTER_ADDR": "10.0.0.1"}, {"10.0.0.1": "10.0.0.2"}, "eth1"),
        # The first worker's machine knows itself as 127.0.1.1.
        ({"MASTER_ADDR": "127.0.1.1"}, {"127.0.1.1": "127.0.0.1", "192.0.2.1": "192.168.1.5"}, "eth0"),
        ({"MASTER_ADDR": "127.0.1.1"}, {"127.0.1.1": "127.0.0.1"}, None),
        ({"MASTER_ADDR": "10.0.0.1", "GLOO_SOCKET_IFNAME": "mine"}, {"10.0.0.1": "10.0.0.2"}, None),
    ],
)
def test_gloo_is_told_by_which_interface_the_other_machines_are_reached(
    environment: dict[str, str], ways: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def own_host(family: int, towards: tuple[str, int]) -> str:
        if towards[0] not in ways:
            raise OSError("no way")
        return ways[towards[0]]

    monkeypatch.setattr(workers, "own_host", own_host)
    sizes = {"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "2"} if environment else {}
    found = interface_to_others(environment | sizes, _interfaces(lo="127.0.0.1", eth0="192.168.1.5", eth1="10.0.0.2"))
    assert found == expected
