"""torch.compile and torch.export take verify attention whole, with requests made before the call or of tensors."""

import random

import numpy as np
import pytest
import torch
from oracle import attention_oracle, random_parents

import tpverify as tv
from tpverify.errors import ArgumentError
from tpverify.ops.attention import TreeMask, VerifyRequest, verify_attention

SCALE = 0.07


class Case:
    """Requests of (prefix, nodes), and what attention over them is in float64."""

    def __init__(self, lengths, seed=0):
        generator = torch.Generator().manual_seed(seed)
        tokens = sum(s + n for s, n in lengths)
        self.pool = torch.randn(tokens + 7, 576, generator=generator)
        slots = iter(torch.randperm(tokens, generator=generator).split([x for pair in lengths for x in pair]))
        parents = [random_parents(random.Random(seed + i), n) for i, (_, n) in enumerate(lengths)]
        self.trees = [tv.DraftTree.from_parents(np.arange(len(p)), np.array(p)) for p in parents]
        self.requests = [VerifyRequest(next(slots).numpy(), next(slots), tree) for tree in self.trees]
        self.q = torch.randn(sum(n for _, n in lengths), 2, 576, generator=generator)
        parts, self.expected = self.q.split([n for _, n in lengths]), []
        for q, request, p in zip(parts, self.requests, parents, strict=True):
            prefix = torch.as_tensor(request.prefix_slots)
            self.expected.append(attention_oracle(q, self.pool, prefix, request.tree_slots, p, SCALE))

    def check(self, out, lse):
        for found, i in ((out, 0), (lse, 1)):
            expected = torch.cat([pair[i] for pair in self.expected])
            torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=2e-5)


def attend(q, pool, requests):
    return verify_attention(q * 1.0, pool, requests, softmax_scale=SCALE)


def from_tensors(q, pool, prefix, tree, words, depths):
    return attend(q, pool, [VerifyRequest(prefix, tree, TreeMask(words, depths))])


def inputs_of(case):
    (request,) = case.requests
    return case.q, case.pool, *request.tensors


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_whole_and_again_for_other_requests(backend):
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend=backend, fullgraph=True)
    for seed, lengths in enumerate(([(70, 9), (0, 5)], [(70, 9), (0, 5)], [(3, 2)])):
        case = Case(lengths, seed)
        out, lse = compiled(case.q, case.pool, case.requests)
        case.check(out, lse)
        assert torch.equal(out, attend(case.q, case.pool, case.requests)[0])


def test_one_graph_for_all_steps_when_requests_are_tensors():
    torch._dynamo.reset()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(from_tensors, backend=count, fullgraph=True, dynamic=True)
    for seed, lengths in enumerate([(70, 9), (5, 3), (200, 33)]):
        case = Case([lengths], seed)
        case.check(*compiled(*inputs_of(case)))
    assert len(graphs) == 1
    assert [node.target for node in graphs[0].graph.nodes if "verify" in str(node.target)] == [
        torch.ops.tpverify.verify_attention.default
    ]


@pytest.mark.parametrize("strict", [False, True])
def test_exported_with_requests_as_constants(strict):
    case = Case([(70, 9), (0, 5)])

    class Layer(torch.nn.Module):
        def forward(self, q, pool):
            return attend(q, pool, case.requests)

    exported = torch.export.export(Layer(), (case.q, case.pool), strict=strict).module()
    case.check(*exported(case.q, case.pool))


@pytest.mark.parametrize("strict", [False, True])
def test_exported_for_any_length_and_tree(strict):
    class Layer(torch.nn.Module):
        def forward(self, q, pool, prefix, tree, words, depths):
            return from_tensors(q, pool, prefix, tree, words, depths)

    nodes, dim = torch.export.Dim("nodes", min=2, max=64), torch.export.Dim
    shapes = {name: {0: nodes} for name in ("q", "tree", "words", "depths")}
    shapes |= {"pool": {0: dim("slots", min=2)}, "prefix": {0: dim("prefix", min=2)}}
    exported = torch.export.export(Layer(), inputs_of(Case([(70, 9)])), dynamic_shapes=shapes, strict=strict).module()
    for seed, lengths in enumerate([(70, 9), (5, 3), (200, 33)]):
        case = Case([lengths], seed)
        case.check(*exported(*inputs_of(case)))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_plan_follows_its_updates(backend):
    torch._dynamo.reset()
    plan = tv.VerifyPlan(tv.MlaGeometry(2), max_batch=2, max_nodes=9, max_tokens=100, device="cpu")

    def layer(q, pool, out, lse):
        plan.run(q, pool, out, lse, SCALE)
        return out + 1

    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    for seed in range(2):
        case = Case([(70, 9), (0, 5)], seed)
        plan.update(case.requests)
        out, lse = torch.empty(14, 2, 512), torch.empty(14, 2)
        after = compiled(case.q, case.pool, out, lse)
        case.check(out, lse)
        assert torch.equal(after, out + 1)


def test_a_graph_outlives_its_plan_with_an_error():
    plan = tv.VerifyPlan(tv.MlaGeometry(2), max_batch=1, max_nodes=9, max_tokens=100, device="cpu")
    out, lse = torch.empty(0, 2, 512), torch.empty(0, 2)
    number = plan._id
    torch.ops.tpverify.run_plan(number, torch.empty(0, 2, 576), torch.empty(1, 576), out, lse, SCALE)
    del plan
    with pytest.raises(ArgumentError, match="^plan: expected a VerifyPlan of this process that still exists"):
        torch.ops.tpverify.run_plan(number, torch.empty(0, 2, 576), torch.empty(1, 576), out, lse, SCALE)


def test_the_operators_keep_torchs_contract():
    """Schema, mutation, fake implementation and dispatch, by torch's own checker."""
    case = Case([(70, 9), (0, 5)])
    out, lse = torch.empty(14, 2, 512), torch.empty(14, 2)
    lists = [list(tensors) for tensors in zip(*(r.tensors for r in case.requests), strict=True)]
    arguments = (case.q, case.pool, *lists, out, lse, SCALE, "auto", False)
    torch.library.opcheck(torch.ops.tpverify.verify_attention.default, arguments)
    plan = tv.VerifyPlan(tv.MlaGeometry(2), max_batch=2, max_nodes=9, max_tokens=100, device="cpu")
    plan.update(case.requests)
    torch.library.opcheck(torch.ops.tpverify.run_plan.default, (plan._id, case.q, case.pool, out, lse, SCALE))


def test_masks_of_tensors_are_checked_for_shape():
    words, depths = torch.ones(2, 1, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    q, pool, slots = torch.zeros(2, 1, 576), torch.zeros(9, 576), torch.arange(2)
    for wrong in ((words[:1], depths), (words.int(), depths), (words, depths.float()), (words, depths[None])):
        with pytest.raises(ArgumentError, match=r"^requests\[0\].tree: expected int"):
            from_tensors(q, pool, slots, slots, *wrong)
    for wrong in ([0, -1], [0, 2], [0, 2**32]):  # the last is 0 in 32 bits
        with pytest.raises(ArgumentError, match=r"^requests\[0\].tree: expected depths from 0 to 1, got "):
            from_tensors(q, pool, slots, slots, words, torch.tensor(wrong))
    from_tensors(q, pool, slots, slots, words, depths)
