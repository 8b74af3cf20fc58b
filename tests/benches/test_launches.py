"""What a GPU's thread launches, which follows from the layers and hardly from any size."""

from scripts.benches import launches


def test_a_microbatch_and_an_inner_step_of_a_dozen_layers_are_few_launches() -> None:
    """Three times what four layers take is more than a dozen take."""
    counts = launches.run(launches.Options(d_model=64, layers=4, vocab_size=64, sequence_length=8))
    assert 3 * counts["launches_per_microbatch"] <= 1_100
    assert counts["launches_per_inner_step"] <= 20
    assert counts["launches_captured"] <= 25
