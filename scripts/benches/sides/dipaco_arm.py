"""A process that trains one arm of the bench `dipaco`: many peers in one process, and what they have learnt.

Each peer serves all stages of one path, with the product's own stages (backends, buckets, inner and outer steps) and
its own averaging (shares, codecs, all-reduce): all of it is the code of a peer but for the calls between processes. A
peer takes the next microbatch once it has taken the inner step before it, and all peers end a round together, so that
nothing is late, lost or computed twice.
"""

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from scripts.benches.shared.common import compute_like_peers, cpu_backend, with_corpus
from scripts.benches.sides.reference import Reference, is_point
from swarm import config as configs
from swarm.averaging.agreement.shares import clip_of, divide
from swarm.averaging.vectors.allreduce import Reduction
from swarm.averaging.vectors.exchange import Closed, Exchanges, Side
from swarm.averaging.wire.transport import Payload
from swarm.compression.codec import Buffer
from swarm.config import RunConfig
from swarm.data import path_router, tokenizers
from swarm.data.microbatches import Microbatches
from swarm.data.path_router import NUM_TOKENS, PathRouter, hashed
from swarm.errors import IntegrityError
from swarm.model.stages import build_transformer
from swarm.rpc.v1 import averaging_pb2 as pb
from swarm.stage.backend import StageBackend
from swarm.stage.boundary import HIDDEN
from swarm.stage.state import digest_of
from swarm.training.optimizers import gradient_optimizer
from swarm.training.round_member import RoundResult
from swarm.training.samples import TOKENS, Samples
from swarm.types import Block

EXCHANGE_SECONDS = 600.0  # Longest wait for an exchange within this process
CURVE_POINTS = 4
_EVALUATED = 256  # Samples of one forward of an evaluation


@dataclass(eq=False)
class Holder:
    """One block of one peer."""

    peer_id: str
    backend: StageBackend
    exchanges: Exchanges
    num_bytes: int = 0
    """What it has sent and received in averages."""


class Peer:
    """A peer that serves all stages of a path."""

    def __init__(self, config: RunConfig, number: int) -> None:
        peer_id, self.path = f"{number:040x}", number % len(config.paths)
        self.holders = {
            block: Holder(
                peer_id,
                cpu_backend(config, block.stage, graph_bytes=1 << 30, variant=block.variant),
                Exchanges(config.averaging, peer_id),
            )
            for block in config.blocks_of(self.path)
        }

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The weights of its path with which the present round began."""
        found = dict[str, torch.Tensor]()
        for holder in self.holders.values():
            weights = holder.backend.weights
            anchor = weights.anchor(weights.round.number)
            assert anchor is not None, "the present round's is always there"
            found |= anchor
        return found

    def train(self, index: int, samples: Samples) -> None:
        """Train on a microbatch, and take the inner step if one is due."""
        *before, last = (holder.backend for holder in self.holders.values())
        number, inputs, forwards = last.weights.round.number, dict(samples), []
        for backend in before:
            forward = backend.forward(index, number, inputs)
            assert forward.wire_hidden is not None
            forwards.append(forward)
            inputs = {**samples, HIDDEN: forward.wire_hidden.wait()}
        _, answer, accumulated = last.forward_loss(index, number, inputs, accumulate=True)
        done = [(last, accumulated)]
        for backend, forward in zip(reversed(before), reversed(forwards), strict=True):
            assert answer is not None
            answer, accumulated = backend.backward(forward, answer.wait(), accumulate=True)
            done.append((backend, accumulated))
        for backend, accumulated in done:
            assert accumulated is not None
            backend.settle(accumulated)


class PathSwarm:
    """Peers of all paths, which train round after round. A path, or the only one, may have several peers."""

    def __init__(self, config: RunConfig, data: Microbatches, num_peers: int) -> None:
        self._config = config
        self._data = data
        self.peers = [Peer(config, number) for number in range(num_peers)]
        self._holders: dict[Block, list[Holder]] = {}
        for peer in self.peers:
            for block, holder in peer.holders.items():
                self._holders.setdefault(block, []).append(holder)

    @property
    def bytes_per_peer(self) -> float:
        """What a peer has sent and received in averages so far."""
        return sum(holder.num_bytes for row in self._holders.values() for holder in row) / len(self.peers)

    @property
    def weights_of_paths(self) -> list[dict[str, torch.Tensor]]:
        """The weights of each path's model, with which the present round began."""
        return [peer.weights for peer in self.peers[: len(self._config.paths)]]

    async def train_round(self, number: int) -> None:
        """Train a round, of which all peers get their part of the microbatches, and average. Raises IntegrityError if
        the holders of a block do not end with the same bits."""
        size = self._config.microbatches_per_round
        for index in range(number * size, (number + 1) * size):
            self.peers[index % len(self.peers)].train(index, self._data.samples(index))
        for holders in self._holders.values():
            await _end_round(self._config, holders)


