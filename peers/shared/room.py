"""How much memory one process may have on its device, and which stages it can serve with it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

from peers.shared.devices import Device, free_ram_bytes, resident_bytes
from peers.shared.needs import Needs, of_stages
from peers.shared.network import Membership
from swarm.config import RunConfig
from swarm.machine.out_of_memory import in_words
from swarm.types import Block

Served = range | Sequence[Block]
"""What a peer serves together: adjacent stages that have no variants, or any blocks."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """The memory that one process may have, with what it has taken already.

    Attributes:
        device: the device's name.
        device_bytes: memory of the device; if that is the CPU, all memory.
        ram_bytes: memory of the machine.
        each: what each stage needs; empty if the run has a class of its own whose size cannot be measured.
    """

    device: str
    device_bytes: int
    ram_bytes: int
    each: Mapping[int, Needs]

    @classmethod
    def of(
        cls, device: Device, run: Membership, config: RunConfig, blocks: Sequence[Block] | None, *,
        anchors_on_disk: bool = False,
    ) -> "Room":  # fmt: skip
        """The room for these blocks of a run, or with None for all, beside the peers that are there. `config` is the
        run's as the device computes it. Blocks for a moment, while the shapes of stages are found out. Raises
        ValueError if a class of theirs cannot be imported."""
        num_peers = 1 + min(len(run.known.others(block)) for block in blocks or run.blocks)
        each = of_stages(
            config, on_gpu=device.kind == "cuda", num_peers=num_peers, anchors_on_disk=anchors_on_disk, blocks=blocks
        )
        ram_bytes = free_ram_bytes() + resident_bytes() if device.kind == "cuda" else device.all_bytes
        return cls(device=device.name, device_bytes=device.all_bytes, ram_bytes=ram_bytes, each=each)

    def holds(self, needs: Needs) -> bool:
        return needs.least <= self.device_bytes and needs.ram <= self.ram_bytes

    @property
    def spans(self) -> list[range] | None:
        """All spans of adjacent stages for which there is room, with one variant of each; None if that is not known."""
        found = list[range]()
        for first in self.each:
            end = first
            while end in self.each and self.holds(together(self.each, range(first, end + 1))):
                end += 1
                found.append(range(first, end))
        return found if self.each else None

    def largest(self, wanted: Served) -> range | None:
        """The longest span for which there is room, no longer than the wanted one, and as much of that as can be; None
        if no stage fits."""
        spans = [span for span in self.spans or () if len(span) <= len(wanted)]
        stages = {block.stage for block in blocks_of(wanted)}
        return max(spans, key=lambda span: (len(span), len({*span} & stages), -span.start), default=None)

    def comparison(self, span: Served | None) -> str:
        """What a span takes, or with None a single stage of the run, and what there is, in words."""
        needs = [*self.each.values()] if span is None else [together(self.each, span)]
        least, most = (in_words(choose(one.least for one in needs)) for choose in (min, max))
        what = "a stage" if span is None else named(span)
        text = f"{what} {'take' if span is not None and len(span) > 1 else 'takes'} "
        text += f"{least if least == most else f'{least} to {most}'} or more"
        text += f", and {in_words(self.device_bytes)} of {self.device} are there"
        if ram := max(one.ram for one in needs):
            text += f"; beside it {in_words(ram)} of RAM, and {in_words(self.ram_bytes)} are there"
        return text

    def fault(self, span: Served | None) -> str:
        """What is wrong, and what to do, if there is no room for a span, or with None for any stage; empty if there is
        room, or if that is not known."""
        if not self.each or any(map(self.holds, self.each.values() if span is None else [together(self.each, span)])):
            return ""
        fitting = self.largest(span or range(1))
        advice = "close other programs, take a run with more stages, or another --device"
        if fitting is not None:
            num_stages = len({block.stage for block in blocks_of(span or ())})
            of_one = " of one path (--path)" if span and num_stages < len(span) else ""
            advice = f"take --stage {written(fitting)}{of_one}, which fits, or a run with more stages"
        return f"{self.comparison(span)}: {advice}"


def together(each: Mapping[int, Needs], span: Served) -> Needs:
    return reduce(add, (each[block.stage] for block in blocks_of(span)))


def blocks_of(span: Served) -> list[Block]:
    return [Block(one) if isinstance(one, int) else one for one in span]


def named(span: Served) -> str:
    return f"stage{'s' if len(span) > 1 else ''} {written(span).replace('-', ' to ')}"


def written(span: Served) -> str:
    """A span as --stage names it; if that has no name for it, all of its blocks."""
    blocks = blocks_of(span)
    first, last = blocks[0].stage, blocks[-1].stage
    if len(blocks) > 1 and blocks == blocks_of(range(first, last + 1)):
        return f"{first}-{last}"
    return ", ".join(map(str, blocks))
