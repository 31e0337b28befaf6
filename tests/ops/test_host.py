"""Verify attention of the host library beside what tests/ops/test_reference.py asks of it."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
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
    assert not host.takes(pool, 500) and not host.takes(torch.zeros(10, 515), 512)


def _strided(rows):
    wide = torch.full((len(rows) + 1, 2 * 576 + 3), torch.nan)
    wide[1:, 3::2] = rows
    return wide[1:, 3::2]


@pytest.mark.parametrize(
    "stored",
    [
        lambda rows: rows.t().contiguous().t(),
        lambda rows: torch.cat([torch.zeros(1), rows.flatten()])[1:].view(rows.shape),
        lambda rows: torch.cat([rows, rows], dim=1)[:, :576],
        lambda rows: torch._neg_view(-rows),
        _strided,
    ],
    ids=["columns first", "odd address", "wide rows", "negated when read", "every second column"],
)
def test_where_and_how_rows_are_stored_changes_no_bit(stored):
    generator = torch.Generator().manual_seed(0)
    pool, q = torch.randn(150, 576, generator=generator), torch.randn(9, 2, 576, generator=generator)
    request = VerifyRequest(torch.arange(130), torch.arange(140, 149), TreeMask.chain(9))
    expected = verify_attention(q, pool, [request], softmax_scale=0.1)
    got = verify_attention(q, stored(pool), [request], softmax_scale=0.1)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    one = verify_attention(q, pool[:1].expand(150, -1), [request], softmax_scale=0.1)
    copied = verify_attention(q, pool[:1].repeat(150, 1), [request], softmax_scale=0.1)
    assert torch.equal(one[0], copied[0])


@pytest.mark.parametrize("depth", [-1, -200, 3, 2**31 - 1])
def test_depths_that_no_tree_has_are_refused_by_the_library(depth, host_library):
    """They choose where a row's sums are kept."""
    (plan,) = plan_reference([request_of(0, 3)], 1)
    plan.depths = np.array([0, depth, 2], np.int32)
    with pytest.raises(ArgumentError, match="^depths: expected 0..2, got "):
        host.verify(torch.zeros(3, 1, 576), torch.zeros(3, 576), plan, 512, 1.0)


def test_no_row_reads_a_later_node():
    """However rows are shared out over threads and blocks."""
    generator = torch.Generator().manual_seed(0)
    pool, q = torch.randn(60, 576, generator=generator), torch.randn(60, 1, 576, generator=generator)
    (plan,) = plan_reference([request_of(0, 60)], 1)
    expected, _ = host.verify(q, pool, plan, 512, 0.1)
    plan.words = np.full_like(plan.words, 2**64 - 1)
    assert torch.equal(host.verify(q, pool, plan, 512, 0.1)[0], expected)


WITHOUT_THREADS = """
import os, resource, sys, torch
from tpverify import native
from tpverify.ops import host
from tpverify.ops.attention import TreeMask, plan_reference
from tpverify.ops.cuda import Request
native.host()
mask = TreeMask.chain(64)
(plan,) = plan_reference([Request(torch.arange(1900), torch.arange(1900, 1964), mask.words, mask.depths)], 4)
q, pool = torch.randn(64, 4, 576), torch.randn(1964, 576)
torch.set_num_threads(1)  # of its own; the library is told of 4
torch.get_num_threads = lambda: 4
out, lse = host.verify(q, pool, plan, 512, 0.1)
if os.getuid() == 0:
    os.setuid(65534)  # the limit does not hold for root
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
again, lse_again = host.verify(q, pool, plan, 512, 0.1)
sys.exit(not (torch.equal(out, again) and torch.equal(lse, lse_again)))
"""


def test_a_process_that_may_start_no_thread_gets_the_same_bits(host_library):
    folder = str(Path(host_library._name).parent)
    environment = os.environ | {"TPVERIFY_LIB_DIR": folder, "TPVERIFY_NATIVE": "1"}
    done = subprocess.run([sys.executable, "-c", WITHOUT_THREADS], env=environment, timeout=120)
    assert done.returncode == 0


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
def test_a_wrong_argument_is_refused_by_name(field, value, monkeypatch):
    (plan,) = plan_reference([request_of(4, 4)], 1)

    class Faulty(native.AttentionParams):
        def __init__(self, **fields):
            super().__init__(**fields | {field: value})

    monkeypatch.setattr(native, "AttentionParams", Faulty)
    with pytest.raises(ArgumentError, match=rf"^[^:]*{field}"):
        host.verify(torch.zeros(4, 1, 576), torch.zeros(8, 576), plan, 512, 1.0)


def test_the_products_agree():
    """Two ways to the same numbers, not to the same bits."""
    generator = torch.Generator().manual_seed(1)
    pool, q = torch.randn(400, 576, generator=generator), torch.randn(40, 2, 576, generator=generator)
    (plan,) = plan_reference([request_of(300, 40)], 2)
    for ours, theirs in zip(
        host.verify(q, pool, plan, 512, 0.05), reference.verify(q, pool, plan, 512, 0.05), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)
