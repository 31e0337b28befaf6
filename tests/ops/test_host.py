"""Verify attention of the host library beside what tests/ops/test_reference.py asks of it."""

import ctypes

import pytest
import torch

from tpverify import native
from tpverify.errors import ArgumentError
from tpverify.ops import host, reference
from tpverify.ops.attention import TreeMask, VerifyRequest, plan_reference, verify_attention
from tpverify.ops.cuda import Request


@pytest.fixture(autouse=True)
def _use_native(host_library, monkeypatch):
    monkeypatch.setattr(native, "host", lambda: host_library)


def request_of(prefix, n):
    mask = TreeMask.chain(n)
    return Request(torch.arange(prefix), torch.arange(prefix, prefix + n), mask.words, mask.depths)


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_threads_change_no_bit(threads, monkeypatch):
    generator = torch.Generator().manual_seed(threads)
    pool, q = torch.randn(3000, 576, generator=generator), torch.randn(49, 3, 576, generator=generator)
    (plan,) = plan_reference([request_of(2900, 49)], 3)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    out, lse = host.verify(q, pool, plan, 512, 0.1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    again, lse_again = host.verify(q, pool, plan, 512, 0.1)
    assert torch.equal(again, out) and torch.equal(lse_again, lse)


@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize(("rank", "rope"), [(16, 0), (32, 8), (128, 40), (512, 64)])
def test_scores_from_tiny_to_huge_match_float64(rank, rope, scale):
    """Weights from 1 down to what float32 cannot hold, in rows of any whole number of vectors."""
    generator = torch.Generator().manual_seed(rank)
    pool, q = torch.randn(200, rank + rope, generator=generator), torch.randn(20, 2, rank + rope, generator=generator)
    (plan,) = plan_reference([request_of(180, 20)], 2)
    assert host.takes(pool, rank)
    out, lse = host.verify(q, pool, plan, rank, scale)
    scores = torch.einsum("nhd,kd->nhk", q.double() * scale, pool.double())
    hidden = torch.arange(200) > 180 + torch.arange(20)[:, None, None]
    scores = scores.masked_fill(hidden, -torch.inf)
    torch.testing.assert_close(out.double(), scores.softmax(-1) @ pool[:, :rank].double(), atol=3e-5 * scale, rtol=0)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), atol=1e-5, rtol=1e-6)


def test_rows_that_it_cannot_read_go_to_the_products():
    pool = torch.zeros(10, 576)
    assert host.takes(pool, 512)
    assert not host.takes(pool.bfloat16(), 512) and not host.takes(pool.double(), 512)
    assert not host.takes(pool[:, ::2], 256) and not host.takes(pool[:1].expand(10, -1), 512)
    assert not host.takes(pool, 500) and not host.takes(torch.zeros(10, 515), 512)


def test_not_a_number_in_a_query_spoils_its_own_row_only():
    generator = torch.Generator().manual_seed(0)
    pool, q = torch.randn(100, 576, generator=generator), torch.randn(8, 2, 576, generator=generator)
    request = VerifyRequest(torch.arange(92), torch.arange(92, 100), TreeMask.chain(8))
    out, lse = verify_attention(q, pool, [request], softmax_scale=0.1)
    q[3, 1, 70] = torch.nan
    spoiled, lse_spoiled = verify_attention(q, pool, [request], softmax_scale=0.1)
    assert spoiled[3, 1].isnan().all() and lse_spoiled[3, 1].isnan()
    spoiled[3, 1], lse_spoiled[3, 1] = out[3, 1], lse[3, 1]
    assert torch.equal(spoiled, out) and torch.equal(lse_spoiled, lse)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("struct_size", 8), ("nodes", 0), ("nodes", 1025), ("heads", 0), ("threads", 0), ("prefix", -1), ("slots", 0),
        ("rank", 24), ("rank", 0), ("row_dim", 496), ("row_dim", 580), ("pool_stride", 500), ("q", None), ("out", None),
        ("kv_pool", None), ("prefix_slots", None), ("tree_slots", None), ("depths", None), ("ancestor_words", None),
        ("lse", None), ("slots", 5),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_refused_by_name(field, value, host_library, monkeypatch):
    (plan,) = plan_reference([request_of(4, 4)], 1)
    true_params = native.AttentionParams

    def with_fault(**fields):
        return true_params(**{**fields, field: value})

    monkeypatch.setattr(native, "AttentionParams", with_fault)
    monkeypatch.setattr(ctypes, "sizeof", lambda _: _SIZE)
    with pytest.raises(ArgumentError):
        host.verify(torch.zeros(4, 1, 576), torch.zeros(8, 576), plan, 512, 1.0)


_SIZE = ctypes.sizeof(native.AttentionParams)


def test_the_products_agree():
    """Two ways to the same numbers, not to the same bits."""
    generator = torch.Generator().manual_seed(1)
    pool, q = torch.randn(400, 576, generator=generator), torch.randn(40, 2, 576, generator=generator)
    (plan,) = plan_reference([request_of(300, 40)], 2)
    for ours, theirs in zip(
        host.verify(q, pool, plan, 512, 0.05), reference.verify(q, pool, plan, 512, 0.05), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)
