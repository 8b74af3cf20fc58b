"""Takes a view of one run at intervals, for all viewers together, and also while there are none.

Each view is added to the history, and becomes the run's part of the state that is published: a JSON object with every
figure that peers/status defines. No figure is named here.
"""

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, Never

from peers.dashboard.history import History, Line
from peers.status.figure import Column, figures, needed_columns
from peers.status.lookout import Lookout
from peers.status.peer_row import PeerRow
from peers.status.view import Joining, SwarmView, TrainerRow
from swarm.config import RunConfig
from swarm.errors import SwarmError
from swarm.machine.clock import Clock
from swarm.machine.words import counted

logger = logging.getLogger(__name__)


def about(config: RunConfig) -> dict[str, Any]:
    return {
        "name": config.run,
        "run": config.run_id,
        "paths": [[block.label for block in config.blocks_of(path)] for path in range(len(config.paths))],
        "figures": {"peer": _explained(PeerRow), "trainer": _explained(TrainerRow)},
    }


def sizes(config: RunConfig) -> dict[str, Any]:
    """What an amendment may change. `config` is the one that is in force."""
    model, rounds = config.model, config.rounds
    stages, tokens = counted(config.stages.num_stages, "stage"), counted(config.data.sequence_length, "token")
    return {
        "facts": {
            "Setting": "synchronous" if rounds.synchronous else "DiLoCo",
            "Model": f"{counted(model.num_layers, 'layer')} of {model.d_model} in {stages}",
            "Round": f"rounds of {counted(rounds.round_samples, 'sample')} of {tokens}",
            "Access": "locked" if config.owner else "open to all",
        },
        "round_samples": {str(block): config.round_samples_of(block) for block in config.blocks},
    }


def present(view: SwarmView, history: History) -> dict[str, Any]:
    """The part that changes with each view: the view, and all of the history except its series."""
    rows = [(row.block.label, peer) for row in view.stages for peer in row.peers]
    columns = needed_columns(PeerRow, view.peers)
    trainer_columns = needed_columns(TrainerRow, view.trainers)
    return {
        "stages": [row.block.label for row in view.stages],
        "empty_stages": view.empty_stages,
        "waiting_paths": {str(stage): paths for stage, paths in view.waiting_paths.items()},
        "last_peers": {str(stage): dataclasses.asdict(last) for stage, last in view.last_peers.items()},
        "columns": {"peer": list(columns), "trainer": list(trainer_columns)},
        # A peer that moves is listed at two stages.
        "peers": {f"{stage}/{peer.peer_id}": {"stage": stage} | _row(peer, columns) for stage, peer in rows},
        "trainers": [_row(trainer, trainer_columns) for trainer in view.trainers],
        "rounds": history.rounds.to_json(),
        "contributions": history.contributions.to_json(),
        "events": [dataclasses.asdict(event) for event in history.events],
    }


def how_to_join(joining: Joining) -> dict[str, str]:
    """The commands with which people join the run, by their purpose; none while no peer serves."""
    if joining == Joining():
        return {}
    return {
        "Give a machine to the run": joining.peer,
        "Feed it text": joining.trainer,
        "Watch it in a terminal": joining.status,
    }


def _row(row: PeerRow | TrainerRow, columns: Mapping[str, Column]) -> dict[str, Any]:
    return dataclasses.asdict(row) | {"cells": {name: column.text(row) for name, column in columns.items()}}


def _explained(record: type) -> Mapping[str, Mapping[str, Any]]:
    return {
        name: {
            "help": figure.help,
            "unit": figure.unit,
            "heading": "" if figure.column is None else figure.column.heading,
            "is_text": figure.column is not None and figure.column.is_text,
        }
        for name, figure in figures(record).items()
    }


TALLY_SECONDS = 10.0
"""The least time between two questions for the tally, and for amendments."""
SECONDS_PER_PEER = 0.01
"""The time between two views is at least this times the number of peers, because each peer that is asked costs work."""


class Watcher:
    def __init__(self, lookout: Lookout, history: History, *, clock: Clock, interval_seconds: float) -> None:
        self.history = history
        self._lookout = lookout
        self._clock = clock
        self._interval_seconds = interval_seconds
        self._seen: SwarmView | None = None
        self._tallied_at = -math.inf
        config = lookout.timeline.config
        self._state: dict[str, Any] = about(config) | sizes(config)
        self._state |= {"fault": "", "interval_seconds": interval_seconds}

    @property
    def state(self) -> Mapping[str, Any]:
        """The run's part of the published state; a new object after each view."""
        return self._state

    @property
    def series(self) -> Mapping[str, Any]:
        """The figures over time as the page gets them when it opens; afterwards it adds new figures itself."""
        return {name: series.to_json() for name, series in self.history.series.items()}

    async def watch(self, publish: Callable[[], None]) -> Never:
        """Take views and publish after each, until cancelled. If one fails, the state says why."""
        while True:
            began = self._clock.monotonic()
            await self.look()
            publish()
            num_peers = len(self._state.get("peers", ()))
            took = self._clock.monotonic() - began
            wait = max(self._interval_seconds, SECONDS_PER_PEER * num_peers) - took
            await self._clock.sleep(max(wait, self._interval_seconds / 2))

    async def look(self) -> None:
        try:
            view = await self._lookout.view()
        except SwarmError as error:
            self._failed(str(error))
            return
        at = self._clock.time()
        if self._state["fault"]:
            self.history.happened(Line("good", "the run can be seen again"), at)
        figures = self.history.add(self._seen, view, at)
        await self._ask_seldom()
        self._seen = view
        self._state = self._state | sizes(self._lookout.timeline.at(view.round)) | present(view, self.history) | {
            "at": at,
            "figures_now": figures,
            "fault": "",
            "join": how_to_join(self._lookout.joining),
        }  # fmt: skip

    async def _ask_seldom(self) -> None:
        if (now := self._clock.monotonic()) - self._tallied_at >= TALLY_SECONDS:
            self._tallied_at = now
            with contextlib.suppress(SwarmError):
                self.history.contributions.take(await self._lookout.tallies())
                await self._lookout.hear_amendments()

    def _failed(self, reason: str) -> None:
        if not self._state["fault"]:
            logger.warning("the run cannot be seen, looking again: %s", reason)
            self.history.happened(Line("bad", f"the run cannot be seen: {reason}"), self._clock.time())
        self._state = self._state | {"fault": reason}
