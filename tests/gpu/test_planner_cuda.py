"""The device planner for 132 and 188 SMs: what it covers and how evenly, against brute force. Not run without a GPU.

The planner is compiled alone, with a number of SMs that need not be the device's.
"""

import ctypes
import random
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from tpverify.ops import cuda

missing = cuda.why_not() or (None if shutil.which("nvcc") else "no nvcc")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(missing is not None, reason=f"NOT run: {missing}")]

CSRC = Path(__file__).parents[2] / "csrc"
MULTIPROCESSORS = (132, 188)  # H200, RTX PRO 6000
ITEM_COST = 10.0  # tiles: what starting an item costs, beside its own
ROOM = 1 << 18  # items and merges
APART = 1 << 20  # slots from request to request

ENTRY = """
#include "verify/planner.h"
extern "C" int make_plan(const int32_t* counts, int batch, int heads, int tile_rows, int split_heads,
                         int split_tile_rows, int blocks, int fixed_length, tpv::PlanHeader* header,
                         tpv::WorkItem* items, tpv::MergeItem* merges) {
  tpv::PlanInput in = {};
  in.table.prefix_len = counts, in.table.nodes = counts + batch;
  in.table.slot_begin = counts + 2 * batch, in.table.node_begin = in.table.word_begin = counts + 3 * batch;
  in.header = header, in.items = items, in.merges = merges;
  in.batch = batch, in.heads = heads, in.tile_rows = tile_rows;
  in.split_heads = split_heads, in.split_tile_rows = split_tile_rows;
  in.blocks = blocks, in.fixed_length = fixed_length;
  const cudaError_t error = tpv::launch_plan(in, nullptr);
  return error ? error : cudaDeviceSynchronize();
}
"""


@pytest.fixture(scope="module")
def planner(tmp_path_factory):
    folder = tmp_path_factory.mktemp("planner")
    (folder / "entry.cu").write_text(ENTRY)
    command = ["nvcc", "-std=c++20", "-O3", "-arch=native", f"-I{CSRC}", "-shared", "-Xcompiler=-fPIC"]
    sources = [CSRC / "verify/planner.cu", folder / "entry.cu"]
    subprocess.run([*command, *sources, "-o", folder / "planner.so"], check=True, timeout=280)
    return ctypes.CDLL(str(folder / "planner.so")).make_plan


def tiles_of(prefix, nodes):
    return -(-(prefix + nodes) // 16)


def plan(
    planner, lengths, blocks, heads=8, tile_rows=64, split_heads=8, split_tile_rows=64, fixed_length=0, apart=APART
):
    """items [n, 5]: request, row tile, begin, end, partial. merges [m, 4]: request, row tile, first partial, count. And
    how many items have a block to themselves.

    Requests are told apart by where their slots, and their nodes, begin."""
    requests = np.arange(len(lengths))
    table = np.stack([*np.array(lengths).T, requests * apart, requests])
    counts = torch.tensor(table, dtype=torch.int32, device="cuda").contiguous()
    header, items, merges = (
        torch.full((size,), -7, dtype=torch.int32, device="cuda") for size in (5, ROOM * 8, ROOM * 8)
    )
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (counts, header, items, merges)]
    sizes = (len(lengths), heads, tile_rows, split_heads, split_tile_rows, blocks, fixed_length)
    assert planner(pointers[0], *sizes, *pointers[1:]) == 0
    num_items, num_merges, num_nodes, alone, most_splits = header.tolist()
    assert num_nodes == sum(nodes for _, nodes in lengths) and num_items < ROOM
    assert 0 <= alone <= num_items and alone < blocks
    written = max(num_items, blocks)  # a block reads its first item before it knows how many there are
    assert not items.view(-1, 8)[num_items:written].any() and (items.view(-1, 8)[written:] == -7).all()
    assert (merges.view(-1, 8)[num_merges:] == -7).all()
    items, merges = (x.view(-1, 8)[:n].cpu().numpy() for x, n in ((items, num_items), (merges, num_merges)))
    slots, tokens, committed, row_tile, nodes, node_begin, _, partial = items.T
    assert num_merges == 0 or merges[:, 1].max() == most_splits
    request, begin = slots // apart, slots % apart
    assert (node_begin == request).all() and (committed + begin == table[0][request]).all()
    assert (nodes == table[1][request]).all() and (merges[:, 3] == table[1][merges[:, 4]]).all()
    return np.stack([request, row_tile, begin, begin + tokens, partial], 1), merges[:, [4, 2, 0, 1]], alone


