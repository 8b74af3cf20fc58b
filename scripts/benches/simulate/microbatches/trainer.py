"""A simulated trainer, which keeps as many microbatches in flight as its window says, the real one."""

from scripts.benches.simulate.microbatches.hop import train
from scripts.benches.simulate.microbatches.pipeline import SimulatedPipeline, View
from swarm.pipeline.window import MOST_IN_FLIGHT, Window


class SimulatedTrainer:
    """Sends microbatches for ever.

    Attributes:
        num_done: how many microbatches have come back.
    """

    def __init__(self, pipeline: SimulatedPipeline, view: View, *, max_in_flight: int = MOST_IN_FLIGHT) -> None:
        self.num_done = 0
        self._pipeline = pipeline
        self._view = view
        self._window = Window(start=2 * pipeline.num_stages, largest=max_in_flight)
        self._num_in_flight = 0

    def fill(self) -> None:
        while self._num_in_flight < self._window.size:
            self._num_in_flight += 1
            train(self._pipeline, self._view, self._came_back)

    def _came_back(self, num_busy: int) -> None:
        self.num_done += 1
        self._window.finished(num_busy=num_busy, in_flight=self._num_in_flight)
        self._num_in_flight -= 1
        self.fill()
