"""One stage whose members come and go, in virtual time.

Used by the study `averaging`. Its members (simulated_member) decide with the classes and functions that run; messages
that take a while, training at an even pace, exchanges as long as their slowest line, and downloads are simulated. A
member that dies falls silent, its machine with it: no other member is told.
"""

import random

from swarm.simulation.rules.own_rule import LISTED_SECONDS
from swarm.simulation.simulated_member import SimulatedMember
from swarm.simulation.simulated_participant import TIMING, Host, Network
from swarm.simulation.stage_rounds import Setting, StageRounds
from swarm.simulation.timeline import Timeline
from swarm.types import PeerId

LINE_SPREAD = 0.5
"""Standard deviation of the logarithm of a member's bandwidth: one in six is 1.6 times slower than usual, or faster."""
LINK_SECONDS = (0.02, 0.2)
"""Round trip to a member; drawn evenly."""
AWAY_SECONDS = 20.0
"""Mean time until a machine that died is back, with its key and nothing else."""
SNAPSHOT_FACTOR = 8
"""A member that is back downloads so many times the bytes of a contribution: 64 bits a parameter, for anchor and
momentum, against 8."""


class SimulatedStage(Network[SimulatedMember]):
    """All members, and how they come and go.

    Attributes:
        rounds: what became of their rounds.
    """

    def __init__(self, timeline: Timeline, rng: random.Random, setting: Setting) -> None:
        super().__init__(timeline)
        self.rounds = StageRounds(setting, timeline)
        self._rng = rng
        for _ in range(setting.num_members):
            host = Host(
                peer_id=PeerId(f"{rng.getrandbits(160):040x}"),
                bytes_per_second=setting.bytes_per_second * rng.lognormvariate(0.0, LINE_SPREAD),
                link_seconds=rng.uniform(*LINK_SECONDS),
            )
            self._serve(SimulatedMember(self, self.rounds, host))

    def kill(self, member: SimulatedMember) -> None:
        """A machine is gone, from one moment to the next, and comes back later."""
        del self.members[member.peer_id]
        member.die()
        self.timeline.after(self._rng.uniform(*LISTED_SECONDS), lambda: self._forget(member))
        self.timeline.after(self._rng.expovariate(1 / AWAY_SECONDS), lambda: self._download(member.host))

    def _forget(self, member: SimulatedMember) -> None:
        if self.records.get(member.peer_id) is member.record:
            del self.records[member.peer_id]

    def _download(self, host: Host) -> None:
        """A newcomer becomes what the stage is now; what is committed meanwhile it makes up for afterwards."""
        member = SimulatedMember(self, self.rounds, host)
        seconds = SNAPSHOT_FACTOR * self.rounds.setting.payload_bytes / host.bytes_per_second
        self.timeline.after(seconds, lambda: self._serve(member))

    def _serve(self, member: SimulatedMember) -> None:
        self.members[member.peer_id] = member
        self.records[member.peer_id] = member.record
        member.make_known()
        member.serve(self._rng.random() * TIMING.heartbeat_seconds)
        lifetime_seconds = self.rounds.setting.lifetime_seconds
        if lifetime_seconds < float("inf"):
            self.timeline.after(self._rng.expovariate(1 / lifetime_seconds), lambda: self.kill(member))