def check_covers(lengths, items, merges, heads, tile_rows):
    """Every row tile sees each of its request's tokens once, and its partials lie in a row, in order of position."""
    owners = [(r, t) for r, (_, n) in enumerate(lengths) for t in range(-(-n * heads // tile_rows))]
    assert [tuple(merge[:2]) for merge in merges] == owners
    by_partial = items[np.argsort(items[:, 4], kind="stable")]
    assert by_partial[:, 4].tolist() == list(range(len(items)))
    assert sum(merge[3] for merge in merges) == len(items)
    for request, row_tile, first, count in merges:
        own = by_partial[first : first + count]
        assert (own[:, 0] == request).all() and (own[:, 1] == row_tile).all() and count >= 1
        assert own[0, 2] == 0 and own[-1, 3] == sum(lengths[request])
        assert (own[1:, 2] == own[:-1, 3]).all() and (own[:, 2] < own[:, 3]).all() and (own[:, 2] % 16 == 0).all()


def longest_block(tiles, blocks, alone=0):
    """In tiles, of blocks that take item b alone if b < alone, else b, b + blocks - alone, ...; and the mean over
    blocks."""
    loads, items = np.zeros(blocks), np.arange(len(tiles))
    np.add.at(loads, np.where(items < alone, items, alone + (items - alone) % (blocks - alone)), tiles + ITEM_COST)
    return loads.max(), loads.mean()


def best_uniform(lengths, blocks, heads=8, tile_rows=64):
    """Brute force over split lengths, within three waves of blocks where rows alone do not need more."""
    tiles = np.array([tiles_of(*length) for length in lengths if length[1]])
    rows = np.array([-(-n * heads // tile_rows) for _, n in lengths if n])
    best = np.inf
    for length in np.unique(np.geomspace(1, tiles.max(), 400).astype(int)):
        splits = -(-tiles // length)
        if (splits * rows).sum() <= max(3 * blocks, rows.sum()):
            cut = [np.diff(t * np.arange(s + 1) // s).repeat(r) for t, s, r in zip(tiles, splits, rows, strict=True)]
            best = min(best, longest_block(np.concatenate(cut), blocks)[0])
    return best


def mixed(seed, batch, prefixes, nodes):
    rng = random.Random(seed)
    return [(rng.choice(prefixes) if isinstance(prefixes, tuple) else rng.randrange(prefixes), rng.choice(nodes))
            for _ in range(batch)]  # fmt: skip


# A batch, and how far its longest block may lie above the mean.
BATCHES = {
    "one": ([(185_000, 64)], 1.1),
    "one long, seven short": ([(185_000, 16)] + [(1000, 16)] * 7, 1.1),
    "doubling": ([(1000 << i, 16) for i in range(8)], 1.1),
    "ThunderMLA's": ([(4641, 4), (45_118, 4), (1730, 4), (1696, 4)], 1.1),
    "8 mixed": (mixed(1, 8, 185_000, (1, 8, 64)), 1.15),
    "16 from none to 185,000": (mixed(2, 16, (0, 100, 30_000, 185_000), (1, 8, 16, 33, 64, 129)), 1.25),
    "64 short": (mixed(3, 64, 8000, (16,)), 1.25),
    "64 mixed": (mixed(4, 64, 185_000, (16,)), 1.25),
    "1,024 nodes beside one": ([(100, 1024), (185_000, 1), (4000, 64)], 1.25),
    # Rows fill the three waves here, so that the longest requests can hardly be split.
    "64 from none to 185,000": (mixed(5, 64, (0, 100, 30_000, 185_000), (1, 8, 16, 33, 64, 129)), 2.2),
}


@pytest.mark.parametrize("blocks", MULTIPROCESSORS)
@pytest.mark.parametrize("name", BATCHES)
def test_work_is_even_over_the_blocks(planner, name, blocks):
    lengths, bar = BATCHES[name]
    items, merges, alone = plan(planner, lengths, blocks)
    check_covers(lengths, items, merges, 8, 64)
    longest, mean = longest_block(-(-(items[:, 3] - items[:, 2]) // 16), blocks, alone)
    assert longest <= bar * mean
    assert longest <= 1.15 * best_uniform(lengths, blocks)


@pytest.mark.parametrize("blocks", MULTIPROCESSORS)
@pytest.mark.parametrize("seed", range(12))
def test_any_batch_is_covered_once(planner, seed, blocks):
    """Padded requests, empty prefixes and more requests than threads among them."""
    rng = random.Random(seed)
    batch = rng.choice((1, 2, 7, 64, 255, 256, 257, 600))
    lengths = [(rng.choice((0, 1, 15, 16, 17, 4096, rng.randrange(200_000))), rng.choice((0, 1, 2, 9, 65, 257)))
               for _ in range(batch)]  # fmt: skip
    heads, tile_rows = rng.choice((1, 2, 8, 12, 64, 128)), rng.choice((16, 32, 64))
    items, merges, _ = plan(planner, lengths, blocks, heads, tile_rows, split_tile_rows=rng.choice((16, 32, 64)))
    check_covers(lengths, items, merges, heads, tile_rows)


@pytest.mark.parametrize("blocks", MULTIPROCESSORS)
def test_splits_do_not_depend_on_local_heads_or_tiles(planner, blocks):
    lengths = mixed(6, 9, 60_000, (1, 8, 33))
    cuts = []
    for heads, tile_rows in ((8, 64), (1, 16), (4, 32), (8, 16), (64, 64)):
        items, *_ = plan(planner, lengths, blocks, heads, tile_rows)
        cuts.append({tuple(item) for item in items[:, [0, 2, 3]].tolist()})
    assert all(cut == cuts[0] for cut in cuts)


def test_fixed_splits_do_not_depend_on_the_batch_or_the_device(planner):
    """flashinfer pull/5176: a request's plan must not come from the others."""
    lengths = mixed(7, 5, 60_000, (1, 8, 33))
    together, *_ = plan(planner, lengths, 132, fixed_length=64)
    for request, length in enumerate(lengths):
        alone, *_ = plan(planner, [length], 188, fixed_length=64)
        own = together[together[:, 0] == request]
        assert np.array_equal(own[:, 1:4], alone[:, 1:4])


@pytest.mark.parametrize("blocks", MULTIPROCESSORS)
def test_one_wave_takes_all_blocks_where_its_splits_do_not_divide_them(planner, blocks):
    """185,000 tokens in 8 row tiles: an equal split for all but 4 blocks, which share what those leave over."""
    lengths = [(185_000, 64), *[(0, 0)] * 3]
    items, merges, alone = plan(planner, lengths, blocks)
    check_covers(lengths, items, merges, 8, 64)
    assert alone == blocks - 4
    tiles = -(-(items[:, 3] - items[:, 2]) // 16)
    assert (tiles[:alone] == tiles[0]).all() and (tiles[alone:] < tiles[0]).all()
    longest, mean = longest_block(tiles, blocks, alone)
    assert longest <= 1.01 * mean


def test_an_empty_step_has_no_work(planner):
    items, merges, _ = plan(planner, [(500, 0), (0, 0)], 188)
    assert len(items) == len(merges) == 0


def test_a_long_request_in_fixed_splits(planner):
    """7,813 splits of 500,004 tiles: their product is no int32."""
    lengths = [(8_000_000, 64)]
    items, merges, _ = plan(planner, lengths, 132, fixed_length=64, apart=1 << 30)
    check_covers(lengths, items, merges, 8, 64)
    assert -(-(items[:, 3] - items[:, 2]) // 16).max() <= 64


@pytest.mark.parametrize(("blocks", "nodes"), [(132, 82), (188, 117)])
def test_a_bound_of_the_splits_that_is_no_int32(planner, blocks, nodes):
    """Rows for all blocks of an eighth of waves but one, so that its splits' bound is all the work: nothing was
    planned."""
    lengths = [(300_000_000, nodes)]
    items, merges, alone = plan(planner, lengths, blocks, split_heads=128, heads=128, apart=1 << 30)
    check_covers(lengths, items, merges, 128, 64)
    longest, _ = longest_block(-(-(items[:, 3] - items[:, 2]) // 16), blocks, alone)
    assert longest <= 1.15 * best_uniform(lengths, blocks, heads=128)


def test_work_of_many_long_requests_is_counted_in_full(planner):
    """1.1e9 tokens: tiles times row tiles is no int32, and the longest block is still near the mean."""
    lengths = [(1_000_000_000, 1024), (100_000_000, 1024)]
    items, merges, alone = plan(planner, lengths, 132, split_heads=128, heads=128, apart=1 << 30)
    check_covers(lengths, items, merges, 128, 64)
    longest, mean = longest_block(-(-(items[:, 3] - items[:, 2]) // 16), 132, alone)
    assert longest <= 1.15 * mean
