"""Norms: one is compared with its formula, the other with torch's."""

import torch

from swarm.model.norms import LayerNorm, RMSNorm


def test_rms_norm_ignores_the_scale_of_its_input() -> None:
    norm = RMSNorm(16, 1e-12)
    hidden = torch.randn(2, 3, 16)
    torch.testing.assert_close(norm(hidden * 100), norm(hidden))
    torch.testing.assert_close(norm(hidden).square().mean(-1), torch.ones(2, 3))


def test_layer_norm_has_torch_s_parameters_and_numbers() -> None:
    ours, theirs = LayerNorm(16, 1e-5), torch.nn.LayerNorm(16)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(0))
    theirs.load_state_dict(ours.state_dict())
    hidden = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(ours(hidden), theirs(hidden))
