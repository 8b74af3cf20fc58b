"""A checkpoint goes through the workers' memory tensor by tensor."""

import errno
import os
from pathlib import Path

import pytest
import torch

from peers.static.checkpoints import Checkpoints, Progress
from peers.static.options import StaticOptions
from peers.static.spread import Spread
from peers.static.workers import Shape, joined
from swarm.checkpoint import file
from swarm.errors import Fatal
from swarm.machine import tensor_file
from swarm.stage import state
from swarm.training import optim
from swarm.training.optimizers import gradient_optimizer
from tests.peers.static.pretended import CONFIG, CUTS, SOME_CUTS, Memory, pretended

ALONE = Shape(dp=1, tp=1, pp=1)


def options(folder: Path, shape: Shape) -> StaticOptions:
    return StaticOptions(
        preset="tiny", dp=shape.dp, tp=shape.tp, fsdp="zero3" if shape.dp > 1 else None, checkpoint=folder
    )


def stepped(model: Spread) -> optim.Optimizer:
    """An optimizer that has taken a step, so that it has a state."""
    optimizer, parameters = gradient_optimizer(CONFIG, same_bits=False), model.local_parameters
    gradients = {name: torch.full_like(parameter, 0.1) for name, parameter in parameters.items()}
    optim.step(optimizer, parameters, gradients, 1e-3)
    return optimizer


def written_alone(folder: Path) -> dict[str, torch.Tensor]:
    """Write the checkpoint of step 1 as a single process does, and return its tensors."""
    with joined(ALONE, torch.device("cpu"), {}) as workers:
        model = Spread(CONFIG, options(folder, ALONE), workers, None)
        checkpoints = Checkpoints(CONFIG, model, options(folder, ALONE), workers)
        progress = checkpoints.write(Progress(step=1, run_samples=4), stepped(model))
        checkpoints.require_written()
    (name,) = file.names(folder)
    tensors = file.load(folder / str(name), file.parameters(folder / str(name)))
    header = file.read_header(folder / str(name), CONFIG)
    assert (header.lineage, header.state_digest) == (progress.lineage, state.digest_of(tensors))
    return tensors


@SOME_CUTS
def test_the_worker_that_writes_holds_one_whole_tensor(shape: Shape, tmp_path: Path) -> None:
    with pretended(shape, rank=0) as workers:
        given = options(tmp_path, shape)
        model = Spread(CONFIG, given, workers, None)
        checkpoints, optimizer = Checkpoints(CONFIG, model, given, workers), stepped(model)
        with Memory() as memory:
            checkpoints.write(Progress(step=1, run_samples=4), optimizer)
        checkpoints.require_written()
    largest = 4 * max(shape.numel() for shape in model.shapes.values())
    # Parts come together in a buffer, and are laid out behind each other.
    assert memory.most <= 4 * largest
    assert file.read_header(tmp_path / str(file.names(tmp_path)[0]), CONFIG).round == 1


@SOME_CUTS
def test_a_worker_goes_on_with_its_part_and_never_holds_much_more(shape: Shape, tmp_path: Path) -> None:
    whole = written_alone(tmp_path)
    with pretended(shape, rank=1) as workers:
        given = options(tmp_path, shape)
        model = Spread(CONFIG, given, workers, None)
        checkpoints, optimizer = Checkpoints(CONFIG, model, given, workers), gradient_optimizer(CONFIG, same_bits=False)
        with Memory() as memory, pytest.raises(Fatal, match="the workers see different checkpoints"):
            checkpoints.restore(optimizer)
        parameters = model.local_parameters
        held = state.named(parameters, optim.state_tensors(optimizer, parameters))
        assert held.keys() == whole.keys()
        for key, part in held.items():
            expected = model.part_of(key.split("/")[1], whole[key])
            torch.testing.assert_close(part, expected, rtol=0, atol=0)
    largest = 4 * max(shape.numel() for shape in model.shapes.values())
    assert memory.most <= sum(part.nbytes for key, part in held.items() if key.startswith("outer/")) + 2 * largest


@pytest.mark.parametrize("num_written", [0, 3])
def test_a_worker_that_cannot_write_still_puts_all_tensors_together_with_the_others(
    num_written: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    added, whole, joined_in = tensor_file.Stream.add, Spread.whole, list[str]()

    def full(stream: tensor_file.Stream, tensor: torch.Tensor) -> None:
        if len(joined_in) > num_written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        added(stream, tensor)

    def noted(model: Spread, name: str, part: torch.Tensor) -> torch.Tensor:
        joined_in.append(name)
        return whole(model, name, part)

    monkeypatch.setattr(tensor_file.Stream, "add", full)
    monkeypatch.setattr(Spread, "whole", noted)
    with pretended(CUTS["fsdp"], rank=0) as workers:
        given = options(tmp_path, CUTS["fsdp"])
        model = Spread(CONFIG, given, workers, None)
        checkpoints = Checkpoints(CONFIG, model, given, workers)
        checkpoints.write(Progress(step=1, run_samples=4), stepped(model))
        with pytest.raises(Fatal, match="step 1 could not be written"):
            checkpoints.require_written()
    assert len(joined_in) == 4 * len(model.shapes)
    assert not list(tmp_path.iterdir())
