"""The CPU reference against float64, and its bit-for-bit promises: tree = decoding, any heads, slots, batch,
chunking."""

import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from oracle import attention_oracle, distinct_tokens, path_to, random_parents

from tpverify import native
from tpverify.ops import gemm
from tpverify.ops.attention import TreeMask, VerifyRequest, verify_attention
from tpverify.tree import DraftTree

SCALE = 0.11


@pytest.fixture(params=["native", "probed", "plain blocks"], autouse=True)
def products(request, monkeypatch):
    """Every promise has to hold for the host library, on a BLAS that passes the probes and on one that passes none."""
    library = request.getfixturevalue("host_library") if request.param == "native" else None
    monkeypatch.setattr(native, "host", lambda: library)
    if request.param == "plain blocks":
        monkeypatch.setattr(gemm, "rows_independent", lambda *_: False)
        monkeypatch.setattr(gemm, "score_columns", lambda *_: gemm.CHUNK)
        monkeypatch.setattr(gemm, "chain_rows", lambda *_: gemm.CHUNK)
    return library


class Case:
    """A request with random contents at random slots."""

    def __init__(
        self, seed: int, prefix: int, n: int, heads: int = 4, dtype=torch.float32, parents=None, slots: int = 3000
    ):
        rng = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        self.parents = parents or random_parents(rng, n)
        self.pool = torch.randn(slots, 576, generator=generator).to(dtype)
        self.q = torch.randn(n, heads, 576, generator=generator).to(dtype)
        order = torch.randperm(slots - 1, generator=generator)[: prefix + n] + 1
        self.prefix, self.tree_slots = order[:prefix], order[prefix:]
        self.tree = DraftTree.from_parents(distinct_tokens(self.parents), np.array(self.parents))

    @property
    def request(self) -> VerifyRequest:
        return VerifyRequest(self.prefix, self.tree_slots, self.tree)

    def run(self):
        return verify_attention(self.q, self.pool, [self.request], softmax_scale=SCALE)

    def oracle(self):
        return attention_oracle(self.q, self.pool, self.prefix, self.tree_slots, self.parents, SCALE)


@pytest.mark.parametrize("prefix", [0, 1, 63, 64, 65, 127, 128, 1000])
@pytest.mark.parametrize("n", [1, 2, 33, 65, 129])
def test_float32_matches_float64(prefix, n):
    case = Case(prefix * 1000 + n, prefix, n)
    out, lse = case.run()
    expected_out, expected_lse = case.oracle()
    assert out.dtype == lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected_out, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(lse.double(), expected_lse, atol=2e-5, rtol=2e-6)


