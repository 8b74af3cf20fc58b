"""The norm that is not torch's own is compared with its formula."""

import torch

from swarm.model.functions import RMSNorm


def test_rms_norm_ignores_the_scale_of_its_input() -> None:
    norm = RMSNorm(16, 1e-12)
    hidden = torch.randn(2, 3, 16)
    torch.testing.assert_close(norm(hidden * 100), norm(hidden))
    torch.testing.assert_close(norm(hidden).square().mean(-1), torch.ones(2, 3))
