"""verify_attention and VerifyPlan as callers meet them: one clear error for each bad input, and the plan equals the
call."""

import random

import numpy as np
import pytest
import torch
from oracle import attention_oracle, random_parents

from tpverify.config import MlaGeometry
from tpverify.errors import ArgumentError
from tpverify.ops.attention import TreeMask, VerifyRequest, verify_attention
from tpverify.ops.plan import VerifyPlan
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


def call(inputs: dict):
    return verify_attention(inputs.pop("q"), inputs.pop("kv_pool"), inputs.pop("requests"), **inputs)


BAD = {
    "q of another width": ({"q": torch.randn(3, 2, 512)}, "q", r"\[nodes, heads, 576\]"),
    "q without heads": ({"q": torch.randn(3, 576)}, "q", "heads"),
    "q with no head": ({"q": torch.randn(3, 0, 576)}, "q", "at least one head"),
    "q in float64": ({"q": torch.randn(3, 2, 576).double()}, "q", "float32 or bfloat16"),
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
    "words of another width": (
        {
            "requests": [
                VerifyRequest(np.arange(4), np.arange(3), TreeMask(np.ones((3, 2), np.uint64), np.zeros(3, np.int32)))
            ]
        },
        r"requests\[0\].tree",
        r"\[3, 1\]",
    ),
    "no nodes": (
        {
            "requests": [
                VerifyRequest(np.arange(4), np.arange(0), TreeMask(np.ones((0, 0), np.uint64), np.zeros(0, np.int32)))
            ]
        },
        r"requests\[0\].tree",
        "1 to 1024",
    ),
    "not a request": ({"requests": [None]}, r"requests\[0\]", "VerifyRequest"),
    "infinite scale": ({"softmax_scale": float("inf")}, "softmax_scale", "finite"),
    "scale as text": ({"softmax_scale": "1"}, "softmax_scale", "finite"),
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
    with pytest.raises(ArgumentError, match="^backend: "):
        VerifyPlan(MlaGeometry(num_heads=2), 1, 4, 10, "cuda")
