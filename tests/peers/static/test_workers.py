"""Meeting other workers, and losing one."""

import pytest
import torch
import torch.distributed as dist

from peers.static.workers import Shape, joined
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


def test_a_worker_that_is_alone_has_lost_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="shapes"):
        _raise_among(1, RuntimeError("shapes cannot be multiplied"), monkeypatch)


def _raise_among(num_workers: int, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    with joined(Shape(dp=1, tp=1, pp=1), torch.device("cpu"), {}) as workers:
        assert workers.total(1.0, 2.0) == [1.0, 2.0]
        monkeypatch.setattr(dist, "get_world_size", lambda: num_workers)
        raise error
