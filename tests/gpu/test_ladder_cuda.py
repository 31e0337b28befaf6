"""Each rung of the ladder against the one below: naive against float64, flash_fp32 against naive, the bf16 kernel
against flash_fp32 on the same values. Not run without a GPU and the CUDA library."""

import itertools

import numpy as np
import pytest
import torch
from random_case import SCALE, Case

from tpverify.errors import ArgumentError
from tpverify.ops import cuda
from tpverify.ops.attention import TreeMask, VerifyRequest, check_requests, verify_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(cuda.why_not() is not None, reason=f"NOT run: {cuda.why_not()}")]

LENGTHS = [[(s, n)] for s, n in itertools.product((0, 1, 31, 32, 33, 1000), (1, 8, 65))] + [
    [(0, 1), (4097, 33), (15, 129), (0, 257), (100, 1)],
    [(0, 7)] * 9,
    [(40, 1024)],
]


class Float32(Case):
    """The same case with values that bf16 does not have."""

    def __init__(self, lengths, heads, seed=0):
        super().__init__(lengths, heads, seed)
        generator = torch.Generator("cuda").manual_seed(seed)
        self.q = torch.randn(self.q.shape, device="cuda", generator=generator)
        self.rows = torch.randn(self.rows.shape, device="cuda", generator=generator)
        self.place(seed)

    def place(self, seed):
        rows = self.rows
        self.rows = rows.bfloat16()
        super().place(seed)
        self.rows, self.pool = rows, self.pool.float()
        self.pool[self.slots] = rows.float()


def distance(out, expected):
    """The largest of the rows' relative errors."""
    rows = (out.double() - expected.double()).norm(dim=2) / expected.double().norm(dim=2)
    assert rows.isfinite().all()
    return rows.max().item()


def in_float64(case):
    outs, lses, first, begin = [], [], 0, 0
    for (prefix, n), bits in zip(case.lengths, case.bits, strict=True):
        kv, q = case.rows[begin : begin + prefix + n].double(), case.q[first : first + n].double()
        hidden = torch.zeros(n, 1, prefix + n, dtype=torch.bool)
        hidden[:, 0, prefix:] = ~torch.from_numpy(bits)
        scores = (q @ kv.T * SCALE).masked_fill(hidden.cuda(), -torch.inf)
        outs.append(scores.softmax(2) @ kv[:, :512])
        lses.append(scores.logsumexp(2))
        first, begin = first + n, begin + prefix + n
    return torch.cat(outs), torch.cat(lses)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_naive_against_float64(lengths):
    case = Float32(lengths, 3)
    out, lse = case(backend="cuda_naive")
    expected, expected_lse = in_float64(case)
    assert distance(out, expected) < 2e-5
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=0)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("heads", [3, 8])
def test_flash_fp32_against_naive(lengths, heads):
    case = Float32(lengths, heads)
    out, lse = case(backend="cuda_fp32")
    expected, expected_lse = case(backend="cuda_naive")
    assert distance(out, expected) < 2e-5
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=0)
    assert all(map(torch.equal, (out, lse), case(backend="cuda_fp32")))


@pytest.mark.parametrize("lengths", [*LENGTHS, [(70000, 3)]], ids=str)
def test_flash_against_flash_fp32(lengths):
    """Weights and outputs are rounded to bf16: each by at most 2^-8 of itself, in the mean by a quarter of that."""
    case = Case(lengths, 8)
    out, lse = case()
    expected, expected_lse = verify_attention(
        case.q.float(), case.pool.float(), case.requests, softmax_scale=SCALE, backend="cuda_fp32"
    )
    assert distance(out, expected) < 2**-8
    torch.testing.assert_close(lse, expected_lse, atol=2**-8, rtol=0)


