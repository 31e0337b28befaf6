"""The kernels between the products of an MLA layer against float64, for bits, and captured. Not run without a GPU."""

import pytest
import torch
from mla_rows import Rows

from tpverify.errors import ArgumentError
from tpverify.ops import cuda
from tpverify.ops.mla import rope_cache

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(cuda.why_not() is not None, reason=f"NOT run: {cuda.why_not()}")]
MLA = {"rank": 512, "rope": 64, "dtype": torch.bfloat16, "device": "cuda"}
KIMI_K2 = {"hidden": 7168, "low": 1536, "nope": 128, **MLA}
ROUNDING = 2**-8  # of bf16: inputs are exact, sums are in fp32, results are rounded once


@pytest.mark.parametrize("size", [1.0, 1e-3, 30.0])
@pytest.mark.parametrize(
    ("n", "shards", "heads", "widths"),
    [
        (32, 4, 8, KIMI_K2), (33, 8, 8, KIMI_K2), (1, 1, 8, KIMI_K2), (528, 2, 8, KIMI_K2),
        (7, 3, 5, {"hidden": 8, "low": 8, "nope": 8, **MLA}),
        (5, 1, 1, {"hidden": 7688, "low": 24, "nope": 200, **MLA}),
    ],
    ids=str,
)  # fmt: skip
def test_rope_cache_is_two_norms_and_a_rotation(n, shards, heads, widths, size):
    rows = Rows(n, shards, heads, **widths, size=size, spare=8)
    rope_cache(*rows.arguments())
    rows.check(ROUNDING)
    rows.check_untouched()


def test_bits_repeat_and_are_a_rows_own():
    """Whatever rows and heads are beside it: half of the shards is what a rank of two has."""
    once, again, some = (Rows(33, 8, 8, **KIMI_K2) for _ in range(3))
    rope_cache(*once.arguments())
    rope_cache(*again.arguments())
    assert all(torch.equal(getattr(once, name), getattr(again, name)) for name in ("nope", "q", "pool"))
    x, down, queries, rotation, slots, nope, q, pool, *eps = some.arguments()
    part, shards = slice(3, 20), slice(4, 8)
    queries, nope, q = queries[shards, part].contiguous(), nope[shards, part].contiguous(), q[part, 32:].clone()
    rope_cache(x[part], down[part], queries, rotation[part], slots[part], nope, q, pool, *eps)
    assert torch.equal(nope, once.nope[shards, part])
    assert torch.equal(q[..., 512:], once.q[part, 32:, 512:])
    assert torch.equal(pool[slots[part]], once.pool[once.slots[part]])


def test_captured_after_a_product_it_reads_what_that_wrote():
    """It starts while the kernel before it ends: that one's results are waited for, in every one of 200 links."""
    rows = Rows(32, 4, 8, **KIMI_K2)
    fresh, chain = rows.x.clone(), 200
    weight = torch.eye(7168, device="cuda").bfloat16()
    pools = torch.zeros(chain, *rows.pool.shape, device="cuda", dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()

    def run():
        for link in range(chain):
            torch.mm(fresh, weight, out=rows.x)
            rope_cache(*rows.arguments()[:7], pools[link], *rows.arguments()[8:])

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.mm(fresh, weight, out=rows.x)
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        run()
    fresh.mul_(3)
    rows.x.zero_()
    graph.replay()
    torch.cuda.synchronize()
    rows.pool.copy_(pools[0])
    rows.check(ROUNDING)
    assert (pools == pools[0]).all() and torch.equal(rows.x, fresh)


def test_what_the_kernels_do_not_take_is_refused():
    arguments = list(Rows(4, 2, 2, **KIMI_K2).arguments())

    def refused(index, value, said):
        with pytest.raises(ArgumentError, match=said):
            rope_cache(*arguments[:index], value, *arguments[index + 1 :])

    refused(0, arguments[0].float(), "^x: expected dense bfloat16")
    refused(2, arguments[2].transpose(1, 2).contiguous().transpose(1, 2), "^queries: expected dense bfloat16")
    refused(4, arguments[4].int(), "^slots: expected int64, got torch.int32")
    refused(4, arguments[4].cpu(), "^slots: ")
    odd = Rows(4, 2, 2, **{**KIMI_K2, "hidden": 7164})
    with pytest.raises(ArgumentError, match="^hidden: expected a multiple of 8"):
        rope_cache(*odd.arguments())
    rope_cache(*arguments)
