"""Processes of hivemind.moe, with which the benches `hop` and `peers` compare a swarm.

    moe identity READY_FILE NUM_POSITIONS WIDTH
    moe stage READY_FILE CONFIG STAGE [ADDRESS]
    moe train CONFIG RESULTS ADDRESS...

The first serves an expert that does nothing, the second a stage of the model; both write their DHT's addresses to
READY_FILE once they serve. The third trains such stages through RemoteExpert, in turns.
"""

import itertools
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import util
from pathlib import Path
from typing import Any

import hivemind
import torch
import torch.nn.functional as F
from hivemind.moe import ModuleBackend, Server
from hivemind.moe.client.expert import create_remote_experts
from hivemind.moe.expert_uid import ExpertInfo
from hivemind.p2p import PeerID
from hivemind.utils.tensor_descr import BatchTensorDescriptor
from torch import Tensor, nn

from scripts.benches.shared.common import compute_like_peers, with_corpus, write_json
from scripts.benches.shared.paired import take_turns
from scripts.benches.sides.reference import BareStage, torch_adamw
from swarm import config as configs
from swarm.config import RunConfig

EXPERT = "identity.0"
MAX_BATCH_SAMPLES = 64
IDENTITY_HANDLERS, STAGE_HANDLERS = 4, 2
"""Handler processes of an expert: hivemind recommends four, and two stages share two cores."""
NUM_THREADS = 6  # Microbatches that the trainer has under way


def serve(backend: ModuleBackend, ready_file: Path, num_handlers: int, initial_peers: Sequence[str] = ()) -> None:
    """Serve one expert until killed."""
    compute_like_peers()
    # hivemind forks while its threads run. If one of them holds tempfile's lock at that moment, the child waits for it
    # for ever. tempfile takes the lock only at its first use, so it is used here first.
    util.get_temp_dir()
    dht = hivemind.DHT(initial_peers=list(initial_peers), host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)
    Server(dht, {backend.name: backend}, num_connection_handlers=num_handlers, start=True)
    write_json(ready_file, {"addresses": [str(address) for address in dht.get_visible_maddrs()]})
    signal.pause()


def build_identity(num_positions: int, width: int) -> ModuleBackend:
    hidden = BatchTensorDescriptor(num_positions, width)
    return ModuleBackend(
        EXPERT, torch.nn.Identity(), args_schema=(hidden,), outputs_schema=hidden, max_batch_size=MAX_BATCH_SAMPLES
    )


class LastStage(nn.Module):
    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, hidden_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        """Each sample's mean loss, shape (B, 1)."""
        losses_BT = F.cross_entropy(self.stage(hidden_BTD).transpose(1, 2), targets_BT, reduction="none")
        return losses_BT.mean(dim=1, keepdim=True)


class RoundBackend(ModuleBackend):  # type: ignore[misc]  # hivemind has no annotations
    """A module whose optimizer takes a step for each round."""

    def __init__(self, name: str, module: nn.Module, *, round_samples: int, **kwargs: Any) -> None:
        super().__init__(name, module, **kwargs)
        self._round_samples = round_samples
        self._num_samples = 0

    def on_backward(self, batch_size: int) -> None:
        self._num_samples += batch_size
        if self._num_samples >= self._round_samples:
            self._num_samples = 0
            super().on_backward(batch_size)


def _expert_name(stage: int) -> str:
    return f"stage.{stage}"


def build_stage(config: RunConfig, stage: int) -> RoundBackend:
    """A stage of the model, with the swarm's own loss and optimizer. The last one returns the loss of each sample."""
    module = BareStage(config, stage)
    length = config.data.sequence_length
    tokens = BatchTensorDescriptor(length, dtype=torch.int64)
    hidden = BatchTensorDescriptor(length, config.model.d_model)
    is_last = stage == config.stages.num_stages - 1
    return RoundBackend(
        _expert_name(stage), LastStage(module) if is_last else module, round_samples=config.rounds.round_samples,
        optimizer=torch_adamw(module, config.gradient_step), args_schema=(hidden, tokens) if is_last else (tokens,),
        outputs_schema=BatchTensorDescriptor(1) if is_last else hidden, max_batch_size=4 * config.data.microbatch_size,
    )  # fmt: skip


def train(config_path: Path, results: Path, addresses: Sequence[str]) -> None:
    """Train a round in each turn, until killed. `addresses` are those of each stage's server, in order."""
    compute_like_peers()
    config, data = with_corpus(configs.load(config_path))
    dht = hivemind.DHT(initial_peers=list(addresses), host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)
    servers = [PeerID.from_base58(address.rsplit("/", 1)[1]) for address in addresses]
    infos = [ExpertInfo(_expert_name(stage), server) for stage, server in enumerate(servers)]
    *stages, last = create_remote_experts(infos, dht)
    numbers = itertools.count()

    def microbatch(index: int) -> None:
        tokens_BT1 = torch.from_numpy(data.tokens(index)).long()
        hidden = tokens_BT1[:, :-1]
        for stage in stages:
            hidden = stage(hidden)
        last(hidden, tokens_BT1[:, 1:]).mean().backward()

    with ThreadPoolExecutor(NUM_THREADS) as threads:

        def work() -> None:
            number, size = next(numbers), config.microbatches_per_round
            list(threads.map(microbatch, range(number * size, (number + 1) * size)))

        work()
        take_turns(results, work)


def main(role: str, first: Path, *rest: str) -> None:
    if role == "identity":
        serve(build_identity(int(rest[0]), int(rest[1])), first, IDENTITY_HANDLERS)
    elif role == "stage":
        serve(build_stage(configs.load(Path(rest[0])), int(rest[1])), first, STAGE_HANDLERS, rest[2:])
    else:
        train(first, Path(rest[0]), rest[1:])
