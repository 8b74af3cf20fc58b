"""The train loop that one would write with torch alone (DistributedDataParallel), for the bench `methods`.

torch.distributed.run starts it.
"""

import contextlib
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from scripts.benches.shared.common import compute_like_peers, with_corpus
from scripts.benches.sides.reference import torch_adamw
from swarm import config as configs
from swarm.model.stages import build_stage
from swarm.training.samples import TOKENS


def main(path: Path, num_steps: int, metrics: Path) -> None:
    compute_like_peers()
    dist.init_process_group("gloo")
    rank, num_workers = dist.get_rank(), dist.get_world_size()
    config, data = with_corpus(configs.load(path))
    model = DistributedDataParallel(build_stage(config, 0, device="cpu"), gradient_as_bucket_view=True)
    optimizer = torch_adamw(model.module, config.gradient_step)
    own = range(rank, config.microbatches_per_round, num_workers)
    ended_at = time.perf_counter()
    for step in range(num_steps):
        total = torch.zeros(1)
        for number in own:
            tokens = data.samples(step * config.microbatches_per_round + number)[TOKENS].long()
            # Gradients are averaged once, with the last microbatch.
            with model.no_sync() if number != own[-1] else contextlib.nullcontext():
                loss = model(tokens[:, :-1], dropout_key=None, targets_BT=tokens[:, 1:])
                loss = loss / (len(own) * tokens[:, 1:].numel())
                loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        seconds, ended_at = time.perf_counter() - ended_at, time.perf_counter()
        if rank == 0:
            row = {"step": step + 1, "train/loss": float(total) / num_workers, "train/step_time": seconds}
            with metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
