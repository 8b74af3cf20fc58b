"""The kinds of hops between the stages of a chain."""

import pytest

from tests.support import chain


@pytest.fixture(params=["grpc", "local"])
def hops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test twice: with a process for each peer, and with processes that serve a block of every stage."""
    monkeypatch.setattr(chain.SPANS, "by_default", request.param == "local")
