"""verify_attention and VerifyPlan as callers meet them: one clear error for each bad input, and the plan equals the
call."""

import copy
import pickle
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from oracle import attention_oracle, random_parents

from tpverify.config import MlaGeometry
from tpverify.errors import ArgumentError
from tpverify.ops.attention import TreeMask, VerifyRequest, verify_attention
from tpverify.ops.plan import VerifyPlan
from tpverify.ops.staging import Request
from tpverify.tree import DraftTree


def good() -> dict:
    return {
        "q": torch.randn(3, 2, 576),
        "kv_pool": torch.randn(20, 576),
        "requests": [VerifyRequest(np.arange(4), np.arange(5, 8), TreeMask.chain(3))],
        "softmax_scale": 0.1,
        "backend": "auto",
        "batch_invariant": False,
    }


def request(**changes) -> VerifyRequest:
    return replace(VerifyRequest(np.arange(4), np.arange(5, 8), TreeMask.chain(3)), **changes)


def call(inputs: dict):
    return verify_attention(inputs.pop("q"), inputs.pop("kv_pool"), inputs.pop("requests"), **inputs)


BAD = {
    "q of another width": ({"q": torch.randn(3, 2, 512)}, "q", r"\[nodes, heads, 576\]"),
    "q without heads": ({"q": torch.randn(3, 576)}, "q", "heads"),
    "q with no head": ({"q": torch.randn(3, 0, 576)}, "q", "at least one head"),
    "q in float64": ({"q": torch.randn(3, 2, 576).double()}, "q", "float32 or bfloat16"),
    "sparse q": ({"q": torch.randn(3, 2, 576).to_sparse()}, "q", "a dense tensor"),
    "sparse pool": ({"kv_pool": torch.randn(20, 576).to_sparse()}, "kv_pool", "a dense tensor"),
    "q not a tensor": ({"q": np.zeros((3, 2, 576))}, "q", "torch tensor"),
    "q with too many rows": ({"q": torch.randn(4, 2, 576)}, "q", "3 rows"),
    "pool in another dtype": ({"kv_pool": torch.randn(20, 576).bfloat16()}, "kv_pool", "float32"),
    "pool of another width": ({"kv_pool": torch.randn(20, 512)}, "kv_pool", "576"),
    "pool too small": ({"kv_pool": torch.randn(7, 576)}, r"requests\[0\].tree_slots", "0 to 6"),
    "negative slot": (
        {"requests": [VerifyRequest(np.array([-1]), np.arange(3), TreeMask.chain(3))]},
        r"requests\[0\].prefix_slots",
        "-1",
    ),
    "float slots": (
        {"requests": [VerifyRequest(np.zeros(2), np.arange(3), TreeMask.chain(3))]},
        r"requests\[0\].prefix_slots",
        "int32 or int64",
    ),
    "too few tree slots": (
        {"requests": [VerifyRequest(np.arange(4), np.arange(2), TreeMask.chain(3))]},
        r"requests\[0\].tree_slots",
        "3 slots",
    ),
    "slots as text": ({"requests": [request(prefix_slots="abc")]}, r"requests\[0\].prefix_slots", "int32 or int64"),
    "no slots": ({"requests": [request(prefix_slots=None)]}, r"requests\[0\].prefix_slots", "int32 or int64"),
    "boolean slots": ({"requests": [request(prefix_slots=[True])]}, r"requests\[0\].prefix_slots", "int32 or int64"),
    "ragged slots": ({"requests": [request(tree_slots=[[1], [2, 3]])]}, r"requests\[0\].tree_slots", "numbers"),
    "one slot": ({"requests": [request(tree_slots=np.int64(1))]}, r"requests\[0\].tree_slots", "int32 or int64"),
    "no tree": ({"requests": [request(tree=None)]}, r"requests\[0\].tree", "a DraftTree or a TreeMask"),
    "not a request": ({"requests": [None]}, r"requests\[0\]", "VerifyRequest"),
    "no requests": ({"requests": None}, "requests", "a list of VerifyRequests"),
    "a request alone": ({"requests": request()}, "requests", "a list of VerifyRequests"),
    "infinite scale": ({"softmax_scale": float("inf")}, "softmax_scale", "finite"),
    "scale as text": ({"softmax_scale": "1"}, "softmax_scale", "finite"),
    "no scale": ({"softmax_scale": None}, "softmax_scale", "finite"),
    "boolean scale": ({"softmax_scale": True}, "softmax_scale", "finite"),
    "scale beyond float32": ({"softmax_scale": 1e300}, "softmax_scale", "finite float32"),
    "scale beyond any float": ({"softmax_scale": 10**400}, "softmax_scale", "finite float32"),
    "backend of another type": ({"backend": None}, "backend", "reference"),
    "unknown backend": ({"backend": "triton"}, "backend", "reference"),
    "kernel without a GPU build": ({"backend": "cuda"}, "backend", "CUDA"),
    "batch_invariant not a bool": ({"batch_invariant": 1}, "batch_invariant", "bool"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_names_the_argument(case):
    change, argument, expected = BAD[case]
    with pytest.raises(ArgumentError, match=rf"^{argument}: expected .*{expected}|^{argument}: .*{expected}"):
        call(good() | change)


def test_the_good_input_of_that_table_is_good():
    out, lse = call(good())
    assert out.shape == (3, 2, 512) and lse.shape == (3, 2) and out.isfinite().all()


@pytest.mark.filterwarnings("error")
def test_slots_and_scale_of_any_fitting_kind():
    """Reversed and read-only arrays, lists, other integer widths and numpy's numbers: the bits do not change."""
    torch.manual_seed(0)
    inputs = good()
    expected = call(dict(inputs))
    frozen, backwards = np.arange(4), np.arange(4, dtype=np.int32)[::-1].copy()[::-1]
    frozen.flags.writeable = False
    for slots in (frozen, backwards, [0, 1, 2, 3], torch.arange(4, dtype=torch.int32)):
        for scale in (0.1, np.float64(0.1)):
            got = call(inputs | {"requests": [request(prefix_slots=slots)], "softmax_scale": scale})
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    halved = call(inputs | {"softmax_scale": np.float32(0.5)})
    assert torch.equal(halved[0], call(inputs | {"softmax_scale": 0.5})[0])
    assert not call(inputs | {"q": inputs["q"].requires_grad_()})[0].requires_grad


def words_of(rows):
    return np.array([[row] for row in rows], np.uint64)


WRONG_MASKS = {
    "no own bit": (words_of([1, 1]), [0, 1], r"words\[1\]"),
    "a later node's bit": (words_of([3, 3]), [0, 1], r"words\[0\]"),
    "bits beyond the tree": (words_of([1, 3 | 1 << 9]), [0, 1], r"words\[1\]"),
    "two roots": (words_of([1, 2]), [0, 0], r"words\[1\]"),
    "a parent without its ancestors": (words_of([1, 3, 6]), [0, 1, 1], r"words\[2\]"),
    "ancestors of two branches": (words_of([1, 3, 5, 15]), [0, 1, 1, 3], r"words\[3\]"),
    "an empty row": (words_of([1, 0]), [0, 1], r"words\[1\]"),
    "depth of the root": (words_of([1, 3]), [1, 2], r"depths\[0\]"),
    "depth beyond int32": (words_of([1]), [2**32], r"depths\[0\]"),
    "depth below the parent's": (words_of([1, 3, 7]), [0, 1, 5], r"depths\[2\]"),
    "negative depth": (words_of([1, 3]), [0, -1], r"depths\[1\]"),
    "words of another width": (np.ones((3, 2), np.uint64), [0, 1, 1], "words"),
    "signed words": (words_of([1]).view(np.int64), [0], "words"),
    "no words": (None, [0], "words"),
    "no depths": (words_of([1]), None, "depths"),
    "no nodes": (np.ones((0, 0), np.uint64), np.zeros(0, np.int32), "depths"),
    "float depths": (words_of([1]), [0.0], "depths"),
    "too many nodes": (np.ones((1025, 17), np.uint64), np.zeros(1025, int), "depths"),
}


@pytest.mark.parametrize("case", WRONG_MASKS)
def test_a_mask_that_no_tree_has_is_refused(case):
    words, depths, argument = WRONG_MASKS[case]
    with pytest.raises(ArgumentError, match=f"^{argument}: expected "):
        TreeMask(words, depths)


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 200, 1024])
def test_masks_of_trees_are_taken_and_stay_as_they_are(n):
    tree = DraftTree.from_parents(np.arange(n), random_parents(random.Random(n), n))
    words = tree.ancestor_words().copy()
    mask = TreeMask(words, tree.depths.astype(np.int64))
    words[:] = 0
    for same in (mask, copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert (same.words == tree.ancestor_words()).all() and (same.depths == tree.depths).all()
        assert not same.words.flags.writeable and not same.depths.flags.writeable
    assert (TreeMask.chain(n).words == DraftTree.chain(np.arange(n)).ancestor_words()).all()


def test_no_requests_gives_empty_outputs():
    out, lse = verify_attention(torch.empty(0, 2, 576), torch.randn(4, 576), [], softmax_scale=1.0)
    assert out.shape == (0, 2, 512) and lse.shape == (0, 2)


def test_plan_runs_many_layers_and_many_steps():
    generator = torch.Generator().manual_seed(0)
    plan = VerifyPlan(MlaGeometry(num_heads=2), max_batch=2, max_nodes=40, max_tokens=500, device="cpu")
    for step in range(3):
        slots = torch.randperm(900, generator=generator)
        parents = [random_parents(random.Random(step * 2 + i), n) for i, n in enumerate((33, 5))]
        trees = [DraftTree.from_parents(np.arange(len(p)), np.array(p)) for p in parents]
        spans = [(slots[:300], slots[300:333]), (slots[400 : 400 + step], slots[500:505])]
        if step == 1:  # slots as a replica has them
            tables = [[slots.numpy().astype(np.int32) for slots in span] for span in spans]
            plan.take([Request(*t, tree.ancestor_words(), tree.depths) for t, tree in zip(tables, trees, strict=True)])
        else:
            plan.update([VerifyRequest(*span, tree) for span, tree in zip(spans, trees, strict=True)])
        for _ in range(2):
            pool, q = torch.randn(900, 576, generator=generator), torch.randn(38, 2, 576, generator=generator)
            out, lse = torch.full((38, 2, 512), torch.nan), torch.full((38, 2), torch.nan)
            plan.run(q, pool, out, lse, 0.1)
            for rows, span, parent in ((slice(0, 33), spans[0], parents[0]), (slice(33, 38), spans[1], parents[1])):
                expected_out, expected_lse = attention_oracle(q[rows], pool, *span, parent, 0.1)
                torch.testing.assert_close(out[rows].double(), expected_out, atol=2e-5, rtol=2e-5)
                torch.testing.assert_close(lse[rows].double(), expected_lse, atol=2e-5, rtol=2e-6)


def test_plan_limits():
    plan = VerifyPlan(MlaGeometry(num_heads=2), max_batch=1, max_nodes=4, max_tokens=10, device="cpu")
    request = VerifyRequest(np.arange(10), np.arange(10, 14), TreeMask.chain(4))
    plan.update([request])
    with pytest.raises(ArgumentError, match="requests: expected at most 1"):
        plan.update([request, request])
    with pytest.raises(ArgumentError, match=r"requests\[0\].tree: expected at most 4 nodes"):
        plan.update([VerifyRequest(np.arange(10), np.arange(10, 15), TreeMask.chain(5))])
    with pytest.raises(ArgumentError, match="at most 10 prefix tokens"):
        plan.update([VerifyRequest(np.arange(11), np.arange(11, 12), TreeMask.chain(1))])
    q, pool = torch.randn(4, 2, 576), torch.randn(14, 576)
    out, lse = torch.empty(4, 2, 512), torch.empty(4, 2)
    plan.run(q, pool, out, lse, 0.1)  # what a refused update left in place
    for name, arguments in (
        ("q", (q[:3], pool, out, lse)),
        ("kv_pool", (q, pool[:13], out, lse)),
        ("out", (q, pool, out.bfloat16(), lse)),
        ("lse", (q, pool, out, lse[:, :1])),
    ):
        with pytest.raises(ArgumentError, match=f"^{name}: "):
            plan.run(*arguments, 0.1)
    for name, wrong in (("out", None), ("out", out.numpy()), ("lse", lse.to("meta")), ("q", q.tolist())):
        with pytest.raises(ArgumentError, match=f"^{name}: "):
            plan.run(**{"q": q, "kv_pool": pool, "out": out, "lse": lse, "softmax_scale": 0.1} | {name: wrong})
    for wrong in (None, request):
        with pytest.raises(ArgumentError, match="^requests: "):
            plan.update(wrong)
    plan.run(q.requires_grad_(), pool, out.requires_grad_(), lse, np.float32(0.1))


BAD_PLANS = {
    "geometry": [None, 64],
    "max_batch": [0, True, 1.0],
    "max_nodes": [1025, "4"],
    "max_tokens": [-1, None],
    "device": [None, "gpu", "cuda", "cuda:99", "meta", torch.device("meta"), 1.5, [], "cpu:x"],
    "batch_invariant": [None, 1],
    "exact": [None, 1],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD_PLANS.items() for value in values])
def test_a_bad_plan_names_its_argument(name, value):
    good = {"geometry": MlaGeometry(2), "max_batch": 1, "max_nodes": 4, "max_tokens": 10, "device": "cpu"}
    with pytest.raises(ArgumentError, match=f"^{name}: expected "):
        VerifyPlan(**good | {name: value})
