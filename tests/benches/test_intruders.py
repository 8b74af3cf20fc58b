"""The bench `intruders`: its intruders count the outcomes of their calls, and a harmless intruder makes the bench
fail."""

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from scripts.benches.intruders import KINDS, OWN_FAULTS, require_let_in
from scripts.benches.sides.intruder import Intruder
from swarm.errors import IntegrityError
from tests.support.chain import PATIENCE_SECONDS


@pytest.mark.parametrize(
    ("num_calls", "outcomes"),
    [
        (0, {}),
        (9, {"UNAUTHENTICATED": 5}),
        (9, {"UNIMPLEMENTED": 5, "UNAVAILABLE": 1, "UsageError": 1}),
        (9, {"PERMISSION_DENIED": 5}),
    ],
)
def test_an_intruder_that_is_turned_away_is_one_line(num_calls: int, outcomes: dict[str, int]) -> None:
    with pytest.raises(IntegrityError, match="the opens intruder does no harm: of its"):
        require_let_in("opens", num_calls, outcomes)


async def _tally(kind: str, tally: Path, *handlers: grpc.GenericRpcHandler) -> dict[str, Any]:
    """Run an intruder against a server with these services, and return its tally once one of its calls has ended."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(handlers)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        intruder = Intruder(channel, {"run_id": "run", "num_samples": 1})
        running = asyncio.create_task(intruder.run(kind, tally))
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not _read(tally).get("outcomes", {}).keys() - OWN_FAULTS:  # noqa: ASYNC110 - another task writes it
                await asyncio.sleep(0.05)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
    await server.stop(0)
    return _read(tally)


def _read(tally: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(tally.read_text()) if tally.exists() else {}
    return found


@pytest.mark.parametrize("kind", KINDS)
async def test_methods_that_are_not_there_are_told(kind: str, tmp_path: Path) -> None:
    found = await _tally(kind, tmp_path / "tally.json")
    assert found["calls"] > 0
    with pytest.raises(IntegrityError, match="UNIMPLEMENTED"):
        require_let_in(kind, found["calls"], found["outcomes"])