@pytest.mark.parametrize("shape", ["chain of 64 drafts", "star", "1,024 nodes"])
def test_extreme_trees_match_float64(shape):
    parents = {
        "chain of 64 drafts": list(range(-1, 64)),
        "star": [-1] + [0] * 200,
        "1,024 nodes": random_parents(random.Random(7), 1024),
    }[shape]
    case = Case(3, 100, len(parents), heads=1, parents=parents)
    out, lse = case.run()
    expected_out, expected_lse = case.oracle()
    torch.testing.assert_close(out.double(), expected_out, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(lse.double(), expected_lse, atol=2e-5, rtol=2e-6)


@pytest.mark.parametrize("prefix", [0, 100, 1000])
def test_bfloat16_error_is_within_twice_that_of_plain_bfloat16(prefix):
    case = Case(prefix, prefix, 33, dtype=torch.bfloat16)
    out, _ = case.run()
    expected, _ = case.oracle()
    plain = torch.stack(
        [
            torch.softmax(
                case.q[i]
                @ (rows := case.pool[torch.cat([case.prefix, case.tree_slots[path_to(case.parents, i)]])]).T
                * SCALE,
                -1,
            )
            @ rows[:, :512]
            for i in range(33)
        ]
    )
    assert out.dtype == torch.bfloat16
    assert (out - expected).abs().max() <= 2 * (plain - expected).abs().max()


@pytest.mark.parametrize("prefix", [0, 5, 60, 63, 64, 100, 511])
@pytest.mark.parametrize("n", [17, 33, 257])
def test_node_equals_its_path_decoded_one_token_at_a_time(prefix, n):
    """rmagur1203 §11.8: node t of the tree equals the last output when its ancestor path is run as a chain. Bit for
    bit, one head at a time, from other slots."""
    case = Case(n + prefix, prefix, n)
    out, lse = case.run()
    elsewhere = torch.randperm(len(case.pool), generator=torch.Generator().manual_seed(1))
    moved = torch.empty_like(case.pool)
    moved[elsewhere] = case.pool
    for node in random.Random(0).sample(range(n), 8):
        path = case.tree_slots[path_to(case.parents, node)]
        alone = VerifyRequest(elsewhere[torch.cat([case.prefix, path[:-1]])], elsewhere[path[-1:]], TreeMask.chain(1))
        head = node % 4
        out_alone, lse_alone = verify_attention(
            case.q[node : node + 1, head : head + 1], moved, [alone], softmax_scale=SCALE
        )
        assert torch.equal(out_alone[0, 0], out[node, head])
        assert torch.equal(lse_alone[0, 0], lse[node, head])


def test_chunked_prefill_equals_decoding():
    generator = torch.Generator().manual_seed(0)
    pool, q = torch.randn(400, 576, generator=generator), torch.randn(300, 2, 576, generator=generator)
    slots = torch.randperm(400, generator=generator)[:300]

    def run(chunks):
        outs, start = [], 0
        for count in chunks:
            request = VerifyRequest(slots[:start], slots[start : start + count], TreeMask.chain(count))
            outs.append(verify_attention(q[start : start + count], pool, [request], softmax_scale=SCALE)[0])
            start += count
        return torch.cat(outs)

    whole = run([300])
    assert torch.equal(run([1] * 300), whole)
    assert torch.equal(run([64, 1, 130, 9, 96]), whole)


def test_other_heads_and_other_requests_do_not_matter():
    a, b, c = Case(1, 70, 33, heads=8), Case(2, 0, 5, heads=8), Case(3, 300, 129, heads=8)
    b.pool[:] = c.pool[:] = a.pool
    out, lse = verify_attention(
        torch.cat([a.q, b.q, c.q]), a.pool, [a.request, b.request, c.request], softmax_scale=SCALE, batch_invariant=True
    )
    rows = 0
    for case in (a, b, c):
        own, own_lse = case.run()
        assert torch.equal(out[rows : rows + len(own)], own) and torch.equal(lse[rows : rows + len(own)], own_lse)
        shards = [
            verify_attention(q, case.pool, [case.request], softmax_scale=SCALE)[0] for q in case.q.split(2, dim=1)
        ]
        assert torch.equal(torch.cat(shards, dim=1), own)
        rows += len(own)


def test_same_call_twice_is_the_same_bits():
    case = Case(5, 200, 65)
    first, second = case.run(), case.run()
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


@pytest.mark.parametrize("order", ["siblings last", "interleaved"])
def test_siblings_do_not_see_each_other(order):
    """FastDeploy pull/3514, sglang pull/39703: a causal shortcut on tiles below the diagonal shows a node its
    sibling."""
    parents = [-1, 0, 0, 1, 2, 1, 2] if order == "interleaved" else [-1, 0, 1, 2, 0, 0, 0]
    case = Case(11, 10, 7, parents=parents)
    out, _ = case.run()
    for node in range(7):
        unseen = [i for i in range(7) if i not in path_to(parents, node)]
        rows = case.pool[case.tree_slots[unseen]]
        case.pool[case.tree_slots[unseen]] = 100.0
        assert torch.equal(case.run()[0][node], out[node])
        case.pool[case.tree_slots[unseen]] = rows


def test_rows_that_must_not_be_read_may_be_nan():
    """vllm issues/57156: slot 0 gathered for masked entries; NaN there times weight 0 is NaN, since K is V as well."""
    case = Case(4, 40, 33)
    out, lse = case.run()
    used = torch.cat([case.prefix, case.tree_slots])
    unused = torch.ones(len(case.pool), dtype=torch.bool).index_fill_(0, used, False)
    case.pool[unused] = torch.nan
    assert torch.equal(case.run()[0], out)
    leaf = max(set(range(33)) - set(case.parents))  # nobody descends from it
    case.pool[case.tree_slots[leaf]] = torch.nan
    again, lse_again = case.run()
    others = [i for i in range(33) if i != leaf]
    assert torch.equal(again[others], out[others]) and torch.equal(lse_again[others], lse[others])
    assert again[leaf].isnan().all()


def test_strided_inputs():
    case = Case(6, 130, 33)
    out, lse = case.run()
    wide_q = torch.full((33, 8, 1152), torch.nan)
    wide_q[:, ::2, ::2] = case.q
    wide_pool = torch.full((len(case.pool), 600), torch.nan)
    wide_pool[:, 8:584] = case.pool
    spread = torch.stack([case.prefix, torch.zeros_like(case.prefix)], dim=1)[:, 0]
    strided = verify_attention(
        wide_q[:, ::2, ::2],
        wide_pool[:, 8:584],
        [VerifyRequest(spread, case.tree_slots.int(), case.tree)],
        softmax_scale=SCALE,
    )
    assert torch.equal(strided[0], out) and torch.equal(strided[1], lse)


def test_inputs_that_require_grad():
    case = Case(9, 70, 9)
    out, _ = case.run()
    case.q.requires_grad_(), case.pool.requires_grad_()
    again, _ = case.run()
    assert torch.equal(again, out) and not again.requires_grad


def test_slots_beyond_32_bit_offsets():
    """flashinfer pull/3136, vllm pull/47671, SGLang #9344: slot x 576 past 2^31 elements wraps in 32 bits."""
    high = 2**31 // 576 + 1000
    pool = torch.empty(high + 200, 576, dtype=torch.bfloat16)  # only the pages written below become memory
    slots = torch.arange(high, high + 130)
    case = Case(8, 100, 30, heads=1, dtype=torch.bfloat16, slots=400)
    pool[slots] = case.pool[torch.cat([case.prefix, case.tree_slots])]
    wrapped = slots * 576 % 2**31 // 576
    pool[wrapped] = 7.0
    request = VerifyRequest(slots[:100].numpy(), slots[100:].int(), case.tree)
    assert slots.dtype == torch.int64
    assert torch.equal(verify_attention(case.q, pool, [request], softmax_scale=SCALE)[0], case.run()[0])


MEMORY_SCRIPT = """
import resource, torch
from tpverify.ops.attention import TreeMask, VerifyRequest, verify_attention
torch.set_num_threads(1)
prefix, n, heads = 185_000, 65, 8
pool = torch.zeros(prefix + n, 576); pool[:, ::7] = 0.5
q = torch.randn(n, heads, 576)
request = VerifyRequest(torch.arange(prefix), torch.arange(prefix, prefix + n), TreeMask.chain(n))
small = VerifyRequest(torch.arange(300), torch.arange(300, 300 + n), TreeMask.chain(n))
verify_attention(q, pool, [small], softmax_scale=0.1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
out, lse = verify_attention(q, pool, [request], softmax_scale=0.1)
assert torch.isfinite(out).all() and torch.isfinite(lse).all()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_185k_prefix_stays_under_600_mb(products):
    environment = {**os.environ, "TPVERIFY_NATIVE": "0"}
    if products is not None:
        environment |= {"TPVERIFY_NATIVE": "1", "TPVERIFY_LIB_DIR": os.path.dirname(products._name)}
    run = subprocess.run(
        [sys.executable, "-c", MEMORY_SCRIPT], capture_output=True, text=True, timeout=300, env=environment
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) * 1024 < 600e6, f"{int(run.stdout) / 1e3:.0f} MB above the inputs"
