"""The peers of a local swarm: starts them, sees when they serve, kills them."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from peers.commands import command_line
from peers.local.options import PRESET, LocalOptions
from peers.local.supervisor import Child, Supervisor
from peers.shared import cli, devices
from peers.shared.devices import Device
from peers.shared.run_options import CheckpointOptions
from peers.shared.stage_choice import StageChoice
from peers.stage_peer.options import PeerOptions
from swarm.config import RunConfig
from swarm.types import Block, PeerRecord, PeerState

MOST_ADDRESSES = 4


@dataclass(eq=False)
class LocalPeer:
    child: Child
    span: StageChoice
    blocks: Sequence[Block]
    ready_file: Path
    record: PeerRecord | None = None
    """That of its first block; None until it serves."""
    dht_address: str = ""

    def is_ready(self) -> bool:
        """Whether the peer serves: it writes its ready file then."""
        if self.record is None and self.ready_file.exists():
            ready = json.loads(self.ready_file.read_text())
            self.dht_address = next(iter(ready["dht_addresses"]), "")
            self.record = PeerRecord(
                peer_id=ready["peer_id"], name=self.child.name, announced_at=ready["time"], stage=self.blocks[0].stage,
                variant=self.blocks[0].variant, endpoint=ready["endpoint"], certificate_pem=ready["certificate_pem"],
                state=PeerState.SERVING, device=ready["device"],
            )  # fmt: skip
        return self.record is not None


def spans_of(config: RunConfig, stages_per_peer: int | None = None) -> list[StageChoice]:
    """What peers serve so that every block has one: a stage each, or so many adjacent ones; in a run with variants a
    path each, of as few paths as lead through all blocks. Raises ValueError for a number in such a run."""
    if not config.stages.variants:
        each, num_stages = stages_per_peer or 1, config.stages.num_stages
        return [StageChoice(first, min(first + each, num_stages) - 1) for first in range(0, num_stages, each)]
    if stages_per_peer is not None:
        raise ValueError("--stages-per-peer is for runs without variants: in this one a peer serves a path")
    left, chosen = {*config.blocks}, list[StageChoice]()
    paths = {n: {*config.blocks_of(n)} for n in range(len(config.paths))}
    while left:
        path = max(paths, key=lambda path: len(paths[path] & left))
        left -= paths[path]
        chosen.append(StageChoice(path=path))
    return chosen


class LocalPeers:
    def __init__(
        self, options: LocalOptions, config: RunConfig, children: Supervisor, folder: Path, places: Sequence[Device]
    ) -> None:
        """`places` are the devices of the peers, in the order in which they start; `folder` has their keys and ready
        files."""
        self.blocks = config.blocks
        self.spans = spans_of(config, options.stages_per_peer)
        self.running: list[LocalPeer] = []
        self._options = options
        self._config = config
        named = dict(config.data.named_by_users)
        self.own_text: dict[str, Any] = named | ({"dataset": config.data.datasets} if "dataset" in named else {})
        """What the trainer has to name, because it is code of the user's own."""
        self._children = children
        self._folder = folder
        self._places = places
        self._num_started = 0

    def start(self, span: StageChoice) -> LocalPeer:
        """Start one more peer, and do not wait until it serves."""
        self._num_started += 1
        name = f"peer-{self._num_started}"
        device = self._places[self._num_started - 1]
        graph_bytes = devices.graph_bytes(device, num_processes=self._places.count(device))
        ready_file, options = self._folder / f"{name}.json", self._options
        own = PeerOptions(
            stage=span if span.path is None else None, path=span.path, name=name, host="127.0.0.1", device=device.name,
            graph_memory_mib=graph_bytes >> 20, threads=options.threads, max_in_flight=options.max_in_flight,
            identity=self._folder / f"{name}.pem", ready_file=ready_file, insecure=options.insecure,
            **{each.name: getattr(options, each.name) for each in fields(CheckpointOptions)}, **self._run_options(),
        )  # fmt: skip
        child = self._children.start(name, command_line("peer", cli.arguments(own)))
        peer = LocalPeer(child=child, span=span, blocks=span.of(self._config), ready_file=ready_file)
        self.running.append(peer)
        return peer

    def _run_options(self) -> dict[str, Any]:
        """The options with which the next peer joins the run through peers that serve. If none serves, the next peer
        begins the run."""
        options = self._options
        if addresses := self.addresses:
            return {"initial_peers": addresses, "allow_class": self._config.own_classes}
        preset = None if options.config or options.model else options.preset or PRESET
        names = ("config", "model", "stages", "dataset", "validation", "tokenizer", "max_tokens", "lora_rank", "set")
        # A preset, or a file, has a schedule of its own.
        steps = options.steps + self._steps_before() if options.model else None
        return {"preset": preset, "steps": steps} | {name: getattr(options, name) for name in names}

    def _steps_before(self) -> int:
        """The steps that the run had made at its newest checkpoint, from which it goes on."""
        if self._options.resume is None:
            return 0
        # Imported only here, because it imports torch, which takes seconds.
        from swarm.checkpoint import file

        return max((name.round for name in file.names(self._options.resume)), default=0)

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(peer.dht_address for peer in self.running if peer.dht_address)[:MOST_ADDRESSES]

    @property
    def serving(self) -> list[LocalPeer]:
        return [peer for peer in self.running if peer.record is not None]

    def counts(self) -> dict[Block, int]:
        return dict.fromkeys(self.blocks, 0) | Counter(block for peer in self.running for block in peer.blocks)

    def still_paths(self) -> tuple[list[int], bool]:
        """The paths that stand still because a block on them has no running peers, and whether some path goes on. In
        the synchronous setting all paths wait for each."""
        counts, paths = self.counts(), range(len(self._config.paths))
        still = [path for path in paths if not all(counts[block] for block in self._config.blocks_of(path))]
        return still, len(still) < len(paths) and not (still and self._config.rounds.synchronous)

    def most_needed(self) -> StageChoice:
        """What one more peer is to serve: where there are fewest."""
        counts = self.counts()
        return min(self.spans, key=lambda span: min(counts[block] for block in span.of(self._config)))

    def kill(self, peer: LocalPeer) -> None:
        self.running.remove(peer)
        self._children.kill9(peer.child)

    def ended(self, name: str) -> LocalPeer:
        gone = next(peer for peer in self.running if peer.child.name == name)
        self.running.remove(gone)
        return gone
