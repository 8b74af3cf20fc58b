"""A process that serves an expert which does nothing by hivemind.moe: what the hop bench compares ours with.

    python -m scripts.benches.moe_server READY_FILE NUM_POSITIONS WIDTH

Writes its DHT addresses to READY_FILE once it serves, and goes on until killed.
"""

import signal
import sys
from pathlib import Path

import hivemind
import torch
from hivemind.moe import ModuleBackend, Server
from hivemind.utils.tensor_descr import BatchTensorDescriptor

from scripts.benches.common import write_json

EXPERT = "identity.0"
MAX_BATCH_SAMPLES = 64


def main(ready_file: Path, num_positions: int, width: int) -> None:
    """Serve one torch.nn.Identity for hidden states [B, num_positions, width], until killed."""
    torch.set_num_threads(1)
    dht = hivemind.DHT(host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)
    expert = ModuleBackend(
        EXPERT,
        torch.nn.Identity(),
        args_schema=(BatchTensorDescriptor(num_positions, width),),
        outputs_schema=BatchTensorDescriptor(num_positions, width),
        max_batch_size=MAX_BATCH_SAMPLES,
    )
    # As many handlers as hivemind recommends for an expert.
    Server(dht, {EXPERT: expert}, num_connection_handlers=4, start=True)
    write_json(ready_file, {"addresses": [str(address) for address in dht.get_visible_maddrs()]})
    signal.pause()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
