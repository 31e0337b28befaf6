"""The kernels over a pairwise grid of all that verify attention takes. Not run without a GPU."""

import pairwise
import pytest
import torch

from tpverify.ops import cuda

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(cuda.why_not() is not None, reason=f"NOT run: {cuda.why_not()}")]


@pytest.mark.parametrize("settings", pairwise.pairwise(), ids=str)
def test_float64_guard_bands_and_bits(settings: pairwise.Settings) -> None:
    """Values are there for flashinfer pull/3136, aiter issues/5765, vllm issues/57156, flashinfer issues/1341 too."""
    case = pairwise.Run(settings, "cuda")
    out, lse = case()
    case.check(out, lse)
    again, lse_again = case()
    assert torch.equal(out.view(torch.uint8), again.view(torch.uint8))
    assert torch.equal(lse.view(torch.uint8), lse_again.view(torch.uint8))
