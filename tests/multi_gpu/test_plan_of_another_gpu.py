"""Plans on a GPU that is not the current one."""

import numpy as np
import pytest
import torch

from tpverify.config import MlaGeometry
from tpverify.ops.attention import TreeMask, VerifyRequest, verify_attention
from tpverify.ops.plan import VerifyPlan

TOO_FEW = torch.cuda.device_count() < 2
pytestmark = [pytest.mark.multi_gpu, pytest.mark.skipif(TOO_FEW, reason="NOT run: under 2 GPUs")]


def test_a_capture_on_one_gpu_is_no_other_gpus() -> None:
    """A plan may be updated while another GPU's stream is captured, and not while its own is."""
    plans = [VerifyPlan(MlaGeometry(8), 1, 8, 100, f"cuda:{index}") for index in range(2)]
    requests = [VerifyRequest(np.arange(40), np.arange(40, 45), TreeMask.chain(5))]
    pool = torch.randn(45, 576, generator=torch.Generator().manual_seed(0)).bfloat16()
    q = torch.randn(5, 8, 576, generator=torch.Generator().manual_seed(1)).bfloat16()
    with (
        torch.cuda.device(1),
        torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="relaxed"),
        torch.cuda.device(0),
    ):
        with pytest.raises(RuntimeError, match="cannot be updated while a CUDA graph is captured"):
            plans[1].update(requests)
        plans[0].update(requests)
    plans[1].update(requests)
    found = []
    for plan in plans:
        rows = q.to(plan.device)
        out = torch.empty(5, 8, 512, dtype=torch.bfloat16, device=plan.device)
        plan.run(rows, pool.to(plan.device), out, torch.empty(5, 8, device=plan.device), 576**-0.5)
        found.append(out.cpu())
    assert torch.equal(*found)
    exact, _ = verify_attention(q.float(), pool.float(), requests, softmax_scale=576**-0.5)
    assert (found[0] - exact).norm() / exact.norm() < 4e-3
