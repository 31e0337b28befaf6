"""The bf16 verify kernel against float64, and for bits. Not run without a GPU and the CUDA library."""

import itertools

import numpy as np
import pytest
import torch
from random_case import SCALE, Case

from tpverify.config import MlaGeometry
from tpverify.errors import ArgumentError
from tpverify.ops import cuda
from tpverify.ops.attention import TreeMask, VerifyRequest, verify_attention
from tpverify.ops.plan import VerifyPlan

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(cuda.why_not() is not None, reason=f"NOT run: {cuda.why_not()}")]

LENGTHS = [
    [(s, n)] for s, n in itertools.product((0, 1, 15, 16, 17, 63, 64, 65, 4095, 4096, 4097), (1, 8, 65))
] + [
    [(0, 1), (4097, 33), (15, 129), (0, 1024), (1000, 1)],
    [(0, 7)] * 9,
    [(777, 257)],
    [(64, 513), (63, 64)],
    [(70000, 3)],
]  # fmt: skip


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_float64_and_repeats(lengths):
    case = Case(lengths, 8)
    out, lse = case()
    case.check(out, lse)
    assert all(torch.equal(out, again) and torch.equal(lse, b) for again, b in (case() for _ in range(3)))


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 12, 16, 64, 128])
@pytest.mark.parametrize("lengths", [[(3000, 9)], [(100, 33), (0, 5), (4097, 1)]], ids=str)
def test_heads(lengths, heads):
    case = Case(lengths, heads, seed=heads)
    out, lse = case()
    case.check(out, lse)
    for part in {1, max(1, heads // 8), -(-heads // 2)}:
        split = [case(q) for q in case.q.split(part, dim=1)]
        assert torch.equal(out, torch.cat([o for o, _ in split], 1)), part
        assert torch.equal(lse, torch.cat([x for _, x in split], 1)), part


@pytest.mark.parametrize("lengths", [[(5000, 40)], [(33, 7), (9000, 12), (0, 65)]], ids=str)
def test_bits_over_tiles_slots_and_batches(lengths, monkeypatch):
    case = Case(lengths, 8)
    expected = case(batch_invariant=True)
    case.check(*expected)
    first = 0
    for request, n in zip(case.requests, case.masks, strict=True):
        rows = slice(first, first := first + len(n.depths))
        alone = verify_attention(
            case.q[rows], case.pool, [request], softmax_scale=SCALE, backend="cuda", batch_invariant=True
        )
        assert torch.equal(alone[0], expected[0][rows]) and torch.equal(alone[1], expected[1][rows])
    for rows in cuda.TILE_ROWS:
        monkeypatch.setattr(cuda, "choose_tile_rows", lambda *_, rows=rows: rows)
        assert all(map(torch.equal, expected, case(batch_invariant=True)))
    monkeypatch.undo()
    usual = case()
    case.place(seed=5)
    assert all(map(torch.equal, usual, case()))


@pytest.mark.parametrize("heads", [2, 64, 128])
@pytest.mark.parametrize("lengths", [[(9000, 9)], [(100, 33), (0, 5), (20_000, 1)]], ids=str)
def test_splits_that_fit_the_heads(lengths, heads):
    """exact=False: other splits, the same promises but that of other head counts."""
    case = Case(lengths, heads, seed=heads)
    plan = VerifyPlan(MlaGeometry(heads), 3, 33, 21_000, "cuda", exact=False)
    plan.update(case.requests)
    out, lse = case.q.new_empty(case.nodes, heads, 512), torch.empty(case.nodes, heads, device="cuda")
    plan.run(case.q, case.pool, out, lse, SCALE)
    case.check(out, lse)
    again, lse_again = torch.empty_like(out), torch.empty_like(lse)
    plan.run(case.q, case.pool, again, lse_again, SCALE)
    assert torch.equal(out, again) and torch.equal(lse, lse_again)


def test_a_thousand_repeats():
    """FlashMLA-ETAP pull/3: a missing barrier showed in 17 of 56 configurations."""
    case = Case([(2000, 33), (17, 2)], 8)
    plan = VerifyPlan(MlaGeometry(8), 2, 33, 4096, "cuda")
    plan.update(case.requests)
    expected, lse = case()
    out, again = torch.empty_like(expected), torch.empty_like(lse)
    differing = torch.zeros((), device="cuda", dtype=torch.int64)
    for _ in range(1000):
        plan.run(case.q, case.pool, out, again, SCALE)
        differing += (out.view(torch.int16) != expected.view(torch.int16)).sum() + (again != lse).sum()
    assert int(differing) == 0


def test_what_no_one_sees_may_be_nan():
    """A sibling is seen by itself only; the others' rows must not change (vllm issues/57156)."""
    case = Case([(100, 20)], 4)
    star = np.eye(20, 64, dtype=bool)
    star[:, 0] = True
    words = np.packbits(star, axis=1, bitorder="little").view(np.uint64)
    (request,) = case.requests
    case.requests = [VerifyRequest(request.prefix_slots, request.tree_slots, TreeMask(words, star.sum(1) - 1))]
    out, lse = case()
    case.pool[request.tree_slots[7]] = torch.nan
    spoiled, spoiled_lse = case()
    others = [i for i in range(20) if i != 7]
    assert torch.equal(out[others], spoiled[others]) and torch.equal(lse[others], spoiled_lse[others])
    assert spoiled[7].isnan().all()


@pytest.mark.parametrize("scale", [0.0, -0.1, 3e38])
def test_scales_that_move_a_maximum_are_refused(scale):
    """Maxima are of unscaled scores: 0 and less made NaN. The float32 kernels and the reference take them."""
    case = Case([(20, 3)], 2)
    with pytest.raises(ArgumentError, match="^softmax_scale: expected a number from above 0 to 2.35866e.38 for this"):
        verify_attention(case.q, case.pool, case.requests, softmax_scale=scale)


def test_slots_beyond_32_bit_offsets():
    """flashinfer pull/3136, tokenspeed pull/501, aiter issues/5765: slot x row wraps at 2^31 and 2^32."""
    case = Case([(900, 5)], 2)
    out, lse = case()
    high = 7_600_000
    pool = torch.empty(high, 576, device="cuda", dtype=torch.bfloat16)
    pool[-len(case.pool) :] = case.pool
    (request,) = case.requests
    shift = high - len(case.pool)
    moved = VerifyRequest(request.prefix_slots + shift, request.tree_slots + shift, request.tree)
    again, again_lse = verify_attention(case.q, pool, [moved], softmax_scale=SCALE)
    assert torch.equal(out, again) and torch.equal(lse, again_lse)


def test_strided_inputs_and_large_scores():
    """flashinfer issues/1341: wrong unless contiguous. Maxima that grow along the prefix make every row rescale."""
    case = Case([(1500, 11)], 4)
    case.rows *= torch.linspace(0.1, 6, len(case.rows), device="cuda").bfloat16()[:, None]
    case.place(3)
    wide = torch.zeros(11, 8, 584, device="cuda", dtype=torch.bfloat16)
    wide[:, ::2, :576] = case.q
    out, lse = case(wide[:, ::2, :576])
    case.check(out, lse)
    assert torch.equal(out, case()[0])


def test_errors_leave_the_process_usable():
    case = Case([(20, 3)], 2)
    with pytest.raises(ArgumentError, match="^q: expected bfloat16 on CUDA"):
        verify_attention(case.q.float(), case.pool.float(), case.requests, softmax_scale=SCALE)
    with pytest.raises(ArgumentError, match="^q: expected at most 128 heads"):
        verify_attention(case.q.repeat(1, 65, 1), case.pool, case.requests, softmax_scale=SCALE)
    shifted = torch.zeros(3 * 2 * 576 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(3, 2, 576)
    with pytest.raises(ArgumentError, match="^q: expected device memory aligned to 16 bytes"):
        case(shifted)
    case.check(*case())
