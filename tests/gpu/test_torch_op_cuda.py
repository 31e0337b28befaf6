"""torch.compile around the kernels: whole graphs, with the bits of the plain call."""

import pytest
import torch
from random_case import SCALE, Case

from tpverify.config import MlaGeometry
from tpverify.ops import cuda
from tpverify.ops.attention import verify_attention
from tpverify.ops.plan import VerifyPlan

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(cuda.why_not() is not None, reason=f"NOT run: {cuda.why_not()}")]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_call(backend):
    torch._dynamo.reset()

    def attend(q, pool, requests):
        return verify_attention(q * 1.0, pool, requests, softmax_scale=SCALE)

    compiled = torch.compile(attend, backend=backend, fullgraph=True)
    for lengths in ([(1000, 33), (0, 5)], [(64, 9), (3, 70)]):
        case = Case(lengths, 8)
        assert all(map(torch.equal, compiled(case.q, case.pool, case.requests), case()))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_plan_in_a_cuda_graph(backend):
    torch._dynamo.reset()
    plan = VerifyPlan(MlaGeometry(8), 2, 70, 2000, "cuda")
    out, lse = torch.empty(79, 8, 512, device="cuda", dtype=torch.bfloat16), torch.empty(79, 8, device="cuda")
    q, pool = (
        torch.zeros(79, 8, 576, device="cuda", dtype=torch.bfloat16),
        torch.zeros(1200, 576, device="cuda").bfloat16(),
    )

    def layer(q, pool):
        plan.run(q, pool, out, lse, SCALE)
        return out * 2

    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    compiled(q, pool)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = compiled(q, pool)
    for lengths in ([(1000, 33), (0, 5)], [(64, 9), (3, 70)]):
        case = Case(lengths, 8)
        plan.update(case.requests)
        q[: case.nodes], pool[: len(case.pool)] = case.q, case.pool
        graph.replay()
        plan.run(q, pool, again := torch.empty_like(out), torch.empty_like(lse), SCALE)
        case.check(out[: case.nodes], lse[: case.nodes])
        assert torch.equal(out, again) and torch.equal(doubled, out * 2)


def test_export_on_cuda():
    case = Case([(300, 17)], 8)

    class Layer(torch.nn.Module):
        def forward(self, q, pool):
            return verify_attention(q, pool, case.requests, softmax_scale=SCALE)

    exported = torch.export.export(Layer(), (case.q, case.pool)).module()
    assert all(map(torch.equal, exported(case.q, case.pool), case()))
