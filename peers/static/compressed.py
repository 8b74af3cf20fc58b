"""Gradients averaged with a swarm's codecs: a communication hook for DDP, with error feedback.

Made by program.py. All gradients are one vector, laid out as a swarm's stage lays out its own. With a sparse codec and
few workers, each worker gets the encoded vectors of all others (gather). Otherwise each worker sums one part of the
vector for all (butterfly), as the members of a swarm's round do. docs/protocol.md has the sizes.

Shapes: D elements of the vector, P of a part.
"""

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from peers.static.spread import Spread
from peers.static.workers import Workers
from swarm.averaging.vectors.feedback import ErrorFeedback, Residual
from swarm.compression import buffers
from swarm.compression.buffers import Buffer
from swarm.compression.codec import contribution_codec, result_codec
from swarm.config import AveragingConfig


class CompressedAverage:
    """One worker's side of the average."""

    def __init__(self, model: Spread, config: AveragingConfig, workers: Workers) -> None:
        """Have the model's DDP average with a codec from now on."""
        self._num_sent = 0
        self._names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.parameters.items()}
        self._group = workers.mesh.get_group("dp")
        self._num_workers, self._place = workers.shape.dp, workers.place("dp")
        self._codec, self._result_codec = contribution_codec(config), result_codec(config)
        self._gathers = self._codec.is_sparse and self._num_workers <= config.gather_members
        self._feedback = ErrorFeedback(config.feedback_decay)
        assert isinstance(model.module, DistributedDataParallel)
        model.module.register_comm_hook(None, self._hook)

    def bytes_sent(self) -> int:
        """The bytes that this worker has sent since the last call."""
        num_sent, self._num_sent = self._num_sent, 0
        return num_sent

    def _hook(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket's gradients. DDP calls this once the bucket is full; there is one bucket, which has all
        gradients."""
        pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
        gradients = {self._names[parameter]: gradient for parameter, gradient in pairs}
        tiled = self._codec.tile == buffers.TILE
        # The vector is padded with zeros, so that all parts have the same number of whole tiles.
        num_elements = sum(gradient.numel() for gradient in gradients.values())
        unit = self._codec.tile * self._num_workers
        vector_D = torch.zeros(-(-num_elements // unit) * unit)
        (buffers.flatten if tiled else buffers.concatenate)(gradients, vector_D[:num_elements])
        vector_D = self._feedback.compensate(vector_D)
        average_D = (self._gather if self._gathers else self._butterfly)(vector_D)[:num_elements]
        for name, average in (buffers.unflatten if tiled else buffers.cut)(average_D, gradients).items():
            gradients[name].copy_(average)
        averaged = torch.futures.Future[torch.Tensor]()
        averaged.set_result(bucket.buffer())
        return averaged

    def _gather(self, vector_D: torch.Tensor) -> torch.Tensor:
        encoded = self._codec.encode(vector_D)
        contributions = [self._codec.decode(other, len(vector_D)) for other in self._all_of(encoded)]
        self._keep(vector_D - contributions[self._place], slice(0, 0), None)
        return torch.stack(contributions).sum(dim=0) / self._num_workers

    def _butterfly(self, vector_D: torch.Tensor) -> torch.Tensor:
        length = len(vector_D) // self._num_workers
        own = slice(self._place * length, (self._place + 1) * length)
        encoded = [self._codec.encode(part_P) for part_P in torch.split(vector_D, length)]
        residual_D = vector_D - torch.cat([self._codec.decode(part, length) for part in encoded])
        parts = [self._codec.decode(part, length) for part in self._exchanged(encoded)]
        # A worker's own part does not travel, so it is summed without encoding.
        parts[self._place], residual_D[own] = vector_D[own], 0.0
        sum_P = torch.stack(parts).sum(dim=0) / self._num_workers
        if (owed_P := self._feedback.owed(own)) is not None:
            sum_P += owed_P
        result = self._result_codec.encode(sum_P)
        self._keep(residual_D, own, sum_P - self._result_codec.decode(result, length))
        return torch.cat([self._result_codec.decode(part, length) for part in self._all_of(result)])

    def _keep(self, residual_D: torch.Tensor, part: slice, sum_P: torch.Tensor | None) -> None:
        if self._codec.needs_feedback:
            self._feedback.commit(Residual(contribution_D=residual_D, part=part, sum_P=sum_P))

    def _all_of(self, own: Buffer) -> list[Buffer]:
        """The buffers of all workers, which are of equal size."""
        bytes_N = _tensor(own)
        received = [torch.empty_like(bytes_N) for _ in range(self._num_workers)]
        dist.all_gather(received, bytes_N, group=self._group)
        self._num_sent += len(bytes_N) * (self._num_workers - 1)
        return [each.numpy().data for each in received]

    def _exchanged(self, parts: list[Buffer]) -> list[Buffer]:
        """Send each worker its part, and return the parts that all workers have for this one. All are of equal size."""
        sent_N = torch.cat([_tensor(part) for part in parts])
        received_N = torch.empty_like(sent_N)
        dist.all_to_all_single(received_N, sent_N, group=self._group)
        length = len(sent_N) // self._num_workers
        self._num_sent += length * (self._num_workers - 1)
        return [part_N.numpy().data for part_N in torch.split(received_N, length)]


def _tensor(buffer: Buffer) -> torch.Tensor:
    view = memoryview(buffer).cast("B")
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)
