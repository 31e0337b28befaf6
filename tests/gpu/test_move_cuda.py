"""move_rows on a GPU against row-by-row copies and the hash's numpy twin, which tests/ops/test_move.py checks."""

import numpy as np
import pytest
import torch

from tpverify.errors import ArgumentError
from tpverify.ops import cuda
from tpverify.ops.move import move_rows, row_hashes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(cuda.why_not() is not None, reason=f"NOT run: {cuda.why_not()}")]


def random_pool(layers, slots, row, dtype):
    generator = torch.Generator("cuda").manual_seed(row)
    return torch.randint(0, 256, (layers, slots, row), device="cuda", generator=generator, dtype=torch.uint8).to(dtype)


def moves(slots, count, seed=0):
    order = np.random.default_rng(seed).permutation(slots)
    return order[:count], order[count : 2 * count]


def hashes_of(rows):
    return row_hashes(np.ascontiguousarray(rows.contiguous().cpu().view(torch.uint8).numpy())).view(np.int64)


@pytest.mark.parametrize(
    ("row", "dtype"),
    [(576, torch.bfloat16), (576, torch.float32), (16, torch.uint8), (48, torch.uint8), (656, torch.uint8)]
    + [(512, torch.uint8), (1536, torch.uint8), (1552, torch.uint8), (8192, torch.float32)],
    ids=str,
)
@pytest.mark.parametrize("count", [1, 7, 200])
def test_rows_and_hashes(row, dtype, count):
    pool = random_pool(3, 500, row, dtype)
    before = pool.clone()
    src, dst = moves(500, count)
    hashes = move_rows(pool, src, dst, hashed=True)
    expected = before.clone()
    for source, target in zip(src.tolist(), dst.tolist(), strict=True):
        expected[:, target] = before[:, source]
    assert torch.equal(pool, expected)
    assert (hashes.cpu().numpy() == hashes_of(before[:, torch.from_numpy(src)])).all()
    again = before.clone()
    assert move_rows(again, torch.from_numpy(src).int().cuda(), dst) is None
    assert torch.equal(again, expected)


def test_the_cpu_gives_the_same_bits():
    pool = random_pool(2, 100, 576, torch.bfloat16)
    there = pool.cpu()
    src, dst = moves(100, 40)
    assert torch.equal(move_rows(pool, src, dst, hashed=True).cpu(), move_rows(there, src, dst, hashed=True))
    assert torch.equal(pool.cpu(), there)


def test_strided_pools_keep_what_is_between():
    wide = random_pool(2, 100, 640, torch.bfloat16)
    before = wide.clone()
    src, dst = moves(50, 20)
    hashes = move_rows(wide[:, ::2, 32:608], src, dst, hashed=True)
    expected = before.clone()
    expected[:, 2 * dst, 32:608] = before[:, 2 * src, 32:608]
    assert torch.equal(wide, expected)
    assert (hashes.cpu().numpy() == hashes_of(before[:, 2 * src, 32:608])).all()


def test_many_rows_of_many_layers_and_high_slots():
    """Slot times row passes 2^32 bytes."""
    slots = 4_000_000
    pool = torch.empty(2, slots, 576, device="cuda", dtype=torch.bfloat16)
    src, dst = moves(4000, 1000)
    src, dst = src + slots - 4000, dst + slots - 4000
    pool[:, -4000:] = torch.randn(2, 4000, 576, device="cuda").bfloat16()
    rows = pool[:, torch.from_numpy(src)]
    hashes = move_rows(pool, src, dst, hashed=True)
    assert torch.equal(pool[:, torch.from_numpy(dst)], rows) and torch.equal(pool[:, torch.from_numpy(src)], rows)
    assert (hashes.cpu().numpy() == hashes_of(rows)).all()


def test_a_captured_move_reads_its_slots_anew():
    pool = random_pool(2, 100, 576, torch.bfloat16)
    slots = torch.tensor([[1, 2], [11, 12]], dtype=torch.int32, device="cuda")
    hashes = torch.empty(2, 2, dtype=torch.int64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cuda.move_rows(pool, slots[0], slots[1], hashes)
    slots.copy_(torch.tensor([[3, 4], [13, 14]]))
    before = pool.clone()
    graph.replay()
    before[:, [13, 14]] = before[:, [3, 4]]
    assert torch.equal(pool, before) and (hashes.cpu().numpy() == hashes_of(before[:, [3, 4]])).all()


def test_a_misaligned_pool_is_refused_and_the_next_call_works():
    flat = torch.zeros(2 * 10 * 576 + 4, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ArgumentError, match="^pool: expected device memory aligned to 16 bytes"):
        move_rows(flat[4:].view(2, 10, 576), np.array([0]), np.array([1]))
    with pytest.raises(ArgumentError, match="^slot_stride: expected a multiple of 16"):
        move_rows(flat[:-4].as_strided((2, 9, 576), (5760, 580, 1)), np.array([0]), np.array([1]))
    move_rows(flat[:-4].view(2, 10, 576), np.array([0]), np.array([1]))
