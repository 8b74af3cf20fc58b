"""The kill and the join that --kill-at and --join-at ask for.

Used by swarm.py, which calls it after each step.
"""

import random
from collections import Counter

from peers.local.options import LocalOptions
from peers.local.peers import LocalPeer, LocalPeers


class Drama:
    """Kills a peer at one step and starts another at another step, once each."""

    def __init__(self, options: LocalOptions, peers: LocalPeers) -> None:
        self.num_killed = 0
        self.num_joined = 0
        self._kill_at = options.kill_at
        self._join_at = options.join_at
        self._random = random.Random(options.seed)
        self._peers = peers
        self._newcomer: LocalPeer | None = None

    def act(self, num_steps: int) -> list[str]:
        """Do what is due after this number of steps of this run; gives what happened."""
        happened = []
        if self._kill_at is not None and num_steps >= self._kill_at and not self.num_killed:
            happened += self._kill()
        if self._newcomer is not None:
            happened += self._see_it_join(self._newcomer)
        elif self._join_at is not None and num_steps >= self._join_at:
            counts = self._peers.counts()
            self._newcomer = self._peers.start(min(counts, key=lambda stage: (counts[stage], stage)))
            happened.append(f"{self._newcomer.child.name} starts for stage {self._newcomer.stage}")
        return happened

    def _kill(self) -> list[str]:
        # Peers may have died by themselves, so the last one of a stage is not killed.
        serving = self._peers.serving
        stages = Counter(peer.stage for peer in serving)
        victims = [peer for peer in serving if stages[peer.stage] > 1]
        if not victims:
            return []
        victim = self._random.choice(victims)
        self._peers.kill(victim)
        self.num_killed += 1
        return [f"kill -9 {victim.child.name} of stage {victim.stage}"]

    def _see_it_join(self, newcomer: LocalPeer) -> list[str]:
        if self.num_joined or not newcomer.is_ready():
            return []
        self.num_joined += 1
        return [f"{newcomer.child.name} joined stage {newcomer.stage}"]
