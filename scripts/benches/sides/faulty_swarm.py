"""Causes faults in a swarm of real processes, one in every second step. A peer of each stage stays."""

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from peers.local.supervisor import Child
from scripts.benches.shared.common import POLL_SECONDS, START_SECONDS, fail_on_exit, say
from scripts.benches.shared.swarm import STALL_SECONDS, Lines, ServingPeer, SwarmProcesses, serve
from swarm.errors import DeadlineExceeded, PeerUnavailable

EVERY = 2  # Steps from one fault to the next
MAX_IN_FLIGHT = 4  # Microbatches under way. There are few of them, so that joiners get enough of the cores.
HELD_SECONDS = (0.5, 2.0)
"""How long messages are held back before they are lost. By then the receiver's work has been done."""
ONE_WAY_SECONDS = 6.0
"""How long bytes pass in one direction only. This is longer than peers need to notice that a neighbour is
unreachable."""


@dataclass(eq=False)
class FaultySwarm:
    """A swarm, and the faults that happen to it while it trains."""

    swarm: SwarmProcesses
    rng: random.Random
    faults: Counter[str] = field(default_factory=Counter)  # How many faults there were, by kind
    owed: int = 0  # Faults that are due but wait, because no peer can be spared at the moment
    joining: list[tuple[Child, int]] = field(default_factory=list)
    """Peers that were started and do not serve yet, with their stages."""
    _timeline: list[tuple[float, Callable[[], None]]] = field(default_factory=list)

    def train(self, steps: int, fault: Callable[["FaultySwarm"], bool]) -> None:
        """Let a trainer train this many steps, and call `fault` in every second step. Raises PeerUnavailable and
        DeadlineExceeded."""
        trainer = self.swarm.launch_trainer("trainer", steps, max_in_flight=MAX_IN_FLIGHT)
        self._stepped_at = time.monotonic()
        num_steps, planned, due_at = 0, 1, 0.0
        while not self.has_ended(trainer):
            now = time.monotonic()
            if (taken := len(self.swarm.steps("trainer"))) > num_steps:
                seconds, self._stepped_at = (now - self._stepped_at) / (taken - num_steps), now
                num_steps = taken
                # No fault is planned after the last step.
                while planned <= num_steps and planned < steps:
                    planned += EVERY
                    self.owed += 1
                    due_at = now + self.rng.uniform(0.0, seconds)
                    say(f"step {num_steps}, {dict(self.faults)}, {len(self.swarm.peers)} peers")
            if self.owed and now >= due_at and fault(self):
                self.owed -= 1
            for entry in [entry for entry in self._timeline if entry[0] <= now]:
                self._timeline.remove(entry)
                entry[1]()
            self._take_in()
            if now - self._stepped_at > STALL_SECONDS:
                raise DeadlineExceeded(f"no step for {STALL_SECONDS:.0f} s after step {num_steps}")
            time.sleep(POLL_SECONDS)
        for _, undo in self._timeline:
            undo()
        self._until_all_serve()

    def _until_all_serve(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            fail_on_exit(self.swarm.children)
            self._take_in()
            if not self.joining:
                return
            if time.monotonic() > deadline:
                name = self.joining[0][0].name
                raise DeadlineExceeded(f"{name} does not serve {START_SECONDS:.0f} s after the last step")
            time.sleep(POLL_SECONDS)

    def has_ended(self, trainer: Child) -> bool:
        """Whether the trainer has ended without an error. Raises PeerUnavailable if any other process has ended."""
        ends = self.swarm.children.exits()
        for end in ends:
            if end.name != trainer.name or end.returncode != 0:
                raise PeerUnavailable(f"{end.name} ended early: {end.reason}")
        return bool(ends)

    def _take_in(self) -> None:
        for child, stage in list(self.joining):
            if self.swarm.ready_file(child.name).exists():
                self.joining.remove((child, stage))
                self.swarm.peers.append(self.swarm.until_ready(child, stage))
                serve(self.swarm, self.swarm.peers[-1:])

    # -- kills ---------------------------------------------------------------------------------------------------------

    def _spare(self, stage: int) -> list[ServingPeer]:
        peers = [peer for peer in self.swarm.peers if peer.record.stage == stage]
        return peers if len(peers) > 1 else []

    def kill(self, stages: Sequence[int]) -> bool:
        """Kill a peer of each of these stages at the same time, and start others in their place. Return False, and kill
        none, if a stage has too few peers."""
        candidates = [self._spare(stage) for stage in stages]
        if not all(candidates):
            return False
        victims = [self.rng.choice(peers) for peers in candidates]
        for victim in victims:
            self.swarm.peers.remove(victim)
            self.swarm.children.kill9(victim.child)
        self.joining += [(self.swarm.launch_peer(stage), stage) for stage in stages]
        self.faults["kill"] += len(victims)
        return True

    def kill_one(self) -> bool:
        return self.kill([self.rng.randrange(self.swarm.config.stages.num_stages)])

    def kill_neighbours(self) -> bool:
        stage = self.rng.randrange(self.swarm.config.stages.num_stages - 1)
        return self.kill([stage, stage + 1])

    # -- the network ---------------------------------------------------------------------------------------------------

    def disturb(self) -> bool:
        """For a while, lose a process's answers or acknowledgements, or let bytes pass in one direction only."""
        lines = self.swarm.children
        assert isinstance(lines, Lines)
        stage = self.rng.randrange(self.swarm.config.stages.num_stages)
        target = self.rng.choice([peer for peer in self.swarm.peers if peer.record.stage == stage])
        callers = [peer.child.name for peer in self.swarm.peers if peer.record.stage == stage - 1]
        caller = lines.links[self.rng.choice(callers or [f"{self.swarm.folder.name}-trainer"])]
        callee = lines.links[target.child.name]
        kind = self.rng.choice(["lost_replies", "lost_acks", "one_way"])
        self.faults[kind] += 1
        ends = (caller, callee) if kind == "lost_acks" else (callee, caller)
        if kind == "one_way" and self.rng.random() < 0.5:
            ends = ends[::-1]
        lines.throttle.hinder(*ends)
        seconds = ONE_WAY_SECONDS if kind == "one_way" else self.rng.uniform(*HELD_SECONDS)

        def end() -> None:
            if kind != "one_way":
                lines.throttle.break_connections(caller, callee)
            lines.throttle.clear(*ends)

        self._timeline.append((time.monotonic() + seconds, end))
        return True
