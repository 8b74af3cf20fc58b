"""Members of two kinds of processors: what a child process computes with plainer instructions is nearly the same."""

import pytest

from scripts.benches.shared.common import with_corpus
from scripts.benches.sides.liars_arm import run_config
from scripts.benches.sides.mixed_processors import PLAINEST, other_kind, train
from swarm.errors import PeerUnavailable


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["synchronous", "diloco"])
def test_honest_members_compute_nearly_the_same_and_nobody_is_left_out(setting: str) -> None:
    config, data = with_corpus(run_config(setting, "stdlib", "fp32", 0))
    with other_kind(setting, "stdlib", "fp32", 0) as other:
        found = train(config, data, other, (6, 1), 4)
        assert (found["rounds"], found["falsely_named"], found["left_out"]) == (4, 0, 0)
        assert found["num_checked"] == (23 if setting == "synchronous" else 0), "one of each member that lives"
        # Where this processor has no other instructions either, both round alike.
        assert 0.0 <= found["rounding"] < 1e-3, PLAINEST
        other.stop()
        with pytest.raises(PeerUnavailable, match="has ended"):
            train(config, data, other, (6, 1), 1)