@dataclass(frozen=True)
class _Within:
    """Reaches the other holders' sides of an exchange within this process."""

    sides: Mapping[str, Side]
    own_id: str

    async def exchange(self, peer_id: str, part: Buffer, reply_bytes: int, *, waits: bool = True) -> Payload:
        """See AllReduceTransport."""
        side = self.sides[peer_id]
        if isinstance(side, Reduction) and self.own_id in side.missing:
            await side.add(self.own_id, part)
        return await side.result()


async def _end_round(config: RunConfig, holders: Sequence[Holder]) -> None:
    """End the round of one block, as its group does."""
    closed: dict[str, Closed] = {}
    for holder in holders:
        closed[holder.peer_id] = await holder.exchanges.flatten(holder.backend.weights.contribute())
    begun = {
        peer_id: pb.BeginReply(
            num_samples=each.contribution.num_samples, num_targets=each.contribution.num_targets,
            round_samples=each.contribution.round_samples, norm=each.norm,
        )
        for peer_id, each in closed.items()
    }  # fmt: skip
    shares = divide(
        begun, num_elements=holders[0].backend.weights.num_elements, tile=holders[0].exchanges.codec.tile,
        clip_to_median=clip_of(config),
    )  # fmt: skip
    sides = {holder.peer_id: holder.exchanges.open(closed[holder.peer_id], shares) for holder in holders}

    async def exchange(holder: Holder) -> str:
        own = closed[holder.peer_id]
        average, _ = await holder.exchanges.run(
            own, shares, sides[holder.peer_id], _Within(sides, holder.peer_id), EXCHANGE_SECONDS
        )
        weights = holder.backend.weights
        result = RoundResult(
            round=weights.round.number, num_samples=shares.round_samples, squared_norm=average.squared_norm,
            tensors=holder.exchanges.unflatten(average.vector_D, own.contribution.tensors), lineage="", attempts=1,
            total_squared_norm=average.squared_norm, members=tuple(closed), digest=average.digest,
            closing=own.contribution.closing,
        )  # fmt: skip
        holder.exchanges.committed(own.contribution.fragment, average.residual)
        holder.num_bytes += average.bytes_sent + average.bytes_received
        weights.commit(result)
        return digest_of(weights.state())

    if len({*await asyncio.gather(*map(exchange, holders))}) > 1:
        raise IntegrityError("the holders of a block ended a round with different weights")


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldOutText:
    """A piece of a held-out sequence, all of it on one path: samples [N, T + 1] of a kind."""

    kind: str
    path: int
    tokens_NT1: torch.Tensor


def held_out_texts(
    config: RunConfig, sequences: Sequence[tuple[str, str]], router: PathRouter | None, *, reroutes: bool = False
) -> Iterator[HeldOutText]:  # fmt: skip
    """Cut sequences, each a kind and its text, into samples, of which the first predicts the first token that has not
    chosen a path.

    Args:
        router: chooses the path of each by its first tokens. Without one they take the paths in turn.
        reroutes: let the router choose anew for each sample, by the tokens before the first that is predicted.
    """
    tokenizer, length = tokenizers.load(config.data.tokenizer), config.data.sequence_length
    for number, (kind, text) in enumerate(sequences):
        tokens = [*tokenizer.prefix.tolist(), *tokenizer.encode(text).tolist()]
        num_samples = (len(tokens) - NUM_TOKENS) // length
        for first in range(0, num_samples, 1 if reroutes else max(1, num_samples)):
            begin = first * length
            path = number % len(config.paths) if router is None else router.choose(tokens[begin:], hashed)
            samples = torch.tensor(tokens[begin + NUM_TOKENS - 1 :]).unfold(0, length + 1, length)
            yield HeldOutText(kind=kind, path=path, tokens_NT1=samples[:1] if reroutes else samples)


