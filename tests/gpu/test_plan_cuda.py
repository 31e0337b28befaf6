"""A plan on a GPU: steps in captured graphs, tables that the graph fetches, what is refused. Not run without a GPU."""

from dataclasses import astuple

import pytest
import torch
from random_case import SCALE, Case

from tpverify.config import MlaGeometry
from tpverify.errors import ArgumentError
from tpverify.ops import cuda
from tpverify.ops.attention import VerifyRequest, verify_attention
from tpverify.ops.plan import VerifyPlan
from tpverify.ops.staging import Request

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(cuda.why_not() is not None, reason=f"NOT run: {cuda.why_not()}")]


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


def test_a_run_needs_rows_for_whatever_a_replay_may_have_fetched():
    """Replays are not seen: of what is staged and what was before it, the larger counts until both are known."""
    plan = VerifyPlan(MlaGeometry(8), max_batch=1, max_nodes=64, max_tokens=4000, device="cuda")
    large, small = Case([(3000, 64)], 8), Case([(40, 2)], 8)
    out, lse = torch.empty(64, 8, 512, device="cuda").bfloat16(), torch.empty(64, 8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    plan.fetch()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        plan.fetch()

    def run(case, rows):
        plan.run(large.q[:rows], case.pool, out[:rows], lse[:rows], SCALE)

    def refused(rows):
        with pytest.raises(ArgumentError, match="^q: expected torch.bfloat16 .64, 8, 576."):
            run(small, rows)

    plan.update(small.requests)
    run(small, 2)
    torch.cuda.synchronize()
    plan.stage(on_host(large.requests))
    refused(2)
    graph.replay()
    refused(63)
    run(large, 64)
    large.check(out, lse)
    plan.stage(on_host(small.requests))
    refused(2)
    graph.replay()
    out.fill_(7)
    run(small, 64)
    assert (out[2:] == 0).all()
    torch.cuda.synchronize()
    plan.stage(on_host(small.requests))
    run(small, 2)


def test_slots_beyond_a_captured_pool_are_refused():
    """The graph has that pool, whatever a later step's slots are."""
    plan, case = VerifyPlan(MlaGeometry(8), max_batch=1, max_nodes=8, max_tokens=100, device="cuda"), Case([(40, 2)], 8)
    out, lse = torch.empty(2, 8, 512, device="cuda").bfloat16(), torch.empty(2, 8, device="cuda")
    plan.update(case.requests)
    plan.run(case.q, case.pool, out, lse, SCALE)
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        plan.run(case.q, case.pool, out, lse, SCALE)
    (request,) = case.requests
    size = len(case.pool)
    with pytest.raises(ArgumentError, match=rf"^requests\[0\]\.tree_slots: expected slots from 0 to {size - 1}, got"):
        plan.update([VerifyRequest(request.prefix_slots, request.tree_slots * 0 + size, request.tree)])
    out.fill_(7)
    graph.replay()
    case.check(out, lse)


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
