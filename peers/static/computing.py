"""The batches of one worker, and how it computes them: microbatch by microbatch, or as one stage of a pipeline.

Either way gradients are summed in the parameters, and only workers with the last stage know losses. During backward the
gradients are averaged over the axis dp: DDP does this with the last microbatch, and FSDP, which cuts gradients into
parts, with each microbatch.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from peers.static.spread import Spread
from peers.static.workers import Shape, Workers
from swarm.compression import buffers
from swarm.compression.buffers import Buffer
from swarm.compression.codec import contribution_codec, result_codec
from swarm.compression.feedback import ErrorFeedback, Owed, Residual
from swarm.config import AveragingConfig, RunConfig
from swarm.data.microbatches import Microbatches
from swarm.stage.staging import staging_of
from swarm.training import samples
from swarm.training.samples import NO_TARGET, TOKENS, Samples
from swarm.types import Block

NO_DROPOUT = -1
"""Used in the place of a microbatch's number where there must be no dropout."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Several microbatches.

    Attributes:
        inputs: for each microbatch, the arguments of a Part with all layers of the model.
        num_targets: how many targets all microbatches together have.
    """

    inputs: Sequence[dict[str, torch.Tensor]]
    num_targets: int


def microbatches_a_worker(config: RunConfig, shape: Shape) -> int:
    """How many microbatches each worker computes of a step: in a pipeline at least as many as it has stages."""
    return max(-(-config.microbatches_per_round // shape.dp), shape.pp)


class Batches:
    def __init__(self, config: RunConfig, data: Microbatches, workers: Workers) -> None:
        self._config = config
        self._data = data
        self._place, self._dp = workers.place("dp"), workers.shape.dp
        self._upload = staging_of(workers.device).upload
        self.size = microbatches_a_worker(config, workers.shape)

    def of_step(self, run_samples: int) -> Batch:
        """This worker's batch of the step before which the run has had so many samples. Steps follow each other in the
        text as a swarm's rounds do, also behind rounds of another size."""
        numbers = self._config.indices_after(run_samples, Block(0))[self._place :: self._dp]
        return self._batch([self._data.samples(number) for number in numbers], numbers)

    def of_evaluation(self, held_out: Sequence[Samples]) -> list[Batch]:
        """This worker's batches of held-out samples, without dropout. Every worker has the same number of batches."""
        num_batches = -(-len(held_out) // (self._dp * self.size))
        own = held_out[self._place :: self._dp]
        parts = [own[first * self.size : (first + 1) * self.size] for first in range(num_batches)]
        return [self._batch(part, [NO_DROPOUT] * len(part)) for part in parts]

    def _batch(self, found: Sequence[Samples], numbers: Sequence[int]) -> Batch:
        inputs = [self._inputs(one, number) for one, number in zip(found, numbers, strict=True)]
        if len(inputs) < self.size:
            filler = self._inputs(self._data.samples(0), NO_DROPOUT)
            filler["targets_BT"] = torch.full_like(filler["targets_BT"], NO_TARGET)
            inputs += [filler] * (self.size - len(inputs))
        return Batch(inputs=inputs, num_targets=sum(samples.amount(one).targets for one in found))

    def _inputs(self, found: Samples, number: int) -> dict[str, torch.Tensor]:
        tensors = {"inputs": found[TOKENS][:, :-1].long(), "targets_BT": samples.targets(found)}
        if (documents_BT := samples.documents(found)) is not None:
            tensors["documents_BT"] = documents_BT
        # The last microbatch of held-out samples may have fewer rows, so it is padded.
        rows = self._config.data.microbatch_size - len(tensors["inputs"])
        filled = {
            name: self._upload(F.pad(tensor, (0, 0, 0, rows), value=NO_TARGET if name == "targets_BT" else 0))
            for name, tensor in tensors.items()
        }
        return {**filled, "microbatch_1": torch.tensor([number])}


class OneByOne:
    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def backward(self, batch: Batch, weight: float) -> torch.Tensor:
        """Add the gradients of `weight` times the sum of all targets' losses, and return that product, a scalar."""
        losses, ddp = [], self._module if isinstance(self._module, DistributedDataParallel) else None
        for number, inputs in enumerate(batch.inputs, 1):
            is_last = number == len(batch.inputs)
            with contextlib.nullcontext() if ddp is None or is_last else ddp.no_sync():
                loss_1: torch.Tensor = self._module(**inputs) * weight
                loss_1.backward()  # type: ignore[no-untyped-call]  # torch does not annotate it
            losses.append(loss_1.detach())
        return torch.cat(losses).sum()

    def losses(self, batch: Batch) -> torch.Tensor:
        """The loss of each of the batch's N microbatches, summed over its targets [N], without gradients."""
        with torch.no_grad():
            return torch.cat([self._module(**inputs) for inputs in batch.inputs])


class Pipeline:
    """Computes one stage of several, which work on different microbatches at the same time."""

    def __init__(self, module: nn.Module, config: RunConfig, workers: Workers, num_microbatches: int) -> None:
        self._place, self._num_stages = workers.place("pp"), workers.shape.pp
        self._is_last = self._place == self._num_stages - 1
        self._needs_tokens = config.model.bottleneck_dim > 0
        rows, length, width = config.data.microbatch_size, config.data.sequence_length, config.model.hidden_width
        tokens_BT = torch.empty(rows, length, dtype=torch.int64, device="meta")
        hidden_BTR = torch.empty(rows, length, width, device="meta", requires_grad=True)
        stage = PipelineStage(
            module,
            self._place,
            self._num_stages,
            workers.device,
            input_args=tokens_BT if self._place == 0 else hidden_BTR,
            output_args=torch.empty(1, device="meta", requires_grad=True) if self._is_last else hidden_BTR,
            group=workers.mesh.get_group("pp"),
        )
        self._schedule = Schedule1F1B(stage, num_microbatches, loss_fn=_weighted, scale_grads=False)

    def backward(self, batch: Batch, weight: float) -> torch.Tensor:
        """Add gradients as OneByOne does. Return 0 unless this is the last stage."""
        losses: list[torch.Tensor] = []
        inputs, others = self._arguments(batch)
        self._schedule.step(*inputs, losses=losses, return_outputs=False, loss_kwargs={"weight": weight}, **others)
        return torch.stack(losses).detach().sum() if losses else torch.zeros(())

    def losses(self, batch: Batch) -> torch.Tensor:
        """The losses, in the form of OneByOne.losses; zeros unless this is the last stage."""
        losses: list[torch.Tensor] = []
        inputs, others = self._arguments(batch)
        with torch.no_grad():
            self._schedule.eval(*inputs, losses=losses, loss_kwargs={"weight": 1.0}, **others)
        return torch.stack(losses) if losses else torch.zeros(len(batch.inputs))

    def _arguments(self, batch: Batch) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """This stage's arguments for all microbatches, concatenated."""
        whole = {name: torch.cat([inputs[name] for inputs in batch.inputs]) for name in batch.inputs[0]}
        # The last stage computes the losses itself, but torch's schedule requires a target for each microbatch.
        whole["target"] = whole["microbatch_1"]
        tokens = whole.pop("inputs")
        if not self._is_last:
            del whole["targets_BT"]
        if self._place == 0:
            return [tokens], whole
        return [], {**whole, "tokens_BT": tokens} if self._needs_tokens else whole


def _weighted(loss_1: torch.Tensor, target: torch.Tensor, *, weight: float) -> torch.Tensor:
    return loss_1.sum() * weight


class CompressedAverage:
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
        self._keep(vector_D - contributions[self._place])
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
        self._keep(residual_D, Owed(own, sum_P - self._result_codec.decode(result, length)))
        return torch.cat([self._result_codec.decode(part, length) for part in self._all_of(result)])

    def _keep(self, residual_D: torch.Tensor, *owed: Owed) -> None:
        if self._codec.needs_feedback:
            self._feedback.commit(Residual(contribution_D=residual_D, owed=owed))

    def _all_of(self, own: Buffer) -> list[Buffer]:
        """The buffers of all workers, which are of equal size."""
        bytes_N = buffers.as_tensor(own, len(own), "a vector")
        received = [torch.empty_like(bytes_N) for _ in range(self._num_workers)]
        dist.all_gather(received, bytes_N, group=self._group)
        self._num_sent += len(bytes_N) * (self._num_workers - 1)
        return [each.numpy().data for each in received]

    def _exchanged(self, parts: list[Buffer]) -> list[Buffer]:
        """Send each worker its part, and return the parts that all workers have for this one. All are of equal size."""
        sent_N = torch.cat([buffers.as_tensor(part, len(part), "a vector") for part in parts])
        received_N = torch.empty_like(sent_N)
        dist.all_to_all_single(received_N, sent_N, group=self._group)
        length = len(sent_N) // self._num_workers
        self._num_sent += length * (self._num_workers - 1)
        return [part_N.numpy().data for part_N in torch.split(received_N, length)]
