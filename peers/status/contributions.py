"""--contributions: what each peer has given to a run since it began, from its peers, its checkpoints or its event logs;
and who is named as a liar.

The members of each round sign what they have given, and whom they name (training/tally). Here it is checked who has
signed what is shown.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from safetensors import SafetensorError, safe_open

from swarm import config as configs
from swarm.errors import IntegrityError
from swarm.machine.words import counted
from swarm.training.complaints import Complaints, Named
from swarm.training.tally import Tally, by_peer, total
from swarm.types import Block


@dataclass
class Tallies:
    """The tallies of a run's blocks.

    Attributes:
        names: of peers, by id, as far as they are known.
        signers: the peers that have signed the tally of each block; None where that was proven otherwise.
    """

    run: str
    blocks: dict[Block, Tally] = field(default_factory=dict)
    signers: dict[Block, set[str] | None] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    def add(self, block: Block, texts: Iterable[str], among: Collection[str] | None = None) -> None:
        """Take the tally of a block that most have signed; of equal ones the newest. Signatures of others than `among`
        do not count: anybody can make keys."""
        for text in texts:
            try:
                tally = Tally.read(text)
            except IntegrityError:
                continue
            signers = tally.signers(self.run, block)
            signers = signers if among is None else signers & set(among)
            known, before = self.blocks.get(block), self.signers.get(block) or set()
            if known is None or (len(signers), tally.round) > (len(before), known.round):
                self.blocks[block], self.signers[block] = tally, signers

    def to_json(self) -> str:
        blocks = {
            str(block): {
                "since": tally.since, "round": tally.round, "signed_by": sorted(self.signers.get(block) or ()),
                "not_signed_by": self._unsigned(block),
                "named": {
                    peer_id: named._asdict() | {"signed_by": self._accusers(block, peer_id)}
                    for peer_id, named in self.named(block).items()
                },
                "out_of_line": list(self._words(block)),
            }
            for block, tally in sorted(self.blocks.items())
        }  # fmt: skip
        peers = {
            peer_id: {"name": self.names.get(peer_id, ""), **total(given)._asdict()}
            | {"blocks": {str(block): gave._asdict() for block, gave in given.items()}}
            for peer_id, given in by_peer(self.blocks).items()
        }
        return json.dumps({"run": self.run, "blocks": blocks, "peers": peers})

    def named(self, block: Block) -> dict[str, Named]:
        """Whom most members of the block's last round name as liars, by what they have signed."""
        return self.blocks[block].named_by(self._complaints(block))

    def _complaints(self, block: Block) -> dict[str, Complaints]:
        return self.blocks[block].complaints(self.signers.get(block) or ())

    def _accusers(self, block: Block, peer_id: str) -> list[str]:
        return [signer for signer, complaints in self._complaints(block).items() if peer_id in complaints.named]

    def _words(self, block: Block) -> Iterator[dict[str, Any]]:
        """What each owner of a part has found out of line in the last rounds, by its own signed word."""
        for signer, complaints in self._complaints(block).items():
            for word in complaints.words:
                yield {"owner": signer, **word._asdict()}

    def _unsigned(self, block: Block) -> list[str]:
        signers = self.signers.get(block)
        return [] if signers is None else [peer for peer in self.blocks[block].members if peer not in signers]

    def render(self) -> RenderableType:
        columns = "peer", "stages", "samples", "targets", "sent, MB", "rounds"
        table = Table(*columns, title=escape(f"what peers have given to {self.run}"))
        for peer_id, given in by_peer(self.blocks).items():
            gave, name = total(given), self.names.get(peer_id, peer_id[:8])
            numbers = f"{gave.samples:,}", f"{gave.targets:,}", f"{gave.num_bytes / 1e6:,.1f}", f"{gave.rounds:,}"
            table.add_row(escape(name), ", ".join(map(str, given)), *numbers)
        return Group(table, *map(self._source, sorted(self.blocks)), *self._lines())

    def _lines(self) -> Iterator[str]:
        for block, tally in sorted(self.blocks.items()):
            for peer_id, named in self.named(block).items():
                by = f"{len(self._accusers(block, peer_id))} of {counted(len(tally.members), 'member')} name it"
                name = self.names.get(peer_id, peer_id[:8])
                yield f"stage {block}: {escape(name)} ({by}): {escape(named.line)}"

    def _source(self, block: Block) -> str:
        tally, signers = self.blocks[block], self.signers.get(block)
        if tally.round < 0:
            return f"stage {block}: no round is counted yet"
        by = "as the event logs prove" if signers is None else f"signed by {counted(len(signers), 'peer')}"
        others = ", ".join(escape(self.names.get(peer, peer[:8])) for peer in self._unsigned(block))
        return f"stage {block}: rounds {tally.since} to {tally.round}, {by}{others and f', and not by {others}'}"


def of_checkpoints(paths: Sequence[Path]) -> Tallies:
    """The tallies in checkpoints of one run, of which the newest of each block counts. Raises ValueError for files that
    are none, have none, or are of several runs, and OSError."""
    found: Tallies | None = None
    newest: dict[Block, int] = {}
    for path in paths:
        metadata = _metadata(path)
        try:
            run_id = configs.from_json(metadata["config"], source=str(path)).run_id
            block, number = Block(int(metadata["stage"]), int(metadata.get("variant", 0))), int(metadata["round"])
            text = metadata["tally"]
        except KeyError as lacking:
            raise ValueError(f"{path} has no tally ({lacking.args[0]} is not in it)") from None
        found = found or Tallies(run_id)
        if found.run != run_id:
            raise ValueError(f"{path} is of the run {run_id}, and the files before it of {found.run}")
        if number > newest.get(block, -1):
            newest[block] = number
            found.blocks.pop(block, None)
            found.add(block, [text])
        if block not in found.blocks:
            raise ValueError(f"the tally in {path} cannot be read")
    assert found is not None, "at least one file is named"
    return found


def _metadata(path: Path) -> Mapping[str, str]:
    """The metadata of a safetensors file, read without torch."""
    try:
        with safe_open(path, framework="numpy") as file:
            return file.metadata() or {}
    except SafetensorError:
        raise ValueError(f"{path} is no checkpoint") from None


def of_logs(run_id: str, tallies: Mapping[Block, Tally]) -> Tallies:
    return Tallies(run_id, dict(tallies), dict.fromkeys(tallies))
