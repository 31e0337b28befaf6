"""move_rows on the CPU, and the hash of rows against one written with Python's integers."""

import numpy as np
import pytest
import torch

from tpverify.errors import ArgumentError
from tpverify.kv.digest import MASK64, mix64
from tpverify.ops.move import move_rows, row_hashes


def hash_of(row: bytes) -> int:
    """By the definition in csrc/tpverify.h: output i of SplitMix64 seeded with word i, added up."""
    total = 0
    for i in range(len(row) // 8):
        word = int.from_bytes(row[8 * i : 8 * i + 8], "little")
        total += mix64((word + i * 0x9E3779B97F4A7C15) & MASK64)
    return total & MASK64


def test_splitmix64_is_the_published_one():
    """The first outputs of the seed 1234567, from the generator's reference program."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [mix64(1234567 + i * 0x9E3779B97F4A7C15 & MASK64) for i in range(4)] == published


@pytest.mark.parametrize("row_bytes", [16, 48, 1152, 4096])
def test_row_hashes(row_bytes):
    rows = np.random.default_rng(0).integers(0, 256, (2, 3, row_bytes), np.uint8)
    assert [[int(h) for h in layer] for layer in row_hashes(rows)] == [[hash_of(r.tobytes()) for r in x] for x in rows]


def test_row_hashes_see_every_bit_and_the_order():
    """sglang pull/31218: a layout bug permuted values within a page, and a plain checksum stayed the same."""
    row = np.zeros((1, 1152), np.uint8)
    bits = np.eye(1152 * 8, dtype=np.uint8)
    flipped = np.packbits(bits, axis=1)
    words = np.random.default_rng(1).integers(0, 2**62, (1, 144), np.uint64)
    swapped = words.repeat(143, axis=0)
    for i in range(143):
        swapped[i, [i, i + 1]] = words[0, [i + 1, i]]
    signs = words ^ np.uint64(0x8000800080008000)  # of a negated bf16 row
    every = [row, flipped, words.view(np.uint8), swapped.view(np.uint8), signs.view(np.uint8)]
    hashes = np.concatenate([row_hashes(rows) for rows in every])
    assert len(np.unique(hashes)) == len(hashes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
@pytest.mark.parametrize("strided", [False, True])
def test_moves_on_the_cpu(dtype, strided):
    generator = torch.Generator().manual_seed(0)
    wide = torch.randint(0, 200, (3, 60, 640), generator=generator).to(dtype)
    pool = wide[:, ::2, :576] if strided else wide[:, :30, :576].contiguous()
    before = pool.clone()
    order = torch.randperm(30, generator=generator)
    src, dst = order[:10], order[10:20]
    hashes = move_rows(pool, src.numpy().astype(np.int32), dst, hashed=True)
    for slot in range(30):
        source = int(src[dst.tolist().index(slot)]) if slot in dst else slot
        assert torch.equal(pool[:, slot], before[:, source])
    expected = [[hash_of(before[layer, s].view(torch.uint8).numpy().tobytes()) for s in src] for layer in range(3)]
    assert hashes is not None and hashes.numpy().view(np.uint64).tolist() == expected
    assert move_rows(pool, dst, src) is None and torch.equal(pool[:, src], before[:, src])


def test_no_moves():
    pool = torch.ones(2, 4, 8)
    hashes = move_rows(pool, np.zeros(0, np.int64), np.zeros(0, np.int64), hashed=True)
    assert hashes is not None and hashes.shape == (2, 0) and (pool == 1).all()


BAD = {
    "a pool that is no tensor": ({"pool": np.zeros((1, 9, 8))}, "pool"),
    "a pool without layers": ({"pool": torch.zeros(9, 8)}, "pool"),
    "rows of 12 bytes": ({"pool": torch.zeros(1, 9, 3)}, "pool"),
    "rows of no bytes": ({"pool": torch.zeros(1, 9, 0)}, "pool"),
    "rows that are not dense": ({"pool": torch.zeros(1, 9, 16)[..., ::2]}, "pool"),
    "rows that overlap": ({"pool": torch.zeros(99).as_strided((1, 9, 8), (99, 4, 1))}, "pool"),
    "a pool without memory": ({"pool": torch.zeros(1, 9, 8, device="meta")}, "pool"),
    "float slots": ({"src": np.zeros(2)}, "src"),
    "slots in two axes": ({"src": np.zeros((1, 2), int)}, "src"),
    "text": ({"dst": "ab"}, "dst"),
    "fewer destinations": ({"dst": np.array([3])}, "dst"),
    "a slot below 0": ({"src": np.array([-1, 1])}, "src"),
    "a slot beyond the pool": ({"dst": np.array([3, 9])}, "dst"),
    "a destination twice": ({"dst": np.array([3, 3])}, "dst"),
    "a destination that is a source": ({"dst": np.array([3, 0])}, "dst"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_moves_are_refused_and_nothing_moves(case):
    changes, argument = BAD[case]
    good = {"pool": torch.arange(72.0).view(1, 9, 8), "src": np.array([0, 1]), "dst": np.array([3, 4])}
    before = good["pool"].clone()
    with pytest.raises(ArgumentError, match=f"^{argument}: expected "):
        move_rows(**good | changes)
    assert torch.equal(good["pool"], before)
    move_rows(**good)
    assert torch.equal(good["pool"][0, 3:5], before[0, :2])
