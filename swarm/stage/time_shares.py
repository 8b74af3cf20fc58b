"""What a stage peer did with the last minute: it computed, waited for input or for room, or averaged.

A look a few times a second sees what the peer waits for, and the
compute thread knows how long it has computed. Nothing is decided by these figures.
"""

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from swarm.config import RunConfig
from swarm.machine.clock import Clock
from swarm.stage.stage import Stage

LOOK_SECONDS = 0.25
KEPT_SECONDS = 60.0
"""The time to which the shares refer."""


@dataclass(frozen=True, kw_only=True)
class TimeShares:
    """Shares of the last minute, which are 1 together; all 0 if no microbatch was computed in it.

    Attributes:
        computing: its compute thread or its GPU worked.
        waiting_for_input: it had nothing to compute, because hidden states or gradients were still to come.
        waiting_for_room: it had nothing to compute, and what it had computed found no room at the next stage or on the
            line.
        averaging: it had nothing to compute, because its round was closed and not committed yet.
        flops_per_second: the model's floating-point operations; 0 for a custom class.
    """

    computing: float = 0.0
    waiting_for_input: float = 0.0
    waiting_for_room: float = 0.0
    averaging: float = 0.0
    flops_per_second: float = 0.0


class _Look(NamedTuple):
    """The sums since the first look, in seconds and operations."""

    at: float
    busy: float
    computing: float = 0.0
    input: float = 0.0
    room: float = 0.0
    averaging: float = 0.0
    flops: float = 0.0
    num_tasks: int = 0


class TimeWatch:
    def __init__(self, stage: Stage, clock: Clock) -> None:
        self._stage = stage
        self._clock = clock
        backend = stage.context.backend
        self._forward_flops, self._backward_flops = microbatch_flops(backend.config, stage.number, backend.module)
        self._looks = deque(
            [_Look(clock.monotonic(), stage.context.runtime.busy_seconds)], maxlen=1 + int(KEPT_SECONDS / LOOK_SECONDS)
        )

    async def run(self) -> None:
        while True:
            await self._clock.sleep(LOOK_SECONDS)
            self.look()

    def look(self) -> None:
        """Add what happened since the last look. The time in which nothing was computed goes to what is waited for
        now."""
        last, now, counters = self._looks[-1], self._clock.monotonic(), self._stage.counters
        busy, elapsed = self._stage.context.runtime.busy_seconds, now - last.at
        computing = min(max(0.0, busy - last.busy), elapsed)
        idle = elapsed - computing
        averages = self._stage.stands_still
        finds_no_room = not averages and self._stage.context.is_held_up
        self._looks.append(
            _Look(
                at=now,
                busy=busy,
                computing=last.computing + computing,
                input=last.input + (0.0 if averages or finds_no_room else idle),
                room=last.room + (idle if finds_no_room else 0.0),
                averaging=last.averaging + (idle if averages else 0.0),
                flops=counters["forwards"] * self._forward_flops + counters["backwards"] * self._backward_flops,
                num_tasks=counters["forwards"] + counters["backwards"],
            )
        )

    @property
    def shares(self) -> TimeShares:
        first, last = self._looks[0], self._looks[-1]
        seconds = last.at - first.at
        if last.num_tasks == first.num_tasks or seconds <= 0.0:
            return TimeShares()
        return TimeShares(
            computing=(last.computing - first.computing) / seconds,
            waiting_for_input=(last.input - first.input) / seconds,
            waiting_for_room=(last.room - first.room) / seconds,
            averaging=(last.averaging - first.averaging) / seconds,
            flops_per_second=(last.flops - first.flops) / seconds,
        )


def microbatch_flops(config: RunConfig, stage: int, module: nn.Module) -> tuple[float, float]:
    """The floating-point operations of a microbatch's forward and backward at a stage; 0 for a custom class.

    As for PaLM (arXiv 2204.02311, appendix B): each weight of a matrix is multiplied and added once for each token, and
    so is each pair of positions in attention, twice. A backward takes twice as many, or for frozen matrices as many.
    What is computed again does not count.
    """
    model, num_tokens = config.model, config.data.tokens_per_microbatch
    if model.custom_class:
        return 0.0, 0.0
    matrices = [value for name, value in module.named_parameters() if name.startswith("layers.") and value.ndim == 2]
    head = model.vocab_size * model.d_model if stage == config.stages.num_stages - 1 else 0
    num_layers = len({name.split(".")[1] for name, _ in module.named_parameters() if name.startswith("layers.")})
    attention = 4.0 * num_layers * model.num_heads * model.width_of_heads * config.data.sequence_length
    all_weights = sum(matrix.numel() for matrix in matrices) + head
    trained = sum(matrix.numel() for matrix in matrices if matrix.requires_grad) + head * (not config.lora.is_on)
    forward = 2.0 * all_weights + attention
    return num_tokens * forward, num_tokens * (2.0 * all_weights + 2.0 * trained + 2 * attention)
