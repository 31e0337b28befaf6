"""The bf16 verify kernel against float64, and for bits. Not run without a GPU and the CUDA library."""

import itertools
import random
from dataclasses import astuple

import numpy as np
import pytest
import torch

from tpverify.config import MlaGeometry
from tpverify.errors import ArgumentError
from tpverify.ops import cuda
from tpverify.ops.attention import TreeMask, VerifyRequest, verify_attention
from tpverify.ops.plan import VerifyPlan
from tpverify.ops.staging import Request

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(cuda.why_not() is not None, reason=f"NOT run: {cuda.why_not()}")]
SCALE = 576**-0.5


def random_mask(n, rng):
    """Any node order in which parents come first: neither breadth-first nor a chain. sglang pull/39703, FastDeploy
    pull/3514: masks cut short to a causal tile."""
    bits = np.zeros((n, -(-n // 64) * 64), bool)
    depths = np.zeros(n, np.int32)
    for i in range(n):
        if i:
            parent = rng.randrange(max(0, i - rng.choice((1, 2, 8, n))), i)
            bits[i], depths[i] = bits[parent], depths[parent] + 1
        bits[i, i] = True
    return TreeMask(np.packbits(bits, axis=1, bitorder="little").view(np.uint64), depths), bits[:, :n]


class Case:
    """Random slots; NaN in slot 0 and in every slot that no request has (vllm issues/57156)."""

    def __init__(self, lengths, heads, seed=0):
        rng, g = random.Random(seed), torch.Generator("cuda").manual_seed(seed)
        tokens, self.nodes = sum(s + n for s, n in lengths), sum(n for _, n in lengths)
        self.lengths, self.heads = lengths, heads
        rows = torch.randn(tokens, 576, device="cuda", generator=g).bfloat16()
        self.q = torch.randn(self.nodes, heads, 576, device="cuda", generator=g).bfloat16()
        trees = [random_mask(n, rng) for _, n in lengths]
        self.masks, self.bits = [t for t, _ in trees], [b for _, b in trees]
        self.rows = rows
        self.place(seed)

    def place(self, seed):
        order = torch.randperm(len(self.rows) + 50, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
        self.slots = order[: len(self.rows)] + 1
        self.pool = torch.full((len(self.rows) + 51, 576), torch.nan, device="cuda", dtype=torch.bfloat16)
        self.pool[self.slots] = self.rows
        parts = iter(self.slots.split([x for length in self.lengths for x in length]))
        self.requests = [VerifyRequest(next(parts), next(parts), mask) for mask in self.masks]

    def __call__(self, q=None, **options):
        q = self.q if q is None else q
        return verify_attention(q, self.pool, self.requests, softmax_scale=SCALE, **options)

    def check(self, out, lse, sample=24):
        """Relative error against float64, at most twice that of rounding P and the output to bf16. A denominator sums
        P as rounded, so that lse may be 2^-8 off."""
        assert out.isfinite().all() and lse.isfinite().all()
        first = begin = 0
        for (prefix, n), bits in zip(self.lengths, self.bits, strict=True):
            kv = self.rows[begin : begin + prefix + n].double()
            for node in sorted(random.Random(0).sample(range(n), min(n, sample))):
                seen = torch.cat([torch.ones(prefix, dtype=torch.bool), torch.from_numpy(bits[node])]).cuda()
                scores = (self.q[first + node].double() @ kv[seen].T) * SCALE
                weights = scores.softmax(1)
                exact = weights @ kv[seen, :512]
                plain = (weights.bfloat16().double() @ kv[seen, :512]).bfloat16().double()
                error, bar = (out[first + node].double() - exact).norm(), (plain - exact).norm()
                assert error <= 2 * bar + 1e-9, (prefix, n, node, float(error / exact.norm()))
                torch.testing.assert_close(lse[first + node].double(), scores.logsumexp(1), atol=2**-8, rtol=0)
            first, begin = first + n, begin + prefix + n


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


@pytest.mark.parametrize("fetches", [False, True], ids=["update", "stage"])
def test_graph_replays_other_steps_and_clears_padding(fetches):
    """Stale plans, unwritten padded rows: flashinfer pull/5176, issues/2883, vllm pull/38416. Outputs lie in poison.
    Tables come before the graph, or by the graph: from other memory where they do not fit."""
    rows, heads = 200, 8
    plan = VerifyPlan(MlaGeometry(heads), max_batch=4, max_nodes=129, max_tokens=30000, device="cuda")
    q = torch.zeros(rows, heads, 576, device="cuda", dtype=torch.bfloat16)
    pool = torch.full((40000, 576), torch.nan, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(rows + 2, heads, 512, device="cuda", dtype=torch.bfloat16)
    lse = torch.empty(rows + 2, heads, device="cuda")

    def run():
        if fetches:
            plan.fetch()
        plan.run(q, pool, out[1:-1], lse[1:-1], SCALE)

    plan.update(Case([(500, 30)], heads).requests)
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for lengths in ([(500, 30)], [(25000, 129), (0, 1)], [(3, 2)] * 4, [(1, 1)], [], [(25000, 50), (64, 64), (0, 86)]):
        case = Case(lengths, heads, seed=len(lengths)) if lengths else None
        nodes = case.nodes if case else 0
        requests = case.requests if case else []
        if fetches:
            torch.cuda.synchronize()
            plan.stage(on_host(requests))
        else:
            plan.update(requests)
        if case:
            q[:nodes], pool[: len(case.pool)] = case.q, case.pool
        out.fill_(7), lse.fill_(7)
        graph.replay()
        assert (out[[0, -1]] == 7).all() and (lse[[0, -1]] == 7).all()
        assert (out[1 + nodes : -1] == 0).all() and (lse[1 + nodes : -1] == -torch.inf).all()
        if case:
            case.check(out[1 : 1 + nodes], lse[1 : 1 + nodes])
    with pytest.raises(ArgumentError, match="requests: expected at most 200 nodes, as captured"):
        plan.update(Case([(0, 129), (0, 100)], heads).requests)
    with pytest.raises(ArgumentError, match="requests: expected at most 200 nodes, as captured"):
        plan.stage(on_host(Case([(0, 129), (0, 100)], heads).requests))
    (slots_there,) = Case([(5, 3)], heads).requests
    with pytest.raises(ArgumentError, match="requests: expected slots on the CPU, got slots on a GPU"):
        plan.stage([Request(slots_there.prefix_slots, slots_there.tree_slots, *astuple(slots_there.tree))])


def on_host(requests):
    """As a rank has them."""
    slots = [(r.prefix_slots.cpu().int().numpy(), r.tree_slots.cpu().int().numpy()) for r in requests]
    return [Request(*s, r.tree.words, r.tree.depths) for s, r in zip(slots, requests, strict=True)]


def test_a_graph_that_fetches_has_the_bits_of_plain_calls():
    """Splits are chosen for a step's own lengths, though the graph was captured for others."""
    rows, heads = 64, 8
    plan = VerifyPlan(MlaGeometry(heads), max_batch=2, max_nodes=64, max_tokens=70000, device="cuda")
    q, pool = (torch.zeros(size, device="cuda", dtype=torch.bfloat16) for size in ((rows, heads, 576), (80000, 576)))
    out, lse = torch.empty(rows, heads, 512, device="cuda").bfloat16(), torch.empty(rows, heads, device="cuda")
    plan.update(Case([(30000, 32)], heads).requests)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        plan.fetch()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        plan.fetch()
        plan.run(q, pool, out, lse, SCALE)
    for lengths in ([(30000, 32)], [(60000, 64)], [(40, 1)], [(900, 2), (20000, 60)], [(0, 64)], [(2500, 8)]):
        case = Case(lengths, heads, seed=7)
        q[: case.nodes], pool[: len(case.pool)] = case.q, case.pool
        torch.cuda.synchronize()
        plan.stage(on_host(case.requests))
        graph.replay()
        expected, expected_lse = case()
        assert torch.equal(out[: case.nodes], expected) and torch.equal(lse[: case.nodes], expected_lse)


def test_what_is_staged_has_the_checks_of_what_is_updated():
    """More nodes than q has rows would be read and written beyond it; a tile is kept from the capture on."""
    plan = VerifyPlan(MlaGeometry(8), max_batch=2, max_nodes=64, max_tokens=70000, device="cuda")
    large, small = Case([(3000, 64)], 8), Case([(40, 2)], 8)
    out, lse = torch.empty(64, 8, 512, device="cuda").bfloat16(), torch.empty(64, 8, device="cuda")
    plan.stage(on_host(large.requests))
    plan.fetch()
    with pytest.raises(ArgumentError, match="^q: expected torch.bfloat16 .64, 8, 576."):
        plan.run(large.q[:32], large.pool, out[:32], lse[:32], SCALE)
    plan.run(large.q, large.pool, out, lse, SCALE)
    large.check(out, lse)
    torch.cuda.synchronize()
    plan.stage(on_host(small.requests))
    plan.fetch()
    plan.run(small.q, small.pool, out[:2], lse[:2], SCALE)
    small.check(out[:2], lse[:2])

    graph = torch.cuda.CUDAGraph()
    plan.update(small.requests)
    with torch.cuda.graph(graph):
        plan.fetch()
        with pytest.raises(RuntimeError, match="capture its fetch, then stage"):
            plan.update(small.requests)
    plan.update(large.requests)  # for which it would have another tile
    torch.cuda.synchronize()
    plan.stage(on_host(large.requests))
    graph.replay()
    plan.run(large.q, large.pool, out, lse, SCALE)
    large.check(out, lse)


@pytest.mark.parametrize("kept", [True, False], ids=["one plan", "plans of one call"])
def test_tables_of_steps_that_nobody_waits_for(kept):
    """All enqueued behind a GPU that is busy: host memory is filled again only when it has been fetched, also that of
    plans that are gone by then."""
    plan = VerifyPlan(MlaGeometry(8), max_batch=1, max_nodes=20, max_tokens=9000, device="cuda")
    cases = [Case([(1000 + 1500 * (seed % 6), 20)], 8, seed) for seed in range(20)]
    steps = [[VerifyRequest(r.prefix_slots.cpu(), r.tree_slots.cpu(), r.tree) for r in case.requests] for case in cases]
    found = []
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)  # 10 ms
    for case, step in zip(cases, steps, strict=True):
        if kept:
            plan.update(step)
            found.append((torch.empty(20, 8, 512, device="cuda").bfloat16(), torch.empty(20, 8, device="cuda")))
            plan.run(case.q, case.pool, *found[-1], SCALE)
        else:
            found.append(verify_attention(case.q, case.pool, step, softmax_scale=SCALE))
            torch.full((20_000,), 3, dtype=torch.int32).pin_memory()  # what is free is taken, and written
    for case, (out, lse) in zip(cases, found, strict=True):
        case.check(out, lse)


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
