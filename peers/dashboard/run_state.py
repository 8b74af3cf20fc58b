"""Makes the JSON object that describes one run to the page, from a view (the same that swarm-status shows) and the
history.

Used by watcher.py. No figure is named here: the object has every figure that peers/status defines, with its help text
and unit.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from peers.dashboard.history import History
from peers.shared.joining import Joining
from peers.status.figure import Column, figures, needed_columns
from peers.status.peer_row import PeerRow
from peers.status.view import SwarmView, TrainerRow
from swarm.config import RunConfig
from swarm.machine.words import counted


def about(config: RunConfig) -> dict[str, Any]:
    """The part that stays the same throughout the run."""
    model, rounds = config.model, config.rounds
    stages, tokens = counted(config.stages.num_stages, "stage"), counted(config.data.sequence_length, "token")
    return {
        "name": config.run,
        "run": config.run_id,
        "facts": {
            "Setting": "synchronous" if rounds.synchronous else "DiLoCo",
            "Model": f"{counted(model.num_layers, 'layer')} of {model.d_model} in {stages}",
            "Round": f"rounds of {counted(rounds.round_samples, 'sample')} of {tokens}",
            "Access": "locked" if config.owner else "open to all",
        },
        "samples_per_microbatch": config.data.microbatch_size,
        "round_samples": rounds.round_samples,
        "figures": {"peer": _explained(PeerRow), "trainer": _explained(TrainerRow)},
    }


def present(view: SwarmView, history: History) -> dict[str, Any]:
    """The part that changes with each view: the view, and all of the history except its series."""
    rows = [(row.stage, peer) for row in view.stages for peer in row.peers]
    columns = needed_columns(PeerRow, view.peers)
    trainer_columns = needed_columns(TrainerRow, view.trainers)
    return {
        "stages": [row.stage for row in view.stages],
        "empty_stages": view.empty_stages,
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
    """All figures of a row, and its cells in the table."""
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
