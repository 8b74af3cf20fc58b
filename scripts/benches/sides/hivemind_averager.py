"""A process with hivemind's averagers, for the bench `allreduce`, which gives it orders.

python -m scripts.benches.sides.hivemind_averager FOLDER NUMBER NUM_PEERS NUM_PARAMETERS [DHT_ADDRESS...]
"""

import sys
import time
from pathlib import Path
from typing import Any

import hivemind
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.control import AveragingStage, StepControl
from hivemind.compression import CompressionBase, Float16Compression, Uniform8BitQuantization

from scripts.benches.shared.common import compute_like_peers, write_json
from scripts.benches.sides.averaging_peer import POLL_SECONDS, READY_FILE, Orders, as_tensors, compare, values

CODECS: dict[str, CompressionBase] = {"8bit": Uniform8BitQuantization(), "fp16": Float16Compression()}
MATCHMAKING_SECONDS, REQUEST_SECONDS = 1.0, 0.5  # The shortest times with which a group of four still finds each other
STEP_SECONDS = 60.0  # After this time hivemind gives up a step. This is the default of hivemind's own optimizer.
CHUNK_SECONDS = 5.0
"""After this time without a message from a member, hivemind goes on without the member. The round with a kill needs
this. hivemind's default is 15."""


class CodecPeer:
    """The averager of one codec."""

    def __init__(self, codec: str, num_peers: int, num_parameters: int, dht: hivemind.DHT) -> None:
        self.averager = DecentralizedAverager(
            as_tensors(torch.zeros(num_parameters)), dht, prefix=f"bench-{codec}", target_group_size=num_peers,
            min_group_size=num_peers, min_matchmaking_time=MATCHMAKING_SECONDS, request_timeout=REQUEST_SECONDS,
            allreduce_timeout=STEP_SECONDS, next_chunk_timeout=CHUNK_SECONDS, compression=CODECS[codec],
            allow_state_sharing=False, start=True,
        )  # fmt: skip
        self._control: StepControl
        self._matchmaking_seconds = 0.0
        self._reply: dict[str, Any] = {}

    def prepare(self, tensors: list[torch.Tensor]) -> None:
        with self.averager.get_tensors() as own:
            for tensor, value in zip(own, tensors, strict=True):
                tensor.copy_(value)
        started_at = time.monotonic()
        self._control = self.averager.step(wait=False, require_trigger=True, timeout=STEP_SECONDS)
        while self._control.stage is not AveragingStage.AWAITING_TRIGGER:
            if self._control.done():
                self._control.result()
            time.sleep(POLL_SECONDS)
        self._matchmaking_seconds = time.monotonic() - started_at

    def start(self, at: float) -> None:
        """Begin to average at that time of the clock, and return when the average is done."""
        time.sleep(at - time.monotonic())
        self._control.allow_allreduce()
        self._reply = {"matchmaking_seconds": self._matchmaking_seconds, "error": ""}
        try:
            self._reply["num_members"] = len(self._control.result())
        except Exception as error:  # noqa: BLE001 - whatever it raises is what its survivors are told
            self._reply["error"] = f"{type(error).__name__}: {error}"
        self._reply["seconds"] = time.monotonic() - at

    def finish(self) -> dict[str, Any]:
        return self._reply


def main(folder: Path, number: int, num_peers: int, num_parameters: int, addresses: list[str]) -> None:
    compute_like_peers()
    dht = hivemind.DHT(initial_peers=addresses, host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)
    peers = {codec: CodecPeer(codec, num_peers, num_parameters, dht) for codec in CODECS}
    own = as_tensors(values(number, num_parameters))
    write_json(folder / READY_FILE, {"addresses": [str(address) for address in dht.get_visible_maddrs()]})
    orders, active = Orders(folder), peers["fp16"]
    while True:
        if (order := orders.poll()) is None:
            time.sleep(POLL_SECONDS)
            continue
        reply: dict[str, Any] = {}
        match order["name"]:
            case "prepare":
                active = peers[order["codec"]]
                active.prepare(own)
            case "start":
                active.start(order["at"])
            case "finish":
                reply = active.finish()
            case "compare":
                with active.averager.get_tensors() as held:
                    reply = compare(held, order["means"], num_parameters)
        orders.answer(reply)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
