"""A process that trains stages served by hivemind.moe, through RemoteExpert.

    python -m scripts.benches.sides.moe_trainer CONFIG RESULTS STEPS ADDRESS...

The trainer for moe_stage. Several threads have one microbatch each under way, so that both stages always have work.
Each turn (see ../shared/turns.py) trains STEPS rounds.
"""

import itertools
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hivemind
import torch
from hivemind.moe.client.expert import create_remote_experts
from hivemind.moe.expert_uid import ExpertInfo
from hivemind.p2p import PeerID

from scripts.benches.shared.common import compute_like_peers, with_corpus
from scripts.benches.shared.turns import take_turns
from scripts.benches.sides.moe_stage import expert_name
from swarm import config as configs

NUM_THREADS = 6
"""Microbatches under way."""


def main(config_path: Path, results: Path, steps: int, addresses: list[str]) -> None:
    """Train in each turn of this side, until killed.

    Args:
        addresses: the addresses of each stage's server, in order.
    """
    compute_like_peers()
    config, data = with_corpus(configs.load(config_path))
    dht = hivemind.DHT(initial_peers=addresses, host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)
    servers = [PeerID.from_base58(address.rsplit("/", 1)[1]) for address in addresses]
    infos = [ExpertInfo(expert_name(stage), server) for stage, server in enumerate(servers)]
    *stages, last = create_remote_experts(infos, dht)
    numbers = itertools.count()

    def train(index: int) -> None:
        tokens_BT1 = torch.from_numpy(data.tokens(index)).long()
        hidden = tokens_BT1[:, :-1]
        for stage in stages:
            hidden = stage(hidden)
        last(hidden, tokens_BT1[:, 1:]).mean().backward()

    with ThreadPoolExecutor(NUM_THREADS) as threads:

        def work(rounds: int = steps) -> None:
            for number in itertools.islice(numbers, rounds):
                size = config.microbatches_per_round
                list(threads.map(train, range(number * size, (number + 1) * size)))

        work(1)
        take_turns(results, work)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
