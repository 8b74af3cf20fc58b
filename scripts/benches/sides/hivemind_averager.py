"""A process with hivemind's averagers, for the bench `allreduce`, which gives it orders."""

import asyncio
import time
from pathlib import Path
from typing import Any

import hivemind
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.control import AveragingStage, StepControl
from hivemind.compression import CompressionBase, Float16Compression, Uniform8BitQuantization

from scripts.benches.shared.common import compute_like_peers, write_json
from scripts.benches.sides.averaging_peer import READY_FILE, as_tensors, obey, values

CODECS: dict[str, CompressionBase] = {"8bit": Uniform8BitQuantization(), "fp16": Float16Compression()}
MATCHMAKING_SECONDS, REQUEST_SECONDS = 1.0, 0.5  # The shortest times with which a group of four still finds each other
POLL_SECONDS = 0.01
STEP_SECONDS = 60.0  # After this time hivemind gives up a step. This is the default of hivemind's own optimizer.
CHUNK_SECONDS = 5.0
"""After this time without a message from a member, hivemind goes on without the member. The round with a kill needs
this. hivemind's default is 15."""


class HivemindPeer:
    def __init__(self, number: int, num_peers: int, num_parameters: int, dht: hivemind.DHT) -> None:
        self._tensors = as_tensors(values(number, num_parameters))
        self._averagers = {
            codec: DecentralizedAverager(
                as_tensors(torch.zeros(num_parameters)), dht, prefix=f"bench-{codec}", target_group_size=num_peers,
                min_group_size=num_peers, min_matchmaking_time=MATCHMAKING_SECONDS, request_timeout=REQUEST_SECONDS,
                allreduce_timeout=STEP_SECONDS, next_chunk_timeout=CHUNK_SECONDS, compression=compression,
                allow_state_sharing=False, start=True,
            )
            for codec, compression in CODECS.items()
        }  # fmt: skip
        self._active: DecentralizedAverager
        self._control: StepControl
        self._reply: dict[str, Any] = {}

    async def prepare(self, codec: str) -> None:
        self._active = self._averagers[codec]
        with self._active.get_tensors() as own:
            for tensor, value in zip(own, self._tensors, strict=True):
                tensor.copy_(value)
        started_at = time.monotonic()
        self._control = self._active.step(wait=False, require_trigger=True, timeout=STEP_SECONDS)
        while self._control.stage is not AveragingStage.AWAITING_TRIGGER:
            if self._control.done():
                self._control.result()
            await asyncio.sleep(POLL_SECONDS)
        self._reply = {"matchmaking_seconds": time.monotonic() - started_at, "error": ""}

    async def start(self, at: float) -> None:
        """Begin to average at that time of the clock, and return when the average is done."""
        await asyncio.sleep(at - time.monotonic())
        self._control.allow_allreduce()
        try:
            self._reply["num_members"] = len(self._control.result())
        except Exception as error:  # noqa: BLE001 - whatever it raises is what its survivors are told
            self._reply["error"] = f"{type(error).__name__}: {error}"
        self._reply["seconds"] = time.monotonic() - at

    async def finish(self) -> dict[str, Any]:
        return self._reply

    def held(self) -> list[torch.Tensor]:
        with self._active.get_tensors() as held:
            return [tensor.clone() for tensor in held]


def main(folder: Path, number: int, num_peers: int, num_parameters: int, *addresses: str) -> None:
    compute_like_peers()
    dht = hivemind.DHT(initial_peers=list(addresses), host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)
    peer = HivemindPeer(number, num_peers, num_parameters, dht)
    write_json(folder / READY_FILE, {"addresses": [str(address) for address in dht.get_visible_maddrs()]})
    asyncio.run(obey(folder, peer, num_parameters))