class HeldOut:
    """Measures the models of all paths, each on the texts of its path."""

    def __init__(self, config: RunConfig, texts: Iterable[HeldOutText]) -> None:
        self._model = build_transformer(config, device="cpu")
        self._rows: dict[tuple[int, str], list[torch.Tensor]] = {}
        """The samples of each path and kind."""
        for text in texts:
            self._rows.setdefault((text.path, text.kind), []).append(text.tokens_NT1)

    @torch.no_grad()
    def losses(self, weights_of_paths: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, float]:
        """The mean loss over the targets of each kind, and of `all`, in nats."""
        summed, num_targets = defaultdict[str, float](float), defaultdict[str, int](int)
        for (path, kind), rows in sorted(self._rows.items(), key=lambda group: group[0]):
            self._model.load_state_dict(dict(weights_of_paths[path]))
            num_batches = -(-sum(map(len, rows)) // _EVALUATED)
            for tokens_NT1 in torch.cat(rows).chunk(num_batches):
                loss = float(self._model.summed_loss({TOKENS: tokens_NT1}))
                for name in (kind, "all"):
                    summed[name] += loss
                    num_targets[name] += tokens_NT1[:, 1:].numel()
        return {name: loss / num_targets[name] for name, loss in summed.items()}


class Alone:
    """One process that takes all inner steps of all peers of a round, one after another."""

    bytes_per_peer = 0.0

    def __init__(self, config: RunConfig, data: Microbatches) -> None:
        self._rounds, self._per_step = config.rounds, config.rounds.inner_batch_samples // config.data.microbatch_size
        self._reference = Reference(config, data)
        # Nobody takes the same steps, so Muon's products need not be exact.
        self._optimizer = gradient_optimizer(config, same_bits=False)

    @property
    def weights_of_paths(self) -> Sequence[Mapping[str, torch.Tensor]]:
        return [self._reference.weights]

    async def train_round(self, number: int) -> None:
        batch = self._rounds.inner_batch_samples
        steps = self._rounds.round_samples // batch
        for step in range(number * steps, (number + 1) * steps):
            indices = range(step * self._per_step, (step + 1) * self._per_step)
            self._reference.accumulate_mean(dict.fromkeys(indices, 1))
            self._reference.update_with(self._optimizer, step * batch)


async def train(training: PathSwarm | Alone, config: RunConfig, held_out: HeldOut, rounds: int) -> dict[str, Any]:
    """Train so many rounds, and return the arm's figures."""
    started_at, curve = time.perf_counter(), list[tuple[int, float]]()
    losses = dict[str, float]()
    for number in range(rounds):
        await training.train_round(number)
        if is_point(number, rounds, CURVE_POINTS):
            tokens = (number + 1) * config.rounds.round_samples * config.data.sequence_length
            losses = held_out.losses(training.weights_of_paths)
            curve.append((tokens, losses["all"]))
    return {
        "loss": losses.pop("all"), "by_kind": losses, "bytes_per_peer": training.bytes_per_peer, "curve": curve,
        "seconds": time.perf_counter() - started_at,
    }  # fmt: skip


def main(path: Path, held_out: Path, router: str, num_peers: int, rounds: int) -> None:
    """Train the run of a configuration. `held_out` has the sequences to evaluate on, `router` is the folder of the
    router or empty, and with 0 peers one process takes all steps."""
    compute_like_peers()
    config, data = with_corpus(configs.load(path), path.parent / "corpora")
    sequences: list[tuple[str, str]] = json.loads(held_out.read_text(encoding="utf-8"))
    chooser = path_router.read(Path(router)) if router else None
    training: PathSwarm | Alone = PathSwarm(config, data, num_peers) if num_peers else Alone(config, data)
    measured = HeldOut(config, held_out_texts(config, sequences, chooser))
    figures = asyncio.run(train(training, config, measured, rounds))
    if chooser is not None:
        rerouted = HeldOut(config, held_out_texts(config, sequences, chooser, reroutes=True))
        figures["rerouted_loss"] = rerouted.losses(training.weights_of_paths)["all"]
    print(json.dumps(figures))
