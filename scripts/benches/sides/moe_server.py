"""A process in which hivemind.moe serves an expert that does nothing. The hop bench compares our hop with it.

    python -m scripts.benches.sides.moe_server READY_FILE NUM_POSITIONS WIDTH

Writes its DHT addresses to READY_FILE once it serves, and goes on until killed.
"""

import signal
import sys
from collections.abc import Sequence
from multiprocessing import util
from pathlib import Path

import hivemind
import torch
from hivemind.moe import ModuleBackend, Server
from hivemind.utils.tensor_descr import BatchTensorDescriptor

from scripts.benches.shared.common import compute_like_peers, write_json

EXPERT = "identity.0"
MAX_BATCH_SAMPLES = 64
NUM_HANDLERS = 4
"""The number of handler processes that hivemind recommends for an expert."""


def serve(
    backend: ModuleBackend, ready_file: Path, initial_peers: Sequence[str] = (), num_handlers: int = NUM_HANDLERS
) -> None:
    """Serve one expert, write the DHT's addresses to `ready_file`, and go on until killed."""
    compute_like_peers()
    # hivemind forks while its threads run. If one of them holds tempfile's lock at that moment, the child waits for it
    # for ever. tempfile takes the lock only at its first use, so it is used here first.
    util.get_temp_dir()
    dht = hivemind.DHT(initial_peers=list(initial_peers), host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)
    Server(dht, {backend.name: backend}, num_connection_handlers=num_handlers, start=True)
    write_json(ready_file, {"addresses": [str(address) for address in dht.get_visible_maddrs()]})
    signal.pause()


def main(ready_file: Path, num_positions: int, width: int) -> None:
    """Serve one torch.nn.Identity for hidden states [B, num_positions, width], until killed."""
    expert = ModuleBackend(
        EXPERT,
        torch.nn.Identity(),
        args_schema=(BatchTensorDescriptor(num_positions, width),),
        outputs_schema=BatchTensorDescriptor(num_positions, width),
        max_batch_size=MAX_BATCH_SAMPLES,
    )
    serve(expert, ready_file)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
