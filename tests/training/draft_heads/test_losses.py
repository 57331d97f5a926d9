"""The losses of draft heads."""

import pytest
import torch
import torch.nn.functional as F

from training.draft_heads.losses import cross_entropy


@pytest.mark.parametrize(("kind", "error"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_the_cross_entropy_and_its_gradient_are_torchs(kind: torch.dtype, error: float) -> None:
    noise = torch.Generator().manual_seed(3)
    logits = (4 * torch.randn(7, 50, generator=noise)).to(kind).requires_grad_()
    probs = (3 * torch.randn(7, 50, generator=noise)).softmax(dim=-1)
    weight = torch.rand(7, generator=noise)
    results = []
    for each in (cross_entropy(logits, probs), F.cross_entropy(logits.float(), probs, reduction="none")):
        (slope,) = torch.autograd.grad((each * weight).sum(), logits)
        results.append((each, slope))
    (value, slope), (wanted, wanted_slope) = results
    torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(slope, wanted_slope, rtol=error, atol=error * float(wanted_slope.abs().max()))
