"""The model with which the bench `parity` compares a swarm that trains adapters: it learns what the swarm learns."""

import dataclasses
from pathlib import Path

import pytest
import torch

from scripts.benches.parity import BOUND, Options, _config
from scripts.benches.shared.common import with_corpus
from scripts.benches.sides.peft_model import RUN, peft_model, with_model
from scripts.benches.sides.reference import Reference
from swarm.config import LoraConfig, RoundsConfig
from swarm.interchange.run_folder import open_weights
from swarm.interchange.source import parameter_shapes
from tests.support.wire_chain import WireChain


# peft asks transformers by this name.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_peft_s_layers_learn_what_the_stages_learn(tmp_path: Path, text: str) -> None:
    config = _config(Options(dataset=text))
    config = dataclasses.replace(
        config, data=dataclasses.replace(config.data, held_out_fraction=0.05),
        rounds=RoundsConfig(setting="synchronous", round_samples=config.data.microbatch_size), lora=LoraConfig(rank=4),
    )  # fmt: skip
    config, data = with_corpus(with_model(config, tmp_path))
    reference = Reference(config, data, peft_model(config, tmp_path))
    begin = {name: weight.clone() for name, weight in reference.weights.items()}
    given = open_weights(tmp_path / RUN, config).load(set(parameter_shapes(config.model)))
    chain = WireChain(config, data, given=given)
    for number in range(4):
        assert chain.step(number) == pytest.approx(reference.step(number), rel=BOUND)
    found = {name: master.detach() for stage in chain.stages for name, master in stage.weights.masters.items()}
    assert found.keys() == begin.keys()
    for name, weight in reference.weights.items():
        apart, moved = (float(torch.linalg.vector_norm(weight - other)) for other in (found[name], begin[name]))
        assert apart < BOUND * float(torch.linalg.vector_norm(weight)), name
        assert moved > 10 * apart, name
