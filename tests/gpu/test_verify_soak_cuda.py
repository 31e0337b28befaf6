"""The verify kernel over and over, and sums that must come out exactly."""

import pytest
import torch

from tpverify.config import MlaGeometry
from tpverify.ops.attention import TreeMask, VerifyRequest, verify_attention
from tpverify.ops.plan import VerifyPlan

pytestmark = pytest.mark.gpu
SCALE = 576**-0.5


def test_a_hundred_thousand_replays():
    """flashinfer pull/4732: a barrier that an early warp passes twice hangs once in a long while. Splits of one and two
    tiles, replayed from a graph that counts the differences itself."""
    lengths = [(20, 5), (33, 8), (700, 3)]
    generator = torch.Generator("cuda").manual_seed(0)
    pool = torch.randn(1000, 576, device="cuda", generator=generator).bfloat16()
    requests, start = [], 0
    for prefix, n in lengths:
        slots = torch.arange(start, start + prefix + n, device="cuda")
        requests.append(VerifyRequest(slots[:prefix], slots[prefix:], TreeMask.chain(n)))
        start += prefix + n
    q = torch.randn(16, 8, 576, device="cuda", generator=generator).bfloat16()
    plan = VerifyPlan(MlaGeometry(8), 3, 8, 1000, "cuda")
    plan.update(requests)
    out, lse = q.new_empty(16, 8, 512), torch.empty(16, 8, device="cuda")
    plan.run(q, pool, out, lse, SCALE)
    expected, expected_lse = out.clone(), lse.clone()
    assert out.isfinite().all() and lse.isfinite().all()
    differing = torch.zeros((), device="cuda", dtype=torch.int64)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(100):
            out.fill_(7)
            plan.run(q, pool, out, lse, SCALE)
            differing += (out != expected).sum() + (lse != expected_lse).sum()
    for _ in range(1000):
        graph.replay()
    assert int(differing) == 0
    out[0, 0, 0] += 1
    assert int((out != expected).sum()) == 1  # the comparison can fail


@pytest.mark.parametrize(("prefix", "n"), [(0, 1), (17, 9), (5000, 33), (185_000, 8)])
def test_values_of_one_average_to_exactly_one(prefix, n):
    """Dao-AILab pull/2721, flashinfer pull/900: the denominator sums other weights than the numerator; bfloat16 partial
    results. A mean of equal values is that value, whatever the weights and however many splits are merged."""
    generator = torch.Generator("cuda").manual_seed(prefix)
    pool = torch.randn(prefix + n, 576, device="cuda", generator=generator)
    pool[:, :512] = 1.0
    slots = torch.randperm(prefix + n, device="cuda", generator=generator)
    q = torch.randn(n, 8, 576, device="cuda", generator=generator) * 4
    request = VerifyRequest(slots[:prefix], slots[prefix:], TreeMask.chain(n))
    out, _ = verify_attention(q.bfloat16(), pool.bfloat16(), [request], softmax_scale=SCALE)
    assert (out == 1.0).all()
