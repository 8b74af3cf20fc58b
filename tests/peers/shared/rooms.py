"""Made-up needs of stages, for tests of where they fit."""

from peers.shared.needs import Needs

GIB = 1 << 30


def some_needs(gib: float, ram_gib: float = 0.0, *, turns_gib: float = 0.0) -> Needs:
    """Needs of so much memory of the device, of which `turns_gib` are taken by one stage at a time."""
    nothing = dict.fromkeys(("weights", "frozen", "optimizer", "graphs", "in_flight", "cache", "checkpoint"), 0)
    other, turns = int((gib - turns_gib) * GIB), int(turns_gib * GIB)
    return Needs(**nothing, other=other, turns=turns, fewest=0, ram=int(ram_gib * GIB))
