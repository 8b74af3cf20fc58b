"""What must be set before anything imports grpc, hivemind or torch, as the programs do it."""

import os

from peers.shared.process import prepare_environment

prepare_environment()
os.environ.setdefault("OMP_NUM_THREADS", "1")
