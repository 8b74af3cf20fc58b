"""The kinds of hops between the stages of a chain."""

import pytest

from tests.support import chain


@pytest.fixture(params=["grpc", pytest.param("local", marks=pytest.mark.slow)])
def hops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test twice: with a process for each peer, and with processes that serve a block of every stage. The latter
    is slow, since tests/rpc/test_local and test_local_hop have that such a hop is one over gRPC."""
    monkeypatch.setattr(chain.SPANS, "by_default", request.param == "local")