@pytest.mark.parametrize("heads", [1, 2, 8, 12, 64, 128])
def test_a_heads_bits_depend_on_nothing_else(heads):
    """Not on the other heads, nor on slots, nor on the other requests."""
    case = Float32([(100, 33), (0, 5), (1000, 2)], heads)
    for backend in ("cuda_fp32", "cuda_naive"):
        out, lse = case(backend=backend)
        for part in {1, -(-heads // 2)}:
            split = [case(q, backend=backend) for q in case.q.split(part, dim=1)]
            assert torch.equal(out, torch.cat([o for o, _ in split], 1))
            assert torch.equal(lse, torch.cat([x for _, x in split], 1))
        alone = verify_attention(case.q[33:38], case.pool, case.requests[1:2], softmax_scale=SCALE, backend=backend)
        assert torch.equal(out[33:38], alone[0]) and torch.equal(lse[33:38], alone[1])
        case.place(seed=5)
        assert all(map(torch.equal, (out, lse), case(backend=backend)))


@pytest.mark.parametrize("backend", ["cuda_fp32", "cuda_naive"])
def test_large_and_growing_scores_through_strided_inputs(backend):
    """Maxima that grow along the prefix make every tile rescale."""
    case = Float32([(700, 11)], 4)
    case.rows *= torch.linspace(0.1, 30, len(case.rows), device="cuda")[:, None]
    case.place(3)
    wide, pool = torch.zeros(11, 8, 580, device="cuda"), torch.full((len(case.pool), 600), torch.nan, device="cuda")
    wide[:, ::2, :576], pool[:, :576] = case.q, case.pool
    out, lse = verify_attention(wide[:, ::2, :576], pool[:, :576], case.requests, softmax_scale=SCALE, backend=backend)
    expected, expected_lse = in_float64(case)
    assert distance(out, expected) < 5e-5
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-4, rtol=1e-5)
    assert torch.equal(out, case(backend=backend)[0])


@pytest.mark.parametrize("backend", ["cuda_fp32", "cuda_naive"])
def test_a_hidden_sibling_may_be_nan(backend):
    """vllm issues/57156: a weight of 0 times NaN is NaN, and K is V as well."""
    case = Float32([(100, 20)], 4)
    star = np.eye(20, 64, dtype=bool)
    star[:, 0] = True
    words = np.packbits(star, axis=1, bitorder="little").view(np.uint64)
    (request,) = case.requests
    mask = TreeMask(words, star.sum(1) - 1)
    case.requests = [VerifyRequest(request.prefix_slots, request.tree_slots, mask)]
    out, lse = case(backend=backend)
    case.pool[request.tree_slots[7]] = torch.nan
    spoiled, spoiled_lse = case(backend=backend)
    others = [i for i in range(20) if i != 7]
    assert torch.equal(out[others], spoiled[others]) and torch.equal(lse[others], spoiled_lse[others])
    assert spoiled[7].isnan().all()


@pytest.mark.parametrize("kernel", ["cuda_fp32", "cuda_naive"])
def test_graph_replays_other_steps_and_clears_padding(kernel):
    rows, heads = 80, 5
    plan = cuda.CudaPlan(heads, 4, 65, 3000, torch.device("cuda", 0), False, kernel)
    q, pool = torch.zeros(rows, heads, 576, device="cuda"), torch.full((4000, 576), torch.nan, device="cuda")
    out, lse = torch.empty(rows + 2, heads, 512, device="cuda"), torch.empty(rows + 2, heads, device="cuda")
    run = lambda: plan.run(q, pool, out[1:-1], lse[1:-1], SCALE)  # noqa: E731
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for lengths in ([(500, 30)], [(2000, 65), (0, 1)], [(3, 2)] * 4, []):
        case = Float32(lengths, heads) if lengths else None
        nodes = case.nodes if case else 0
        plan.update(check_requests(case.requests, 4000) if case else [])
        if case:
            q[:nodes], pool[: len(case.pool)] = case.q, case.pool
        out.fill_(7), lse.fill_(7)
        graph.replay()
        assert (out[[0, -1]] == 7).all() and (lse[[0, -1]] == 7).all()
        assert (out[1 + nodes : -1] == 0).all() and (lse[1 + nodes : -1] == -torch.inf).all()
        if case:
            assert distance(out[1 : 1 + nodes], in_float64(case)[0]) < 2e-5


def test_slots_beyond_32_bit_offsets():
    """flashinfer pull/3136, tokenspeed pull/501: slot x row wraps at 2^31 and 2^32 bytes, here past 2^33."""
    case = Float32([(90, 5)], 2)
    high = 3_800_000
    pool = torch.empty(high, 576, device="cuda")
    pool[-len(case.pool) :] = case.pool
    (request,) = case.requests
    shift = high - len(case.pool)
    moved = VerifyRequest(request.prefix_slots + shift, request.tree_slots + shift, request.tree)
    for backend in ("cuda_fp32", "cuda_naive"):
        again = verify_attention(case.q, pool, [moved], softmax_scale=SCALE, backend=backend)
        assert all(map(torch.equal, case(backend=backend), again))


def test_dtypes_are_the_kernels():
    case = Case([(20, 3)], 2)
    for backend in ("cuda_fp32", "cuda_naive"):
        with pytest.raises(ArgumentError, match="^q: expected float32 on CUDA"):
            case(backend=backend)
    with pytest.raises(ArgumentError, match="^backend: "):
        case(backend="reference")
